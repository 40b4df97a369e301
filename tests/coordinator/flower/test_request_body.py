"""Bodies that arrive: small ones in memory, large ones on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgefl.coordinator.flower.request_body import MAX_MEMORY_BYTES, SpooledRequestBody

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
