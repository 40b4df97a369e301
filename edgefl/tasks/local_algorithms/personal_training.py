"""What a device trains and keeps: a part of the model on its own (FedRep), or a copy beside the shared one (Ditto).

Sources: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021,
algorithm 1; Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Learner, ModelSpec, TrainConfig
from edgefl.tasks.local_algorithms.optimizers import copy_into, zeros_like
from edgefl.tasks.local_algorithms.registry import LocalAlgorithm

PREFIX = "personal/"
"""Before a tensor's name in the file that a device keeps, so that it is not taken for a part of the shared model."""


class _PartLearner:
    """A learner of which an algorithm sees, and so trains, some parameters."""

    def __init__(self, learner: Learner, names: Collection[str]) -> None:
        self._learner = learner
        self.parameters = {name: array for name, array in learner.parameters.items() if name in names}
        self.gradients = {name: learner.gradients[name] for name in self.parameters}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


def list_parts(
    learner: Learner, plan: TrainConfig, num_examples: int, local_names: Collection[str]
) -> list[tuple[Learner, int | None]]:
    """Returns the local part of a learner and the shared one, each with the iterations after which it ends.

    Raises:
        ConfigError: one of them has no parameter.
    """
    names = [[name for name in learner.parameters if (name in local_names) == is_local] for is_local in (True, False)]
    if not all(names):
        raise ConfigError(
            f"head_epochs = {plan.head_epochs}: {'the whole model' if names[0] else 'nothing of it'} stays on the "
            "device; it needs a part that stays and one that travels"
        )
    limits = plan.count_head_iterations(num_examples), plan.count_iterations(num_examples)
    return [(cast("Learner", _PartLearner(learner, part)), limit) for part, limit in zip(names, limits, strict=True)]


class PulledAlgorithm:
    """A local algorithm on the loss plus (λ/2)·|v - w|²: v ← v - η(∇F(v) + λ(v - w)) with SGD.

    Args:
        inner: makes the step from the gradient of both.
        anchor: w, the shared model that the device received.
        strength: λ; with 0 the copy is trained on the device's examples alone.

    Source: Li et al., algorithm 1, line 8.
    """

    def __init__(self, inner: LocalAlgorithm, anchor: Mapping[str, Array], strength: float) -> None:
        self._inner, self._strength = inner, strength
        self._anchor, self._anchor_arrays = anchor, dict[str, Any]()

    def start(self, learner: Learner) -> None:
        self._inner.start(learner)
        self._anchor_arrays = zeros_like(learner.parameters)
        for name, array in self._anchor_arrays.items():
            copy_into(array, self._anchor[name])

    def step(self, learner: Learner, batch: Dataset) -> None:
        for name, weight in learner.parameters.items():
            gradient = learner.gradients[name]
            gradient += self._strength * (weight - self._anchor_arrays[name])
        self._inner.step(learner, batch)

    def finish(self, learner: Learner) -> None:
        self._inner.finish(learner)


def list_kept_specs(shapes: ModelSpec) -> ModelSpec:
    """Returns the tensors of a personal copy of a model, as a device keeps them."""
    return tuple(replace(spec, name=f"{PREFIX}{spec.name}", shared=False) for spec in shapes)


def add_prefix(copy: Mapping[str, Array]) -> dict[str, Array]:
    """Returns a personal copy with the names of its file."""
    return {f"{PREFIX}{name}": array for name, array in copy.items()}


def remove_prefix(kept: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the personal copy in the arrays of a file, by the names of the model; empty where there is none."""
    return {name.removeprefix(PREFIX): array for name, array in kept.items() if name.startswith(PREFIX)}
