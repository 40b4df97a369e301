"""The contract of a loss, and targets as its kinds take them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgefl.core.errors import TaskError
from edgefl.core.types import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(ABC):
    """A loss; its settings are fields, its name is that of run files and messages."""

    name: ClassVar[str]

    @property
    def needs_torch(self) -> bool:
        """Whether it has no form in NumPy."""
        return False

    @abstractmethod
    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        """Returns targets as `compute` takes them.

        Args:
            targets: [n, ...] of a data set.
            shape: of the model's outputs [n, ...]; None where it is not known yet, to check the values alone.

        Raises:
            TaskError: type, shape or values are none for this loss.
        """

    @abstractmethod
    def compute(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        """Returns the loss of each example [n], and its slope by that example's outputs [n, ...]."""

    def compute_mean(self, outputs: Array, targets: Array, weights: Array | None = None) -> tuple[float, Array]:
        """Returns the mean of weight times loss over the examples, and its gradient by the outputs."""
        values, slopes = self.compute(outputs, targets)
        if weights is None:
            slopes /= len(values)
            return float(np.mean(values)), slopes
        slopes *= (weights / len(values)).astype(slopes.dtype).reshape(-1, *[1] * (slopes.ndim - 1))
        return float(np.mean(values * weights)), slopes

    def count_right(self, outputs: Array, targets: Array) -> float:  # noqa: ARG002 for subclasses
        """Returns the number of right predictions, a fraction of an example with several; NaN without classes.

        `targets` are those of the data set, which `convert_targets` takes.
        """
        return float("nan")


def to_values(targets: Array, whose: str) -> Array:
    """Returns targets as float32.

    Raises:
        TaskError: they are no numbers, or one is not finite.
    """
    if targets.dtype.kind not in "fiub":
        raise TaskError(f"targets of {whose} must be numbers, got {targets.dtype}")
    with np.errstate(over="ignore"):
        values = targets.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        row = tuple(int(index) for index in np.argwhere(~np.isfinite(values))[0])
        raise TaskError(f"targets of {whose} must be finite, got {targets[row]} in row {row[0] if row else 0}")
    return values


def to_classes(labels: Array, num_classes: int | None, *, ignored: int | None = None) -> Array:
    """Returns labels as int64, for softmax cross-entropy; `ignored` is allowed as well.

    Raises:
        TaskError: one is not a whole number from 0 to `num_classes` - 1, such as a value to be predicted.
    """
    limit = np.iinfo(np.int64).max if num_classes is None else num_classes
    if labels.dtype.kind not in "fiub":
        raise TaskError(f"labels must be whole numbers from 0, got {labels.dtype}")
    with np.errstate(invalid="ignore"):
        classes = labels.astype(np.int64, copy=False)
    is_whole = labels.dtype.kind in "iub" or np.array_equal(classes, labels)
    # As unsigned numbers those below 0 are the largest.
    if is_whole and (not classes.size or int(classes.view(np.uint64).max()) < limit):
        return classes
    is_wrong = (classes != labels) | (classes < 0) | (classes >= limit)
    if ignored is not None:
        is_wrong &= labels != ignored
        if not is_wrong.any():
            return classes
    outputs = "" if num_classes is None else f" to {num_classes - 1} (the model has {num_classes} outputs)"
    raise TaskError(
        f"a label is {labels[is_wrong].flat[0]}; the loss is softmax cross-entropy, so labels must be the whole "
        f"numbers from 0{outputs}; values need another loss of the task, such as mse"
    )


def make_shape_error(
    loss: Loss, targets: Array, shape: tuple[int, ...], expected: tuple[int, ...] | None, *, whose: str = "targets"
) -> TaskError:
    found, outputs = ([*["n"], *array[1:]] for array in (targets.shape, shape))
    right = "the model needs outputs [n, classes]"
    if expected is not None:
        right = f"{whose} must be [{', '.join(map(str, ['n', *expected[1:]]))}]"
    return TaskError(
        f"targets are {targets.dtype} [{', '.join(map(str, found))}] and the model's outputs "
        f"[{', '.join(map(str, outputs))}]; with {loss.name} {right}"
    )
