"""Vectors E1 to E3 of ESync's rule and of its budgets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.strategies.synchronous.esync_rule import (
    DeviceRoundProgress,
    DeviceTiming,
    Slack,
    add_measurement,
    compute_budgets,
    compute_estimate,
    compute_horizon_s,
    find_slowest,
    is_ready,
)

FAST_AND_SLOW = [0.03] * 4 + [3.5, 3.5]


def counts(seconds, exchange=None, *, epsilon_s=0.0, **bounds):
    exchange = exchange or [0.0] * len(seconds)
    paces = {
        f"d{i}": DeviceTiming(seconds_per_iteration=c, exchange_s=u)
        for i, (c, u) in enumerate(zip(seconds, exchange, strict=True))
    }
    return list(compute_budgets(paces, Slack(seconds=epsilon_s), **bounds).values())


@pytest.mark.parametrize(
    ("seconds", "epsilon_s", "expected"),
    [
        ([1, 2, 4], 0.5, [3, 1, 1]),
        ([1, 2, 4], 0.0, [4, 2, 1]),
        ([1, 2, 4], 0.01, [3, 1, 1]),
        ([1, 1.5, 10], 0.5, [9, 6, 1]),
        ([2, 3, 7], 0.5, [3, 2, 1]),
        ([0.25, 1, 4], 0.5, [14, 3, 1]),
        ([1, 1, 1], 0.5, [1, 1, 1]),
        (FAST_AND_SLOW, 0.5, [100, 100, 100, 100, 1, 1]),
        (FAST_AND_SLOW, 0.0, [116, 116, 116, 116, 1, 1]),
    ],
)
def test_e1_budgets_let_everybody_end_with_the_slowest(seconds, epsilon_s, expected):
    assert counts(seconds, epsilon_s=epsilon_s) == expected


def test_e2_the_time_of_the_exchange_counts():
    assert counts([1, 2, 4], [2, 1, 0.5]) == [2, 1, 1]
    paces = {
        "a": DeviceTiming(seconds_per_iteration=1, exchange_s=2),
        "b": DeviceTiming(seconds_per_iteration=4, exchange_s=0.5),
    }
    assert compute_horizon_s(paces) == 4.5


def test_exact_divisors_are_not_lost_to_rounding():
    assert counts([0.1, 0.3]) == [3, 1]
    assert counts([0.07, 0.7]) == [10, 1]


def test_a_relative_slack_is_a_part_of_each_devices_own_iteration():
    paces = {"a": DeviceTiming(seconds_per_iteration=0.01), "b": DeviceTiming(seconds_per_iteration=1.006)}
    assert compute_budgets(paces, Slack(fraction=0.5))["a"] == 100
    assert compute_budgets(paces, Slack(fraction=0.7))["a"] == 99
    assert compute_budgets(paces, Slack(seconds=0.5))["a"] == 50


def test_a_slack_below_zero_rounds_up_and_the_slowest_still_does_one():
    paces = {"a": DeviceTiming(seconds_per_iteration=1.1), "b": DeviceTiming(seconds_per_iteration=4.2)}
    assert compute_budgets(paces, Slack(fraction=-0.2)) == {"a": 4, "b": 1}
    assert compute_budgets(paces, Slack(fraction=-1.0)) == {"a": 4, "b": 1}


def test_budgets_have_bounds():
    assert counts(FAST_AND_SLOW, max_iterations=40) == [40, 40, 40, 40, 1, 1]
    assert counts([1, 2, 4], min_iterations=3) == [4, 3, 3]


def test_a_fleet_that_measured_nothing_does_one_iteration_each():
    assert counts([0.0, 0.0]) == [1, 1]
    assert counts([0.0, 2.0]) == [1, 1]
    assert compute_budgets({}, Slack()) == {}
    assert compute_horizon_s({}) == 0.0


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(0, 1e3)), min_size=1, max_size=8),
    st.floats(0, 2),
    st.booleans(),
)
def test_nobody_is_later_than_the_slowest_and_nobody_idles_longer_than_an_iteration_and_the_slack(
    fleet, value, relative
):
    paces = {f"d{i}": DeviceTiming(seconds_per_iteration=c, exchange_s=u) for i, (c, u) in enumerate(fleet)}
    slack = Slack(fraction=value) if relative else Slack(seconds=value)
    end_s = compute_horizon_s(paces)
    for name, count in compute_budgets(paces, slack).items():
        pace = paces[name]
        idle_s = end_s - pace.exchange_s - count * pace.seconds_per_iteration
        assert idle_s > -1e-6 * end_s
        assert count == 1 or idle_s >= slack.to_seconds(pace.seconds_per_iteration) - 1e-6 * end_s
        assert idle_s <= pace.seconds_per_iteration + slack.to_seconds(pace.seconds_per_iteration) + 1e-6 * end_s


def standing(**fields):
    return DeviceRoundProgress(**{"iterations": 1, "seconds_per_iteration": 1.0, "age_s": 0.0, **fields})


SLOW = standing(iterations=0, seconds_per_iteration=4.0, age_s=1.0)


@pytest.mark.parametrize(
    ("one", "last", "is_last", "sends"),
    [
        ({"iterations": 0}, {"is_ready": True}, False, False),
        ({"iterations": 0}, {"iterations": 0, "seconds_per_iteration": 4.0}, True, False),
        ({"seconds_per_iteration": 0.001}, {"seconds_per_iteration": 4.0, "is_ready": True}, False, True),
        ({}, {"iterations": 0, "seconds_per_iteration": 4.0, "age_s": 3.9, "has_model": False}, False, False),
        ({}, {"iterations": 0, "seconds_per_iteration": 4.0, "age_s": 3.9}, False, True),
        ({"seconds_per_iteration": 0.001}, {"iterations": 0, "age_s": 1.1}, False, True),
        ({"seconds_per_iteration": 4.0}, {"seconds_per_iteration": 4.0}, True, True),
    ],
)
def test_e3_nobody_sends_before_its_first_iteration_and_all_once_the_slowest_does(one, last, is_last, sends):
    assert is_ready(standing(**one), standing(**last), 0.5, is_slowest=is_last) is sends


def test_one_more_iteration_is_done_while_it_fits_with_the_slack():
    # The slowest ends in 3 seconds.
    assert not is_ready(standing(seconds_per_iteration=2.4), SLOW, 0.5)
    assert not is_ready(standing(seconds_per_iteration=2.5), SLOW, 0.5)  # exactly
    assert is_ready(standing(seconds_per_iteration=2.6), SLOW, 0.5)


def test_the_first_of_equals_is_the_slowest():
    assert find_slowest({"b": standing(), "a": standing(), "c": standing(seconds_per_iteration=0.5)}) == "b"


@pytest.mark.parametrize("epsilon_s", [0.0, 0.5])
@pytest.mark.parametrize("seconds", [[1, 2, 4], [1, 1.5, 10], [2, 3, 7], [0.25, 1, 4]])
def test_asking_the_rule_before_every_iteration_gives_the_budgets(seconds, epsilon_s):
    """The paper's worker loop, by simulation: common start, exact times, queries that cost nothing."""
    slow = max(range(len(seconds)), key=lambda i: seconds[i])
    found = []
    for number, own_s in enumerate(seconds):
        done = 0
        while True:
            now_s = done * own_s
            one = standing(iterations=done, seconds_per_iteration=own_s)
            last = standing(iterations=int(now_s >= seconds[slow]), seconds_per_iteration=seconds[slow], age_s=now_s)
            if is_ready(one, last if number != slow else one, epsilon_s, is_slowest=number == slow):
                break
            done += 1
        found.append(done)
    assert found == counts(seconds, epsilon_s=epsilon_s)


def test_the_median_forgets_one_hiccup_and_follows_a_change():
    history, seen = [], []
    for value in (9.0, 1.0, 1.0, 50.0, 1.0, 3.0, 3.0):
        history = add_measurement(history, value, "median")
        seen.append(compute_estimate(history))
    assert seen == [9.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0]
    assert len(history) == 3


def test_the_moving_average_goes_half_of_the_way_and_the_last_value_all_of_it():
    assert compute_estimate(add_measurement(add_measurement([], 4.0, "ewma"), 2.0, "ewma")) == 3.0
    assert compute_estimate(add_measurement(add_measurement([], 4.0, "last"), 2.0, "last")) == 2.0
    assert math.isfinite(compute_estimate([0.0]))


def test_a_device_that_measures_next_to_no_time_gets_the_upper_bound():
    paces = {"a": DeviceTiming(seconds_per_iteration=1e-320), "b": DeviceTiming(seconds_per_iteration=1.0)}
    assert compute_budgets(paces, Slack(), max_iterations=50) == {"a": 50, "b": 1}
