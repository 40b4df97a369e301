"""Losses of each output and its target: regression, counts, quantiles, labels of which an example has several."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Array
from edgefl.tasks.losses.loss import Loss, make_shape_error, to_classes, to_values

MAX_QUANTILES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementLoss(Loss):
    """A loss of each output and its target, averaged over an example's outputs."""

    @abstractmethod
    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        """Returns the loss of each output and its slope, in the shape of the outputs."""

    def check_values(self, targets: Array) -> None:
        """Raises a `TaskError` where finite numbers are no targets of this loss."""

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        values = to_values(targets, self.name)
        self.check_values(values)
        if shape is None:
            return values
        if _drop_ones(shape) != _drop_ones(targets.shape):
            raise make_shape_error(self, targets, shape, shape)
        return values.reshape(shape)

    def compute(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        elements, slopes = self.compute_elements(outputs, targets)
        by_example = elements.reshape(len(outputs), -1)
        return by_example.mean(axis=1), slopes / by_example.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryCrossEntropy(ElementLoss):
    """Cross-entropy of logits and targets 0 or 1, of which an example may have several: multi-label."""

    name = "binary-cross-entropy"

    def check_values(self, targets: Array) -> None:
        if (wrong := targets[(targets != 0) & (targets != 1)]).size:
            raise TaskError(f"targets of {self.name} must be 0 or 1, got {wrong[0]:g}")

    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        small = np.exp(-np.abs(outputs))  # in 0 to 1, so that nothing overflows
        values = np.maximum(outputs, 0.0) - outputs * targets + np.log1p(small)
        return values, np.where(outputs >= 0.0, 1.0, small) / (1.0 + small) - targets

    def count_right(self, outputs: Array, targets: Array) -> float:
        """An example is right where all its labels are."""
        is_right = (outputs > 0.0) == (targets.reshape(outputs.shape) > 0.5)
        return float(is_right.reshape(len(outputs), -1).all(axis=1).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredError(ElementLoss):
    """Mean squared distance to the target; to 1 for the class and 0 for the others where targets are classes."""

    name = "mse"

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        if shape is None or not _are_classes(targets, shape):
            # Named as such: `super()` of a dataclass with slots is that of the class without.
            return ElementLoss.convert_targets(self, targets, shape)
        return np.eye(shape[1], dtype=np.float32)[to_classes(targets, shape[1])]

    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        slopes = outputs - targets
        return np.square(slopes), 2.0 * slopes

    def compute_mean(self, outputs: Array, targets: Array, weights: Array | None = None) -> tuple[float, Array]:
        if weights is not None:
            return Loss.compute_mean(self, outputs, targets, weights)
        gradient = outputs - targets
        loss = float(np.mean(np.square(gradient)))
        gradient *= 2.0 / gradient.size
        return loss, gradient

    def count_right(self, outputs: Array, targets: Array) -> float:
        is_class = _are_classes(targets, outputs.shape)
        return float((outputs.argmax(axis=1) == targets).sum()) if is_class else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsoluteError(ElementLoss):
    """Mean absolute distance to the target."""

    name = "mae"

    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        distance = outputs - targets
        return np.abs(distance), np.sign(distance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Huber(ElementLoss):
    """Half the squared distance up to `delta`, and linear beyond it (Huber, 1964)."""

    name = "huber"

    delta: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < np.inf:
            raise ConfigError(f"delta of huber must be finite and above 0, got {self.delta:g}")

    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        distance = outputs - targets
        slopes = np.clip(distance, -self.delta, self.delta)
        return slopes * (distance - 0.5 * slopes), slopes


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantile(ElementLoss):
    """Pinball loss (Koenker and Bassett, 1978); several quantiles are the last axis of the outputs."""

    name = "quantile"

    quantiles: tuple[float, ...] = (0.5,)

    def __post_init__(self) -> None:
        if not 1 <= len(self.quantiles) <= MAX_QUANTILES:
            raise ConfigError(f"quantile takes 1 to {MAX_QUANTILES} quantiles, got {len(self.quantiles)}")
        if wrong := [level for level in self.quantiles if not 0.0 < level < 1.0]:
            raise ConfigError(f"a quantile must be above 0 and below 1, got {wrong[0]:g}")

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:
        count = len(self.quantiles)
        if shape is None or count == 1:
            return ElementLoss.convert_targets(self, targets, shape)
        values = to_values(targets, self.name)
        if shape[-1] != count or len(shape) < 2 or _drop_ones(shape[:-1]) != _drop_ones(targets.shape):
            raise make_shape_error(self, targets, shape, (*targets.shape, count), whose="outputs")
        return np.repeat(values.reshape(*shape[:-1], 1), count, axis=-1)

    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        missing, levels = targets - outputs, np.array(self.quantiles, outputs.dtype)
        if len(levels) == 1:
            levels = levels[0]
        values = np.maximum(levels * missing, (levels - 1.0) * missing)
        return values, np.where(missing > 0.0, -levels, np.where(missing < 0.0, 1.0 - levels, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson(ElementLoss):
    """Half the Poisson deviance of counts, at rates whose logarithms are the outputs; never below 0.

    Differs from the negative log-likelihood, and from torch's, by what does not depend on the outputs.
    """

    name = "poisson"

    def check_values(self, targets: Array) -> None:
        if (wrong := targets[targets < 0.0]).size:
            raise TaskError(f"targets of {self.name} are counts, at least 0, got {wrong[0]:g}")

    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        rates = np.exp(outputs)
        saturated = targets * (np.log(np.where(targets > 0.0, targets, 1.0)) - 1.0)
        return rates - targets * outputs + saturated, rates - targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconstruction(ElementLoss):
    """Distance of the outputs to the model's own input, after `prepare`; the data set's targets are not used."""

    name = "reconstruction"

    of: ElementLoss = field(default_factory=SquaredError)

    def check_values(self, targets: Array) -> None:
        self.of.check_values(targets)

    def compute_elements(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        return self.of.compute_elements(outputs, targets)


def _are_classes(targets: Array, shape: tuple[int, ...]) -> bool:
    return targets.dtype.kind in "iu" and targets.ndim == 1 and len(shape) == 2 and shape[1] > 1


def _drop_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:1], *(size for size in shape[1:] if size != 1))
