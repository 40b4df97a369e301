"""How late heartbeats are, by numbers that can be checked by hand."""

import pytest

SENT = {"pi-1": [10.0, 15.0, 20.0], "pi-2": [12.0, 17.0]}


@pytest.fixture(scope="module")
def lag(harness):
    return harness("heartbeat_lag")


def test_only_what_left_in_the_span_counts_however_late_it_came(lag):
    stored = {("pi-1", 1): 10.5, ("pi-1", 2): 16.0, ("pi-1", 3): 99.0, ("pi-2", 1): 12.25, ("pi-2", 2): 60.0}
    found = lag.lag_of(SENT, stored, 12.0, 20.0)
    assert (found.num_sent, found.num_lost, found.median_s, found.max_s) == (3, 0, 1.0, 43.0)


def test_what_is_not_in_the_store_is_lost_and_no_matter_of_time(lag):
    found = lag.lag_of(SENT, {("pi-1", 1): 10.5, ("pi-3", 1): 11.0}, 0.0, 30.0)
    assert (found.num_sent, found.num_lost, found.median_s, found.max_s) == (5, 4, 0.5, 0.5)
    assert lag.lag_of(SENT, {}, 0.0, 30.0).p99_s == float("inf")


def test_one_of_a_hundred_may_be_late(lag):
    sent = {"pi": [float(number) for number in range(1, 1001)]}
    stored = {("pi", number): number + (50.0 if number <= 9 else 0.125) for number in range(1, 1001)}
    assert lag.lag_of(sent, stored, 0.0, 2000.0).p99_s == 0.125
