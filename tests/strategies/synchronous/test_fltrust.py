"""FLTrust: its mean against the definition, what rogues can do to it, and a round whose root update comes late."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategy_turns import update_of, view_of

from edgefl.core.errors import StrategyError
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.types import DeviceInfo, Role, SparseTensor
from edgefl.strategies.participation import FilteredFleetView
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import MAX_WAIT_S, RoundRules
from edgefl.strategies.synchronous.fltrust import compute_trusted_mean

MODEL = {"w": np.zeros((2, 2), np.float32), "v": np.zeros(3, np.float32), "mean": np.zeros(2, np.float32)}
BUFFERS = frozenset({"mean"})


def tensors_of(row):
    """A flat row of nine numbers as an update, `v` of it sparse."""
    row = np.asarray(row, np.float32)
    kept = np.flatnonzero(row[4:7])
    return {
        "w": row[:4].reshape(2, 2),
        "v": SparseTensor(indices=kept, values=row[4:7][kept], shape=(3,)),
        "mean": row[7:],
    }


def combined(root, rows):
    step = compute_trusted_mean(tensors_of(root), [tensors_of(row) for row in rows], MODEL, BUFFERS)
    return np.concatenate([step["w"].reshape(-1), step["v"], step["mean"]])


def naive(root, rows):
    """Algorithm 2 of the paper; running statistics have a length of their own."""
    trust = [max(0, row[:7] @ root[:7] / np.linalg.norm(row[:7]) / np.linalg.norm(root[:7])) for row in rows]
    scaled = [
        np.concatenate([part * np.linalg.norm(own) / np.linalg.norm(part) for part, own in
                        ((row[:7], root[:7]), (row[7:], root[7:]))])
        for row in rows
    ]  # fmt: skip
    return sum(share * row for share, row in zip(trust, scaled, strict=True)) / (sum(trust) or 1)


matrices = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).standard_normal((5, 9)))


@given(x=matrices, factor=st.sampled_from([1.0, 1e-3, 1e12]))
@settings(max_examples=50, deadline=None)
def test_the_step_is_the_definition_and_no_longer_than_the_root_s_nor_against_it(x, factor):
    root, rows = x[0], np.concatenate([x[1:3] * factor, x[3:]])
    step = combined(root, rows)
    assert step == pytest.approx(naive(root, rows), rel=1e-4, abs=1e-5)
    assert np.linalg.norm(step[:7]) <= 1.0001 * np.linalg.norm(root[:7])
    assert step[:7] @ root[:7] >= -1e-5


def test_only_updates_against_the_root_move_nothing_and_neither_does_an_endless_or_an_empty_one():
    root = np.ones(9)
    assert not combined(root, [-root, -5 * root]).any()
    assert not combined(root, [1e38 * root, 0 * root]).any()
    assert not combined(0 * root, [root]).any()
    assert np.array_equal(combined(root, [-root, 1e38 * root, 3 * root]), root)


EVALUATOR = DeviceInfo(device_id=EVALUATOR_NAME, role=Role.EVALUATOR, source="coordinator")


def view(*names, busy=None, evaluator=True):
    seen = view_of(*names, busy=busy, devices=names)
    seen.devices = {
        name: replace(info, examples={"digits": 10 * (place + 1)})
        for place, (name, info) in enumerate(seen.devices.items())
    }
    seen.devices |= {EVALUATOR_NAME: EVALUATOR} if evaluator else {}
    return seen


def begin(*names, **options):
    """A strategy, and its state after the devices and the evaluator were asked."""
    rules = RoundRules(task="digits", **options)
    strategy = make_strategy("fltrust", {"batch_size": 10, "epochs": 2.0}, rules)
    state, decision = strategy.assign(strategy.init({"w": np.zeros(4, np.float32)}), view(*names))
    return strategy, state, {order.device_id: order for order in decision.instructions}


def receive(strategy, state, order):
    return strategy.receive(state, update_of(order, {"w": np.ones(4, np.float32)}, num_examples=1))


def busy_with(*orders):
    return {order.device_id: [order.assignment_id] for order in orders}


def test_a_round_begins_with_the_evaluator_which_does_as_much_as_the_median_device():
    strategy, _, orders = begin("a", "b", "c")
    assert list(orders) == [EVALUATOR_NAME, "a", "b", "c"]
    assert (orders[EVALUATOR_NAME].plan.epochs, orders[EVALUATOR_NAME].plan.iterations) == (None, 4)
    assert orders["a"].plan.epochs == 2.0
    _, _, orders = begin("a", "b", "c", test_fraction=0.5)
    assert orders[EVALUATOR_NAME].plan.iterations == 2
    state, decision = strategy.assign(strategy.init({"w": np.zeros(4, np.float32)}), view("a", evaluator=False))
    assert (state.open, decision.instructions) == ([], ())


@pytest.mark.parametrize("min_updates", [None, 1])
def test_a_round_waits_for_the_evaluator_and_for_a_device_whoever_is_first(min_updates):
    strategy, state, orders = begin("a", "b", min_updates=min_updates)
    for name in ("a", "b"):
        state = receive(strategy, state, orders[name])
    assert not strategy.ready(state, view("a", "b", busy=busy_with(orders[EVALUATOR_NAME])))
    assert strategy.ready(receive(strategy, state, orders[EVALUATOR_NAME]), view("a", "b"))
    strategy, state, orders = begin("a", "b", min_updates=min_updates)
    state = receive(strategy, state, orders[EVALUATOR_NAME])
    assert not strategy.ready(state, view("a", "b", busy=busy_with(orders["a"], orders["b"])))
    state = receive(strategy, state, orders["a"])
    assert strategy.ready(state, view("a", "b", busy=busy_with(orders["b"]))) == (min_updates == 1)


def test_a_lost_root_update_is_asked_for_again_and_the_run_ends_when_it_never_comes():
    strategy, state, orders = begin("a")
    state, asked_ids = receive(strategy, state, orders["a"]), {orders[EVALUATOR_NAME].assignment_id}
    for _ in range(4):
        state, decision = strategy.assign(state, view("a"))
        (again,) = decision.instructions
        assert again.device_id == EVALUATOR_NAME
        assert again.assignment_id not in asked_ids
        asked_ids.add(again.assignment_id)
        assert again.plan.iterations == 2
        state, decision = strategy.assign(state, view("a", busy=busy_with(again)))
        assert decision.instructions == ()
    with pytest.raises(StrategyError, match="own update of round 1 was lost or refused 5 times"):
        strategy.assign(state, view("a"))
    assert strategy.version(strategy.aggregate(receive(strategy, state, again))) == 1


def test_a_run_whose_root_updates_are_refused_ends_and_one_whose_evaluator_is_away_waits_without_spinning():
    strategy, state, orders = begin("a", round_timeout_s=5.0)
    blocked = FilteredFleetView(view("a"), ["a"], blocked_devices={EVALUATOR_NAME})
    with pytest.raises(StrategyError, match=f"the events of {EVALUATOR_NAME} say why"):
        strategy.assign(state, blocked)
    state = receive(strategy, state, orders["a"])
    for now_s in (0.0, 6.0, 12.0):
        away = view("a", evaluator=False)
        away.now_s = now_s
        state, decision = strategy.assign(state, away)
        assert not strategy.ready(state, away)
    assert (decision.instructions, decision.next_wake_s) == ((), MAX_WAIT_S)
    state, decision = strategy.assign(state, view("a"))
    (again,) = decision.instructions
    assert strategy.ready(receive(strategy, state, again), view("a"))
