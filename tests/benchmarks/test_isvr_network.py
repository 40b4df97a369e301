import numpy as np
import pytest

from edgefl.core.types import Dataset
from edgefl.strategies.peer_algorithms.gossip_node import ALGORITHMS
from edgefl.tasks.registry import make_task

STEP_BY_STEP = ("d2", "gradient-tracking")
AT_RANDOM = ("pdmm-isvr", "admm-isvr", "ad-psgd")


@pytest.fixture(scope="module")
def network(harness):
    return harness("isvr_network")


@pytest.fixture(scope="module")
def images():
    inputs = np.random.default_rng(1).integers(0, 256, size=(400, 28, 28), dtype=np.uint8)
    return Dataset(inputs=inputs, targets=np.repeat(np.arange(10), 40))


@pytest.fixture
def ran(network, images):
    """Runs a method on a ring for sixteen iterations."""

    def run(method, **changes):
        cell = {
            "method": method, "graph": "ring", "exchange": "poisson" if method in AT_RANDOM else "sync",
            "period": 1 if method in STEP_BY_STEP else 4, "iterations": 16, "rounds": 4, "rate": 0.05,
            "decay": "linear", "seed": 1, "batch_size": 10, "points": 4, **changes,
        }  # fmt: skip
        task = make_task("fashion-mnist", {"model": "logistic"})
        found = network.Network(network.Cell(**cell), task, task.learner(), images)
        assert list(found.run()) == [4, 8, 12, 16]
        return found

    return run


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_node_does_its_iterations_and_the_codec_dense_changes_nothing(ran, method):
    plain, encoded = ran(method), ran(method, codec="dense")
    assert {engine.algorithm.iterations for engine in plain.engines.values()} == {16}
    assert plain.num_bytes == pytest.approx(encoded.num_bytes, rel=1e-4)
    for name, tensor in plain.mean_model().items():
        assert np.array_equal(tensor, encoded.mean_model()[name])


@pytest.mark.parametrize(("method", "exchanges"), [("dsgd", 4), ("k-gt", 4), ("d2", 16), ("gradient-tracking", 31)])
def test_in_step_edges_exchange_as_often_as_the_method_says(ran, method, exchanges):
    assert ran(method).exchanges_per_edge == exchanges


def test_at_random_edges_exchange_once_in_a_period_on_average(ran):
    counts = [ran("admm-isvr", seed=seed).exchanges_per_edge for seed in range(1, 6)]
    assert np.mean(counts) == pytest.approx(4, abs=0.7)


@pytest.mark.parametrize("method", ["pdmm-isvr", "dsgd"])
def test_in_pairs_edges_exchange_once_in_a_period_and_every_node_does_its_iterations(ran, method):
    runs = [ran(method, exchange="pair", seed=seed) for seed in range(1, 6)]
    assert np.mean([run.exchanges_per_edge for run in runs]) == pytest.approx(4, abs=0.7)
    assert {engine.algorithm.iterations for run in runs for engine in run.engines.values()} == {16}


def test_lost_mail_is_sent_and_does_not_arrive(ran):
    alone, among = ran("dsgd", lost=1.0), ran("dsgd")
    assert alone.exchanges_per_edge == among.exchanges_per_edge
    assert not np.allclose(alone.mean_model()["fc1.weight"], among.mean_model()["fc1.weight"])


@pytest.mark.parametrize("cut", ["3 of 10", "8 of 10"])
def test_shards_hold_their_classes_and_no_image_twice(network, cut, images):
    classes = network.CUTS[cut]
    shards = network.class_shards(images.targets, classes, np.random.default_rng(1))
    for rows, held in zip(shards, classes, strict=True):
        assert set(images.targets[rows]) == set(held)
    assert sorted(np.concatenate(shards)) == list(range(400))
    if cut == "3 of 10":
        assert [len(rows) for rows in shards] == [50] * 8
