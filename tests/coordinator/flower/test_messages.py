"""Replies in pieces are complete with the last piece, once."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from edgefl.coordinator.flower.messages import ReplyAssembler, spool_to_disk


def test_a_reply_is_complete_with_its_last_piece_in_whatever_order_they_come() -> None:
    half = ReplyAssembler[str]()
    half.start("s", "reply", ["a", "b", "c"])
    assert [half.add_object("s", piece) for piece in ("c", "a", "a")] == [None, None, None]
    assert len(half) == 1
    assert half.add_object("s", "b") == "reply"
    assert (len(half), half.add_object("s", "b")) == (0, None)


def test_pieces_count_for_their_own_session_alone() -> None:
    half = ReplyAssembler[str]()
    half.start("s", "one", ["a"])
    half.start("t", "two", ["a"])
    assert half.add_object("u", "a") is None
    assert half.add_object("t", "a") == "two"
    assert half.add_object("s", "a") == "one"


def test_what_is_dropped_is_never_complete_and_others_are() -> None:
    half = ReplyAssembler[str]()
    for session_id in "st":
        half.start(session_id, session_id, ["a"])
    for session_id in ("s", "s", "", "none"):
        half.remove(session_id)
    assert [half.add_object(session_id, "a") for session_id in "st"] == [None, "t"]


def test_of_many_threads_with_the_last_pieces_one_gets_the_reply() -> None:
    for _ in range(50):
        half, got, start = ReplyAssembler[str](), [], threading.Barrier(8)
        half.start("s", "reply", [f"{number}" for number in range(8)])

        def push(number: int, half=half, got=got, start=start) -> None:  # type: ignore[no-untyped-def]
            start.wait(10)
            got.append(half.add_object("s", f"{number}"))

        threads = [threading.Thread(target=push, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(got, key=str) == [None] * 7 + ["reply"]


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
