"""`asgd`: every displacement moves the model as it is."""

from types import SimpleNamespace

import numpy as np

from edgefl.strategies.asgd import ASGD
from edgefl.strategies.rounds import RoundRules
from edgefl.strategies.server_optimizers import ServerOptimizer
from edgefl.types import DeviceInfo, SparseTensor, Update, UpdateMetrics

VIEW = SimpleNamespace(
    now_s=0.0, devices={name: DeviceInfo(device_id=name) for name in "ab"}, idle=["a", "b"], busy={},
    speeds={}, progress={}, vitals={},
)  # fmt: skip


def after(strategy, start, *moves):
    """Applies one displacement for each of the two devices, both from the first version."""
    state, decision = strategy.assign(strategy.init({"w": start}), VIEW)
    for order, moved in zip(decision.orders, moves, strict=True):
        state = strategy.receive(state, Update(
            assignment_id=order.assignment_id, device_id=order.device_id, base_version=0, tensors={"w": moved},
            metrics=UpdateMetrics(),
        ))  # fmt: skip
        state = strategy.aggregate(state)
    return state.model["w"]


def test_displacements_are_added_whole_however_old_they_are():
    strategy = ASGD().build(RoundRules())
    moved = after(strategy, np.array([1.0, 2.0]), np.array([0.5, 0.0]), np.array([0.25, -1.0]))
    assert moved.tolist() == [1.75, 1.0]


def test_a_sparse_displacement_moves_only_the_entries_that_it_has():
    strategy = ASGD().build(RoundRules())
    sparse = SparseTensor(indices=np.array([1, 5]), values=np.array([1.0, 2.0], np.float32), shape=(2, 3))
    nothing = SparseTensor(indices=np.array([], np.int64), values=np.array([], np.float32), shape=(2, 3))
    moved = after(strategy, np.zeros((2, 3), np.float32), sparse, nothing)
    assert moved.tolist() == [[0, 1, 0], [0, 0, 2]]


def test_the_server_optimiser_takes_each_displacement_for_a_gradient():
    strategy = ASGD().build(RoundRules(server=ServerOptimizer(kind="momentum", beta1=0.5)))
    assert after(strategy, np.array([0.0]), np.array([1.0]), np.array([1.0])).tolist() == [1.0 + 1.5]


def test_nothing_is_kept_for_a_device():
    assert ASGD().build(RoundRules()).bytes_per_device(1000) == 0
