"""The asynchronous template: who is asked, who rests, what is kept, and what becomes of buffers and counters."""

import math

import numpy as np
import pytest
from strategy_turns import update_of, view_of

from edgefl.core.errors import ConfigError
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.asynchronous.asgd import ASGDConfig
from edgefl.strategies.strategy_config import RoundRules

ABC = ("a", "b", "c")


def asked(strategy, state, *, busy=None, devices=ABC, now_s=0.0):
    state, decision = strategy.assign(state, view_of(*devices, busy=busy, devices=devices, now_s=now_s))
    return {order.device_id: order for order in decision.instructions}


def apply(strategy, state, order, tensors):
    strategy.receive(state, update_of(order, tensors))
    while strategy.ready(state, view_of(*ABC)):
        strategy.aggregate(state)


def made(settings=None, **rules):
    return (settings or ASGDConfig(step_scale=1.0, learning_rate=0.1)).build(RoundRules(**rules))


def weights(*values):
    return {"w": np.array(values, np.float32)}


def test_whoever_is_idle_gets_work_at_once_with_the_newest_version():
    strategy = made()
    state = strategy.init(weights(1.0))
    first = asked(strategy, state)
    assert sorted(first) == ["a", "b", "c"]
    apply(strategy, state, first["b"], weights(0.5))
    again = asked(strategy, state, busy={"a": [first["a"].assignment_id], "c": [first["c"].assignment_id]})
    assert [(order.device_id, order.base_version) for order in again.values()] == [("b", 1)]
    assert again["b"].used_assignments == (first["b"].assignment_id,)


def test_updates_are_versions_in_the_order_of_arrival():
    strategy = made()
    state = strategy.init(weights(0.0))
    orders = asked(strategy, state)
    for name in ("c", "a"):
        strategy.receive(state, update_of(orders[name], weights(1.0)))
    seen = []
    while strategy.ready(state, view_of(*ABC)):
        strategy.aggregate(state)
        seen.append((strategy.version(state), strategy.used(state)))
    assert seen == [(1, (orders["c"].assignment_id,)), (2, (orders["a"].assignment_id,))]


def test_a_used_update_is_told_again_until_an_answer_shows_that_it_was_heard():
    strategy = made()
    state = strategy.init(weights(0.0))
    first = asked(strategy, state, devices=["a"])["a"]
    apply(strategy, state, first, weights(1.0))
    second = asked(strategy, state, devices=["a"])["a"]
    third = asked(strategy, state, devices=["a"])["a"]  # the second was lost on its way
    assert second.used_assignments == third.used_assignments == (first.assignment_id,)
    apply(strategy, state, third, weights(1.0))
    fourth = asked(strategy, state, devices=["a"])["a"]
    assert fourth.used_assignments == (first.assignment_id, third.assignment_id)
    # The newest two are named in any case, older ones until they were heard.
    apply(strategy, state, fourth, weights(1.0))
    assert asked(strategy, state, devices=["a"])["a"].used_assignments == (third.assignment_id, fourth.assignment_id)


@pytest.mark.parametrize(
    ("fraction", "num_devices", "expected"), [(0.01, 3, 1), (0.34, 3, 2), (1.0, 3, 3), (0.07, 100, 7)]
)
def test_a_fraction_is_of_all_that_are_there_rounded_up(fraction, num_devices, expected):
    strategy, devices = made(fraction=fraction), [f"d{number:02}" for number in range(num_devices)]
    assert len(asked(strategy, strategy.init(weights(0.0)), devices=devices)) == expected


def test_a_device_that_fails_again_and_again_rests_longer_each_time_and_others_do_not():
    strategy = made()
    state = strategy.init(weights(0.0))
    times, now_s = [], 0.0
    while len(times) < 10:
        state, decision = strategy.assign(state, view_of("a", now_s=now_s))
        times += [now_s] * len(decision.instructions)
        now_s += decision.next_wake_s if not decision.instructions else 0.001
    pauses = np.diff(times)
    assert pauses[0] < 0.01  # one loss may be a device that left and came back
    assert pauses[1:].tolist() == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60], abs=0.01)
    assert sorted(asked(strategy, state, devices=["a", "b"], now_s=now_s)) == ["b"]


def test_a_rest_that_another_clock_noted_is_over():
    strategy = made()
    state = strategy.init(weights(0.0))
    for _ in range(3):
        orders = asked(strategy, state, devices=["a"], now_s=1e6)
    assert not orders
    assert list(asked(strategy, state, devices=["a"], now_s=5.0)) == ["a"]


def test_what_was_kept_for_a_device_goes_when_it_dies():
    strategy = made()
    state = strategy.init(weights(0.0))
    asked(strategy, state)
    assert state.holders == {0: 3}
    for _ in range(2):
        asked(strategy, state, devices=[])
    assert state.holders == {}


def test_when_few_may_work_at_a_time_all_get_their_turn():
    names = [f"n{i}" for i in range(20)]
    strategy = made(max_devices=3, seed=5)
    state, seen, busy, orders_of = strategy.init(weights(0.0)), set(), {}, {}
    for _ in range(200):
        orders = asked(strategy, state, busy=busy, devices=names)
        orders_of |= orders
        busy |= {name: [order.assignment_id] for name, order in orders.items()}
        assert len(busy) == 3
        seen |= set(orders)
        done = next(iter(busy))
        strategy.receive(state, update_of(orders_of[done], weights(0.0)))
        busy.pop(done)
        strategy.aggregate(state)
    assert seen == set(names)


def test_the_learning_rate_follows_the_rounds_of_as_many_updates_as_devices_were_asked_first():
    strategy = made(ASGDConfig(step_scale=1.0, learning_rate=1.0, schedule="step:1:0.5"))
    state = strategy.init(weights(0.0))
    orders, rates = asked(strategy, state), []
    for name in ABC:
        apply(strategy, state, orders[name], weights(0.0))
        busy = {other: [orders[other].assignment_id] for other in ABC if other != name}
        orders |= asked(strategy, state, busy=busy)
        rates.append(orders[name].plan.learning_rate)
    assert rates == [1.0, 1.0, 0.5]


def test_the_run_file_may_say_how_many_updates_are_a_round():
    strategy = made(ASGDConfig(step_scale=1.0, learning_rate=1.0, schedule="step:1:0.5"), updates_per_round=1)
    state = strategy.init(weights(0.0))
    apply(strategy, state, asked(strategy, state)["a"], weights(0.0))
    assert asked(strategy, state)["a"].plan.learning_rate == 0.5


def test_a_device_takes_one_step_unless_the_run_file_says_otherwise():
    assert ASGDConfig().plan().iterations == 1
    assert ASGDConfig(epochs=2.0).plan().iterations == 1  # a task's advice for strategies in rounds
    assert (
        ASGDConfig(iterations=0, epochs=2.0).plan().iterations,
        ASGDConfig(iterations=0, epochs=2.0).plan().epochs,
    ) == (
        None,
        2.0,
    )
    assert (ASGDConfig(seconds=3.0).plan().iterations, ASGDConfig(seconds=3.0).plan().seconds) == (None, 3.0)
    with pytest.raises(ConfigError, match=r"strategy\.iterations must be a whole number at least 0, got -1"):
        ASGDConfig(iterations=-1).plan()


def test_running_means_are_mixed_so_that_a_variance_never_becomes_negative():
    strategy = made(server=ServerOptimizer(buffers=frozenset({"var"})))
    start = {"w": np.zeros(1, np.float32), "var": np.array([10.0], np.float32)}
    state, smallest = strategy.init(start), math.inf
    names = [f"n{i}" for i in range(30)]
    for _ in range(3):
        orders = asked(strategy, state, devices=names)
        # Everybody saw a variance of 1 and sends the way there; the sum of thirty ways would end at -260.
        for order in orders.values():
            base = state.buffers[order.base_version]["var"]
            apply(strategy, state, order, {"w": np.zeros(1, np.float32), "var": 1.0 - base})
            smallest = min(smallest, float(state.model["var"][0]))
    assert smallest == pytest.approx(1.0)
    assert state.buffers == {}


def test_a_running_mean_without_delay_is_the_devices_own_to_the_last_bit():
    strategy = made(server=ServerOptimizer(buffers=frozenset({"mean"})))
    state = strategy.init({"w": np.zeros(1, np.float32), "mean": np.array([0.1], np.float32)})
    moved = np.array([0.7], np.float32)
    apply(strategy, state, asked(strategy, state)["a"], {"w": np.zeros(1, np.float32), "mean": moved})
    assert state.model["mean"] == np.array([0.1], np.float32) + moved


def test_a_running_mean_that_is_s_versions_old_weighs_one_over_one_plus_s():
    strategy = made(server=ServerOptimizer(buffers=frozenset({"mean"})))
    state = strategy.init({"w": np.zeros(1), "mean": np.array([1.0])})
    orders, expected = asked(strategy, state), 1.0
    for delay, name in enumerate(ABC):
        apply(strategy, state, orders[name], {"w": np.zeros(1), "mean": np.array([4.0 + delay])})
        own = 1.0 + 4.0 + delay  # what the device has: where it began and its displacement
        expected += (own - expected) / (1 + delay)
        assert state.model["mean"][0] == pytest.approx(expected)


def test_counters_add_up():
    strategy = made()
    state = strategy.init({"w": np.zeros(1, np.float32), "seen": np.array(5)})
    for order in asked(strategy, state).values():
        apply(strategy, state, order, {"w": np.zeros(1, np.float32), "seen": np.array(2)})
    assert int(state.model["seen"]) == 11
