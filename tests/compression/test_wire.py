"""The header: what it carries, and that no damage gets past it."""

import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from edgefl.compression.wire import (
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_STAGES,
    MAX_TENSORS,
    PayloadReader,
    read_frame,
    write_frame,
)
from edgefl.core.errors import CodecError

PARTS = (np.array([1, 2, 3], dtype=np.uint8), np.array([[1.5]], dtype=np.float32), np.zeros((0, 4)))
PAYLOAD = b"\x01\x02\x03" + struct.pack("<f", 1.5)


def sealed(body: bytes) -> bytes:
    """The body with a checksum that holds, so that what stands behind the checksum is reached."""
    crc = zlib.crc32(body[24:], zlib.crc32(body[:20]))
    return body[:20] + struct.pack("<I", crc) + body[24:]


def test_the_frame_read_is_the_frame_written() -> None:
    frame = read_frame(write_frame([1, "acme-sketch", 2], 5, PARTS, epoch=9))
    assert (frame.stages, frame.epoch, frame.num_tensors) == ((1, "acme-sketch", 2), 9, 5)
    assert bytes(frame.payload) == PAYLOAD


def test_the_header_is_exactly_as_documented() -> None:
    body = write_frame([1, 2], 3, PARTS, epoch=7)
    stages = b"\x01\x00\x02\x00" + bytes(4)
    fixed = b"EFLC" + bytes([1, 2]) + struct.pack("<HIII", 32, 7, 3, len(PAYLOAD))
    crc = zlib.crc32(fixed + stages + PAYLOAD)
    assert body == fixed + struct.pack("<I", crc) + stages + PAYLOAD


@pytest.mark.parametrize("stages", [[1], [1, 2], ["a"], [1, "abc", 2], ["x" * MAX_NAME_BYTES] * MAX_STAGES])
def test_the_payload_starts_at_a_multiple_of_eight(stages: list[int | str]) -> None:
    body = write_frame(stages, 1, [np.zeros(3, dtype=np.uint8)])
    assert (len(body) - 3) % 8 == 0
    assert read_frame(body).stages == tuple(stages)


def test_the_payload_is_a_view_of_the_body_and_not_a_copy() -> None:
    body = bytearray(write_frame([1], 1, PARTS))
    frame = read_frame(memoryview(body))
    body[-1] ^= 0xFF
    assert frame.payload[-1] == body[-1]


def test_big_endian_and_strided_parts_are_written_little_endian_in_order() -> None:
    parts = [np.array([1, 2], dtype=">u2"), np.arange(6, dtype=np.uint8)[::2], np.array(7, dtype=">i4")]
    assert bytes(read_frame(write_frame([1], 1, parts)).payload) == bytes([1, 0, 2, 0, 0, 2, 4, 7, 0, 0, 0])


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (4, b"\x02", "header version 2"),
        (5, b"\x00", "body has 0 stages"),
        (5, b"\x09", "body has 9 stages"),
        (6, b"\x10\x00", "header of 16 bytes"),
        (6, b"\xff\xff", "header of 65535 bytes"),
        (12, struct.pack("<I", MAX_TENSORS + 1), "65537 tensors"),
        (16, struct.pack("<I", MAX_PAYLOAD_BYTES + 1), "payload of 536870913 bytes"),
        (16, struct.pack("<I", 4), "as its header says"),
    ],
)
def test_a_length_over_its_cap_is_refused_even_under_a_valid_checksum(
    offset: int, value: bytes, message: str
) -> None:
    body = write_frame([1], 2, PARTS)
    with pytest.raises(CodecError, match=message):
        read_frame(sealed(body[:offset] + value + body[offset + len(value) :]))


@pytest.mark.parametrize("length", [0, 40, 255])
def test_a_name_longer_than_the_header_or_empty_is_refused_under_a_valid_checksum(length: int) -> None:
    body = bytearray(write_frame(["abc"], 2, PARTS))
    body[26] = length
    with pytest.raises(CodecError):
        read_frame(sealed(bytes(body)))


@pytest.mark.parametrize(
    "write",
    [
        lambda: write_frame([], 1, []),
        lambda: write_frame([1] * (MAX_STAGES + 1), 1, []),
        lambda: write_frame(["x" * (MAX_NAME_BYTES + 1)], 1, []),
        lambda: write_frame(["größe"], 1, []),
        lambda: write_frame([1], MAX_TENSORS + 1, []),
        lambda: write_frame([1], 1, [np.broadcast_to(np.uint8(0), MAX_PAYLOAD_BYTES + 1)]),
    ],
)
def test_what_could_not_be_read_is_not_written(write: Callable[[], bytes]) -> None:
    with pytest.raises(CodecError):
        write()


def test_a_reader_gives_no_more_than_there_is() -> None:
    reader = PayloadReader(memoryview(b"abcd"))
    assert bytes(reader.read_bytes(3)) == b"abc"
    with pytest.raises(CodecError, match="2 bytes wanted at 3, 4 are there"):
        reader.read_bytes(2)
    with pytest.raises(CodecError):
        reader.read_bytes(-1)
    with pytest.raises(CodecError, match="1 bytes too many"):
        reader.require_end()
    with pytest.raises(CodecError, match="ends early"):
        PayloadReader(memoryview(b"abcd")).read_array(np.dtype("<f8"), 2**60)
