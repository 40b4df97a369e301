"""`dc-asgd`: the spec's vectors, its three variants, and what it keeps for each device."""

import numpy as np
import pytest
from strategy_turns import begun, moved, view_of

from edgefl.core.types import SparseTensor
from edgefl.strategies.asynchronous.asgd import ASGDConfig
from edgefl.strategies.asynchronous.dc_asgd import (
    DCASGDConfig,
    apply_delay_compensation,
    compute_adaptive_strength,
    update_mean_square,
)
from edgefl.strategies.synchronous.strategy import RoundRules

ABC = ("a", "b", "c")


def asked(settings, start):
    strategy = settings.build(RoundRules())
    return strategy, *begun(strategy, {"w": start}, ABC)


def stepped(strategy, state, order, displacement):
    return moved(strategy, state, order, {"w": displacement})


def test_the_adaptive_form_is_that_of_the_spec():  # E7
    squares = update_mean_square(None, np.array([-0.05]), 0.1, 0.95)
    strength = compute_adaptive_strength(squares, 2.0)
    step = apply_delay_compensation(np.array([-0.05]), np.array([1.0]), np.array([0.8]), strength, 0.1)
    assert squares[0] == pytest.approx(0.0125)
    assert strength[0] == pytest.approx(17.8885, abs=1e-4)
    assert 1.0 + step[0] == pytest.approx(0.860558, abs=1e-6)


@pytest.mark.parametrize(("variant", "expected"), [("constant", 0.9498), ("adaptive", 0.860558)])
def test_a_run_takes_the_backup_of_the_version_that_the_device_began_with(variant, expected):
    strategy, state, orders = asked(DCASGDConfig(variant=variant, learning_rate=0.1), [0.8])
    state = stepped(strategy, state, orders["a"], [0.2])  # no delay: asgd's step
    assert state.model["w"][0] == pytest.approx(1.0)
    state = stepped(strategy, state, orders["b"], [-0.05])
    assert state.model["w"][0] == pytest.approx(expected, abs=1e-6)


def test_the_mean_square_is_kept_by_device():
    strategy, state, orders = asked(DCASGDConfig(variant="adaptive", learning_rate=0.1, mean_square_decay=0.5), [0.0])
    state = stepped(strategy, state, orders["a"], [-0.1])
    state = stepped(strategy, state, orders["b"], [-0.2])
    assert state.mean_squares["a"]["w"][0] == pytest.approx(0.5)
    assert state.mean_squares["b"]["w"][0] == pytest.approx(2.0)
    _, decision = strategy.assign(state, view_of("a", busy={"b": ["x"], "c": [orders["c"].assignment_id]}))
    state = stepped(strategy, state, decision.orders[0], [-0.3])
    assert state.mean_squares["a"]["w"][0] == pytest.approx(0.5 * 0.5 + 0.5 * 9)


def test_mxnets_form_knows_only_the_step_of_whoever_came_last():
    strategy, state, orders = asked(DCASGDConfig(variant="mxnet", compensation=0.1, learning_rate=1.0), [0.0])
    for name in ABC:
        state = stepped(strategy, state, orders[name], [1.0])
    # 1; then 1 - 0.1 * (1 - 0); then 1 - 0.1 * (1.9 - 1), although c began at 0.
    assert state.model["w"][0] == pytest.approx(1.0 + 0.9 + 0.91)


@pytest.mark.parametrize("variant", ["constant", "adaptive", "mxnet"])
@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_without_compensation_it_is_asgd_to_the_last_bit(variant, dtype):
    rng = np.random.default_rng(3)
    start = rng.standard_normal(50).astype(dtype)
    turns = []
    for turn in range(6):
        dense = (0.1 * rng.standard_normal(50)).astype(dtype)
        sparse = SparseTensor(indices=np.arange(0, 50, 3), values=dense[::3], shape=(50,))
        turns.append(sparse if turn % 2 else dense)
    plain = in_turn(ASGDConfig(learning_rate=0.1), start, turns)
    other = in_turn(DCASGDConfig(variant=variant, compensation=0.0, learning_rate=0.1), start, turns)
    assert plain.model["w"].tobytes() == other.model["w"].tobytes()
    assert not other.backups


def in_turn(settings, start, displacements):
    """Returns the state after so many answers of a, b, c, a, ... each of whom is asked again at once."""
    strategy, state, orders = asked(settings, start)
    for turn, displacement in enumerate(displacements):
        name = ABC[turn % 3]
        state = stepped(strategy, state, orders[name], displacement)
        busy = {other: [orders[other].assignment_id] for other in ABC if other != name}
        state, decision = strategy.assign(state, view_of(name, busy=busy))
        (orders[name],) = decision.orders
    return state


def test_a_learning_rate_of_nothing_divides_by_nothing():
    strategy, state, orders = asked(DCASGDConfig(learning_rate=0.0), [0.8])
    state = stepped(strategy, state, orders["a"], [0.0])
    assert state.model["w"].tolist() == [0.8]


def test_what_is_kept_for_a_device_goes_with_it():
    strategy, state, orders = asked(DCASGDConfig(variant="adaptive"), [0.0])
    state = stepped(strategy, state, orders["a"], [0.1])
    assert set(state.mean_squares) == {"a"}
    assert set(state.backups) == {0}
    for _ in range(3):
        state, _ = strategy.assign(state, view_of())
    assert (state.mean_squares, state.backups) == ({}, {})


@pytest.mark.parametrize(("variant", "expected"), [("constant", 1000), ("adaptive", 2000), ("mxnet", 0)])
def test_the_bytes_of_each_device_are_declared(variant, expected):
    assert DCASGDConfig(variant=variant).build(RoundRules()).bytes_per_device(1000) == expected
    assert DCASGDConfig(variant=variant, compensation=0.0).build(RoundRules()).bytes_per_device(1000) == 0
