"""Streaming weighted sum of updates, independent of the order of arrival, with one model in memory.

Floating-point addition is not associative, so updates are added in a fixed order, that of the slots: a slot holds one
expected result, from any device. An early update waits undecoded (its tensors stay in the journal until they are
read).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgefl.core.types import Array, LazyTensors, SparseTensor, Tensor, Tensors, Update
from edgefl.strategies.update_tensors import require_tensor

_BLOCK_SIZE = 2**16
"""Numbers per block: the products stay in the cache until they are added."""


@dataclass(slots=True)
class StreamingMean:
    """Streaming sum of weighted displacements.

    Attributes:
        expected: slots in the order in which they are added; `cursor` is the number already added.
        waiting: early updates by slot, `weights` their weight and norm.
        total: sum of weight x displacement / norm by tensor; of buffers, without the norm.
        weight, weighted_norm: sums of weight and of weight x norm.
        integers: displacement of counters, from the update with most examples.
        used: slot -> assignment id, in the order in which they were added.
    """

    expected: list[str] = field(default_factory=list)
    cursor: int = 0
    waiting: dict[str, Update] = field(default_factory=dict)
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    total: dict[str, Array] = field(default_factory=dict)
    weight: float = 0.0
    weighted_norm: float = 0.0
    integers: dict[str, Array] = field(default_factory=dict)
    integers_examples: int = -1
    used: dict[str, str] = field(default_factory=dict)

    @property
    def num_received(self) -> int:
        return len(self.used) + len(self.waiting)

    def has_update(self, slot: str) -> bool:
        return slot in self.waiting or slot in self.used

    def add_update(self, slot: str, update: Update, *, weight: float = 1.0, norm: float = 1.0) -> None:
        """Adds the update of an expected slot; the first one counts.

        Args:
            slot: one of `expected`.
            update: with the displacement d.
            weight: its share w in the mean.
            norm: a, by which the displacement of parameters is divided; see `compute_mean`.
        """
        if not self.has_update(slot):
            self.waiting[slot] = update
            self.weights[slot] = weight, norm

    def add_next_updates(self, model: Mapping[str, Array], buffers: frozenset[str] = frozenset()) -> None:
        """Adds the received updates that are next in order."""
        while self.cursor < len(self.expected) and self.expected[self.cursor] in self.waiting:
            self._add_to_total(self.expected[self.cursor], model, buffers)
            self.cursor += 1

    def unload_waiting(self, slot: str) -> None:
        """Unloads the decoded tensors of an early update: many may wait."""
        if slot in self.waiting:
            unload_tensors(self.waiting[slot].tensors)

    def compute_mean(self, model: Mapping[str, Array], buffers: frozenset[str] = frozenset()) -> dict[str, Array]:
        """Adds the waiting updates in order, and returns the mean displacement, owned by the caller.

        Parameters move by (Σ w a / Σ w) (Σ w d / a) / Σ w, which is the weighted mean of d where all norms a are 1;
        buffers by the weighted mean, counters as in the update with most examples.
        """
        for slot in self.expected[self.cursor :]:
            if slot in self.waiting:
                self._add_to_total(slot, model, buffers)
        self.cursor = len(self.expected)
        if self.weight > 0:
            scale = self.weighted_norm / self.weight
            for name, total in self.total.items():
                np.divide(total, self.weight, out=total)
                if scale != 1.0 and name not in buffers:
                    np.multiply(total, scale, out=total)
        return {**self.total, **self.integers}

    def _add_to_total(self, slot: str, model: Mapping[str, Array], buffers: frozenset[str]) -> None:
        update, (weight, norm) = self.waiting.pop(slot), self.weights.pop(slot)
        num_examples = update.metrics.num_examples
        for name, like in model.items():
            if np.issubdtype(like.dtype, np.inexact):
                # Half floats end at 65504, which a displacement times its number of examples soon exceeds.
                kind = np.promote_types(like.dtype, np.float32)
                displacement = require_tensor(update, name, like)
                _add_weighted(self.total, name, displacement, weight if name in buffers else weight / norm, kind)
            elif num_examples > self.integers_examples:
                self.integers[name] = dense_tensor(update, name, like).astype(like.dtype)
        self.integers_examples = max(self.integers_examples, num_examples)
        self.weight += weight
        self.weighted_norm += weight * norm
        self.used[slot] = update.assignment_id
        unload_tensors(update.tensors)


def dense_tensor(update: Update, name: str, like: Array) -> Array:
    """Returns one dense tensor of an update, which still owns it.

    Raises:
        StrategyError: it is missing, or has another shape than the model's.
    """
    tensor = require_tensor(update, name, like)
    return tensor.dense() if isinstance(tensor, SparseTensor) else tensor


def apply_step(model: dict[str, Array], step: Mapping[str, Array]) -> None:
    """Adds a step to a model in place; tensors keep their dtype."""
    for name, displacement in step.items():
        np.add(model[name], displacement, out=model[name], casting="same_kind")


def unload_tensors(tensors: Tensors) -> None:
    """Unloads the decoded tensors of an update."""
    if isinstance(tensors, LazyTensors):
        tensors.unload()


def _add_weighted(
    total: dict[str, Array], name: str, displacement: Tensor, weight: float, dtype: np.dtype[Any]
) -> None:
    if isinstance(displacement, SparseTensor):
        sums = total.setdefault(name, np.zeros(displacement.shape, dtype)).reshape(-1)
        sums[displacement.indices] += np.multiply(displacement.values, weight, dtype=dtype)
    elif name in total:
        _add_blocks(total[name].reshape(-1), displacement.reshape(-1), weight)
    else:  # into a new array: NumPy's product of a 0-d tensor is not writable
        total[name] = np.multiply(displacement, weight, dtype=dtype, out=np.empty(displacement.shape, dtype))


def _add_blocks(sums: Array, displacement: Array, weight: float) -> None:
    """Adds weight x displacement in place to flat arrays, block by block, in one pass over memory."""
    products = np.empty(min(_BLOCK_SIZE, sums.size), sums.dtype)
    for start in range(0, sums.size, _BLOCK_SIZE):
        block = sums[start : start + _BLOCK_SIZE]
        part = products[: block.size]
        np.multiply(displacement[start : start + _BLOCK_SIZE], weight, dtype=sums.dtype, out=part)
        np.add(block, part, out=block)
