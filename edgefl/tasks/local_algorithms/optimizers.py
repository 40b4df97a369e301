"""Local algorithms along the gradient, and their parts: hyperparameters, and arrays beside each weight.

SGD, with decay, proximal, drift-corrected, adaptive, and full gradient descent; for NumPy and torch alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Learner, TrainConfig
from edgefl.strategies.peer_algorithms.algorithm import GradientCorrection

log = logging.getLogger(__name__)

ITERATIONS = "iterations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    """One option of a local algorithm: its default, and its range from 0 to below a bound."""

    default: float
    positive: bool = False
    below: float = math.inf

    def is_valid(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return (value > 0 or (value == 0 and not self.positive)) and value < self.below

    def __str__(self) -> str:
        lower = "above 0" if self.positive else "0 or more"
        return lower if self.below == math.inf else f"{lower} and below {self.below:g}"


def parse_hyperparameters(plan: TrainConfig, specs: Mapping[str, Hyperparameter]) -> dict[str, float]:
    """Returns the options of a plan over their defaults.

    Raises:
        ConfigError: the algorithm has no such option, or a value is out of its range.
    """
    for name, value in plan.options.items():
        if name not in specs:
            raise ConfigError(
                f"local algorithm {plan.algorithm} has no option {name!r}, only {', '.join(specs) or 'none'}"
            )
        if not specs[name].is_valid(value):
            raise ConfigError(f"{name} of local algorithm {plan.algorithm} must be {specs[name]}, got {value!r}")
    return {name: float(plan.options.get(name, number.default)) for name, number in specs.items()}


class Moments:
    """Arrays of some kinds (`velocity`, `square`) beside each weight, zero at first, and the iterations so far.

    They are the backend's own arrays; `state` gives NumPy copies that `restore` takes, on any device.
    """

    def __init__(self, *moment_names: str) -> None:
        self._arrays: dict[str, dict[str, Any]] = {kind: {} for kind in moment_names}
        self.iterations = 0

    def reset(self, learner: Learner) -> None:
        self._arrays = {kind: zeros_like(learner.gradients) for kind in self._arrays}
        self.iterations = 0

    def get(self, name: str) -> list[Any]:
        """Returns the arrays beside one weight, in the order of the kinds."""
        return [arrays[name] for arrays in self._arrays.values()]

    def state(self) -> dict[str, Array]:
        named_arrays = self._get_named_arrays()
        return {
            ITERATIONS: np.array(self.iterations),
            **{key: to_numpy(array) for key, array in named_arrays.items()},
        }

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restores a state; one that does not fit the model is ignored. Called after `reset`."""
        named_arrays = self._get_named_arrays()
        saved_shapes = {key: tuple(value.shape) for key, value in saved.items() if key != ITERATIONS}
        if ITERATIONS not in saved or saved_shapes != {
            key: tuple(array.shape) for key, array in named_arrays.items()
        }:
            log.warning("the saved moments of the local algorithm do not fit the model; they begin anew")
            return
        self.iterations = int(saved[ITERATIONS])
        for key, array in named_arrays.items():
            copy_into(array, saved[key])

    def _get_named_arrays(self) -> dict[str, Any]:
        return {f"{kind}/{name}": array for kind, arrays in self._arrays.items() for name, array in arrays.items()}


def zeros_like(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns zeros in the backend's own kind of array."""
    # With a temporary extra dimension: NumPy's sum of an array without any is a scalar.
    zeros = {name: (array[None] + 0.0)[0, ...] for name, array in arrays.items()}
    for array in zeros.values():
        array[...] = 0.0  # not times zero: a NaN of an earlier batch would stay
    return zeros


def to_numpy(array: Any) -> Array:
    """Returns a copy of the backend's array in NumPy."""
    return np.array(array.cpu().numpy() if hasattr(array, "cpu") else array)


def copy_into(array: Any, value: Array) -> None:
    """Writes a NumPy array into the backend's own."""
    array[...] = array.new_tensor(value) if hasattr(array, "new_tensor") else value


class Sgd:
    """Stochastic gradient descent: v ← μv + g + λw, w ← w - ηv, with the plan's momentum μ and weight decay λ."""

    def __init__(self, plan: TrainConfig, hyperparameter_specs: Mapping[str, Hyperparameter] | None = None) -> None:
        self._hyperparameters = parse_hyperparameters(plan, hyperparameter_specs or {})
        self._plan = plan
        self._moments = Moments(*(["velocity"] if plan.momentum else []))

    def start(self, learner: Learner) -> None:
        self._moments.reset(learner)

    def step(self, learner: Learner, batch: Dataset) -> None:  # noqa: ARG002 the mean gradient suffices
        plan, learning_rate = self._plan, self._compute_learning_rate()
        self._moments.iterations += 1
        for name, weight in learner.parameters.items():
            gradient = learner.gradients[name]
            if plan.weight_decay:
                gradient += plan.weight_decay * weight
            weight -= learning_rate * self._compute_direction(gradient, *self._moments.get(name))  # noqa: PLW2901 in place: the learner's own array

    def _compute_direction(self, gradient: Any, *moments: Any) -> Any:
        """Returns a weight's step at a learning rate of 1, and updates its moments."""
        if not moments:
            return gradient
        (velocity,) = moments
        velocity *= self._plan.momentum
        velocity += gradient
        return velocity

    def _compute_learning_rate(self) -> float:
        return self._plan.learning_rate

    def finish(self, learner: Learner) -> None: ...

    def state(self) -> dict[str, Array]:
        return self._moments.state()

    def restore(self, saved: Mapping[str, Array]) -> None:
        self._moments.restore(saved)


class DecayedSgd(Sgd):
    """SGD whose learning rate falls with the iterations: η_t = η/√t, t = 1, 2, ….

    t counts from the start of the assignment, or of the run when the plan keeps its state.
    Source: Parallel-SGD, its gradient decay (there with η = 0.03).
    """

    def _compute_learning_rate(self) -> float:
        return float(self._plan.learning_rate / (self._moments.iterations + 1) ** 0.5)


class ProximalSgd(Sgd):
    """SGD on the loss plus (μ/2)·|w - w₀|², w₀ being the global model that the assignment began from.

    Options: `mu`, 0.01 unless the plan says otherwise; with 0 it is `sgd` to the bit.
    Source: Li et al., Federated Optimization in Heterogeneous Networks (FedProx), MLSys 2020, algorithm 2.
    """

    def __init__(self, plan: TrainConfig) -> None:
        super().__init__(plan, {"mu": Hyperparameter(default=0.01)})
        self._start_weights: dict[str, Any] = {}

    def start(self, learner: Learner) -> None:
        super().start(learner)
        self._start_weights = {name: weight + 0.0 for name, weight in learner.parameters.items()}

    def step(self, learner: Learner, batch: Dataset) -> None:
        if mu := self._hyperparameters["mu"]:
            for name, weight in learner.parameters.items():
                gradient = learner.gradients[name]
                gradient += mu * (weight - self._start_weights[name])
        super().step(learner, batch)


class DriftCorrectedSgd(Sgd):
    """w ← (w - η(v - c)) / (1 + ηh), v being the step of SGD: the local step of a node of a graph.

    The correction c and the shrinkage h hold for all steps of an assignment; momentum, if any, applies to v only.
    Source: Niwa et al., Asynchronous Decentralized Optimization With Implicit Stochastic Variance Reduction, 2021.
    """

    def __init__(self, plan: TrainConfig, correction: GradientCorrection) -> None:
        super().__init__(plan)
        self._correction = correction
        self._correction_arrays: dict[str, Any] = {}

    def start(self, learner: Learner) -> None:
        super().start(learner)
        self._correction_arrays = {}
        for name, array in zeros_like(learner.parameters).items():
            if name in self._correction.correction:
                copy_into(array, self._correction.correction[name])
                self._correction_arrays[name] = array

    def step(self, learner: Learner, batch: Dataset) -> None:
        super().step(learner, batch)
        learning_rate = self._plan.learning_rate
        shrunk = 1 / (1 + learning_rate * self._correction.shrinkage)
        for name, weight in learner.parameters.items():
            if name in self._correction_arrays:
                weight += learning_rate * self._correction_arrays[name]  # noqa: PLW2901 in place: the learner's own array
            if shrunk != 1:
                weight *= shrunk  # noqa: PLW2901 likewise


class FullGradientDescent:
    """One step along the mean gradient over every example seen, all of it taken at the start point."""

    def __init__(self, plan: TrainConfig) -> None:
        parse_hyperparameters(plan, {})
        self._plan = plan
        self._gradient_sum: dict[str, Any] = {}
        self._num_examples = 0

    def start(self, learner: Learner) -> None:
        self._gradient_sum = zeros_like(learner.gradients)

    def step(self, learner: Learner, batch: Dataset) -> None:
        # Weighted, so that an epoch with a short last batch still gives the exact gradient over the shard.
        self._num_examples += len(batch)
        for name, gradient in learner.gradients.items():
            self._gradient_sum[name] += len(batch) * gradient

    def finish(self, learner: Learner) -> None:
        plan, scale = self._plan, self._plan.learning_rate / max(1, self._num_examples)
        for name, weight in learner.parameters.items():
            direction = self._gradient_sum[name]
            direction *= scale
            if plan.weight_decay:
                direction += plan.learning_rate * plan.weight_decay * weight
            weight -= direction  # noqa: PLW2901 in place: the learner's own array


class _AdaptiveAlgorithm(Sgd):
    """Base of the four that scale every weight's step by its past gradients; subclasses define moments and step.

    In all of them g is the mean gradient of the batch plus λw, η the plan's learning rate, and every operation is per
    weight. They have no momentum: a plan with one is rejected.
    """

    moment_names: ClassVar[tuple[str, ...]]
    hyperparameter_specs: ClassVar[Mapping[str, Hyperparameter]]

    def __init__(self, plan: TrainConfig) -> None:
        if plan.momentum:
            raise ConfigError(f"local algorithm {plan.algorithm} takes no momentum, got {plan.momentum}; leave it 0")
        super().__init__(plan, self.hyperparameter_specs)
        self._moments = Moments(*self.moment_names)


class Adam(_AdaptiveAlgorithm):
    """m ← β₁m + (1-β₁)g, r ← β₂r + (1-β₂)g², w ← w - η·m̂/(√r̂ + ε) with m̂ = m/(1-β₁ᵗ), r̂ = r/(1-β₂ᵗ).

    Options: `beta1` (β₁) 0.9, `beta2` (β₂) 0.999, `epsilon` (ε) 1e-8; the usual learning rate is 0.001.
    Source: Kingma, Ba, Adam, ICLR 2015, algorithm 1.
    """

    moment_names = ("mean", "square")
    hyperparameter_specs: ClassVar[Mapping[str, Hyperparameter]] = {
        "beta1": Hyperparameter(default=0.9, below=1.0),
        "beta2": Hyperparameter(default=0.999, below=1.0),
        "epsilon": Hyperparameter(default=1e-8, positive=True),
    }

    def _compute_direction(self, gradient: Any, *moments: Any) -> Any:
        mean, square = moments
        beta1, beta2, t = self._hyperparameters["beta1"], self._hyperparameters["beta2"], self._moments.iterations
        update_moving_average(mean, gradient, beta1)
        update_moving_average(square, gradient * gradient, beta2)
        scale = (square / (1.0 - beta2**t)) ** 0.5 + self._hyperparameters["epsilon"]
        return mean / (1.0 - beta1**t) / scale


class RMSprop(_AdaptiveAlgorithm):
    """r ← a·r + (1-a)g², w ← w - η·g/(√r + ε).

    Options: `alpha` (a) 0.9, `epsilon` (ε) 1e-7; the usual learning rate is 0.01.
    Source: Tieleman, Hinton, Neural Networks for Machine Learning, lecture 6.5, 2012.
    """

    moment_names = ("square",)
    hyperparameter_specs: ClassVar[Mapping[str, Hyperparameter]] = {
        "alpha": Hyperparameter(default=0.9, below=1.0),
        "epsilon": Hyperparameter(default=1e-7, positive=True),
    }

    def _compute_direction(self, gradient: Any, *moments: Any) -> Any:
        (square,) = moments
        update_moving_average(square, gradient * gradient, self._hyperparameters["alpha"])
        return gradient / (square**0.5 + self._hyperparameters["epsilon"])


class Adagrad(_AdaptiveAlgorithm):
    """r ← r + g², w ← w - η·g/(√r + ε).

    Options: `epsilon` (ε) 1e-7; the usual learning rate is 0.01.
    Source: Duchi, Hazan, Singer, Adaptive Subgradient Methods, JMLR 2011, the diagonal form.
    """

    moment_names = ("square",)
    hyperparameter_specs: ClassVar[Mapping[str, Hyperparameter]] = {
        "epsilon": Hyperparameter(default=1e-7, positive=True)
    }

    def _compute_direction(self, gradient: Any, *moments: Any) -> Any:
        (square,) = moments
        square += gradient * gradient
        return gradient / (square**0.5 + self._hyperparameters["epsilon"])


class Adadelta(_AdaptiveAlgorithm):
    """r ← a·r + (1-a)g², d = √(x + ε)/√(r + ε)·g, x ← a·x + (1-a)d², w ← w - η·d.

    Options: `alpha` (a) 0.95, `epsilon` (ε) 1e-6; the paper's learning rate is 1.
    Source: Zeiler, ADADELTA, 2012, algorithm 1.
    """

    moment_names = ("square", "moved")
    hyperparameter_specs: ClassVar[Mapping[str, Hyperparameter]] = {
        "alpha": Hyperparameter(default=0.95, below=1.0),
        "epsilon": Hyperparameter(default=1e-6, positive=True),
    }

    def _compute_direction(self, gradient: Any, *moments: Any) -> Any:
        square, square_steps = moments
        alpha, epsilon = self._hyperparameters["alpha"], self._hyperparameters["epsilon"]
        update_moving_average(square, gradient * gradient, alpha)
        direction = (square_steps + epsilon) ** 0.5 / (square + epsilon) ** 0.5 * gradient
        update_moving_average(square_steps, direction * direction, alpha)
        return direction


def update_moving_average(moment: Any, value: Any, keep: float) -> None:
    """Moves a running mean in place: moment ← keep·moment + (1 - keep)·value."""
    moment *= keep
    moment += (1.0 - keep) * value
