"""A weighted sum of updates that does not depend on who answered first, with one model in memory.

Floating-point addition is not associative, so updates are added in the order in which they were assigned. One
that comes early waits as it is (its tensors stay in the journal until they are read).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgefl.errors import StrategyError
from edgefl.types import Array, LazyTensors, SparseTensor, Tensors, Update


@dataclass(slots=True)
class Fold:
    """The sum so far. `expected` are assignment ids in order, `cursor` how many of them are behind us."""

    expected: tuple[str, ...] = ()
    cursor: int = 0
    waiting: dict[str, Update] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    total: dict[str, Array] = field(default_factory=dict)
    weight: float = 0.0
    integers: dict[str, Array] = field(default_factory=dict)
    integers_examples: int = -1
    used: list[str] = field(default_factory=list)

    @property
    def num_received(self) -> int:
        return len(self.used) + len(self.waiting)

    def has(self, assignment_id: str) -> bool:
        return assignment_id in self.waiting or assignment_id in self.used


def receive(fold: Fold, update: Update, weight: float, model: Mapping[str, Array]) -> None:
    """Takes an update if it is expected and new; adds what is next in order."""
    if update.assignment_id not in fold.expected or fold.has(update.assignment_id):
        return
    fold.waiting[update.assignment_id] = update
    fold.weights[update.assignment_id] = weight
    while fold.cursor < len(fold.expected) and fold.expected[fold.cursor] in fold.waiting:
        _add(fold, fold.expected[fold.cursor], model)
        fold.cursor += 1


def close(fold: Fold, model: dict[str, Array]) -> None:
    """Adds what still waits, in order, and moves `model` (owned by the caller's state) by the weighted mean."""
    for assignment_id in fold.expected[fold.cursor :]:
        if assignment_id in fold.waiting:
            _add(fold, assignment_id, model)
    if fold.weight > 0:
        for name, total in fold.total.items():
            np.divide(total, fold.weight, out=total)
            np.add(model[name], total, out=model[name], casting="same_kind")
    for name, moved in fold.integers.items():
        np.add(model[name], moved, out=model[name])


def _add(fold: Fold, assignment_id: str, model: Mapping[str, Array]) -> None:
    update, weight = fold.waiting.pop(assignment_id), fold.weights[assignment_id]
    tensors, num_examples = update.tensors, update.metrics.num_examples
    for name, like in model.items():
        moved = _checked(tensors, name, like, update)
        if np.issubdtype(like.dtype, np.inexact):
            # Half floats end at 65504, which a displacement times its number of examples soon passes.
            _add_weighted(fold.total, name, moved, weight, np.promote_types(like.dtype, np.float32))
        elif num_examples > fold.integers_examples:
            fold.integers[name] = moved.astype(like.dtype)
    fold.integers_examples = max(fold.integers_examples, num_examples)
    fold.weight += weight
    fold.used.append(assignment_id)
    if isinstance(tensors, LazyTensors):
        tensors.release()


def _add_weighted(total: dict[str, Array], name: str, moved: Array, weight: float, kind: np.dtype[Any]) -> None:
    if name in total:
        total[name] += np.multiply(moved, weight, dtype=kind)
    else:  # into an array of its own: what NumPy makes of a tensor without axes cannot be written to
        total[name] = np.multiply(moved, weight, dtype=kind, out=np.empty(moved.shape, kind))


def _checked(tensors: Tensors, name: str, like: Array, update: Update) -> Array:
    if name not in tensors:
        raise StrategyError(f"update {update.assignment_id} of {update.device_id} has no tensor {name!r}")
    tensor = tensors[name]
    moved = tensor.dense() if isinstance(tensor, SparseTensor) else tensor
    if moved.shape != like.shape:
        raise StrategyError(
            f"update {update.assignment_id} of {update.device_id}: tensor {name!r} has shape {moved.shape}, "
            f"the model's is {like.shape}"
        )
    return moved
