"""Stacks of cluster models, and the model that a device takes of one."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from edgefl.core import clusters
from edgefl.core.errors import DataError
from edgefl.core.types import Dataset, TensorSpec

SHAPES = (TensorSpec(name="a/w", shape=(2,)), TensorSpec(name="b", shape=()))
DATA = Dataset(inputs=np.zeros((3, 1)), targets=np.zeros(3, np.int64))


class Losses:
    """A learner whose loss is what its model holds."""

    def load(self, tensors):
        self.model = tensors

    def evaluate(self, data):
        assert data is DATA
        return self.model["loss"], math.nan


def find(*losses):
    learner, models = Losses(), [{"loss": loss} for loss in losses]
    found = clusters.load_best_cluster(learner, models, DATA)
    assert learner.model is models[found]
    return found


def test_a_stack_has_each_cluster_once_and_comes_apart_again_in_order():
    shapes = clusters.make_stack_shapes(SHAPES, 12)
    assert len(shapes) == 24
    assert [spec.name for spec in shapes[:3]] == ["cluster-0/a/w", "cluster-0/b", "cluster-1/a/w"]
    stack = {spec.name: place for place, spec in enumerate(shapes)}
    models = clusters.split_stack(dict(reversed(stack.items())))
    assert [model["a/w"] for model in models] == list(range(0, 24, 2))
    assert clusters.make_stack_shapes(SHAPES, 0) == SHAPES
    assert clusters.split_stack({"w": 1}) == [{"w": 1}]


def test_a_device_takes_the_least_loss_the_first_of_equal_ones_and_none_that_has_diverged():
    assert find(3.0, 1.0, 2.0) == 1
    assert find(2.0, 1.0, 1.0) == 1
    assert find(math.nan, math.inf, 5.0) == 2
    with pytest.raises(DataError, match="none of 2 cluster models has a finite loss"):
        find(math.nan, math.inf)
    with pytest.raises(DataError, match="holds no examples"):
        clusters.load_best_cluster(Losses(), [{"loss": 1.0}], DATA.take(np.arange(0)))


@pytest.mark.parametrize("value", [1, 17, -2, True, "2", 2.0, None])
def test_an_instruction_with_another_number_of_clusters_is_refused(value):
    assert clusters.parse_num_clusters({"clusters": 16}) == 16
    assert clusters.parse_num_clusters({}) == 0
    with pytest.raises(DataError, match="clusters must be 2 to 16, got"):
        clusters.parse_num_clusters({"clusters": value})


@pytest.mark.parametrize(
    ("cluster", "fault"), [(-1, "cluster -1, of 0 to 2"), (3, "cluster 3, of 0 to 2"), (2, None)]
)
def test_an_update_for_a_cluster_that_is_not_there_is_at_fault(cluster, fault):
    update = clusters.add_cluster({"w": np.zeros(2)}, cluster)
    found = clusters.find_cluster_fault(update, 3)
    assert found is None if fault is None else fault in found
    assert [spec.name for spec in clusters.make_update_shapes(SHAPES)] == ["a/w", "b", clusters.CLUSTER]
    assert clusters.find_cluster_fault({"w": np.zeros(2)}, 0) is None


def test_one_model_of_a_stack_is_chosen_by_its_number_and_nothing_else():
    stack = {"cluster-0/w": 1, "cluster-1/w": 2}
    assert clusters.select_cluster(stack, 1) == {"w": 2}
    assert clusters.select_cluster({"w": 3}, None) == {"w": 3}
    for wrong in (None, 2):
        with pytest.raises(DataError, match=r"2 models, one for each cluster.*\(--cluster\), 0 to 1"):
            clusters.select_cluster(stack, wrong)
    with pytest.raises(DataError, match=r"cluster 0 \(--cluster\): it is one model"):
        clusters.select_cluster({"w": 3}, 0)
    assert not clusters.is_stack({**stack, "w": SimpleNamespace()})
