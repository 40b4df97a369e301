"""What a device does with one gradient: the local algorithms, found by name.

They see a `Learner`'s arrays and change them in place with `+=`, `-=`, `*=` and scalars only, so the same
text drives NumPy arrays and torch tensors. Packages add algorithms by the entry point `edgefl.local_steps`:
a callable that takes the `LocalPlan` and returns a `LocalStep`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

from edgefl.errors import ConfigError
from edgefl.types import Algorithm, Dataset, Learner, LocalPlan

ENTRY_POINT_GROUP = "edgefl.local_steps"


class LocalStep(Protocol):
    """One local algorithm for one assignment: `begin`, then `step` per batch, then `end`."""

    def begin(self, learner: Learner) -> None: ...
    def step(self, learner: Learner, batch: Dataset) -> None:
        """Uses `learner.gradients`, which hold the mean gradient over `batch`."""

    def end(self, learner: Learner) -> None: ...


def make_local_step(plan: LocalPlan) -> LocalStep:
    """Returns the algorithm that the plan names.

    Raises:
        ConfigError: nothing on this board has that name.
    """
    if plan.algorithm == Algorithm.SGD:
        return SgdStep(plan)
    if plan.algorithm == Algorithm.GRADIENT:
        return GradientStep(plan)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=plan.algorithm):
        step: LocalStep = entry_point.load()(plan)
        return step
    raise ConfigError(
        f"local algorithm {plan.algorithm!r} is not installed on this board, only {', '.join(local_step_names())}"
    )


def local_step_names() -> tuple[str, ...]:
    found = {entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted({*map(str, Algorithm), *found}))


class SgdStep:
    """Stochastic gradient descent: v ← μv + g + λw, w ← w - ηv."""

    def __init__(self, plan: LocalPlan) -> None:
        self._plan = plan
        self._velocity: dict[str, Any] = {}

    def begin(self, learner: Learner) -> None:
        if self._plan.momentum:
            self._velocity = zeros_like(learner.gradients)

    def step(self, learner: Learner, batch: Dataset) -> None:  # noqa: ARG002 the mean gradient says all
        plan = self._plan
        for name, weight in learner.parameters.items():
            direction = learner.gradients[name]
            if plan.weight_decay:
                direction += plan.weight_decay * weight
            if plan.momentum:
                velocity = self._velocity[name]
                velocity *= plan.momentum
                velocity += direction
                direction = velocity
            weight -= plan.learning_rate * direction  # noqa: PLW2901 in place: the learner's own array

    def end(self, learner: Learner) -> None: ...


class GradientStep:
    """One step along the mean gradient over every example seen, all of it taken at the start point."""

    def __init__(self, plan: LocalPlan) -> None:
        self._plan = plan
        self._sum: dict[str, Any] = {}
        self._num_examples = 0

    def begin(self, learner: Learner) -> None:
        self._sum = zeros_like(learner.gradients)

    def step(self, learner: Learner, batch: Dataset) -> None:
        # Weighted, so that an epoch with a short last batch still gives the exact gradient over the shard.
        self._num_examples += len(batch)
        for name, gradient in learner.gradients.items():
            self._sum[name] += len(batch) * gradient

    def end(self, learner: Learner) -> None:
        plan, scale = self._plan, self._plan.learning_rate / max(1, self._num_examples)
        for name, weight in learner.parameters.items():
            direction = self._sum[name]
            direction *= scale
            if plan.weight_decay:
                direction += plan.learning_rate * plan.weight_decay * weight
            weight -= direction  # noqa: PLW2901 in place: the learner's own array


def zeros_like(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns zeros in the backend's own kind of array."""
    zeros = {name: array + 0.0 for name, array in arrays.items()}
    for array in zeros.values():
        array[...] = 0.0  # not times zero: a NaN of an earlier batch would stay
    return zeros
