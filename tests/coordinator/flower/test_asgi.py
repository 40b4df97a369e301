"""Bytes are counted for the instruction that they belong to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from edgefl.coordinator.flower.asgi import (
    MAX_COUNTED_INSTRUCTIONS,
    MAX_MEMORY_BYTES,
    SEND_CHUNK_BYTES,
    ByteCounters,
    SpooledRequestBody,
    send_response,
)

NODE, OTHER = 1, 2


def test_what_is_fetched_while_the_answer_before_is_still_sent_counts_for_the_newer_instruction():
    traffic = ByteCounters()
    traffic.add_instruction_downlink(NODE, 1000, "first")
    traffic.add_instruction_downlink(NODE, 5000)
    traffic.add_uplink(NODE, 70)
    traffic.add_instruction_downlink(NODE, 2000, "second")
    traffic.add_other_downlink(NODE, 9)
    assert traffic.pop_reply_bytes(NODE, "first") == (70, 6009)
    traffic.add_uplink(NODE, 80)
    assert traffic.pop_reply_bytes(NODE, "second") == (80, 2000)
    assert traffic.pop_reply_bytes(NODE, "second") == (0, 0)


def test_nodes_are_counted_apart():
    traffic = ByteCounters()
    traffic.add_instruction_downlink(NODE, 1000, "a")
    traffic.add_instruction_downlink(OTHER, 1, "b")
    assert traffic.pop_reply_bytes(OTHER, "b") == (0, 1)
    assert traffic.pop_reply_bytes(NODE, "a") == (0, 1000)


def test_instructions_that_nobody_answers_do_not_gather():
    traffic = ByteCounters()
    for number in range(3 * MAX_COUNTED_INSTRUCTIONS):
        traffic.add_instruction_downlink(NODE, 1, str(number))
    assert traffic.pop_reply_bytes(NODE, "0") == (0, 0)
    assert traffic.pop_reply_bytes(NODE, str(3 * MAX_COUNTED_INSTRUCTIONS - 1)) == (0, 1)
    assert len(traffic._downlink[NODE]) < MAX_COUNTED_INSTRUCTIONS


@pytest.mark.parametrize("size", [0, 1, SEND_CHUNK_BYTES, SEND_CHUNK_BYTES + 1, 3 * SEND_CHUNK_BYTES])
def test_an_answer_leaves_slice_by_slice_and_says_which_is_the_last(size):
    content, sent = os.urandom(size), []

    async def send(message):
        sent.append(message)

    asyncio.run(send_response(send, 200, content))
    start, *slices = sent
    assert dict(start["headers"])[b"content-length"] == str(size).encode()
    assert b"".join(message["body"] for message in slices) == content
    assert all(len(message["body"]) <= SEND_CHUNK_BYTES for message in slices)
    assert [message["more_body"] for message in slices] == [True] * (len(slices) - 1) + [False]


PIECE_BYTES = 64 * 1024


@pytest.mark.parametrize("size", [0, 1, MAX_MEMORY_BYTES, MAX_MEMORY_BYTES + 1, 10 * MAX_MEMORY_BYTES + 7])
def test_a_body_is_whole_whatever_its_size_and_can_be_asked_for_twice(tmp_path: Path, size: int) -> None:
    sent = os.urandom(size)
    with SpooledRequestBody(tmp_path) as body:
        for start in range(0, size, PIECE_BYTES):
            body.append(sent[start : start + PIECE_BYTES])
        assert body.num_bytes == size
        assert body.read() == sent
        assert body.read() == sent


def test_a_large_body_is_not_in_memory_and_leaves_no_file(tmp_path: Path) -> None:
    with SpooledRequestBody(tmp_path) as body:
        for _ in range(100):
            body.append(bytes(PIECE_BYTES))
            assert sum(map(len, body._chunks)) <= MAX_MEMORY_BYTES
        assert list(tmp_path.iterdir()) == []
        assert body._file is not None
        file = body._file
    assert file.closed
    assert body._chunks == []


def test_a_small_body_opens_no_file(tmp_path: Path) -> None:
    with SpooledRequestBody(tmp_path) as body:
        body.append(bytes(MAX_MEMORY_BYTES))
        assert body._file is None


@pytest.mark.parametrize("room", [0, MAX_MEMORY_BYTES + PIECE_BYTES, 3 * MAX_MEMORY_BYTES + 5])
def test_a_body_stays_whole_where_the_disk_has_no_room_for_it(tmp_path: Path, room: int) -> None:
    """`room` bytes fit; /dev/full would take none, and a file of its own can be limited anywhere."""
    sent = os.urandom(5 * MAX_MEMORY_BYTES)
    with _SmallDisk(tmp_path, room) as body:
        for start in range(0, len(sent), PIECE_BYTES):
            body.append(sent[start : start + PIECE_BYTES])
        assert body.read() == sent


def test_a_body_stays_in_memory_where_no_file_can_be_made(tmp_path: Path) -> None:
    sent = os.urandom(2 * MAX_MEMORY_BYTES)
    with SpooledRequestBody(tmp_path / "missing") as body:
        body.append(sent)
        assert body.read() == sent


class _SmallDisk(SpooledRequestBody):
    """Writes as a disk does on which so many bytes are left: some of a piece, then an error."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__(folder)
        self._left = room

    def _write(self, piece: memoryview) -> int:
        if not self._left:
            raise OSError(28, "No space left on device")
        written = super()._write(piece[: self._left])
        self._left -= written
        return written
