"""What a device does with one gradient: the local algorithms, found by name.

They see a `Learner`'s arrays and change them in place with `+=`, `-=`, `*=`, scalars and, for a root, `** 0.5`, so
the same text drives NumPy arrays and torch tensors. Packages add algorithms by the entry point `edgefl.local_steps`:
a callable that takes the `LocalPlan` and returns a `LocalStep`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from edgefl.errors import ConfigError
from edgefl.tasks.adaptive import AdaDeltaStep, AdaGradStep, AdamStep, RmsPropStep
from edgefl.tasks.descent import DecayStep, GradientStep, ProxStep, SgdStep
from edgefl.tasks.scaffold import ScaffoldStep
from edgefl.types import Algorithm, Array, Dataset, Learner, LocalPlan

ENTRY_POINT_GROUP = "edgefl.local_steps"


class LocalStep(Protocol):
    """One local algorithm for one assignment: `begin`, then `step` per batch, then `end`."""

    def begin(self, learner: Learner) -> None: ...
    def step(self, learner: Learner, batch: Dataset) -> None:
        """Uses `learner.gradients`, which hold the mean gradient over `batch`."""

    def end(self, learner: Learner) -> None: ...


@runtime_checkable
class LastingStep(Protocol):
    """What a `LocalStep` offers beside its calls when a plan may keep its state from one assignment to the next."""

    def state(self) -> dict[str, Array]:
        """Returns what is to be kept, as NumPy arrays; asked after `end`."""

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Goes on from what `state` gave; called after `begin`."""


BUILT_IN: Mapping[str, Callable[[LocalPlan], LocalStep]] = MappingProxyType(
    {
        Algorithm.SGD: SgdStep,
        Algorithm.GRADIENT: GradientStep,
        Algorithm.DECAY: DecayStep,
        Algorithm.PROX: ProxStep,
        Algorithm.ADAM: AdamStep,
        Algorithm.RMSPROP: RmsPropStep,
        Algorithm.ADAGRAD: AdaGradStep,
        Algorithm.ADADELTA: AdaDeltaStep,
        Algorithm.SCAFFOLD: ScaffoldStep,
    }
)


def make_local_step(plan: LocalPlan) -> LocalStep:
    """Returns the algorithm that the plan names.

    Raises:
        ConfigError: nothing on this board has that name, or the plan's options do not fit it.
    """
    if plan.algorithm in BUILT_IN:
        return BUILT_IN[plan.algorithm](plan)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=plan.algorithm):
        step: LocalStep = entry_point.load()(plan)
        return step
    raise ConfigError(
        f"local algorithm {plan.algorithm!r} is not installed on this board, only {', '.join(local_step_names())}"
    )


def local_step_names() -> tuple[str, ...]:
    found = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*map(str, BUILT_IN), *found}))
