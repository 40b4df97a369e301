"""Header of every encoded body; the only file with byte offsets.

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
        24    2n  stages, a number each; 65535 marks a stage that travels by name
               …  for each such stage: length of its name (1) and the name, ASCII
               …  zeros up to the header length

Nothing is allocated from a length before it is checked against a cap and against the available bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import CodecError
from edgefl.core.types import Array

MAGIC = b"EFLC"
HEADER_VERSION = 1
NAMED_STAGE_ID = 0xFFFF
MAX_STAGES = 8
MAX_NAME_BYTES = 64
MAX_TENSORS = 65_536
MAX_PAYLOAD_BYTES = 512 * 1024 * 1024

StageId = int | str
"""A stage's identity on the wire: built-in ones by number, those of other packages by name."""

_FIXED_HEADER = struct.Struct("<4sBBHIIII")
_CRC_OFFSET = 20
_STAGE_NUMBER = struct.Struct("<H")
_ALIGNMENT = 8
_MAX_VARINT_BITS = 63
_MAX_HEADER_BYTES = _FIXED_HEADER.size + MAX_STAGES * (_STAGE_NUMBER.size + 1 + MAX_NAME_BYTES) + _ALIGNMENT

_PEER_MAGIC = b"eE1"
_PEER_HEADER = struct.Struct("<3sBIIIII")
_PEER_PART = struct.Struct("<BI")
_MAX_PARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecFrame:
    """A body with a valid checksum: its stages, and its payload, not copied."""

    stages: tuple[StageId, ...]
    epoch: int
    num_tensors: int
    payload: memoryview


class PayloadReader:
    """Reads a payload from front to back; reading beyond its end is a CodecError."""

    __slots__ = ("_offset", "_payload")

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._offset = 0

    def read_bytes(self, num_bytes: int) -> memoryview:
        end = self._offset + num_bytes
        if num_bytes < 0 or end > len(self._payload):
            raise CodecError(
                f"payload ends early: {num_bytes} bytes wanted at {self._offset}, {len(self._payload)} are there"
            )
        content = self._payload[self._offset : end]
        self._offset = end
        return content

    def read_array(self, dtype: np.dtype[np.generic], size: int) -> Array:
        """Returns the next `size` numbers: a read-only view where memory alignment allows, else a copy."""
        values = np.frombuffer(self.read_bytes(size * dtype.itemsize), dtype=dtype, count=size)
        return values if values.flags.aligned else values.copy()

    def read_varint(self, limit: int) -> int:
        """Returns the next number that `encode_varint` wrote, at most `limit`."""
        value = 0
        for shift in range(0, _MAX_VARINT_BITS, 7):
            byte = self.read_bytes(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value > limit:
                    break
                return value
        raise CodecError(f"payload holds a number over {limit} at {self._offset}")

    def require_end(self) -> None:
        num_left = len(self._payload) - self._offset
        if num_left:
            raise CodecError(f"payload has {num_left} bytes too many")


def encode_varint(value: int) -> Array:
    """Returns a number below 2**63 as bytes: seven bits each, lowest first, the top bit set if more follow."""
    parts = [value >> shift & 0x7F for shift in range(0, max(value.bit_length(), 1), 7)]
    return np.array([part | 0x80 for part in parts[:-1]] + parts[-1:], dtype=np.uint8)


def write_frame(stages: Sequence[StageId], num_tensors: int, parts: Iterable[Array], *, epoch: int = 0) -> bytes:
    """Returns header and payload; the parts are copied once, into the result.

    Args:
        stages: numbers, or names for stages of other packages.
        num_tensors: number of tensors in the payload.
        parts: arrays whose little-endian bytes, one after the other, are the payload.
        epoch: generation of a stateful wrapper's state; 0 for none.

    Raises:
        CodecError: a name, a number or the payload is over its cap.
    """
    pieces = [to_little_endian(part) for part in parts]
    length = sum(len(piece) for piece in pieces)
    if length > MAX_PAYLOAD_BYTES:
        raise CodecError(f"payload must be at most {MAX_PAYLOAD_BYTES} bytes, got {length}")
    if num_tensors > MAX_TENSORS:
        raise CodecError(f"a body holds at most {MAX_TENSORS} tensors, got {num_tensors}")
    table = _encode_stage_table(stages)
    fields = (MAGIC, HEADER_VERSION, len(stages), _FIXED_HEADER.size + len(table), epoch, num_tensors, length)
    crc = zlib.crc32(table, zlib.crc32(_FIXED_HEADER.pack(*fields, 0)[:_CRC_OFFSET]))
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return b"".join((_FIXED_HEADER.pack(*fields, crc), table, *pieces))


def read_frame(body: bytes | memoryview) -> CodecFrame:
    """Returns the header's fields and a view of the payload.

    Raises:
        CodecError: not a body of ours, of a later version, damaged, cut or extended.
    """
    view = memoryview(body).cast("B")
    if len(view) < _FIXED_HEADER.size:
        raise CodecError(f"body of {len(view)} bytes is shorter than the {_FIXED_HEADER.size} of a header")
    magic, version, num_stages, header_bytes, epoch, num_tensors, length, crc = _FIXED_HEADER.unpack_from(view)
    if magic != MAGIC:
        raise CodecError(f"body must start with {MAGIC!r}, got {bytes(magic)!r}")
    if version != HEADER_VERSION:
        raise CodecError(f"body has header version {version}, this edgefl reads {HEADER_VERSION}")
    _check_lengths(len(view), num_stages, header_bytes, num_tensors, length)
    table = view[_FIXED_HEADER.size : header_bytes]
    payload = view[header_bytes:]
    checksum = zlib.crc32(payload, zlib.crc32(table, zlib.crc32(view[:_CRC_OFFSET])))
    if checksum != crc:
        raise CodecError(f"body is damaged: checksum {checksum:08x}, the header says {crc:08x}")
    return CodecFrame(
        stages=_read_stage_ids(table, num_stages), epoch=epoch, num_tensors=num_tensors, payload=payload
    )


def to_little_endian(part: Array) -> memoryview:
    converted = np.ascontiguousarray(part).astype(part.dtype.newbyteorder("<"), copy=False)
    return converted.reshape(-1).view(np.uint8).data


def _encode_stage_table(stages: Sequence[StageId]) -> bytes:
    if not 1 <= len(stages) <= MAX_STAGES:
        raise CodecError(f"a codec has 1 to {MAX_STAGES} stages, got {len(stages)}")
    numbers = b"".join(_STAGE_NUMBER.pack(stage if isinstance(stage, int) else NAMED_STAGE_ID) for stage in stages)
    names = b"".join(_encode_stage_name(stage) for stage in stages if isinstance(stage, str))
    table = numbers + names
    return table + bytes(-(_FIXED_HEADER.size + len(table)) % _ALIGNMENT)


def _encode_stage_name(name: str) -> bytes:
    if not name.isascii() or not 1 <= len(name) <= MAX_NAME_BYTES:
        raise CodecError(f"a stage's name must be 1 to {MAX_NAME_BYTES} ASCII characters, got {name!r}")
    return bytes([len(name)]) + name.encode("ascii")


def _check_lengths(total: int, num_stages: int, header_bytes: int, num_tensors: int, length: int) -> None:
    if not 1 <= num_stages <= MAX_STAGES:
        raise CodecError(f"body has {num_stages} stages, 1 to {MAX_STAGES} are read")
    shortest = _FIXED_HEADER.size + num_stages * _STAGE_NUMBER.size
    if not shortest <= header_bytes <= min(_MAX_HEADER_BYTES, total):
        raise CodecError(f"body has a header of {header_bytes} bytes, {shortest} to {_MAX_HEADER_BYTES} are read")
    if num_tensors > MAX_TENSORS:
        raise CodecError(f"body has {num_tensors} tensors, at most {MAX_TENSORS} are read")
    if length > MAX_PAYLOAD_BYTES:
        raise CodecError(f"body has a payload of {length} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    if header_bytes + length != total:
        raise CodecError(f"body must be {header_bytes + length} bytes as its header says, got {total}")


def _read_stage_ids(table: memoryview, num_stages: int) -> tuple[StageId, ...]:
    reader = PayloadReader(table)
    numbers = [_STAGE_NUMBER.unpack(reader.read_bytes(_STAGE_NUMBER.size))[0] for _ in range(num_stages)]
    return tuple(_read_stage_name(reader) if number == NAMED_STAGE_ID else number for number in numbers)


def _read_stage_name(reader: PayloadReader) -> str:
    name = bytes(reader.read_bytes(reader.read_bytes(1)[0]))
    if not name.isascii() or not 1 <= len(name) <= MAX_NAME_BYTES:
        raise CodecError(f"body names a stage {name!r}, expected 1 to {MAX_NAME_BYTES} ASCII characters")
    return name.decode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModelFrame:
    """A node's message along an edge: the body of each part, and its acknowledgement.

    Attributes:
        epoch: incarnation of the sender, above 0.
        number: of this message, above 0.
        base_number: of the message that the parts are differences to; 0 where they are whole.
        ack_epoch, ack_number: of the newest message that the sender received from its peer; 0 for none.
        parts: codec bodies by name.
    """

    epoch: int
    number: int
    base_number: int
    ack_epoch: int
    ack_number: int
    parts: Mapping[str, memoryview]


def write_peer_frame(frame: PeerModelFrame) -> bytes:
    """Returns a header, and each part preceded by the lengths of its name and its body."""
    numbers = (frame.epoch, frame.number, frame.base_number, frame.ack_epoch, frame.ack_number)
    pieces = [_PEER_HEADER.pack(_PEER_MAGIC, len(frame.parts), *numbers)]
    for name, body in frame.parts.items():
        encoded = name.encode()
        pieces += [_PEER_PART.pack(len(encoded), len(body)), encoded, bytes(body)]
    return b"".join(pieces)


def read_peer_frame(body: bytes | memoryview) -> PeerModelFrame:
    """Returns the frame that `write_peer_frame` wrote.

    Raises:
        CodecError: the body is damaged or none of an edge.
    """
    view = memoryview(body)
    if len(view) < _PEER_HEADER.size:
        raise CodecError(f"body of an edge has {len(view)} bytes, its header takes {_PEER_HEADER.size}")
    magic, count, epoch, number, base, ack_epoch, ack_number = _PEER_HEADER.unpack_from(view)
    if magic != _PEER_MAGIC:
        raise CodecError(f"body of an edge begins with {magic!r}, expected {_PEER_MAGIC!r}")
    if not 1 <= count <= _MAX_PARTS or not epoch or not number or base >= number:
        raise CodecError(f"header of an edge's body makes no sense: {count} parts, message {number} to {base}")
    parts: dict[str, memoryview] = {}
    start = _PEER_HEADER.size
    for _ in range(count):
        if start + _PEER_PART.size > len(view):
            raise CodecError("body of an edge is cut off")
        name_bytes, body_bytes = _PEER_PART.unpack_from(view, start)
        body_start = start + _PEER_PART.size + name_bytes
        start = body_start + body_bytes
        if start > len(view):
            raise CodecError("body of an edge is cut off")
        parts[_decode_part_name(view[body_start - name_bytes : body_start])] = view[body_start:start]
    if start != len(view) or len(parts) != count:
        raise CodecError("body of an edge holds more than its parts, or one of them twice")
    return PeerModelFrame(
        epoch=epoch, number=number, base_number=base, ack_epoch=ack_epoch, ack_number=ack_number, parts=parts
    )


def _decode_part_name(encoded: memoryview) -> str:
    try:
        return bytes(encoded).decode()
    except UnicodeDecodeError:
        raise CodecError("a part of an edge's body has a name that is no text") from None
