"""A learner of the trained part of a network: a base that stays as it is, and adapters that are added to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from edgefl.core.types import Array, Dataset, Learner, Tensors
from edgefl.tasks.adaptation.parts import LowRankAdapter, ModelParts
from edgefl.tasks.learners.numpy_learner import find_target
from edgefl.tasks.learners.torch_features import make_features
from edgefl.tasks.learners.torch_learner import TorchLearner

MAX_FEATURE_BYTES = 256 * 1024 * 1024
"""Most bytes of the features of a data set; a larger one goes through its base in every epoch."""
FEATURE_BATCH_SIZE = 64


class FeatureDataset(Dataset):
    """Examples whose inputs are the features that a frozen base makes of them."""

    def take(self, rows: Array | slice) -> FeatureDataset:
        return _to_features(super().take(rows))


def _to_features(data: Dataset) -> FeatureDataset:
    return FeatureDataset(inputs=data.inputs, targets=data.targets, weights=data.weights, groups=data.groups)


class AdaptedLearner:
    """A `Learner` of some tensors of another one, in NumPy as in torch.

    Adapters are added to their tensors before a batch, and get their gradients from those: with W' = W + s·B·A and
    G the gradient by W', that by B is s·G·Aᵀ and that by A is s·Bᵀ·G. This is what a layer beside the frozen one
    gives, and the network stays the task's own.

    Args:
        inner: of the whole network; it has a method `freeze(names)` where it can spare their gradients.
        parts: of the network.
        base: the frozen tensors.
    """

    def __init__(self, inner: Learner, parts: ModelParts, base: Mapping[str, Array]) -> None:
        self._inner, self._parts = inner, parts
        inner.load(base)
        targets = {adapter.target.name for adapter in parts.adapters}
        freeze = getattr(inner, "freeze", None)
        if freeze is not None:
            freeze([spec.name for spec in parts.frozen], needed=targets)
        self._adapters = [
            _LoadedAdapter(adapter, inner.parameters[adapter.target.name]) for adapter in parts.adapters
        ]
        trained = [spec.name for spec in parts.trained if spec.name in inner.parameters]
        self._parameters = {name: inner.parameters[name] for name in trained}
        self._gradients = {name: inner.gradients[name] for name in trained}
        for adapter in self._adapters:
            self._parameters |= adapter.factors
            self._gradients |= adapter.gradients
        self._features: tuple[Any] | None = None
        self._has_buffers = len(trained) < len(parts.trained)

    def __getattr__(self, name: str) -> Any:
        # What a task's export, its metrics and random layers ask of a learner beside the protocol's own.
        if name.startswith("_"):
            raise AttributeError(name)
        self._merge()
        return getattr(self._inner, name)

    @property
    def parameters(self) -> Mapping[str, Any]:
        return self._parameters

    @property
    def gradients(self) -> Mapping[str, Any]:
        return self._gradients

    def load(self, tensors: Tensors) -> None:
        factors = {name: factor for adapter in self._adapters for name, factor in adapter.factors.items()}
        for name, tensor in tensors.items():
            if name in factors:
                target, dense = find_target(name, tensor, factors)
                _copy_into(target, dense)
        self._inner.load({name: tensor for name, tensor in tensors.items() if name not in factors})

    def read(self) -> dict[str, Array]:
        known: Mapping[str, Any] = self._parameters
        if self._has_buffers:
            known = {**self._inner.read(), **self._parameters}
        return {spec.name: _to_array(known[spec.name]) for spec in self._parts.shapes}

    def make_features(self, data: Dataset, on_batch: Callable[[], None] = lambda: None) -> Dataset:
        """Returns examples to train on without their way through the base; the same ones where there is no such way.

        There is none where an adapter is in it, where it is random, or where the features are too large. `on_batch`
        is called while they are computed.
        """
        if not len(data) or self._adapters:
            return data
        source = self._find_feature_source(data)
        sample = None if source is None else source.compute_features(data.inputs[:1])
        if source is None or sample is None or sample.nbytes * len(data) > MAX_FEATURE_BYTES:
            return data
        features = np.empty((len(data), *sample.shape[1:]), sample.dtype)
        for start in range(0, len(data), FEATURE_BATCH_SIZE):
            rows = slice(start, start + FEATURE_BATCH_SIZE)
            features[rows] = source.compute_features(data.inputs[rows])
            on_batch()
        return _to_features(replace(data, inputs=features))

    def _find_feature_source(self, data: Dataset) -> Any:
        if self._features is None:
            if isinstance(self._inner, TorchLearner):
                trained = [spec.name for spec in self._parts.trained]
                self._features = (make_features(self._inner, trained, data.inputs),)
            else:
                self._features = (self._inner if hasattr(self._inner, "compute_features") else None,)
        return self._features[0]

    def gradient(self, batch: Dataset) -> float:
        if isinstance(batch, FeatureDataset):
            loss: float = self._find_feature_source(batch).compute_feature_gradient(batch)
            return loss
        self._merge()
        loss = self._inner.gradient(batch)
        for adapter in self._adapters:
            adapter.split_gradient(self._inner.gradients[adapter.name])
        return loss

    def evaluate(self, data: Dataset) -> tuple[float, float]:
        self._merge()
        return self._inner.evaluate(data)

    def _merge(self) -> None:
        for adapter in self._adapters:
            adapter.merge()


class _LoadedAdapter:
    """An adapter's factors, gradients and frozen tensor, in the arrays of the learner's own backend."""

    def __init__(self, adapter: LowRankAdapter, target: Any) -> None:
        self.name, self._scale, self._target = adapter.target.name, adapter.scale, target
        self._frozen = target.copy() if isinstance(target, np.ndarray) else target.clone()
        self._a, self._b = _make_zeros(target, adapter.a.shape), _make_zeros(target, adapter.b.shape)
        self._a_gradient, self._b_gradient = (
            _make_zeros(target, adapter.a.shape),
            _make_zeros(target, adapter.b.shape),
        )
        self.factors = {adapter.a.name: self._a, adapter.b.name: self._b}
        self.gradients = {adapter.a.name: self._a_gradient, adapter.b.name: self._b_gradient}

    def merge(self) -> None:
        """Puts W + s·B·A into the network."""
        self._target[...] = self._frozen + (self._scale * (self._b @ self._a)).reshape(self._frozen.shape)

    def split_gradient(self, gradient: Any) -> None:
        """Fills the factors' gradients from that of their tensor."""
        matrix = gradient.reshape(self._b.shape[0], -1)
        self._b_gradient[...] = self._scale * (matrix @ self._a.T)
        self._a_gradient[...] = self._scale * (self._b.T @ matrix)


def _make_zeros(like: Any, shape: tuple[int, ...]) -> Any:
    return np.zeros(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape)


def _copy_into(target: Any, dense: Array) -> None:
    # A body from the network is a read-only view, which torch takes only as a copy.
    target[...] = dense if isinstance(target, np.ndarray) else target.new_tensor(np.array(dense))


def _to_array(value: Any) -> Array:
    return np.array(value if isinstance(value, np.ndarray) else value.cpu().numpy())
