"""Replies in pieces are complete with the last piece, once."""

from __future__ import annotations

import threading

from edgefl.coordinator.flower.reassembly import ReplyAssembler


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


def test_what_is_dropped_is_never_complete_and_its_sessions_are_told() -> None:
    half = ReplyAssembler[str]()
    for session_id, reply in (("s", "old"), ("t", "old"), ("u", "new")):
        half.start(session_id, reply, ["a"])
    assert sorted(half.remove(lambda reply: reply == "old")) == ["s", "t"]
    assert [half.add_object(session_id, "a") for session_id in "stu"] == [None, None, "new"]


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
