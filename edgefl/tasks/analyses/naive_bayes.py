"""Gaussian naive Bayes in one round: counts, sums and squares of each class, exactly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edgefl.core.analyses import BoardSums, NaiveBayesSettings
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.core.types import Array, Dataset, Task, Tensors
from edgefl.tasks.analyses.analysis import Analysis, pack_result
from edgefl.tasks.analyses.columns import list_classes
from edgefl.tasks.analyses.linear_regression import find_layer
from edgefl.tasks.analyses.moments import (
    MAX_GROUP_NUMBERS,
    add_groups,
    find_group_fault,
    list_group_sums,
    read_matrix,
    sum_groups,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaussians:
    """A normal distribution of each feature in each class: [classes] priors, [classes, features] means, variances."""

    priors: Array
    means: Array
    variances: Array


class NaiveBayes(Analysis):
    """The classes of a task as normal distributions of independent features.

    With variances that all classes share, the logits are linear in the features: a layer of the task's model holds
    them. With variances of each class they are quadratic, and the result is a text.
    """

    is_of_whole_shard = False

    def __init__(self, task: Task, settings: NaiveBayesSettings) -> None:
        """Raises ConfigError: the task has another model, or targets that are no classes."""
        self._task, self._settings, self._layer = task, settings, find_layer(task, "naive-bayes")
        self._classes = list_classes(task)
        if len(self._classes) != self._layer.num_outputs:
            raise ConfigError(f"naive-bayes needs targets that are classes; those of task {task.name} are values")
        if len(self._classes) * self._layer.num_features > MAX_GROUP_NUMBERS:
            raise ConfigError(
                f"naive-bayes takes at most {MAX_GROUP_NUMBERS} classes times features, task {task.name} has "
                f"{len(self._classes)} times {self._layer.num_features}"
            )
        self.has_task_model = not settings.has_result
        self.request_spec = self._layer.spec
        self.sums_spec = list_group_sums(len(self._classes), self._layer.num_features)

    def make_model(self) -> dict[str, Array]:
        return self._task.init(0) if self.has_task_model else pack_result({})

    def make_request(self, model: Tensors) -> dict[str, Array]:
        if not self.has_task_model:
            model = self._task.init(0)  # boards need nothing of it
        return {spec.name: np.asarray(model[spec.name]) for spec in self.request_spec}

    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:  # noqa: ARG002 the same in every round
        return sum_groups(
            self._layer.read_features(data),
            data.targets.astype(np.int64),
            len(self._classes),
            self._settings.min_group,
        )

    def find_fault(self, sums: Tensors) -> str | None:
        return find_group_fault(sums)

    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:  # noqa: ARG002 one round is all
        """Returns the model, or the result; raises `RunFailedError` where a class has no example."""
        counts, sums = add_groups(boards)
        missing = [name for name, count in zip(self._classes, counts, strict=True) if not count]
        if missing:
            raise RunFailedError(
                f"no board has strategy.min_group = {self._settings.min_group} examples of class {missing[0]}"
            )
        found = compute_gaussians(counts, sums, is_shared=self.has_task_model, smoothing=self._settings.smoothing)
        if self.has_task_model:
            return self._layer.make_tensors(*to_layer(found))
        return pack_result(
            {
                "v": 1,
                "task": self._task.name,
                "classes": list(self._classes),
                "counts": counts.tolist(),
                "priors": found.priors.tolist(),
                "means": found.means.tolist(),
                "variances": found.variances.tolist(),
            }
        )


def compute_gaussians(counts: Array, sums: Array, *, is_shared: bool, smoothing: float) -> Gaussians:
    """Returns the distributions of greatest likelihood, each variance with the smoothing added.

    Args:
        counts: [classes] examples, at least one of each.
        sums: [classes, features, 2, WIDTH] exact sums of values and of their squares.
        is_shared: all classes have the variances of the differences from their own means.
        smoothing: part of the largest variance that any feature has over all examples.
    """
    values, of_class = read_matrix(sums), np.array([int(count) for count in counts], object)[:, None]
    total, squares = values[..., 0], values[..., 1]
    num_examples = int(counts.sum())
    means = total / of_class
    within = squares - total * means
    whole_means = total.sum(axis=0) / num_examples
    whole = (squares.sum(axis=0) / num_examples - whole_means * whole_means).astype(float)
    shared = np.broadcast_to(within.sum(axis=0) / num_examples, within.shape)
    variances = (shared if is_shared else within / of_class).astype(float)
    added = smoothing * float(whole.max())
    return Gaussians(
        priors=counts / num_examples, means=means.astype(float), variances=np.maximum(variances, 0.0) + added
    )


def to_layer(gaussians: Gaussians) -> tuple[Array, Array]:
    """Returns weight and bias of the logits log p(class) + log p(features | class), but for what classes share.

    A feature that does not vary within classes says nothing.
    """
    variances = gaussians.variances[0]
    precision = np.divide(1.0, variances, out=np.zeros_like(variances), where=variances > 0)
    # Around the mean of all classes: the logits differ by what all share, and do not lose digits to an offset.
    centre = gaussians.priors @ gaussians.means
    weight = (gaussians.means - centre) * precision
    bias = np.log(gaussians.priors) - 0.5 * (weight * (gaussians.means - centre)).sum(axis=1) - weight @ centre
    return weight, bias
