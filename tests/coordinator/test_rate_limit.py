from __future__ import annotations

import pytest

from edgefl.coordinator.rate_limit import (
    FAILURE_DECAY_S,
    MAX_ADDRESSES,
    MAX_FAILURES,
    MAX_TOTAL_FAILURES,
    TOTAL_FAILURE_DECAY_S,
    RateLimiter,
)
from edgefl.core.errors import TooManyTriesError


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def throttle(clock: Clock) -> RateLimiter:
    return RateLimiter(monotonic=clock)


def is_let_try(throttle: RateLimiter, address: str) -> bool:
    try:
        throttle.check(address)
    except TooManyTriesError:
        return False
    return True


def test_an_address_has_ten_wrong_tries_and_gets_them_back_one_by_one(throttle: RateLimiter, clock: Clock) -> None:
    for _ in range(MAX_FAILURES):
        throttle.check("10.0.0.1")
        throttle.record_failure("10.0.0.1")
    with pytest.raises(TooManyTriesError, match=r"from 10\.0\.0\.1; nothing from there is looked at for 6 s"):
        throttle.check("10.0.0.1")
    clock.now_s += FAILURE_DECAY_S
    throttle.check("10.0.0.1")
    throttle.record_failure("10.0.0.1")
    assert not is_let_try(throttle, "10.0.0.1")


def test_another_address_is_not_slowed_down(throttle: RateLimiter) -> None:
    for _ in range(3 * MAX_FAILURES):
        throttle.record_failure("10.0.0.1")
    throttle.check("10.0.0.2")


def test_checks_alone_cost_nothing(throttle: RateLimiter) -> None:
    for _ in range(3 * MAX_FAILURES):
        throttle.check("10.0.0.1")


def test_when_all_tries_are_used_up_each_new_address_still_has_one(throttle: RateLimiter, clock: Clock) -> None:
    for number in range(MAX_TOTAL_FAILURES):
        throttle.record_failure(f"10.0.{number // 250}.{number % 250}")
    assert not is_let_try(throttle, "10.0.0.7"), "it was wrong once"
    assert is_let_try(throttle, "10.9.9.9"), "it has come for the first time"
    throttle.record_failure("10.9.9.9")
    assert not is_let_try(throttle, "10.9.9.9")
    clock.now_s += 20 * TOTAL_FAILURE_DECAY_S
    assert is_let_try(throttle, "10.9.9.9"), "the flood is over, and one of ten is used"


def test_a_flood_from_ever_new_addresses_takes_bounded_memory_and_no_hour_afterwards(
    throttle: RateLimiter, clock: Clock
) -> None:
    for number in range(3 * MAX_ADDRESSES):
        throttle.record_failure(str(number))
    assert throttle.count_addresses() == MAX_ADDRESSES
    clock.now_s += 2 * TOTAL_FAILURE_DECAY_S
    throttle.record_failure("10.0.0.1")
    clock.now_s += 2 * TOTAL_FAILURE_DECAY_S
    assert is_let_try(throttle, "10.0.0.1")
