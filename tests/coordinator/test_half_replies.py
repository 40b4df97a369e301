"""Replies in pieces are complete with the last piece, once."""

from __future__ import annotations

import threading

from edgefl.coordinator.half_replies import HalfReplies


def test_a_reply_is_complete_with_its_last_piece_in_whatever_order_they_come() -> None:
    half = HalfReplies[str]()
    half.begin("s", "reply", ["a", "b", "c"])
    assert [half.arrived("s", piece) for piece in ("c", "a", "a")] == [None, None, None]
    assert len(half) == 1
    assert half.arrived("s", "b") == "reply"
    assert (len(half), half.arrived("s", "b")) == (0, None)


def test_pieces_count_for_their_own_session_alone() -> None:
    half = HalfReplies[str]()
    half.begin("s", "one", ["a"])
    half.begin("t", "two", ["a"])
    assert half.arrived("u", "a") is None
    assert half.arrived("t", "a") == "two"
    assert half.arrived("s", "a") == "one"


def test_what_is_dropped_is_never_complete_and_its_sessions_are_told() -> None:
    half = HalfReplies[str]()
    for session_id, reply in (("s", "old"), ("t", "old"), ("u", "new")):
        half.begin(session_id, reply, ["a"])
    assert sorted(half.drop(lambda reply: reply == "old")) == ["s", "t"]
    assert [half.arrived(session_id, "a") for session_id in "stu"] == [None, None, "new"]


def test_of_many_threads_with_the_last_pieces_one_gets_the_reply() -> None:
    for _ in range(50):
        half, got, start = HalfReplies[str](), [], threading.Barrier(8)
        half.begin("s", "reply", [f"{number}" for number in range(8)])

        def push(number: int, half=half, got=got, start=start) -> None:  # type: ignore[no-untyped-def]
            start.wait(10)
            got.append(half.arrived("s", f"{number}"))

        threads = [threading.Thread(target=push, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(got, key=str) == [None] * 7 + ["reply"]
