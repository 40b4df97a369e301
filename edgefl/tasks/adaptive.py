"""Local algorithms that scale every weight's step by the gradients it has seen.

In all of them g is the mean gradient of the batch plus λw, η the plan's learning rate, and every operation is per
weight. They have no momentum of their own kind: a plan that asks for one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from edgefl.errors import ConfigError
from edgefl.tasks.moments import Moments, Number, numbers_of
from edgefl.types import Array, Dataset, Learner, LocalPlan


class _Adaptive:
    """The walk over the weights that the four share; each says what it remembers and how far a weight moves."""

    kinds: ClassVar[tuple[str, ...]]
    numbers: ClassVar[Mapping[str, Number]]

    def __init__(self, plan: LocalPlan) -> None:
        if plan.momentum:
            raise ConfigError(f"local algorithm {plan.algorithm} takes no momentum, got {plan.momentum}; leave it 0")
        self._plan = plan
        self._number = numbers_of(plan, self.numbers)
        self._moments = Moments(*self.kinds)

    def begin(self, learner: Learner) -> None:
        self._moments.begin(learner)

    def step(self, learner: Learner, batch: Dataset) -> None:  # noqa: ARG002 the mean gradient says all
        self._moments.iterations += 1
        for name, weight in learner.parameters.items():
            gradient = learner.gradients[name]
            if self._plan.weight_decay:
                gradient += self._plan.weight_decay * weight
            weight -= self._plan.learning_rate * self._direction(gradient, *self._moments.of(name))  # noqa: PLW2901 in place: the learner's own array

    def _direction(self, gradient: Any, *moments: Any) -> Any:
        """Returns how far a weight moves at a learning rate of 1, and brings its moments up to date."""
        raise NotImplementedError

    def end(self, learner: Learner) -> None: ...

    def state(self) -> dict[str, Array]:
        return self._moments.state()

    def restore(self, saved: Mapping[str, Array]) -> None:
        self._moments.restore(saved)


class AdamStep(_Adaptive):
    """m ← β₁m + (1-β₁)g, r ← β₂r + (1-β₂)g², w ← w - η·m̂/(√r̂ + ε) with m̂ = m/(1-β₁ᵗ), r̂ = r/(1-β₂ᵗ).

    Options: `beta1` (β₁) 0.9, `beta2` (β₂) 0.999, `epsilon` (ε) 1e-8; the usual learning rate is 0.001.
    Source: Kingma, Ba, Adam, ICLR 2015, algorithm 1.
    """

    kinds = ("mean", "square")
    numbers: ClassVar[Mapping[str, Number]] = {
        "beta1": Number(default=0.9, below=1.0),
        "beta2": Number(default=0.999, below=1.0),
        "epsilon": Number(default=1e-8, positive=True),
    }

    def _direction(self, gradient: Any, *moments: Any) -> Any:
        mean, square = moments
        beta1, beta2, t = self._number["beta1"], self._number["beta2"], self._moments.iterations
        blend(mean, gradient, beta1)
        blend(square, gradient * gradient, beta2)
        scale = (square / (1.0 - beta2**t)) ** 0.5 + self._number["epsilon"]
        return mean / (1.0 - beta1**t) / scale


class RmsPropStep(_Adaptive):
    """r ← a·r + (1-a)g², w ← w - η·g/(√r + ε).

    Options: `alpha` (a) 0.9, `epsilon` (ε) 1e-7; the usual learning rate is 0.01.
    Source: Tieleman, Hinton, Neural Networks for Machine Learning, lecture 6.5, 2012.
    """

    kinds = ("square",)
    numbers: ClassVar[Mapping[str, Number]] = {
        "alpha": Number(default=0.9, below=1.0),
        "epsilon": Number(default=1e-7, positive=True),
    }

    def _direction(self, gradient: Any, *moments: Any) -> Any:
        (square,) = moments
        blend(square, gradient * gradient, self._number["alpha"])
        return gradient / (square**0.5 + self._number["epsilon"])


class AdaGradStep(_Adaptive):
    """r ← r + g², w ← w - η·g/(√r + ε).

    Options: `epsilon` (ε) 1e-7; the usual learning rate is 0.01.
    Source: Duchi, Hazan, Singer, Adaptive Subgradient Methods, JMLR 2011, the diagonal form.
    """

    kinds = ("square",)
    numbers: ClassVar[Mapping[str, Number]] = {"epsilon": Number(default=1e-7, positive=True)}

    def _direction(self, gradient: Any, *moments: Any) -> Any:
        (square,) = moments
        square += gradient * gradient
        return gradient / (square**0.5 + self._number["epsilon"])


class AdaDeltaStep(_Adaptive):
    """r ← a·r + (1-a)g², d = √(x + ε)/√(r + ε)·g, x ← a·x + (1-a)d², w ← w - η·d.

    Options: `alpha` (a) 0.95, `epsilon` (ε) 1e-6; the paper's learning rate is 1.
    Source: Zeiler, ADADELTA, 2012, algorithm 1.
    """

    kinds = ("square", "moved")
    numbers: ClassVar[Mapping[str, Number]] = {
        "alpha": Number(default=0.95, below=1.0),
        "epsilon": Number(default=1e-6, positive=True),
    }

    def _direction(self, gradient: Any, *moments: Any) -> Any:
        square, moved = moments
        alpha, epsilon = self._number["alpha"], self._number["epsilon"]
        blend(square, gradient * gradient, alpha)
        direction = (moved + epsilon) ** 0.5 / (square + epsilon) ** 0.5 * gradient
        blend(moved, direction * direction, alpha)
        return direction


def blend(moment: Any, value: Any, keep: float) -> None:
    """Moves a running mean in place: moment ← keep·moment + (1 - keep)·value."""
    moment *= keep
    moment += (1.0 - keep) * value
