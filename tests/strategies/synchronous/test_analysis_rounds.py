"""Rounds of an analysis: all boards are asked, the model is solved from what came, and a restart loses nothing."""

import numpy as np
import pytest
from strategy_turns import begun, update_of, view_of

from edgefl.core.errors import RunFailedError
from edgefl.core.types import SparseTensor
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.analysis_rounds import make_analysis_strategy
from edgefl.strategies.synchronous.round_state import RoundState

MODEL = {"mean": np.zeros(1)}


def solve(model, boards):
    """A mean, of another shape than the sums; who it is of in the order of the boards."""
    asked = [(board.device_id, board.sums["sum"], board.sums["count"]) for board in boards]
    mean = sum(total[0] for _, total, _ in asked) / sum(count[0] for *_, count in asked)
    return {"mean": np.array([mean]), "names": np.frombuffer("".join(name for name, *_ in asked).encode(), np.uint8)}


@pytest.fixture
def strategy():
    return make_analysis_strategy(RoundRules(codec="dense|zstd"), solve)


def sums(total, count):
    return {"sum": np.array([total]), "count": np.array([count])}


def test_the_next_model_is_solved_from_all_answers_in_the_order_of_asking(strategy):
    state, orders = begun(strategy, MODEL)
    assert {order.codec for order in orders.values()} == {"dense|zstd"}
    for name, total in (("c", 9), ("a", 1), ("b", 2)):
        state = strategy.receive(state, update_of(orders[name], sums(total, 2)))
    assert strategy.ready(state, view_of("a", "b", "c"))
    state = strategy.aggregate(state)
    assert strategy.model(state)["mean"].tolist() == [2.0]
    assert strategy.model(state)["names"].tobytes() == b"abc"
    assert (strategy.version(state), len(strategy.used(state))) == (1, 3)


def test_a_board_that_died_is_not_waited_for_and_one_entry_of_a_sparse_sum_counts(strategy):
    state, orders = begun(strategy, MODEL)
    state = strategy.receive(state, update_of(orders["a"], sums(4, 2)))
    sparse = SparseTensor(indices=np.array([0]), values=np.array([8]), shape=(1,))
    state = strategy.receive(state, update_of(orders["b"], {"sum": sparse, "count": np.array([2])}))
    assert not strategy.ready(state, view_of("a", "b", busy={"c": [orders["c"].assignment_id]}))
    assert strategy.ready(state, view_of("a", "b"))
    assert strategy.model(strategy.aggregate(state))["mean"].tolist() == [3.0]


def test_a_state_that_was_saved_goes_on_as_the_one_that_was_not(strategy):
    state, orders = begun(strategy, MODEL)
    for name in "abc":
        state = strategy.receive(state, update_of(orders[name], sums(3, 2)))
    state = decode_state(encode_state(strategy.aggregate(state)), RoundState)
    assert strategy.model(state)["mean"].tolist() == [1.5]
    state, decision = strategy.assign(strategy.resumed(state), view_of("b"))
    assert [order.device_id for order in decision.instructions] == ["b"]


def test_what_cannot_be_solved_ends_the_run_with_its_reason():
    def fail(_model, _boards):
        raise RunFailedError("no board has an example")

    strategy = make_analysis_strategy(RoundRules(), fail)
    state, orders = begun(strategy, MODEL, "a")
    state = strategy.receive(state, update_of(orders["a"], sums(0, 0)))
    with pytest.raises(RunFailedError, match="no board has an example"):
        strategy.aggregate(state)
