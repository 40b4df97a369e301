"""Events of many threads, and those who hear them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from edgefl.coordinator.fleet.registry import EventBus


@pytest.fixture
def listeners() -> EventBus[int]:
    return EventBus()


def happen(listeners: EventBus[int], events: Sequence[int]) -> None:
    listeners.enqueue(events)
    listeners.publish()


def test_everybody_hears_everything_in_its_order_until_that_is_ended(listeners: EventBus[int]) -> None:
    first: list[int] = []
    second: list[int] = []
    end = listeners.subscribe(first.append)
    listeners.subscribe(second.append)
    happen(listeners, [1, 2])
    end()
    end()
    happen(listeners, [3])
    assert (first, second) == ([1, 2], [1, 2, 3])


def test_what_a_listener_causes_is_told_after_what_it_hears_and_to_everybody(listeners: EventBus[int]) -> None:
    first: list[int] = []
    second: list[int] = []

    def cause_more(event: int) -> None:
        first.append(event)
        if event < 10:
            happen(listeners, [event + 10])

    listeners.subscribe(cause_more)
    listeners.subscribe(second.append)
    happen(listeners, [1, 2])
    assert first == second == [1, 2, 11, 12]


class LateLock:
    """A lock before whose release something more happens, once."""

    def __init__(self, before_release: Callable[[], None]) -> None:
        self._lock, self._late = threading.Lock(), [before_release]

    def acquire(self, *, blocking: bool) -> bool:
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        if self._late:
            self._late.pop()()
        self._lock.release()


def test_what_comes_when_all_was_told_and_the_teller_has_not_let_go_is_told(listeners: EventBus[int]) -> None:
    heard: list[int] = []
    listeners.subscribe(heard.append)
    listeners._publish_lock = LateLock(lambda: happen(listeners, [2]))  # type: ignore[assignment]
    happen(listeners, [1])
    assert heard == [1, 2]


def test_what_a_listener_raises_comes_out_and_the_other_events_are_told_next(listeners: EventBus[int]) -> None:
    heard: list[int] = []

    def stumble(event: int) -> None:
        if event == 1:
            raise ZeroDivisionError("odd")
        heard.append(event)

    listeners.subscribe(stumble)
    with pytest.raises(ZeroDivisionError):
        happen(listeners, [1, 2])
    listeners.publish()
    assert heard == [2]


def test_no_event_of_many_threads_is_left_behind_or_overtaken(listeners: EventBus[int]) -> None:
    noted: list[int] = []
    heard: list[int] = []
    listeners.subscribe(heard.append)
    lock = threading.Lock()

    def work(number: int) -> None:
        for turn in range(500):
            with lock:
                noted.append(number * 1000 + turn)
                listeners.enqueue(noted[-1:])
            listeners.publish()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert heard == noted
    assert len(heard) == 8 * 500
