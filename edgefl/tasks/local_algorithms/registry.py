"""Local algorithms by name: the update of the weights from one gradient.

They modify a `Learner`'s arrays in place with `+=`, `-=`, `*=`, scalars and, for a root, `** 0.5`, so the same code
works on NumPy arrays and torch tensors. Packages add algorithms by the entry point `edgefl.local_steps`:
a class that inherits from `LocalAlgorithm` and is constructed with the `TrainConfig`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from edgefl.core.errors import ConfigError
from edgefl.core.extensions import ExtensionKind, format_name, inherits_from, list_entry_points, load_entry_point
from edgefl.core.types import Algorithm, Array, Dataset, Learner, TrainConfig
from edgefl.tasks.local_algorithms.optimizers import (
    Adadelta,
    Adagrad,
    Adam,
    DecayedSgd,
    FullGradientDescent,
    ProximalSgd,
    RMSprop,
    Sgd,
)
from edgefl.tasks.local_algorithms.scaffold import ScaffoldSgd


def _make_private(plan: TrainConfig) -> LocalAlgorithm:
    """Returns the algorithm that gets the private gradients."""
    plan.check()
    assert plan.privacy is not None
    return make_local_algorithm(replace(plan, algorithm=plan.privacy.optimizer, privacy=None))


BUILT_IN: Mapping[str, Callable[[TrainConfig], LocalAlgorithm]] = MappingProxyType(
    {
        Algorithm.SGD: Sgd,
        Algorithm.GRADIENT: FullGradientDescent,
        Algorithm.DECAY: DecayedSgd,
        Algorithm.PROX: ProximalSgd,
        Algorithm.ADAM: Adam,
        Algorithm.RMSPROP: RMSprop,
        Algorithm.ADAGRAD: Adagrad,
        Algorithm.ADADELTA: Adadelta,
        Algorithm.SCAFFOLD: ScaffoldSgd,
        Algorithm.DP_SGD: _make_private,
    }
)


class LocalAlgorithm(Protocol):
    """One local algorithm for one assignment: `start`, then `step` per batch, then `finish`."""

    def start(self, learner: Learner) -> None: ...
    def step(self, learner: Learner, batch: Dataset) -> None:
        """Uses `learner.gradients`, which hold the mean gradient over `batch`."""

    def finish(self, learner: Learner) -> None: ...


@runtime_checkable
class StatefulLocalAlgorithm(Protocol):
    """A `LocalAlgorithm` whose state a plan may keep between instructions."""

    def state(self) -> dict[str, Array]:
        """Returns the state to keep, as NumPy arrays; called after `finish`."""

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restores the state that `state` returned; called after `start`."""


KIND = ExtensionKind(
    noun="local algorithm",
    group="edgefl.local_steps",
    is_declared=inherits_from(
        LocalAlgorithm, Sgd, FullGradientDescent, DecayedSgd, ProximalSgd, Adam, RMSprop, Adagrad, Adadelta
    ),
    declaration="inherits from edgefl.tasks.local_algorithms.registry.LocalAlgorithm",
    error=ConfigError,
)


def make_local_algorithm(plan: TrainConfig) -> LocalAlgorithm:
    """Returns the algorithm of a plan.

    Raises:
        ConfigError: no algorithm on this device has that name, or the plan's options do not fit it.
    """
    if plan.algorithm in BUILT_IN:
        return BUILT_IN[plan.algorithm](plan)
    step_class = load_entry_point(KIND, plan.algorithm)
    if step_class is not None:
        step: LocalAlgorithm = step_class(plan)
        return step
    raise ConfigError(
        f"local algorithm {format_name(plan.algorithm)} is not installed on this board, "
        f"only {', '.join(list_local_algorithms())}"
    )


def list_local_algorithms() -> tuple[str, ...]:
    return tuple(sorted({*map(str, BUILT_IN), *list_entry_points(KIND)}))
