"""Cluster models of a run with `ifca`: their names in the stack that travels, and the one that a device takes.

The stack has each tensor of the task once for every cluster, as `cluster-0/fc1.weight`. A device sends the
displacement of one model, and beside it which one, as the tensor `CLUSTER`.

Source: Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated Learning (IFCA), NeurIPS 2020,
algorithm 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.types import Array, Dataset, Json, Learner, ModelSpec, TensorKind, Tensors, TensorSpec

CLUSTERS_KEY = "clusters"
"""Entry of an instruction: how many cluster models are in its body."""
CLUSTER = "-cluster"
"""Tensor of an update: the number of the cluster that it was trained for."""
CLUSTER_FIGURE = "cluster"
"""The same among an update's figures in the history."""
MAX_CLUSTERS = 16

_NAME = re.compile(r"cluster-(0|[1-9][0-9]?)/(.+)", re.DOTALL)


def name_in_stack(cluster: int, name: str) -> str:
    """Returns the name of a cluster's tensor."""
    return f"cluster-{cluster}/{name}"


def make_stack_shapes(shapes: ModelSpec, num_clusters: int) -> ModelSpec:
    """Returns the tensors of all clusters' models; those of the one model for 0."""
    if not num_clusters:
        return shapes
    return tuple(
        replace(spec, name=name_in_stack(cluster, spec.name)) for cluster in range(num_clusters) for spec in shapes
    )


def make_update_shapes(shapes: ModelSpec) -> ModelSpec:
    """Returns the tensors of an update: those of one model, and which."""
    return (*shapes, TensorSpec(name=CLUSTER, shape=(1,), dtype="int64", kind=TensorKind.BUFFER))


def split_stack(model: Tensors) -> list[dict[str, Any]]:
    """Returns the models of a stack by cluster; a model that is none is one cluster."""
    clusters: dict[int, dict[str, Any]] = {}
    for name, tensor in model.items():
        found = _NAME.fullmatch(name)
        number, own_name = (0, name) if found is None else (int(found[1]), found[2])
        clusters.setdefault(number, {})[own_name] = tensor
    return [clusters[number] for number in sorted(clusters)]


def select_cluster(model: Mapping[str, Array], cluster: int | None) -> Mapping[str, Array]:
    """Returns one cluster's model of a stack; another model as it is.

    Raises:
        DataError: nothing says which one, or there is no such.
    """
    if not is_stack(model):
        if cluster is not None:
            raise DataError(f"cluster {cluster} (--cluster): it is one model, not one for each cluster; leave it out")
        return model
    models = split_stack(model)
    if cluster is None or not 0 <= cluster < len(models):
        found = "" if cluster is None else f", got {cluster}"
        raise DataError(
            f"it is {len(models)} models, one for each cluster of devices: say which by cluster (--cluster), 0 to "
            f"{len(models) - 1}{found}; the run's history has each device's own"
        )
    return models[cluster]


def is_stack(model: Tensors) -> bool:
    """Returns whether a model is a stack of clusters' models, by the names of its tensors."""
    return bool(model) and all(_NAME.fullmatch(name) for name in model)


def parse_num_clusters(header: Json) -> int:
    """Returns the number of cluster models of an instruction; 0 where it has one model.

    Raises:
        DataError: it is no number from 2 to `MAX_CLUSTERS`.
    """
    value = header.get(CLUSTERS_KEY, 0)
    if isinstance(value, bool) or not isinstance(value, int) or (value and not 2 <= value <= MAX_CLUSTERS):
        raise DataError(f"the instruction's clusters must be 2 to {MAX_CLUSTERS}, got {value!r:.40}")
    return value


def find_cluster_fault(tensors: Tensors, num_clusters: int) -> str | None:
    """Returns why no device can have sent an update for its cluster; None where one can, or there are no clusters."""
    cluster = get_cluster(tensors)
    return None if 0 <= cluster < max(1, num_clusters) else f"it is for cluster {cluster}, of 0 to {num_clusters - 1}"


def get_cluster(tensors: Tensors) -> int:
    """Returns the cluster of an update; 0 of one that has none."""
    tensor = tensors.get(CLUSTER)
    if tensor is None:
        return 0
    return int((tensor if isinstance(tensor, np.ndarray) else tensor.dense()).reshape(-1)[0])


def load_best_cluster(
    learner: Learner, models: Sequence[Mapping[str, Any]], data: Dataset, on_model: Callable[[], None] = lambda: None
) -> int:
    """Loads the model with the least loss on a device's training examples, and returns its number.

    Of equal ones it is the first. `on_model` is called after each.

    Raises:
        DataError: there are no examples, or no model's loss is a finite number.
    """
    if not len(data):
        raise DataError("the training part of the shard holds no examples")
    losses = []
    for model in models:
        learner.load(model)
        loss = float(learner.evaluate(data)[0])
        losses.append(loss if math.isfinite(loss) else math.inf)
        on_model()
    best = int(np.argmin(losses))
    if math.isinf(losses[best]):
        raise DataError(f"none of {len(models)} cluster models has a finite loss here: they have diverged")
    learner.load(models[best])
    return best


def add_cluster(displacement: Mapping[str, Array], cluster: int | None) -> dict[str, Array]:
    """Returns an update's tensors with its cluster; as they are where there are no clusters."""
    return {**displacement, **({} if cluster is None else {CLUSTER: np.array([cluster])})}
