"""A weighted sum of updates that does not depend on who answered first, with one model in memory.

Floating-point addition is not associative, so updates are added in a fixed order, that of the slots: a slot is what
one expected result fills, whoever brings it. An update that comes early waits as it is (its tensors stay in the
journal until they are read).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgefl.strategies.arrivals import checked
from edgefl.types import Array, LazyTensors, SparseTensor, Tensor, Tensors, Update

_BLOCK = 2**16
"""So many numbers are weighed at a time: their products stay in the cache until they are added."""


@dataclass(slots=True)
class Fold:
    """The sum so far.

    Attributes:
        expected: slots in the order in which they are added; `cursor` says how many of them are behind us.
        waiting: updates by slot that came before their turn, `weights` their weight and norm.
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

    def has(self, slot: str) -> bool:
        return slot in self.waiting or slot in self.used

    def keep(self, slot: str, update: Update, *, weight: float = 1.0, norm: float = 1.0) -> None:
        """Takes the update that fills an expected slot; the first one counts.

        Args:
            slot: one of `expected`.
            update: with the displacement d.
            weight: its share w in the mean.
            norm: a, by which the displacement of parameters is divided; see `displacement`.
        """
        if not self.has(slot):
            self.waiting[slot] = update
            self.weights[slot] = weight, norm

    def add_next(self, model: Mapping[str, Array], buffers: frozenset[str] = frozenset()) -> None:
        """Adds what is next in order and has come."""
        while self.cursor < len(self.expected) and self.expected[self.cursor] in self.waiting:
            self._add(self.expected[self.cursor], model, buffers)
            self.cursor += 1

    def let_wait(self, slot: str) -> None:
        """Lets go of what is decoded of an update whose turn has not come: many may wait."""
        if slot in self.waiting:
            release(self.waiting[slot].tensors)

    def displacement(self, model: Mapping[str, Array], buffers: frozenset[str] = frozenset()) -> dict[str, Array]:
        """Adds what still waits, in order, and returns the mean displacement, which the caller may change.

        Parameters move by (Σ w a / Σ w) (Σ w d / a) / Σ w, which is the weighted mean of d where all norms a are 1;
        buffers by the weighted mean, counters as in the update with most examples.
        """
        for slot in self.expected[self.cursor :]:
            if slot in self.waiting:
                self._add(slot, model, buffers)
        self.cursor = len(self.expected)
        if self.weight > 0:
            scale = self.weighted_norm / self.weight
            for name, total in self.total.items():
                np.divide(total, self.weight, out=total)
                if scale != 1.0 and name not in buffers:
                    np.multiply(total, scale, out=total)
        return {**self.total, **self.integers}

    def _add(self, slot: str, model: Mapping[str, Array], buffers: frozenset[str]) -> None:
        update, (weight, norm) = self.waiting.pop(slot), self.weights.pop(slot)
        num_examples = update.metrics.num_examples
        for name, like in model.items():
            if np.issubdtype(like.dtype, np.inexact):
                # Half floats end at 65504, which a displacement times its number of examples soon passes.
                kind = np.promote_types(like.dtype, np.float32)
                moved = checked(update, name, like)
                _add_weighted(self.total, name, moved, weight if name in buffers else weight / norm, kind)
            elif num_examples > self.integers_examples:
                self.integers[name] = dense_tensor(update, name, like).astype(like.dtype)
        self.integers_examples = max(self.integers_examples, num_examples)
        self.weight += weight
        self.weighted_norm += weight * norm
        self.used[slot] = update.assignment_id
        release(update.tensors)


def dense_tensor(update: Update, name: str, like: Array) -> Array:
    """Returns one tensor of an update, dense; it belongs to the update.

    Raises:
        StrategyError: it is missing, or has another shape than the model's.
    """
    tensor = checked(update, name, like)
    return tensor.dense() if isinstance(tensor, SparseTensor) else tensor


def move(model: dict[str, Array], step: Mapping[str, Array]) -> None:
    """Adds a step to a model in place; its tensors keep their type."""
    for name, moved in step.items():
        np.add(model[name], moved, out=model[name], casting="same_kind")


def release(tensors: Tensors) -> None:
    """Lets go of what was decoded for an update."""
    if isinstance(tensors, LazyTensors):
        tensors.release()


def _add_weighted(total: dict[str, Array], name: str, moved: Tensor, weight: float, kind: np.dtype[Any]) -> None:
    if isinstance(moved, SparseTensor):
        sums = total.setdefault(name, np.zeros(moved.shape, kind)).reshape(-1)
        sums[moved.indices] += np.multiply(moved.values, weight, dtype=kind)
    elif name in total:
        _add_blocks(total[name].reshape(-1), moved.reshape(-1), weight)
    else:  # into an array of its own: what NumPy makes of a tensor without axes cannot be written to
        total[name] = np.multiply(moved, weight, dtype=kind, out=np.empty(moved.shape, kind))


def _add_blocks(sums: Array, moved: Array, weight: float) -> None:
    """Adds weight x moved in place, to flat arrays; memory is gone through once, as by an addition alone."""
    products = np.empty(min(_BLOCK, sums.size), sums.dtype)
    for begin in range(0, sums.size, _BLOCK):
        block = sums[begin : begin + _BLOCK]
        part = products[: block.size]
        np.multiply(moved[begin : begin + _BLOCK], weight, dtype=sums.dtype, out=part)
        np.add(block, part, out=block)
