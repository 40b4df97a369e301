import threading
import time

from edgefl.device.neighbours.peer_queue import MAX_ANSWERS, PeerQueue
from edgefl.device.neighbours.peer_watch import PeerWatch


def queue(*states):
    made = PeerQueue(PeerWatch())
    for state in states:
        assert made.put(state, keep_all=False)
    return made


def sent(made):
    """All that leaves, each taken at once."""
    payloads = []
    while letter := made.next(0.0):
        payloads.append(letter.payload)
        made.taken()
    return payloads


def test_answers_leave_in_order_and_before_the_newest_state():
    made = queue(b"1", b"2", b"")
    for answer in (b"1", b"2"):
        assert made.put(answer, keep_all=True)
    assert sent(made) == [b"1", b"2", b""]
    assert queue().session != queue().session


def test_only_so_many_answers_are_kept_and_a_state_always_is():
    made = queue()
    assert [made.put(b"", keep_all=True) for _ in range(MAX_ANSWERS + 1)] == [True] * MAX_ANSWERS + [False]
    assert made.put(b"state", keep_all=False)


def test_a_newer_state_takes_the_place_of_one_that_was_not_taken_but_not_of_an_answer():
    made = queue(b"old")
    first = made.next(0.0)
    assert first is not None
    assert first == made.next(0.0)
    assert first.number == 1
    made.put(b"new", keep_all=False)
    newer = made.next(0.0)
    assert newer is not None
    assert (newer.number, newer.payload) == (2, b"new")
    made.taken()
    made.put(b"answer", keep_all=True)
    made.next(0.0)
    made.put(b"newest", keep_all=False)
    assert sent(made) == [b"answer", b"newest"]


def test_next_waits_for_a_message_and_no_longer():
    made = queue()
    timer = threading.Timer(0.05, lambda: made.put(b"1", keep_all=False))
    timer.start()
    letter = made.next(20.0)
    assert letter is not None
    assert letter.payload == b"1"
    timer.join()


def test_waking_counts_even_when_nobody_waits_yet():
    made = queue()
    made.wake()
    started_s = time.monotonic()
    assert made.next(20.0) is None
    assert time.monotonic() - started_s < 10.0
    made.put(b"1", keep_all=False)
    assert sent(made) == [b"1"]
