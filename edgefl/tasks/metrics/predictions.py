"""Outputs and targets of a batch in one form, whatever the task: a row for each position of an example."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array
from edgefl.tasks.losses.class_losses import IGNORED_CLASS, softmax

MIN_CLASSES = 2
_MAX_CLASS = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassScores:
    """Scores of a classifier and what was right.

    Attributes:
        logits: [n, classes] float64 without NaN; one output is that of class 1 beside a 0 of class 0.
        targets: [n] classes; of a multi-label task [n, classes] of 0 and 1.
        weights: [n].
        num_invalid: rows that were left out because an output is NaN, which makes the metric NaN.
    """

    logits: Array
    targets: Array
    weights: Array
    num_invalid: int

    @property
    def num_classes(self) -> int:
        return int(self.logits.shape[1])

    @property
    def is_multi_label(self) -> bool:
        return self.targets.ndim > 1

    @property
    def predicted(self) -> Array:
        """The class of the largest logit, [n]; of a multi-label task, [n, classes] whether it is above 0."""
        return self.logits > 0 if self.is_multi_label else self.logits.argmax(axis=1)

    @property
    def is_target(self) -> Array:
        """[n, classes] whether a class is right."""
        return self.targets > 0 if self.is_multi_label else self.targets[:, None] == np.arange(self.num_classes)

    def check_single_label(self, metric: str) -> None:
        """Checks that one class is right in each row.

        Raises:
            TaskError: several may be.
        """
        if self.is_multi_label:
            raise TaskError(f"{metric} is for one class an example, got targets {list(self.targets.shape)} of labels")

    @property
    def probabilities(self) -> Array:
        """[n, classes] by softmax."""
        with np.errstate(invalid="ignore"):
            return softmax(self.logits)


def read_class_scores(outputs: Array, targets: Array, weights: Array | None) -> ClassScores:
    """Returns logits [n, classes, ...] (or [n], of one output) with their classes [n, ...] or labels.

    Raises:
        TaskError: shapes do not fit, or a target is no class of the model.
    """
    logits = _to_rows(outputs)
    is_multi_label = targets.shape == outputs.shape and logits.shape[1] >= MIN_CLASSES
    rows = _to_rows(targets) if is_multi_label else targets.reshape(-1)
    if len(rows) != len(logits):
        raise TaskError(
            f"targets of outputs {list(outputs.shape)} must be a class for each row and position, got "
            f"{list(targets.shape)}"
        )
    row_weights = _repeat_weights(weights, len(outputs), len(logits))
    if logits.shape[1] < MIN_CLASSES:
        logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
    is_counted = np.ones(len(rows), bool) if is_multi_label else rows != IGNORED_CLASS
    is_valid = ~np.isnan(logits).any(axis=1)
    chosen = is_counted & is_valid
    limit = MIN_CLASSES if is_multi_label else logits.shape[1]
    return ClassScores(
        logits=logits[chosen],
        targets=_to_classes(rows[chosen], limit),
        weights=row_weights[chosen],
        num_invalid=int((is_counted & ~is_valid).sum()),
    )


def read_values(outputs: Array, targets: Array, weights: Array | None) -> tuple[Array, Array, Array]:
    """Returns predicted values [n, outputs], true values alike and weights [n, 1], float64.

    Raises:
        TaskError: shapes do not fit.
    """
    predicted, true = _to_rows(outputs), _to_rows(targets)
    if predicted.shape != true.shape:
        raise TaskError(
            f"targets of a regression must have the shape of its outputs {list(outputs.shape)}, got "
            f"{list(targets.shape)}"
        )
    return predicted, true, _repeat_weights(weights, len(outputs), len(predicted))[:, None]


def repeat_targets(outputs: Array, targets: Array, count: int) -> Array:
    """Returns the targets [n] or [n, 1] of outputs [n, count], such as quantiles, once for each; 0 for any count.

    Raises:
        TaskError: shapes do not fit, or there is one output alone.
    """
    is_right = outputs.ndim == 2 and outputs.shape[1] >= 2 and count in {0, outputs.shape[1]}
    if not is_right or targets.shape not in {outputs.shape[:1], (len(outputs), 1)}:
        raise TaskError(
            f"a metric of quantiles needs outputs [n, {count or '2 or more'}] and targets [n], got "
            f"{list(outputs.shape)} and {list(targets.shape)}"
        )
    return np.broadcast_to(targets.reshape(-1, 1), outputs.shape)


def _to_rows(values: Array) -> Array:
    """Returns [n, outputs, ...] as [n * positions, outputs] float64, and [n] as [n, 1]."""
    if not values.ndim or values.dtype.kind not in "fiub":
        raise TaskError(f"a metric needs arrays of numbers by example, got {values.dtype} {list(values.shape)}")
    if values.ndim == 1:
        return values[:, None].astype(np.float64)
    return np.moveaxis(values, 1, -1).reshape(-1, values.shape[1]).astype(np.float64)


def _repeat_weights(weights: Array | None, num_examples: int, num_rows: int) -> Array:
    if weights is None:
        return np.ones(num_rows)
    if weights.shape != (num_examples,) or not np.all(weights >= 0):
        raise TaskError(f"weights must be {num_examples} numbers of at least 0, got {list(weights.shape)}")
    return np.repeat(weights.astype(np.float64), num_rows // max(1, num_examples))


def _to_classes(targets: Array, limit: int) -> Array:
    with np.errstate(invalid="ignore"):
        is_class = (targets >= 0) & (targets < min(limit, _MAX_CLASS)) & (targets == np.floor(targets))
    if not is_class.all():
        raise TaskError(f"a target is {targets[~is_class].flat[0]}, it must be a whole number from 0 to {limit - 1}")
    return targets.astype(np.int64)
