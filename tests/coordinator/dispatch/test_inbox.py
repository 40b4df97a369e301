"""What waits for the thread of a run: in portions, and no more than it can have in memory."""

from __future__ import annotations

import threading
import time

import pytest

from edgefl.coordinator.dispatch.inbox import HELD_BYTES, PATIENCE_S, PORTION_BYTES, Inbox


@pytest.fixture
def inbox() -> Inbox[int]:
    return Inbox()


def _fill(inbox: Inbox[int]) -> int:
    """Puts in as much as may wait, and returns how many items that are."""
    number = HELD_BYTES // (PORTION_BYTES // 4) + 1
    for item in range(number):
        inbox.put(item, PORTION_BYTES // 4)
    return number


def test_what_came_is_taken_in_its_order_and_all_at_once_while_it_is_small(inbox: Inbox[int]) -> None:
    for item in range(1000):
        inbox.put(item)
    assert inbox.take(0.0) == list(range(1000))
    assert inbox.take(0.0) == []


def test_it_waits_for_the_first_item_and_no_longer(inbox: Inbox[int]) -> None:
    threading.Timer(0.1, inbox.put, [7]).start()
    began_s = time.monotonic()
    assert inbox.take(60.0) == [7]
    assert time.monotonic() - began_s < 30
    assert inbox.take(0.01) == []


def test_large_items_are_taken_in_portions_and_none_is_left_behind(inbox: Inbox[int]) -> None:
    number = _fill(inbox)
    assert inbox.take(0.0) == [0, 1, 2, 3]
    taken = [0, 1, 2, 3]
    while portion := inbox.take(0.0):
        assert len(portion) <= 4
        taken += portion
    assert taken == list(range(number))


def test_an_item_larger_than_a_portion_is_taken_alone(inbox: Inbox[int]) -> None:
    inbox.put(1, 3 * PORTION_BYTES)
    inbox.put(2, 1)
    assert inbox.take(0.0) == [1]
    assert inbox.take(0.0) == [2]


def test_who_brings_a_body_waits_until_there_is_room(inbox: Inbox[int]) -> None:
    _fill(inbox)
    is_in = threading.Event()
    bringer = threading.Thread(target=lambda: (inbox.put(-1, 1), is_in.set()))
    bringer.start()
    assert not is_in.wait(PATIENCE_S / 4)
    inbox.take(0.0)
    assert is_in.wait(PATIENCE_S / 2)
    bringer.join()


def test_who_brings_no_body_never_waits(inbox: Inbox[int]) -> None:
    number = _fill(inbox)
    began_s = time.monotonic()
    inbox.put(-1)
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert sum(len(iter_portion) for iter_portion in iter(lambda: inbox.take(0.0), [])) == number + 1


def test_a_run_that_takes_nothing_holds_nobody_up_for_long(inbox: Inbox[int]) -> None:
    _fill(inbox)
    began_s = time.monotonic()
    inbox.put(-1, 1)
    assert PATIENCE_S / 2 < time.monotonic() - began_s < 30


def test_nobody_waits_for_a_run_that_is_over(inbox: Inbox[int]) -> None:
    _fill(inbox)
    threading.Timer(0.1, inbox.close).start()
    began_s = time.monotonic()
    inbox.put(-1, 1)
    inbox.put(-1, 1)
    assert time.monotonic() - began_s < PATIENCE_S
