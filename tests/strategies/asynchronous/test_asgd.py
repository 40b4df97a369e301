"""`asgd`: every displacement moves the model as it is."""

import numpy as np
from strategy_turns import begun, moved

from edgefl.core.types import SparseTensor
from edgefl.strategies.asynchronous.asgd import ASGDConfig
from edgefl.strategies.server_optimizers import ServerOptimizer
from edgefl.strategies.synchronous.strategy import RoundRules


def after(strategy, start, *moves):
    """Applies one displacement for each of the two devices, both from the first version."""
    state, orders = begun(strategy, {"w": start}, "ab")
    for order, move in zip(orders.values(), moves, strict=True):
        state = moved(strategy, state, order, {"w": move})
    return state.model["w"]


def test_displacements_are_added_whole_however_old_they_are():
    strategy = ASGDConfig().build(RoundRules())
    found = after(strategy, np.array([1.0, 2.0]), np.array([0.5, 0.0]), np.array([0.25, -1.0]))
    assert found.tolist() == [1.75, 1.0]


def test_a_sparse_displacement_moves_only_the_entries_that_it_has():
    strategy = ASGDConfig().build(RoundRules())
    sparse = SparseTensor(indices=np.array([1, 5]), values=np.array([1.0, 2.0], np.float32), shape=(2, 3))
    nothing = SparseTensor(indices=np.array([], np.int64), values=np.array([], np.float32), shape=(2, 3))
    found = after(strategy, np.zeros((2, 3), np.float32), sparse, nothing)
    assert found.tolist() == [[0, 1, 0], [0, 0, 2]]


def test_the_server_optimiser_takes_each_displacement_for_a_gradient():
    strategy = ASGDConfig().build(RoundRules(server=ServerOptimizer(kind="momentum", beta1=0.5)))
    assert after(strategy, np.array([0.0]), np.array([1.0]), np.array([1.0])).tolist() == [1.0 + 1.5]
