"""ESync on boards with a pace, and vectors E1 to E3 of its rule and budgets: who does how much, and when."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paced_fleet import Board, PacedFleet, run

from edgefl.core.types import DeviceThroughput, TrainInstruction, Update, UpdateMetrics
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.esync import (
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

PACES = {"a": 1.0, "b": 2.0, "c": 4.0}


def esync(rules=None, **options):
    return make_strategy("esync", {"learning_rate": 0.1, **options}, rules or RoundRules())


def fleet_of(paces=PACES, exchange=None):
    return PacedFleet(
        {
            name: Board(pace, (exchange or {}).get(name, 0.0), target=len(name) + ord(name[-1]))
            for name, pace in paces.items()
        }
    )


def iterations(fleet):
    """Iterations that were really done, by round and device."""
    found = {}
    for _, update in fleet.arrived:
        found.setdefault(update.base_version, {})[update.device_id] = update.metrics.iterations
    return [found[version] for version in sorted(found)]


def spent_s(fleet):
    """Seconds of each round, from its orders to its last update."""
    opened = {o.base_version: at for at, o in reversed(fleet.given) if isinstance(o, TrainInstruction)}
    closed = {update.base_version: at for at, update in fleet.arrived}
    return [round(closed[version] - opened[version], 6) for version in sorted(closed)]


@pytest.mark.parametrize("mode", ["budget", "live", "query"])
def test_everybody_ends_when_the_slowest_does_from_the_second_round_on(mode):
    fleet = fleet_of()
    run(fleet, esync(mode=mode), rounds=4)
    assert iterations(fleet) == [{"a": 1, "b": 1, "c": 1}] + [{"a": 4, "b": 2, "c": 1}] * 3
    assert spent_s(fleet) == [4.0] * 4


@pytest.mark.parametrize("mode", ["budget", "live", "query"])
def test_the_papers_half_second_costs_a_fast_fleet_an_iteration(mode):
    fleet = fleet_of()
    run(fleet, esync(mode=mode, epsilon_s=0.5), rounds=2)
    assert iterations(fleet)[1] == {"a": 3, "b": 1, "c": 1}


@pytest.mark.parametrize("mode", ["budget", "live", "query"])
def test_a_slack_below_zero_lets_devices_end_a_little_after_the_slowest(mode):
    fleet = fleet_of({"a": 1.1, "b": 4.2})
    run(fleet, esync(mode=mode, epsilon=-0.2), rounds=2)
    assert iterations(fleet)[1] == {"a": 4, "b": 1}
    fleet = fleet_of({"a": 1.1, "b": 4.1})
    run(fleet, esync(mode=mode, epsilon=-0.2), rounds=2)
    assert iterations(fleet)[1] == {"a": 3, "b": 1}


@pytest.mark.parametrize("mode", ["budget", "live", "query"])
def test_the_time_on_the_way_counts(mode):
    fleet = fleet_of(exchange={"a": 2.0, "b": 1.0, "c": 0.5})
    run(fleet, esync(mode=mode), rounds=3)
    assert iterations(fleet)[1:] == [{"a": 2, "b": 1, "c": 1}] * 2
    assert spent_s(fleet) == [4.5] * 3


@pytest.mark.parametrize(("mode", "fallbacks"), [("live", [None] * 3), ("query", [4, 2, None])])
def test_work_without_a_budget_is_ended_by_recalls_and_that_of_a_query_falls_back_to_one(mode, fallbacks):
    fleet = fleet_of()
    run(fleet, esync(mode=mode), rounds=2)
    plans = {o.device_id: o.plan for o in fleet.assignments() if o.base_version == 1}
    assert [plans[name].iterations for name in "abc"] == [10_000, 10_000, 1]
    assert [plans[name].report_progress for name in "abc"] == [True, True, False]
    assert [plans[name].fallback_iterations for name in "abc"] == fallbacks
    assert {name for _, name in fleet.recalls()} == {"a", "b"}


@pytest.mark.parametrize(("mode", "done"), [("live", 3), ("query", 2)])
def test_a_device_that_asks_begins_no_iteration_that_no_longer_fits(mode, done):
    fleet = fleet_of()
    fleet.at(4.5, lambda: setattr(fleet.boards["a"], "seconds_per_iteration", 1.7) or [])
    run(fleet, esync(mode=mode, smoothing="last"), rounds=2)
    # Round 2 began at 4 s; a ends its second iteration at 6.7 s, and another would end after c's only one, at 8 s.
    assert iterations(fleet)[1]["a"] == done
    assert spent_s(fleet)[1] == (4.0 if mode == "query" else 4.4)


def test_the_fleets_speeds_serve_for_the_first_round_when_all_are_known():
    fleet = fleet_of()
    fleet.speeds = {name: DeviceThroughput(seconds_per_iteration=pace) for name, pace in PACES.items()}
    run(fleet, esync(), rounds=1)
    assert iterations(fleet) == [{"a": 4, "b": 2, "c": 1}]
    fleet = fleet_of()
    fleet.speeds = {"a": DeviceThroughput(seconds_per_iteration=1.0), "b": DeviceThroughput()}
    run(fleet, esync(), rounds=1)
    assert iterations(fleet) == [{"a": 1, "b": 1, "c": 1}]


@pytest.mark.parametrize("mode", ["budget", "live", "query"])
def test_a_newcomer_warms_up_with_one_iteration_and_does_not_disturb_the_others(mode):
    fleet = fleet_of()
    fleet.boards["d"], fleet.queues["d"] = Board(0.5), []
    fleet.at(5.0, lambda: fleet.join("d"))
    run(fleet, esync(mode=mode), rounds=4)
    assert [found.get("d") for found in iterations(fleet)] == [None, None, 1, 8]
    assert [found["a"] for found in iterations(fleet)] == [1, 4, 4, 4]


def slow_down(fleet, name, at_s, seconds):
    fleet.at(at_s, lambda: setattr(fleet.boards[name], "seconds_per_iteration", seconds) or [])


def test_a_device_that_slows_down_inside_a_round_is_recalled_and_gets_less_work_soon():
    fleet = fleet_of()
    slow_down(fleet, "a", 4.5, 5.0)
    run(fleet, esync(smoothing="last"), rounds=4)
    # In round 2, which began at 4 s, its second iteration takes from 5 to 10 s; after 4 + 1.5 x 4 s it is recalled.
    assert (10.0, "a") in fleet.recalls()
    done = [found["a"] for found in iterations(fleet)]
    assert done[0] == 1
    assert done[1] < 4
    assert done[2:] == [1, 1]
    assert spent_s(fleet)[2:] == [5.0, 5.0]
    assert [found["b"] for found in iterations(fleet)][2:] == [2, 2]


def test_live_a_device_that_slows_down_is_told_to_send_and_the_others_work_on():
    fleet = fleet_of()
    slow_down(fleet, "a", 4.5, 2.9)  # a report at 7.9 s: two iterations, 1.95 s each
    run(fleet, esync(mode="live", smoothing="last"), rounds=2)
    assert iterations(fleet)[1] == {"a": 2, "b": 2, "c": 1}
    assert spent_s(fleet)[1] == 4.0


def test_live_a_device_that_has_become_the_slowest_is_heard_of_by_its_progress():
    fleet = fleet_of({"a": 1.0, "b": 0.5, "c": 4.0})
    slow_down(fleet, "c", 4.0, 9.0)
    run(fleet, esync(mode="live", smoothing="last"), rounds=3)
    # Round 2 was planned with 4 s for c: a and b are told to send in time, c is waited for; round 3 knows better.
    assert iterations(fleet)[1] == {"a": 4, "b": 8, "c": 1}
    assert iterations(fleet)[2] == {"a": 9, "b": 18, "c": 1}


@pytest.mark.parametrize("mode", ["budget", "live", "query"])
def test_when_the_slowest_dies_in_a_round_the_others_go_on_without_it(mode):
    fleet = fleet_of()
    fleet.at(5.5, lambda: fleet.leave("c"))
    run(fleet, esync(mode=mode), rounds=4)
    assert iterations(fleet)[2] == {"a": 2, "b": 1}
    assert all(len(names) == 2 for names in fleet.journal.aggregates[1:])
    if mode != "budget":  # b is the slowest now, and its first iteration is the last
        assert [at for at, _ in fleet.arrived[3:5]] == [6.0, 6.0]


@pytest.mark.parametrize("mode", ["budget", "live", "query"])
def test_when_all_were_lost_it_waits_in_peace_until_they_are_back(mode):
    fleet = fleet_of()
    fleet.at(5.0, lambda: [event for name in PACES for event in fleet.leave(name)])
    fleet.at(900.0, lambda: [event for name in PACES for event in fleet.join(name)])
    run(fleet, esync(mode=mode), rounds=3)
    assert fleet.now_s > 900.0
    assert fleet.turns < 200


def test_a_device_that_hangs_is_given_up_after_the_deadline_or_many_times_the_planned_seconds():
    fleet = fleet_of()
    fleet.at(4.5, lambda: setattr(fleet.boards["b"], "seconds_per_iteration", 1e6) or [])
    fleet.boards["b"].answers = True
    run(fleet, esync(give_up=20.0), rounds=3)
    second = [o for o in fleet.assignments() if o.base_version == 1]
    assert {order.deadline_s for order in second} == {80.0}
    assert len(fleet.journal.aggregates[1]) == 2
    for rules, deadlines in ((RoundRules(deadline_s=33.0), [33.0] * 6), (RoundRules(), [None] * 3 + [60.0] * 3)):
        fleet = fleet_of()
        run(fleet, esync(rules), rounds=2)
        assert [order.deadline_s for order in fleet.assignments()] == deadlines


def two_devices(aggregation, moves, *, global_learning_rate=1.0, num_examples=(10, 10), iterations=(1, 1)):
    strategy = esync(aggregation=aggregation, global_learning_rate=global_learning_rate)
    state = strategy.init({"w": np.array([1.0])})
    state, decision = strategy.assign(state, fleet_of({"a": 1.0, "b": 1.0}).view())
    for place, order in enumerate(decision.instructions):
        metrics = UpdateMetrics(num_examples=num_examples[place], iterations=iterations[place], compute_s=1.0)
        update = Update(
            assignment_id=order.assignment_id, device_id=order.device_id, base_version=0,
            tensors={"w": np.array([moves[place]])}, metrics=metrics,
        )  # fmt: skip
        state = strategy.receive(state, update)
    return float(strategy.model(strategy.aggregate(state))["w"][0])


def test_e4_the_model_moves_by_the_uniform_mean_times_the_global_learning_rate():
    moves = (0.7 - 1.0, 1.1 - 1.0)
    assert two_devices("uniform", moves, iterations=(9, 1)) == pytest.approx(0.9)
    assert two_devices("uniform", moves, global_learning_rate=0.5) == pytest.approx(0.95)


def test_other_aggregations_weigh_by_examples_and_normalise_by_steps():
    assert two_devices("samples", (1.0, 0.0), num_examples=(30, 10)) == pytest.approx(1.75)
    # Directions 0.1 and 0.1 per step, 11/2 steps on average.
    assert two_devices("nova", (1.0, 0.1), iterations=(10, 1)) == pytest.approx(1 + 5.5 * 0.1)


@pytest.mark.parametrize("paces", [{"a": 1.0}, dict.fromkeys("abc", 1.0), PACES])
def test_e5_with_budgets_of_one_it_is_ssgd_bit_for_bit(paces):
    one = esync(max_iterations=1, schedule="step:2:0.5")
    other = make_strategy("ssgd", {"learning_rate": 0.1, "schedule": "step:2:0.5"}, RoundRules())
    first, second = (run(fleet_of(paces), strategy, rounds=5).model["w"] for strategy in (one, other))
    assert first.tobytes() == second.tobytes()


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


@pytest.mark.parametrize("seed", range(20))
def test_by_default_no_device_is_planned_to_return_after_the_slowest(seed):
    rng = np.random.default_rng(seed)
    paces = {
        str(number): DeviceTiming(seconds_per_iteration=seconds, exchange_s=exchange_s)
        for number, (seconds, exchange_s) in enumerate(rng.uniform(0.01, 2.0, (6, 2)))
    }
    budgets = compute_budgets(paces, esync()._slack)
    ends = {
        name: paces[name].seconds_per_iteration * count + paces[name].exchange_s for name, count in budgets.items()
    }
    assert max(ends.values()) == pytest.approx(compute_horizon_s(paces))


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
