"""Local algorithms that scale every weight's step by its past gradients.

In all of them g is the mean gradient of the batch plus λw, η the plan's learning rate, and every operation is per
weight. They have no momentum: a plan with one is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from edgefl.core.errors import ConfigError
from edgefl.core.types import TrainConfig
from edgefl.tasks.local_algorithms.sgd import Hyperparameter, Moments, Sgd


class _AdaptiveAlgorithm(Sgd):
    """Base of the four; subclasses define moments and step."""

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
