"""Bodies of codecs, damaged behind every checksum that would give the damage away.

A body has several surfaces: all of it, its payload, what a lossless stage has packed, the bodies of its layers. Each
can be changed and closed again, so that the change gets to the decoder that is to notice it.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import zstandard
from codec_examples import EXAMPLES, SHAPES, assert_declared, rng, sealed, small_tensors

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.registry import LAYERS_ID, STAGES
from edgefl.compression.stages import select_shared_tensors
from edgefl.compression.wire import CodecFrame, PayloadReader, encode_varint, read_frame, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, TensorSpec

WIDE: ModelSpec = (TensorSpec(name="weight", shape=(48, 40)), TensorSpec(name="waist", shape=(3, 40)))
"""Enough entries for every way to code places; in small tensors some never pay."""

HEADER, LENGTH_OFFSET = struct.Struct("<4sBBHIIII"), 16
MOST_CONTENT_BYTES = 1 << 16
PACKED = {STAGES["zstd"][0], STAGES["shuffle"][0]}
Close = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Surface:
    """Valid content, and what makes a body of other content; `spec` and `shapes` say of which."""

    spec: str
    shapes: ModelSpec
    content: bytes
    close: Close


@cache
def all_surfaces() -> tuple[Surface, ...]:
    """Those of every example, on both tasks."""
    return tuple(surface for spec in EXAMPLES for surface in surfaces_of(spec))


@cache
def surfaces_of(spec: str) -> tuple[Surface, ...]:
    wide = {one.name: rng().standard_t(3, size=one.shape).astype(np.float32) for one in WIDE}
    found = []
    for shapes, tensors in ((SHAPES, small_tensors()), (WIDE, wide)):
        body = make_codec(spec, shapes).encode(tensors, rng())
        found += [
            Surface(spec, shapes, content, close) for content, close in opened(body, select_shared_tensors(shapes))
        ]
    return tuple(found)


def opened(body: bytes, shared: ModelSpec) -> Iterator[tuple[bytes, Close]]:
    """The surfaces of a valid body."""
    frame = read_frame(body)
    yield body, _closed_body
    yield bytes(frame.payload), lambda content: framed(frame, [content])
    if frame.stages[-1] in PACKED:
        content = zstandard.ZstdDecompressor().decompress(frame.payload)
        yield content, lambda content: framed(frame, [zstandard.ZstdCompressor(level=1).compress(content)])
    if frame.stages == (LAYERS_ID,):
        yield from _opened_layers(frame, shared)


def _closed_body(content: bytes) -> bytes:
    """A body whose header may be damaged, with the length and the checksum that it should have."""
    if len(content) < HEADER.size:
        return content
    header_bytes = HEADER.unpack_from(content)[3]
    length = max(0, len(content) - header_bytes)
    return sealed(content[:LENGTH_OFFSET] + struct.pack("<I", length) + content[LENGTH_OFFSET + 4 :])


def _opened_layers(frame: CodecFrame, shared: ModelSpec) -> Iterator[tuple[bytes, Close]]:
    reader = PayloadReader(frame.payload)
    num_groups = reader.read_varint(len(shared))
    groups = []
    for _ in range(num_groups):
        places = read_indices(reader, len(shared))
        groups.append((places, bytes(reader.read_bytes(reader.read_varint(1 << 20)))))
    for at, (places, body) in enumerate(groups):
        for content, close in opened(body, tuple(shared[place] for place in places)):
            yield content, _closing(frame, groups, at, close, len(shared))


def _closing(frame: CodecFrame, groups: list[tuple[Array, bytes]], at: int, close: Close, size: int) -> Close:
    def close_all(content: bytes) -> bytes:
        pieces = [encode_varint(len(groups)).tobytes()]
        for place, (places, body) in enumerate(groups):
            inner = close(content) if place == at else body
            pieces += [part.tobytes() for part in (*write_indices(places, size), encode_varint(len(inner)))]
            pieces.append(inner)
        return framed(frame, pieces)

    return close_all


def framed(frame: CodecFrame, pieces: list[bytes]) -> bytes:
    parts = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
    return write_frame(frame.stages, frame.num_tensors, parts, epoch=frame.epoch)


def decode_damaged(surface: Surface, content: bytes) -> bool:
    """Says whether the content was read; anything but a CodecError or tensors as declared is an error."""
    body = surface.close(content)
    try:
        decoded = decode_body(body, surface.shapes)
    except CodecError:
        return False
    assert_declared(decoded, surface.shapes)
    return True


HOSTILE = (
    *(bytes([byte]) for byte in (0, 1, 2, 63, 64, 65, 127, 128, 192, 255)),
    b"\xff" * 9 + b"\x01",
    b"\x00" * 8,
    b"\xff" * 8,
    *(struct.pack("<f", value) for value in (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45)),
)
"""Lengths, forms of index sets, varints and floats that a decoder may trip over."""


def damaged(content: bytes, luck: np.random.Generator) -> bytes:
    """The content after one to four changes: bits, bytes, hostile numbers, cuts, insertions, repeats."""
    changed = bytearray(content)
    for _ in range(int(luck.integers(1, 5))):
        at, kind = int(luck.integers(len(changed) + 1)), int(luck.integers(6))
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << int(luck.integers(8))
        elif kind == 1 and at < len(changed):
            changed[at] = int(luck.integers(256))
        elif kind == 2:
            hostile = HOSTILE[int(luck.integers(len(HOSTILE)))]
            changed[at : at + len(hostile)] = hostile
        elif kind == 3:
            del changed[at : at + int(luck.integers(1, 9))]
        elif kind == 4:
            changed[at:at] = luck.bytes(int(luck.integers(1, 9)))
        else:
            start = int(luck.integers(len(changed) + 1))
            changed[at:at] = changed[start : start + int(luck.integers(1, 65))]
    return bytes(changed[:MOST_CONTENT_BYTES])
