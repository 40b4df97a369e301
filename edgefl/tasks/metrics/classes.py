"""Metrics of predicted classes: accuracy, top-k, and what follows from each class's hits and misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.metrics import Direction, Metric, Sums
from edgefl.core.types import Array
from edgefl.tasks.metrics.predictions import ClassScores, read_class_scores

ComputeFromCounts = Callable[[Array, Array, Array], float]
"""By class: right predictions, all predictions, all targets -> the value; NaN where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKAccuracy(Metric):
    """Share of the examples whose class is among the `k` of the largest logits; of equal ones the first count.

    With labels in place of a class, and k of 1, the share of the examples of which all labels are right.
    """

    k: int = 1
    direction: Direction = "max"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        scores = read_class_scores(outputs, targets, weights)
        if self.k > 1:
            scores.check_single_label(f"top-{self.k}")
        return {
            "right": np.asarray((self._find_right(scores) * scores.weights).sum()),
            "total": np.asarray(scores.weights.sum()),
            "invalid": np.asarray(scores.num_invalid, np.int64),
        }

    def _find_right(self, scores: ClassScores) -> Array:
        if scores.is_multi_label:
            right: Array = (scores.predicted == scores.is_target).all(axis=1)
            return right
        if self.k == 1:
            return np.asarray(scores.predicted == scores.targets)
        own = scores.logits[np.arange(len(scores.targets)), scores.targets][:, None]
        is_before = np.arange(scores.num_classes) < scores.targets[:, None]
        rank = ((scores.logits > own) | ((scores.logits == own) & is_before)).sum(axis=1)
        return np.asarray(rank < self.k)

    def combine(self, sums: Sums) -> float:
        return divide(float(sums["right"]), float(sums["total"])) if not sums["invalid"] else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCountMetric(Metric):
    """Figure of each class's right predictions, predictions and targets, which `compute` makes of their sums.

    `class_index` is the class it is of, if it is of one.
    """

    compute: ComputeFromCounts
    class_index: int | None = None
    direction: Direction = "max"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        scores = read_class_scores(outputs, targets, weights)
        if self.class_index is not None and self.class_index >= scores.num_classes:
            raise TaskError(
                f"a metric is of class {self.class_index}, the model has classes 0 to {scores.num_classes - 1}"
            )
        is_target, predicted = scores.is_target, scores.predicted
        is_predicted = predicted if predicted.ndim > 1 else predicted[:, None] == np.arange(scores.num_classes)
        return {
            "right": scores.weights @ (is_target & is_predicted),
            "predicted": scores.weights @ is_predicted,
            "actual": scores.weights @ is_target,
            "invalid": np.asarray(scores.num_invalid, np.int64),
        }

    def combine(self, sums: Sums) -> float:
        if sums["invalid"]:
            return float("nan")
        counts = [sums[name] for name in ("right", "predicted", "actual")]
        if self.class_index is not None:
            counts = [count[[self.class_index]] for count in counts]
        return self.compute(*counts)


def compute_balanced_accuracy(right: Array, predicted: Array, actual: Array) -> float:  # noqa: ARG001 one signature
    """Returns the mean recall of the classes that occur in the targets."""
    return _average(right, actual)


def compute_macro_f1(right: Array, predicted: Array, actual: Array) -> float:
    """Returns the mean F1 of the classes that occur in targets or predictions."""
    return _average(2.0 * right, predicted + actual)


def compute_micro_f1(right: Array, predicted: Array, actual: Array) -> float:
    """Returns the F1 of the counts of all classes together."""
    return divide(2.0 * float(right.sum()), float(predicted.sum() + actual.sum()))


def compute_iou(right: Array, predicted: Array, actual: Array) -> float:
    """Returns the mean intersection over union of the classes that occur in targets or predictions."""
    return _average(right, predicted + actual - right)


def divide(part: float, total: float) -> float:
    """Returns part / total, NaN of nothing."""
    return part / total if total > 0 else float("nan")


def _average(parts: Array, totals: Array) -> float:
    """Returns the mean of parts / totals where a total is above 0, NaN where none is."""
    occurs = totals > 0
    return float(np.mean(parts[occurs] / totals[occurs])) if occurs.any() else float("nan")
