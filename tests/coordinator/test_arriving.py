"""Bodies that arrive: small ones in memory, large ones on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgefl.coordinator.arriving import IN_MEMORY_BYTES, ArrivingBody

PIECE_BYTES = 64 * 1024


@pytest.mark.parametrize("size", [0, 1, IN_MEMORY_BYTES, IN_MEMORY_BYTES + 1, 10 * IN_MEMORY_BYTES + 7])
def test_a_body_is_whole_whatever_its_size_and_can_be_asked_for_twice(tmp_path: Path, size: int) -> None:
    sent = os.urandom(size)
    with ArrivingBody(tmp_path) as body:
        for start in range(0, size, PIECE_BYTES):
            body.add(sent[start : start + PIECE_BYTES])
        assert body.num_bytes == size
        assert body.whole() == sent
        assert body.whole() == sent


def test_a_large_body_is_not_in_memory_and_leaves_no_file(tmp_path: Path) -> None:
    with ArrivingBody(tmp_path) as body:
        for _ in range(100):
            body.add(bytes(PIECE_BYTES))
            assert sum(map(len, body._pieces)) <= IN_MEMORY_BYTES
        assert list(tmp_path.iterdir()) == []
        assert body._file is not None
        file = body._file
    assert file.closed
    assert body._pieces == []


def test_a_small_body_opens_no_file(tmp_path: Path) -> None:
    with ArrivingBody(tmp_path) as body:
        body.add(bytes(IN_MEMORY_BYTES))
        assert body._file is None


@pytest.mark.parametrize("room", [0, IN_MEMORY_BYTES + PIECE_BYTES, 3 * IN_MEMORY_BYTES + 5])
def test_a_body_stays_whole_where_the_disk_has_no_room_for_it(tmp_path: Path, room: int) -> None:
    """`room` bytes fit; /dev/full would take none, and a file of its own can be limited anywhere."""
    sent = os.urandom(5 * IN_MEMORY_BYTES)
    with _SmallDisk(tmp_path, room) as body:
        for start in range(0, len(sent), PIECE_BYTES):
            body.add(sent[start : start + PIECE_BYTES])
        assert body.whole() == sent


def test_a_body_stays_in_memory_where_no_file_can_be_made(tmp_path: Path) -> None:
    sent = os.urandom(2 * IN_MEMORY_BYTES)
    with ArrivingBody(tmp_path / "missing") as body:
        body.add(sent)
        assert body.whole() == sent


class _SmallDisk(ArrivingBody):
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
