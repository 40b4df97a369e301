"""What a device trains and keeps: a part of the model (FedRep), or a copy beside the shared one (Ditto, APFL).

Sources: Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021,
algorithm 1; Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021, algorithm 1;
Deng, Kamani, Mahdavi, Adaptive Personalized Federated Learning (APFL), 2020, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array, Dataset, Learner, ModelSpec, TensorSpec, TrainConfig
from edgefl.tasks.local_algorithms.optimizers import copy_into, to_numpy, zeros_like
from edgefl.tasks.local_algorithms.registry import LocalAlgorithm

MIXTURE = "-mixture"
"""Name in a personal copy of its shares in the personal model, [tensors] in the order of their sorted names."""
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


class MixedAlgorithm:
    """A local algorithm of the shared model w, and beside it of a copy v in the mixture u = a·v + (1 - a)·w.

    On each batch w makes its step, and v one along ∂F(u)/∂v = a·∇F(u), with SGD v ← v - η·a·∇F(u). The first batch
    also moves a ← a - η·⟨v - w, ∇F(u)⟩, within 0 to 1. Buffers are no part of the mixture: the copy has its own.

    Args:
        shared: makes the steps of w.
        personal: makes those of v.
        copy: v so far, with its `MIXTURE`; None for one that is w.
        share: a where the copy is None.
        rate: η of the step of a.

    Source: Deng et al., algorithm 1; a moves once in an assignment, as theirs once between two synchronisations.
    """

    gradients_per_batch = 2

    def __init__(
        self,
        shared: LocalAlgorithm,
        personal: LocalAlgorithm,
        copy: Mapping[str, Array] | None,
        share: float,
        rate: float,
    ) -> None:
        self._shared, self._personal, self._rate = shared, personal, rate
        shares = None if copy is None else copy.get(MIXTURE)
        self._share = share if shares is None else float(np.clip(np.min(shares), 0.0, 1.0))
        self._copy = None if copy is None else {name: array for name, array in copy.items() if name != MIXTURE}
        self._has_moved = False

    def start(self, learner: Learner) -> None:
        model = learner.read()
        self._copy = self._copy or model
        learner.load(self._copy)
        self._personal.start(learner)
        learner.load(model)
        self._shared.start(learner)

    def step(self, learner: Learner, batch: Dataset) -> None:
        assert self._copy is not None
        before, names = learner.read(), learner.parameters.keys()
        self._shared.step(learner, batch)
        model = learner.read()
        learner.load({**self._copy, **_mix(self._copy, before, dict.fromkeys(names, self._share))})
        learner.gradient(batch)
        slope = 0.0 if self._has_moved else self._measure_slope(learner, before)
        for gradient in learner.gradients.values():
            gradient *= self._share  # noqa: PLW2901 in place: the learner's own array
        learner.load({name: self._copy[name] for name in names})
        self._personal.step(learner, batch)
        self._copy, self._has_moved = learner.read(), True
        if np.isfinite(slope):
            self._share = float(np.clip(self._share - self._rate * slope, 0.0, 1.0))
        learner.load(model)

    def finish(self, learner: Learner) -> None:
        assert self._copy is not None
        self._shared.finish(learner)
        model = learner.read()
        learner.load(self._copy)
        self._personal.finish(learner)
        self._copy = learner.read()
        learner.load(model)

    def make_copy(self, learner: Learner) -> dict[str, Array]:
        """Returns v with its `MIXTURE`, as a device keeps it."""
        assert self._copy is not None
        shares = [self._share if name in learner.parameters else 1.0 for name in sorted(self._copy)]
        return {**self._copy, MIXTURE: np.array(shares)}

    def _measure_slope(self, learner: Learner, model: Mapping[str, Array]) -> float:
        """Returns ∂F(u)/∂a = ⟨v - w, ∇F(u)⟩."""
        assert self._copy is not None
        return sum(
            float(np.vdot((self._copy[name] - model[name]).astype(np.float64), to_numpy(gradient)))
            for name, gradient in learner.gradients.items()
        )


def make_personal_model(copy: Mapping[str, Array] | None, model: Mapping[str, Array]) -> dict[str, Array]:
    """Returns a device's own model: its copy, or the mixture of it with the shared model; that alone without a copy.

    Raises:
        DataError: the copy's shares are none of its tensors.
    """
    if copy is None:
        return dict(model)
    tensors = {name: array for name, array in copy.items() if name != MIXTURE}
    if MIXTURE not in copy:
        return tensors
    shares = copy[MIXTURE]
    if shares.shape != (len(tensors),) or not ((shares >= 0.0) & (shares <= 1.0)).all():
        raise DataError(f"shares of a personal copy must be {len(tensors)} numbers from 0 to 1, got {shares!s:.80}")
    return _mix(tensors, model, dict(zip(sorted(tensors), shares.tolist(), strict=True)))


def _mix(copy: Mapping[str, Array], model: Mapping[str, Array], shares: Mapping[str, float]) -> dict[str, Array]:
    """Returns the tensors that have a share: share·copy + (1 - share)·model; as they are with a share of 1."""
    return {
        name: copy[name]
        if share == 1.0
        else (share * copy[name] + (1.0 - share) * model[name]).astype(copy[name].dtype)
        for name, share in shares.items()
    }


def list_kept_specs(shapes: ModelSpec, *, has_mixture: bool = False) -> ModelSpec:
    """Returns the tensors of a personal copy of a model, as a device keeps them."""
    names = [TensorSpec(name=MIXTURE, shape=(len(shapes),), dtype="float64")] if has_mixture else []
    return tuple(replace(spec, name=f"{PREFIX}{spec.name}", shared=False) for spec in (*shapes, *names))


def add_prefix(copy: Mapping[str, Array]) -> dict[str, Array]:
    """Returns a personal copy with the names of its file."""
    return {f"{PREFIX}{name}": array for name, array in copy.items()}


def remove_prefix(kept: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the personal copy in the arrays of a file, by the names of the model; empty where there is none."""
    return {name.removeprefix(PREFIX): array for name, array in kept.items() if name.startswith(PREFIX)}
