"""What waits for the thread of a run: in portions, and no more than it can have in memory."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from edgefl.coordinator.dispatch.inbox import HELD_BYTES, PATIENCE_S, PORTION_BYTES, Inbox, Load


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


class Shelf:
    """Takes bodies out of memory; `is_full` as a disk is, and `loses` what it was given."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.is_full = self.loses = False

    def lay_aside(self, item: int) -> Load[int] | None:
        if self.is_full:
            return None
        self.taken.append(item)
        return lambda: None if self.loses else item


def _bring(inbox: Inbox[int], items: range) -> None:
    """Puts in a body for each item, each in a thread of its own."""
    bringers = [threading.Thread(target=inbox.put, args=(item, PORTION_BYTES)) for item in items]
    for bringer in bringers:
        bringer.start()
    for bringer in bringers:
        bringer.join(60)
        assert not bringer.is_alive()


def test_what_comes_while_a_run_stands_still_is_laid_aside_and_not_held_in_memory() -> None:
    shelf = Shelf()
    inbox = Inbox[int](shelf.lay_aside)
    _bring(inbox, range(40))
    assert inbox.num_held_bytes <= HELD_BYTES + PORTION_BYTES
    assert len(shelf.taken) >= 40 - (HELD_BYTES // PORTION_BYTES + 1)
    found = [item for portion in iter(lambda: inbox.take(0.0), []) for item in portion]
    assert sorted(found) == list(range(40))
    assert inbox.num_held_bytes == 0


def test_what_cannot_be_laid_aside_comes_all_the_same() -> None:
    shelf = Shelf()
    shelf.is_full = True
    inbox = Inbox[int](shelf.lay_aside)
    _bring(inbox, range(6))
    assert sorted(item for portion in iter(lambda: inbox.take(0.0), []) for item in portion) == list(range(6))


def test_what_was_laid_aside_and_is_lost_takes_nothing_else_with_it() -> None:
    shelf = Shelf()
    inbox = Inbox[int](shelf.lay_aside)
    _bring(inbox, range(6))
    shelf.loses = True
    inbox.put(-1)
    found = [item for _ in range(10) for item in inbox.take(0.0)]
    assert sorted([*found, *shelf.taken]) == [-1, 0, 1, 2, 3, 4, 5]


def test_nothing_is_laid_aside_while_there_is_room() -> None:
    shelf = Shelf()
    inbox = Inbox[int](shelf.lay_aside)
    for item in range(10):
        inbox.put(item, PORTION_BYTES)
        assert inbox.take(0.0) == [item]
    assert shelf.taken == []


@pytest.mark.parametrize("is_full", [False, True], ids=["laid aside", "no room on disk"])
def test_an_event_loop_never_waits_for_room(*, is_full: bool) -> None:
    shelf = Shelf()
    shelf.is_full = is_full
    inbox = Inbox[int](shelf.lay_aside)
    number = _fill(inbox)

    async def bring() -> None:
        for item in range(number, number + 5):
            inbox.put(item, 1)

    began_s = time.monotonic()
    asyncio.run(bring())
    assert time.monotonic() - began_s < PATIENCE_S
    assert shelf.taken == ([] if is_full else list(range(number, number + 5)))
    assert [item for portion in iter(lambda: inbox.take(0.0), []) for item in portion] == list(range(number + 5))
