"""The header that every encoded body starts with; the only file that knows byte offsets.

Little-endian, in this order:

    offset  size  what
         0     4  magic, EFLC
         4     1  header version
         5     1  number of stages
         6     2  header length, a multiple of 8, so that the payload is aligned in memory
         8     4  epoch of a stateful wrapper, 0 for a stateless codec
        12     4  number of tensors, those of the task's shapes that are shared
        16     4  payload length
        20     4  CRC-32 of everything else, header and payload
        24    2n  stages, a number each; 65535 says that the stage travels by name
               …  for each such stage: length of its name (1) and the name, ASCII
               …  zeros up to the header length

Nothing is allocated from a length before the length is held against a cap and against the bytes at hand.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.errors import CodecError
from edgefl.types import Array

MAGIC = b"EFLC"
HEADER_VERSION = 1
BY_NAME = 0xFFFF
MAX_STAGES = 8
MAX_NAME_BYTES = 64
MAX_TENSORS = 65_536
MAX_PAYLOAD_BYTES = 512 * 1024 * 1024

StageId = int | str
"""How a stage is called on the wire: our own by number, those of other packages by name."""

_FIXED = struct.Struct("<4sBBHIIII")
_CRC_OFFSET = 20
_STAGE = struct.Struct("<H")
_ALIGNMENT = 8
_MAX_VARINT_BITS = 63
_MAX_HEADER_BYTES = _FIXED.size + MAX_STAGES * (_STAGE.size + 1 + MAX_NAME_BYTES) + _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A body whose checksum holds: who wrote the payload, and the payload itself, not copied."""

    stages: tuple[StageId, ...]
    epoch: int
    num_tensors: int
    payload: memoryview


class Reader:
    """Takes a payload apart from front to back; asking for more than is there is a CodecError."""

    __slots__ = ("_offset", "_payload")

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._offset = 0

    def take(self, num_bytes: int) -> memoryview:
        end = self._offset + num_bytes
        if num_bytes < 0 or end > len(self._payload):
            raise CodecError(
                f"payload ends early: {num_bytes} bytes wanted at {self._offset}, {len(self._payload)} are there"
            )
        taken = self._payload[self._offset : end]
        self._offset = end
        return taken

    def array(self, dtype: np.dtype[np.generic], size: int) -> Array:
        """Returns the next `size` numbers: a read-only view where memory alignment allows, else a copy."""
        values = np.frombuffer(self.take(size * dtype.itemsize), dtype=dtype, count=size)
        return values if values.flags.aligned else values.copy()

    def varint(self, limit: int) -> int:
        """Returns the next number that `varint` wrote, at most `limit`."""
        value = 0
        for shift in range(0, _MAX_VARINT_BITS, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > limit:
                    break
                return value
        raise CodecError(f"payload holds a number over {limit} at {self._offset}")

    def finish(self) -> None:
        left = len(self._payload) - self._offset
        if left:
            raise CodecError(f"payload has {left} bytes too many")


def varint(value: int) -> Array:
    """Returns a number below 2**63 as bytes: seven bits each, lowest first, the top bit says if more follow."""
    parts = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return np.array([part | 0x80 for part in parts[:-1]] + parts[-1:], dtype=np.uint8)


def write_frame(stages: Sequence[StageId], num_tensors: int, parts: Iterable[Array], *, epoch: int = 0) -> bytes:
    """Returns header and payload; the parts are copied once, into the result.

    Args:
        stages: numbers, or names for stages of other packages.
        num_tensors: how many tensors the payload holds.
        parts: arrays whose little-endian bytes, one after the other, are the payload.
        epoch: generation of a stateful wrapper's state; 0 says there is none.

    Raises:
        CodecError: a name, a number or the payload is over its cap.
    """
    pieces = [little_endian_bytes(part) for part in parts]
    length = sum(len(piece) for piece in pieces)
    if length > MAX_PAYLOAD_BYTES:
        raise CodecError(f"payload must be at most {MAX_PAYLOAD_BYTES} bytes, got {length}")
    if num_tensors > MAX_TENSORS:
        raise CodecError(f"a body holds at most {MAX_TENSORS} tensors, got {num_tensors}")
    table = _stage_table(stages)
    fixed = (MAGIC, HEADER_VERSION, len(stages), _FIXED.size + len(table), epoch, num_tensors, length)
    crc = zlib.crc32(table, zlib.crc32(_FIXED.pack(*fixed, 0)[:_CRC_OFFSET]))
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return b"".join((_FIXED.pack(*fixed, crc), table, *pieces))


def read_frame(body: bytes | memoryview) -> Frame:
    """Returns what the header says and a view of the payload.

    Raises:
        CodecError: not a body of ours, of a later version, damaged, cut or extended.
    """
    view = memoryview(body).cast("B")
    if len(view) < _FIXED.size:
        raise CodecError(f"body of {len(view)} bytes is shorter than the {_FIXED.size} of a header")
    magic, version, num_stages, header_bytes, epoch, num_tensors, length, crc = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise CodecError(f"body must start with {MAGIC!r}, got {bytes(magic)!r}")
    if version != HEADER_VERSION:
        raise CodecError(f"body has header version {version}, this edgefl reads {HEADER_VERSION}")
    _check_lengths(len(view), num_stages, header_bytes, num_tensors, length)
    table = view[_FIXED.size : header_bytes]
    payload = view[header_bytes:]
    found = zlib.crc32(payload, zlib.crc32(table, zlib.crc32(view[:_CRC_OFFSET])))
    if found != crc:
        raise CodecError(f"body is damaged: checksum {found:08x}, the header says {crc:08x}")
    return Frame(stages=_read_stages(table, num_stages), epoch=epoch, num_tensors=num_tensors, payload=payload)


def little_endian_bytes(part: Array) -> memoryview:
    little = np.ascontiguousarray(part).astype(part.dtype.newbyteorder("<"), copy=False)
    return little.reshape(-1).view(np.uint8).data


def _stage_table(stages: Sequence[StageId]) -> bytes:
    if not 1 <= len(stages) <= MAX_STAGES:
        raise CodecError(f"a codec has 1 to {MAX_STAGES} stages, got {len(stages)}")
    numbers = b"".join(_STAGE.pack(stage if isinstance(stage, int) else BY_NAME) for stage in stages)
    names = b"".join(_packed_name(stage) for stage in stages if isinstance(stage, str))
    table = numbers + names
    return table + bytes(-(_FIXED.size + len(table)) % _ALIGNMENT)


def _packed_name(name: str) -> bytes:
    if not name.isascii() or not 1 <= len(name) <= MAX_NAME_BYTES:
        raise CodecError(f"a stage's name must be 1 to {MAX_NAME_BYTES} ASCII characters, got {name!r}")
    return bytes([len(name)]) + name.encode("ascii")


def _check_lengths(total: int, num_stages: int, header_bytes: int, num_tensors: int, length: int) -> None:
    if not 1 <= num_stages <= MAX_STAGES:
        raise CodecError(f"body has {num_stages} stages, 1 to {MAX_STAGES} are read")
    shortest = _FIXED.size + num_stages * _STAGE.size
    if not shortest <= header_bytes <= min(_MAX_HEADER_BYTES, total):
        raise CodecError(f"body has a header of {header_bytes} bytes, {shortest} to {_MAX_HEADER_BYTES} are read")
    if num_tensors > MAX_TENSORS:
        raise CodecError(f"body has {num_tensors} tensors, at most {MAX_TENSORS} are read")
    if length > MAX_PAYLOAD_BYTES:
        raise CodecError(f"body has a payload of {length} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    if header_bytes + length != total:
        raise CodecError(f"body must be {header_bytes + length} bytes as its header says, got {total}")


def _read_stages(table: memoryview, num_stages: int) -> tuple[StageId, ...]:
    reader = Reader(table)
    numbers = [_STAGE.unpack(reader.take(_STAGE.size))[0] for _ in range(num_stages)]
    return tuple(_read_name(reader) if number == BY_NAME else number for number in numbers)


def _read_name(reader: Reader) -> str:
    name = bytes(reader.take(reader.take(1)[0]))
    if not name.isascii() or not 1 <= len(name) <= MAX_NAME_BYTES:
        raise CodecError(f"body names a stage {name!r}, expected 1 to {MAX_NAME_BYTES} ASCII characters")
    return name.decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeFrame:
    """What a node sends along an edge: the body of each part, and where it stands with its neighbour.

    Attributes:
        epoch: this life of the sender, above 0.
        number: of this message, above 0.
        base: of the message that the parts are differences to; 0 where they are whole.
        heard_epoch, heard_number: of the newest message that the sender has of its neighbour; 0 for none.
        parts: codec bodies by name.
    """

    epoch: int
    number: int
    base: int
    heard_epoch: int
    heard_number: int
    parts: Mapping[str, memoryview]


_EDGE_MAGIC = b"eE1"
_EDGE_HEADER = struct.Struct("<3sBIIIII")
_EDGE_PART = struct.Struct("<BI")
_MOST_PARTS = 8


def write_edge_frame(frame: EdgeFrame) -> bytes:
    """Returns a header, and each part behind the lengths of its name and its body."""
    numbers = (frame.epoch, frame.number, frame.base, frame.heard_epoch, frame.heard_number)
    pieces = [_EDGE_HEADER.pack(_EDGE_MAGIC, len(frame.parts), *numbers)]
    for name, body in frame.parts.items():
        encoded = name.encode()
        pieces += [_EDGE_PART.pack(len(encoded), len(body)), encoded, bytes(body)]
    return b"".join(pieces)


def read_edge_frame(body: bytes | memoryview) -> EdgeFrame:
    """Returns what `write_edge_frame` wrote.

    Raises:
        CodecError: the body is damaged or none of an edge.
    """
    view = memoryview(body)
    if len(view) < _EDGE_HEADER.size:
        raise CodecError(f"body of an edge has {len(view)} bytes, its header takes {_EDGE_HEADER.size}")
    magic, count, epoch, number, base, heard_epoch, heard_number = _EDGE_HEADER.unpack_from(view)
    if magic != _EDGE_MAGIC:
        raise CodecError(f"body of an edge begins with {magic!r}, expected {_EDGE_MAGIC!r}")
    if not 1 <= count <= _MOST_PARTS or not epoch or not number or base >= number:
        raise CodecError(f"header of an edge's body makes no sense: {count} parts, message {number} to {base}")
    parts: dict[str, memoryview] = {}
    start = _EDGE_HEADER.size
    for _ in range(count):
        if start + _EDGE_PART.size > len(view):
            raise CodecError("body of an edge is cut off")
        name_bytes, body_bytes = _EDGE_PART.unpack_from(view, start)
        middle = start + _EDGE_PART.size + name_bytes
        start = middle + body_bytes
        if start > len(view):
            raise CodecError("body of an edge is cut off")
        parts[_name(view[middle - name_bytes : middle])] = view[middle:start]
    if start != len(view) or len(parts) != count:
        raise CodecError("body of an edge holds more than its parts, or one of them twice")
    return EdgeFrame(
        epoch=epoch, number=number, base=base, heard_epoch=heard_epoch, heard_number=heard_number, parts=parts
    )


def _name(encoded: memoryview) -> str:
    try:
        return bytes(encoded).decode()
    except UnicodeDecodeError:
        raise CodecError("a part of an edge's body has a name that is no text") from None
