"""Bodies that are laid aside: on disk, without a name, and gone with whoever holds them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from edgefl.coordinator.flower.spool import spool_to_disk

MIB = 1024 * 1024


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("size", [0, 1, 3 * MIB + 7])
def test_what_was_laid_aside_comes_back_as_often_as_it_is_asked_for(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    aside = spool_to_disk(content, tmp_path)
    assert aside is not None
    assert aside.read() == content
    assert aside.read() == content


def test_it_has_no_name_and_ends_with_whoever_holds_it(tmp_path: Path) -> None:
    before = _open_files()
    aside = spool_to_disk(bytes(MIB), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert _open_files() == before + 1
    del aside
    assert _open_files() == before


def test_where_no_file_can_be_made_it_stays_where_it_was(tmp_path: Path) -> None:
    assert spool_to_disk(b"body", tmp_path / "missing") is None


def test_where_there_is_no_room_it_stays_where_it_was_and_no_file_is_left(tmp_path: Path) -> None:
    before, limits = _open_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        assert spool_to_disk(bytes(2 * MIB), tmp_path) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _open_files() == before


def test_a_file_that_lost_something_is_an_error_and_no_shorter_body(tmp_path: Path) -> None:
    aside = spool_to_disk(bytes(MIB), tmp_path)
    assert aside is not None
    aside._file.truncate(MIB - 1)
    with pytest.raises(OSError, match=f"{MIB - 1} are left"):
        aside.read()
