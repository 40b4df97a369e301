"""Limits of a listener's connections, on a clock of the test."""

from __future__ import annotations

import logging
import resource

import pytest

from edgefl.coordinator.connections import (
    BURST_S,
    EVICTION_AGE_S,
    LOG_INTERVAL_S,
    UNKNOWN_FRACTION,
    ConnectionLimiter,
    count_available_files,
)
from edgefl.core.config import ConnectionSettings


class Door:
    """A limiter, and what it closed."""

    def __init__(self, max_connections: int = 300, **settings: object) -> None:
        self.now_s, self.closed = 100.0, []
        usual = {"new_per_s": 10_000.0}
        chosen = ConnectionSettings(**{**usual, **settings})
        self.limiter = ConnectionLimiter("https", chosen, max_connections, monotonic=lambda: self.now_s)

    def open(self, host: str, *, is_busy: bool = False):
        slot = self.limiter.admit(host)
        if slot is not None:
            slot.close = lambda reason: self.closed.append((slot, reason))
            slot.is_busy = lambda: is_busy
        return slot

    def open_many(self, number: int, host: str) -> list:
        return [slot for _ in range(number) if (slot := self.open(host))]


def test_an_address_at_its_limit_gets_one_more_in_by_closing_one_that_had_its_time():
    door = Door(max_pending_per_address=5)
    slots = door.open_many(8, "192.0.2.1")
    assert len(slots) == 5
    assert door.limiter.refused == {"address": 3}
    door.now_s += EVICTION_AGE_S
    assert door.open("192.0.2.1")
    ((evicted, reason),) = door.closed
    assert evicted in slots
    assert reason == "address"
    assert door.limiter.num_pending == 5


def test_what_has_shown_a_key_is_never_closed_for_others_whoever_shares_its_address():
    door = Door(max_pending_per_address=5)
    boards = []
    for number in range(100):  # one network behind one address: each board has two connections
        for _ in range(2):
            boards.append(door.open("192.0.2.1"))
            boards[-1].authenticate(f"board-{number}")
    door.now_s += EVICTION_AGE_S
    for _ in range(500):
        door.now_s += 0.1
        door.open("192.0.2.1")
    assert all(slot.is_open for slot in boards)
    assert door.limiter.num_owned == 200
    assert door.limiter.num_pending == 5


def test_a_request_under_way_is_not_closed_for_a_newcomer():
    door = Door(max_pending_per_address=2)
    door.open("192.0.2.1", is_busy=True)
    door.open("192.0.2.1", is_busy=True)
    door.now_s += EVICTION_AGE_S
    assert door.open("192.0.2.1") is None
    assert not door.closed


def test_an_address_opens_no_more_than_its_rate_and_a_key_gives_the_place_back():
    door = Door(new_per_s=1.0)
    assert len(door.open_many(30, "192.0.2.1")) == BURST_S
    assert door.limiter.refused == {"rate": 20}
    door.now_s += 3
    assert len(door.open_many(30, "192.0.2.1")) == 3
    honest = Door(new_per_s=1.0)
    for number in range(100):
        slot = honest.open("192.0.2.2")
        slot.authenticate(f"board-{number}")
        slot.release()
    assert not honest.limiter.refused


def test_a_flood_from_many_addresses_leaves_a_share_to_those_that_showed_a_key_before():
    door = Door(max_connections=120)
    assert door.limiter.max_pending == 40
    known = door.open("192.0.2.1")
    known.authenticate("board-1")
    known.release()
    admitted = [slot for n in range(200) if (slot := door.open(f"198.51.{n // 100}.{n % 100}"))]
    assert len(admitted) == door.limiter.max_pending * UNKNOWN_FRACTION
    assert len(door.open_many(10, "192.0.2.1")) == 10
    assert not door.closed, "the share was free"
    door.now_s += EVICTION_AGE_S
    assert door.open("192.0.2.1")
    ((evicted, reason),) = door.closed
    assert evicted.address.startswith("198.51.")
    assert reason == "total"


def test_a_device_with_a_key_cannot_take_all_places():
    door = Door(max_per_device=4)
    for _ in range(10):
        door.open("192.0.2.1").authenticate("board-1")
    assert (door.limiter.num_owned, door.limiter.num_pending) == (4, 6)


def test_places_are_free_again_whatever_the_order_of_ends():
    door = Door()
    slots = door.open_many(20, "192.0.2.1") + door.open_many(20, "2001:db8::1")
    for number, slot in enumerate(slots[::2]):
        slot.authenticate(f"board-{number}")
    for slot in reversed(slots):
        slot.release()
        slot.release()
    assert (door.limiter.num_pending, door.limiter.num_owned) == (0, 0)
    slots[1].authenticate("board-late")
    assert door.limiter.num_owned == 0, "a connection that has ended belongs to nobody"


def test_an_ipv6_network_is_one_address():
    door = Door(max_pending_per_address=5)
    admitted = [slot for n in range(20) if (slot := door.open(f"2001:db8::{n:x}"))]
    assert len(admitted) == 5


def test_refusals_are_one_line_a_minute(caplog: pytest.LogCaptureFixture):
    door = Door(max_pending_per_address=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            door.now_s += 1.0
            door.open("192.0.2.1")
            door.open("192.0.2.1")
        door.limiter.log_refusals()
    assert len(caplog.messages) == 2
    assert "https refused" in caplog.messages[0]
    door.now_s += LOG_INTERVAL_S
    with caplog.at_level(logging.WARNING):
        door.limiter.log_refusals()
        door.limiter.log_refusals()
    assert len(caplog.messages) == 3


def test_there_is_always_a_reserve_of_files():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 6 <= count_available_files() <= max(6, limit - 128)
