"""A task of which a part is trained: fewer tensors to the outside, the whole network to its examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Array, Dataset, Learner, ModelSpec, Scalar, Task, Tensors, TensorSpec, derive_rng
from edgefl.tasks.adaptation.adapted_learner import AdaptedLearner
from edgefl.tasks.adaptation.parts import ModelParts, select_parts

if TYPE_CHECKING:
    from edgefl.core.config import AdaptSection

ADAPTER_RATE_SHARE = 0.2
"""Of the task's learning rate where factors are trained: with the whole rate of digits, they diverge."""


class AdaptedTask(Task):
    """A task with the tensors that its run trains; everything else is that of the inner task.

    Args:
        task: with all tensors.
        section: of the run file.
        base: the frozen tensors by name, and local ones as they are at first; None where only names
            and shapes are asked for.

    Attributes:
        parts: of the inner task's model.

    Raises:
        ConfigError: the section does not fit the model, or the base lacks a tensor.
    """

    def __init__(self, task: Task, section: AdaptSection, base: Mapping[str, Array] | None = None) -> None:
        self._task, self.parts = task, select_parts(section, task.shapes())
        self._base = None if base is None else _select_base(self.parts, base)
        local = [spec for spec in self.parts.trained if not spec.shared]
        self._first_local = {} if base is None else select_fitting(local, base)

    def __getattr__(self, name: str) -> Any:
        # Labels, metrics, loss and whatever else a task may declare.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._task, name)

    @property
    def name(self) -> str:
        return self._task.name

    @property
    def defaults(self) -> Mapping[str, Scalar]:
        """The inner task's; a rate for whole tensors is too high for factors, whose product moves by two of them."""
        found = dict(getattr(self._task, "defaults", {}))
        if self.parts.adapters and "learning_rate" in found:
            found["learning_rate"] = ADAPTER_RATE_SHARE * float(found["learning_rate"])
        return found

    @property
    def inner(self) -> Task:
        """The task with all tensors."""
        return self._task

    def shapes(self) -> ModelSpec:
        return self.parts.shapes

    def init(self, seed: int) -> dict[str, Array]:
        return self.start_from(self._task.init(seed), seed)

    def read(self, path: str) -> Dataset:
        return self._task.read(path)

    def learner(self, *, accelerator: str = "cpu", threads: int | None = None) -> Learner:
        """Returns a learner over the whole network; raises `TaskError` without a base."""
        if self._base is None:
            raise TaskError(f"task {self.name} has frozen tensors, and their values are not here")
        inner = self._task.learner(accelerator=accelerator, threads=threads)
        return AdaptedLearner(inner, self.parts, self._base)

    def start_from(self, whole: Mapping[str, Array], seed: int) -> dict[str, Array]:
        """Returns the trained tensors at first: those of a whole model, and new factors.

        A is normal with a variance of 1/inputs, B is 0, so that the adapted model computes what the whole one does.
        """
        model = {spec.name: self._first_local.get(spec.name, whole[spec.name]) for spec in self.parts.trained}
        for adapter in self.parts.adapters:
            draws = derive_rng(seed, "adapter", adapter.target.name).standard_normal(adapter.a.shape)
            model[adapter.a.name] = (draws / np.sqrt(adapter.a.shape[1])).astype(adapter.a.dtype)
            model[adapter.b.name] = np.zeros(adapter.b.shape, adapter.b.dtype)
        return model

    def merge(self, model: Tensors) -> dict[str, Array]:
        """Returns the whole model of the inner task: frozen and trained tensors, each adapter added to its own.

        Tensors that stay on the devices are absent unless `model` has them.
        """
        if self._base is None:
            raise TaskError(f"task {self.name} has frozen tensors, and their values are not here")
        dense = {name: tensor if isinstance(tensor, np.ndarray) else tensor.dense() for name, tensor in model.items()}
        known = {**self._base, **dense}
        for adapter in self.parts.adapters:
            product = adapter.scale * (dense[adapter.b.name] @ dense[adapter.a.name])
            target = self._base[adapter.target.name]
            known[adapter.target.name] = (target + product.reshape(target.shape)).astype(target.dtype)
        return {spec.name: np.array(known[spec.name]) for spec in self._task.shapes() if spec.name in known}


def select_fitting(shapes: Iterable[TensorSpec], base: Mapping[str, Array]) -> dict[str, Array]:
    """Returns those tensors of a base that a model has with the same shape."""
    return {
        spec.name: base[spec.name].astype(spec.dtype)
        for spec in shapes
        if spec.name in base and base[spec.name].shape == spec.shape
    }


def _select_base(parts: ModelParts, base: Mapping[str, Array]) -> dict[str, Array]:
    for spec in parts.frozen:
        found = base.get(spec.name)
        if found is None or found.shape != spec.shape:
            raise ConfigError(
                f"the base must have tensor {spec.name!r} of shape {spec.shape}, "
                f"got {'none' if found is None else found.shape}"
            )
    return {spec.name: base[spec.name].astype(spec.dtype) for spec in parts.frozen}
