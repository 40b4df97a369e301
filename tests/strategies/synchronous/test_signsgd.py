"""Majority vote: one device, one vote, and what the votes decide."""

import numpy as np
import pytest
from strategy_turns import update_of, view_of

from edgefl.compression.codec import make_codec
from edgefl.core.types import SparseTensor, TensorSpec
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

NAMES = tuple("abcdefg")
START = {"w": np.zeros(3, np.float32), "mean": np.zeros(2, np.float32), "count": np.array(5)}


def vote(options=None):
    rules = RoundRules(server=ServerOptimizer(buffers=frozenset({"mean"})))
    return make_strategy("signsgd", {"step": 0.5, **(options or {})}, rules)


def played(strategy, ballots, state=None, *, examples=10):
    """One round in which each device sends its ballot."""
    view = view_of(*NAMES[: len(ballots)])
    state, decision = strategy.assign(state or strategy.init(START), view)
    # The last one first: they wait in the state for those that were asked before them.
    for order, ballot in reversed(list(zip(decision.instructions, ballots, strict=True))):
        tensors = {"mean": np.zeros(2, np.float32), "count": np.array(0), **ballot}
        state = strategy.receive(state, update_of(order, tensors, num_examples=examples))
    assert strategy.ready(state, view)
    return strategy.aggregate(state)


def w(*values):
    return {"w": np.array(values, np.float32)}


@pytest.mark.parametrize(
    ("options", "rounds", "step", "half_way"),
    [
        ({}, 400, 0.01, 0.5),
        ({}, None, 0.001, 1.0),
        ({"step": 0.3}, 400, 0.3, 1.0),
        ({"schedule": "inverse-sqrt"}, 400, 0.01, 201**-0.5),
    ],
)
def test_the_step_follows_from_the_rounds_of_the_run_and_falls_unless_it_is_set(options, rounds, step, half_way):
    strategy = make_strategy("signsgd", options, RoundRules(rounds=rounds))
    assert strategy.step == step
    assert strategy.lr_schedule(200) == pytest.approx(half_way)


def test_an_entry_moves_by_the_step_the_way_most_devices_moved_it():
    state = played(vote(), [w(0.1, -3, 5), w(0.2, -9, -1e-3), w(-100, 7, -1e-3)])
    assert state.model["w"].tolist() == [0.5, -0.5, -0.5]


def test_an_even_vote_and_an_entry_that_nobody_moved_leave_the_entry_where_it_is():
    state = played(vote(), [w(1, 0, 1), w(-1, 0, 0)])
    assert state.model["w"].tolist() == [0, 0, 0.5]


def test_a_minority_that_sends_the_opposite_times_a_million_changes_nothing():
    rng = np.random.default_rng(1)
    direction = np.array([1.0, -2.0, 0.5], np.float32)
    honest = [{"w": (direction * rng.uniform(0.5, 2, 3)).astype(np.float32)} for _ in range(4)]
    flipped = [{"w": -1e6 * ballot["w"]} for ballot in honest[:3]]
    assert played(vote(), honest + flipped).model["w"].tolist() == played(vote(), honest).model["w"].tolist()


def test_a_device_with_many_examples_has_one_vote_like_any_other():
    strategy = vote()
    few = played(strategy, [w(1, 1, 1), w(-1, -1, -1), w(-1, -1, -1)], examples=1)
    many = played(strategy, [w(1, 1, 1), w(-1, -1, -1), w(-1, -1, -1)], examples=10_000)
    assert few.model["w"].tolist() == many.model["w"].tolist() == [-0.5] * 3


def test_the_schedule_scales_the_step():
    strategy = vote({"schedule": "step:1:0.5"})
    state = played(strategy, [w(1, 1, 1)])
    state = played(strategy, [w(1, 1, 1)], state)
    assert state.model["w"].tolist() == [0.75] * 3


def test_buffers_are_averaged_and_counters_taken_over():
    first = {**w(1, 1, 1), "mean": np.array([1, 4], np.float32), "count": np.array(2)}
    second = {**w(1, 1, 1), "mean": np.array([3, 0], np.float32), "count": np.array(2)}
    state = played(vote(), [first, second])
    assert state.model["mean"].tolist() == [2, 2]
    assert state.model["count"] == 7


def test_entries_that_did_not_travel_are_no_votes():
    sparse = {"w": SparseTensor(indices=np.array([1]), values=np.array([-9], np.float32), shape=(3,))}
    assert played(vote(), [sparse, w(0, 0, 3)]).model["w"].tolist() == [0, -0.5, 0.5]


def test_the_codec_of_one_bit_an_entry_carries_every_vote():
    shapes = (TensorSpec(name="w", shape=(3,)),)
    codec = make_codec("sign", shapes)
    ballots = [w(0.1, -3, 5), w(0.2, -9, -1e-3), w(-100, 7, -1e-3)]
    sent = [codec.decode(codec.encode(ballot, np.random.default_rng(1))) for ballot in ballots]
    assert played(vote(), sent).model["w"].tolist() == played(vote(), ballots).model["w"].tolist()


def test_momentum_lives_on_the_boards_from_round_to_round():
    assert not vote().plan.keeps_state
    plan = vote({"momentum": 0.9}).plan
    assert (plan.momentum, plan.keeps_state, plan.iterations) == (0.9, True, 6)


def test_a_board_takes_several_steps_before_it_votes_unless_the_run_file_says_how_many():
    assert vote().plan.iterations == 6
    assert vote({"iterations": 1}).plan.iterations == 1
    assert vote({"seconds": 2.0}).plan.iterations is None
