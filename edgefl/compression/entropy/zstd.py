"""Zstandard frames, and the lossless stages made of them: `zstd`, and `shuffle`, which groups equal bytes first.

Frames state their content's length, which is capped before memory is allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
import zstandard

from edgefl.compression.stages import StageKind, parse_int_argument
from edgefl.compression.wire import PayloadReader, encode_varint, to_little_endian
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

DEFAULT_LEVEL = 3
# Levels over 19 take hundreds of MB, too much for small devices.
_MAX_LEVEL = 19
_MAX_NUMBER_BYTES = 16
_MAX_RUNS = 2**16


def compress(content: bytes | memoryview, level: int, **settings: int) -> Array:
    """Returns the frame as uint8; `settings` are Zstandard's own and override those of the level."""
    parameters = zstandard.ZstdCompressionParameters.from_level(level, **settings)
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return np.frombuffer(compressor.compress(content), dtype=np.uint8)


def decompress(frame: memoryview, max_bytes: int) -> bytes:
    """Returns the content of a frame.

    Raises:
        CodecError: it is damaged, or states a length over `max_bytes`; nothing was unpacked.
    """
    try:
        # The length is the frame's own claim, and memory is allocated by it: it is checked against the cap first.
        length = zstandard.get_frame_parameters(frame).content_size
        if length == zstandard.CONTENTSIZE_UNKNOWN:
            raise CodecError("payload cannot be unpacked: it does not state its length")
        if length > max_bytes:
            raise CodecError(f"payload unpacks to over {max_bytes} bytes, more than the task's tensors can take")
        if not length:  # the library checks nothing else of an empty frame
            return _decompress_empty(frame)
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=max_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"payload cannot be unpacked: {error}") from None


def _decompress_empty(frame: memoryview) -> bytes:
    """Returns the content of an empty frame after reading all of it."""
    reader = zstandard.ZstdDecompressor().decompressobj()
    content = reader.decompress(frame)
    if content or not reader.eof or reader.unused_data:
        raise CodecError("payload cannot be unpacked: more than the empty frame that it states")
    return content


@dataclass(frozen=True, slots=True)
class Zstd:
    """One Zstandard frame, which states the length of its content."""

    name: ClassVar[str] = "zstd"
    kind: ClassVar[StageKind] = StageKind.LOSSLESS

    level: int = DEFAULT_LEVEL

    @classmethod
    def parse(cls, argument: str) -> Self:
        return cls(level=parse_int_argument(cls.name, argument, 1, _MAX_LEVEL) if argument else DEFAULT_LEVEL)

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]:
        return [compress(b"".join(to_little_endian(part) for part in parts), self.level)]

    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        return memoryview(decompress(payload, max_bytes))


@dataclass(frozen=True, slots=True)
class ByteShuffle(Zstd):
    """All first bytes of equally wide numbers, then all second ones, …; then Zstandard.

    Exponents of neighbouring weights are much alike while the lowest bytes are noise, so they pack better apart.
    The frame starts with a table: the number of runs, and each run's number width and count.
    """

    name: ClassVar[str] = "shuffle"

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]:
        non_empty = [part for part in parts if part.size]
        runs = [
            (width, list(run)) for width, run in itertools.groupby(non_empty, key=lambda part: part.dtype.itemsize)
        ]
        if len(runs) > _MAX_RUNS:
            runs = [(1, non_empty)]
        sizes = [(width, sum(part.nbytes for part in run) // width) for width, run in runs]
        table = [encode_varint(len(runs)), *(encode_varint(number) for size in sizes for number in size)]
        return [compress(_shuffle_bytes(np.concatenate(table), runs, sizes).data, self.level)]

    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        reader = PayloadReader(memoryview(decompress(payload, max_bytes)))
        num_runs = reader.read_varint(_MAX_RUNS)
        runs = [(reader.read_varint(_MAX_NUMBER_BYTES), reader.read_varint(max_bytes)) for _ in range(num_runs)]
        rows = [
            np.frombuffer(reader.read_bytes(width * count), dtype=np.uint8).reshape(width, count).T.tobytes()
            for width, count in runs
        ]
        reader.require_end()
        return memoryview(b"".join(rows))


def _shuffle_bytes(
    table: Array, runs: Sequence[tuple[int, Sequence[Array]]], sizes: Sequence[tuple[int, int]]
) -> Array:
    """Returns the table, then the planes of each run; filled in place, without extra copies."""
    content = np.empty(table.size + sum(width * count for width, count in sizes), dtype=np.uint8)
    content[: table.size] = table
    at = table.size
    for (width, run), (_, count) in zip(runs, sizes, strict=True):
        planes = content[at : at + width * count].reshape(width, count)
        at += planes.size
        num_filled = 0
        for part in run:
            rows = np.frombuffer(to_little_endian(part), dtype=np.uint8).reshape(-1, width)
            planes[:, num_filled : num_filled + len(rows)] = rows.T
            num_filled += len(rows)
    return content
