"""IFCA against its formula: each cluster's model moves by the mean of its own devices' updates."""

import numpy as np
import pytest
from strategy_turns import begun, update_of

from edgefl.core.clusters import CLUSTER
from edgefl.core.errors import ConfigError
from edgefl.storage.state_serialisation import decode_state, encode_state
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.registry import make_strategy
from edgefl.strategies.strategy_config import RoundRules

START = {
    "cluster-0/w": np.array([1.0, 2.0], np.float32),
    "cluster-0/mean": np.array([0.0], np.float32),
    "cluster-1/w": np.array([3.0, 4.0], np.float32),
    "cluster-1/mean": np.array([0.0], np.float32),
    "cluster-2/w": np.array([5.0, 6.0], np.float32),
    "cluster-2/mean": np.array([0.0], np.float32),
}


def play(answers, **server):
    """The model after a round of {device: (cluster, displacement of w, examples)}, and the round's facts."""
    rules = RoundRules(server=ServerOptimizer(buffers=frozenset({"mean"}), **server))
    strategy = make_strategy("ifca", {"clusters": 3}, rules)
    state, orders = begun(strategy, START, tuple(answers))
    for device, (cluster, displacement, num_examples) in answers.items():
        tensors = {"w": np.array(displacement, np.float32), "mean": np.ones(1, np.float32), CLUSTER: [cluster]}
        state = strategy.receive(state, update_of(orders[device], tensors, num_examples=num_examples))
    state = decode_state(encode_state(state), type(state))
    state = strategy.aggregate(state)
    assert sorted(strategy.used(state)) == sorted(order.assignment_id for order in orders.values())
    return strategy.model(state), strategy.facts(state)


ANSWERS = {"a": (0, [4.0, 0.0], 100), "b": (2, [1.0, 1.0], 50), "c": (0, [0.0, 8.0], 300)}


def test_each_cluster_moves_by_its_own_mean_weighted_by_examples_and_one_without_devices_stays():
    model, facts = play(ANSWERS)
    assert model["cluster-0/w"].tolist() == [1.0 + 4.0 / 4, 2.0 + 8.0 * 3 / 4]
    assert model["cluster-1/w"].tolist() == [3.0, 4.0]
    assert model["cluster-2/w"].tolist() == [6.0, 7.0]
    assert facts == {"cluster-0": 2.0, "cluster-1": 0.0, "cluster-2": 1.0}


def test_a_server_optimiser_has_moments_for_each_cluster_and_leaves_buffers_alone():
    model, _ = play(ANSWERS, kind="momentum", learning_rate=0.5)
    assert model["cluster-0/w"].tolist() == [1.0 + 0.5, 2.0 + 3.0]
    assert model["cluster-2/w"].tolist() == [5.5, 6.5]
    assert [model[f"cluster-{place}/mean"].item() for place in range(3)] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("clusters", [1, 17, 2.5, "two"])
def test_another_number_of_clusters_is_refused(clusters):
    with pytest.raises(ConfigError, match="clusters must be"):
        make_strategy("ifca", {"clusters": clusters}, RoundRules())
