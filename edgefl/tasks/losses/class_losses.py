"""Cross-entropy of classes: one an example, or one a position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Array
from edgefl.tasks.losses.loss import Loss, make_shape_error, to_classes

IGNORED_CLASS = -100
"""Target of a position (a pixel, a token) that does not count."""


def softmax(logits: Array) -> Array:
    """Returns the probabilities of [n, classes] logits."""
    probabilities: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    return probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy of logits [n, classes, ...] and whole numbers [n, ...], such as one a pixel.

    Attributes:
        class_weights: [classes] factor of an example's loss by its class; empty for 1 each.
        label_smoothing: part of the target that is spread over all classes, 0 to 1 (Szegedy et al., CVPR 2016).
    """

    name = "cross-entropy"

    class_weights: tuple[float, ...] = ()
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ConfigError(f"label_smoothing must be in [0, 1], got {self.label_smoothing}")
        if wrong := [weight for weight in self.class_weights if not 0.0 <= weight < np.inf]:
            raise ConfigError(f"class_weights must be finite and at least 0, got {wrong[0]}")

    @property
    def is_plain(self) -> bool:
        """Whether it has neither weights nor smoothing."""
        return not self.class_weights and not self.label_smoothing

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        num_classes = len(self.class_weights) or None
        if shape is not None:
            if len(shape) < 2 or targets.shape != (expected := (shape[0], *shape[2:])):
                raise make_shape_error(self, targets, shape, expected if len(shape) > 1 else None)
            if num_classes not in {None, shape[1]}:
                raise TaskError(f"the loss has {num_classes} class_weights, the model {shape[1]} outputs")
            num_classes = shape[1]
        return to_classes(targets, num_classes, ignored=IGNORED_CLASS if targets.ndim > 1 else None)

    def compute(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        if outputs.ndim > 2:
            return self._compute_positions(outputs, targets)
        rows = np.arange(len(targets))
        shifted = outputs - outputs.max(axis=1, keepdims=True)
        slopes: Array = np.exp(shifted)
        total = slopes.sum(axis=1, keepdims=True)
        values: Array = np.log(total[:, 0]) - shifted[rows, targets]
        slopes /= total
        if self.is_plain:
            slopes[rows, targets] -= 1.0
            return values, slopes
        factors = self._make_factors(targets, outputs)
        values = (factors * (np.log(total) - shifted)).sum(axis=1)
        return values, slopes * factors.sum(axis=1, keepdims=True) - factors

    def _make_factors(self, classes: Array, outputs: Array) -> Array:
        """Returns the factor of each class's -log p in the loss, [n, classes]."""
        count = outputs.shape[1]
        weights = np.array(self.class_weights or np.ones(count), outputs.dtype)
        factors: Array = np.tile(self.label_smoothing / count * weights, (len(classes), 1))
        factors[np.arange(len(classes)), classes] += (1.0 - self.label_smoothing) * weights[classes]
        return factors.astype(outputs.dtype, copy=False)

    def _compute_positions(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        """Returns the mean over an example's positions that count; 0 where none does."""
        flat = np.moveaxis(outputs, 1, -1).reshape(-1, outputs.shape[1])
        counts = (targets != IGNORED_CLASS).reshape(len(targets), -1)
        values, slopes = self.compute(flat, np.where(counts.ravel(), targets.ravel(), 0))
        factors = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
        means: Array = (values.reshape(factors.shape) * factors).sum(axis=1)
        slopes *= factors.reshape(-1, 1).astype(slopes.dtype)
        by_position = slopes.reshape(len(outputs), *outputs.shape[2:], outputs.shape[1])
        return means.astype(outputs.dtype), np.moveaxis(by_position, -1, 1)

    def count_right(self, outputs: Array, targets: Array) -> float:
        is_right = outputs.argmax(axis=1) == targets
        if targets.ndim == 1:
            return float(is_right.sum())
        counts = (targets != IGNORED_CLASS).reshape(len(targets), -1)
        is_right = is_right.reshape(counts.shape) & counts
        return float((is_right.sum(axis=1) / np.maximum(1, counts.sum(axis=1))).sum())
