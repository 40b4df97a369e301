"""Aggregation: addition of updates in place, their streaming mean, and the server optimisers.

The mean is independent of the order of arrival, with one model in memory: floating-point addition is not associative,
so updates are added in a fixed order, that of the slots; a slot holds one expected result, from any device. An early
update waits undecoded (its tensors stay in the journal until they are read).

Server optimisers treat the mean displacement of a round as a gradient, and wrap any strategy that moves the model by
a displacement. `momentum` is FedAvgM (Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution,
2019); `adagrad`, `adam` and `yogi` are Algorithm 2 of Reddi et al., Adaptive Federated Optimization, ICLR 2021,
without bias correction as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError, StrategyError
from edgefl.core.types import Array, LazyTensors, SparseTensor, Tensor, Tensors, Update

_BLOCK_SIZE = 2**16
"""Numbers per block: the products stay in the cache until they are added."""

SERVER_OPTIMIZERS = ("none", "momentum", "adagrad", "adam", "yogi")

ServerMoments = dict[str, Array]
"""Moments of an optimiser, part of a strategy's state: `m/NAME` and, except for momentum, `v/NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedUpdate:
    """An update in the queue, with the facts recorded at its dispatch."""

    assignment_id: str
    device_id: str
    base_version: int
    learning_rate: float
    num_examples: int
    tensors: Tensors
    share: float = 1.0


def is_float(tensor: Array) -> bool:
    return tensor.dtype.kind in "fc"


def to_writable(tensor: Tensor) -> Array:
    """Returns a dense, writable tensor."""
    return tensor.dense() if isinstance(tensor, SparseTensor) else np.array(tensor)


def scale_tensor(tensor: Tensor, factor: float) -> Tensor:
    """Returns a displacement times `factor`, in its own type; of a sparse one the same entries."""
    if isinstance(tensor, SparseTensor):
        return replace(tensor, values=np.multiply(tensor.values, factor, dtype=tensor.values.dtype))
    return np.multiply(tensor, factor, dtype=tensor.dtype)


def add_in_place(target: Array, tensor: Tensor) -> None:
    """Adds a displacement in place; of a sparse one only its entries."""
    if isinstance(tensor, SparseTensor):
        add_at_indices(target.reshape(-1), tensor.indices, tensor.values)
    else:
        np.add(target, tensor, out=target, casting="unsafe" if tensor.dtype.kind in "iu" else "same_kind")


def add_at_indices(flat: Array, indices: Array | slice, values: Array) -> None:
    """Adds `values` to entries of a flat tensor; the indices are unique."""
    if isinstance(indices, slice):
        add_in_place(flat[indices], values)
    elif flat.dtype == values.dtype:
        np.add.at(flat, indices, values)  # half the time of reading, adding and writing
    else:
        flat[indices] += values


def require_tensor(update: QueuedUpdate | Update, name: str, like: Array) -> Tensor:
    """Returns one tensor of an update.

    Raises:
        StrategyError: it is missing, or has another shape than the model's.
    """
    if name not in update.tensors:
        raise StrategyError(f"update {update.assignment_id} of {update.device_id} has no tensor {name!r}")
    tensor = update.tensors[name]
    if tensor.shape != like.shape:
        raise StrategyError(
            f"update {update.assignment_id} of {update.device_id}: tensor {name!r} has shape {tensor.shape}, "
            f"the model's is {like.shape}"
        )
    return tensor


@dataclass(slots=True)
class StreamingMean:
    """Streaming sum of weighted displacements.

    Attributes:
        expected: slots in the order in which they are added; `cursor` is the number already added.
        waiting: early updates by slot, `weights` their weight, norm and group.
        total: sum of weight x displacement / norm by tensor; of buffers, without the norm.
        weight, weighted_norm: sums of weight and of weight x norm, each times the update's share.
        whole_weight: that sum over updates that are no parts.
        part_groups: groups of which a part was added.
        part_weights: of tensors of parts, the sum of weights over the runs of entries (start, end) that parts had.
        integers: displacement of counters, from the update with most examples.
        used: slot -> assignment id, in the order in which they were added.
        precision: least dtype of sums of floats.
    """

    expected: list[str] = field(default_factory=list)
    cursor: int = 0
    waiting: dict[str, Update] = field(default_factory=dict)
    weights: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    total: dict[str, Array] = field(default_factory=dict)
    weight: float = 0.0
    weighted_norm: float = 0.0
    whole_weight: float = 0.0
    part_groups: set[str] = field(default_factory=set)
    part_weights: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    integers: dict[str, Array] = field(default_factory=dict)
    integers_examples: int = -1
    used: dict[str, str] = field(default_factory=dict)
    precision: str = "float32"

    @property
    def num_received(self) -> int:
        return len(self.used) + len(self.waiting)

    def has_update(self, slot: str) -> bool:
        return slot in self.waiting or slot in self.used

    def add_update(
        self, slot: str, update: Update, *, weight: float = 1.0, norm: float = 1.0, part_group: str = ""
    ) -> None:
        """Adds the update of an expected slot; the first one counts.

        Args:
            slot: one of `expected`.
            update: with the displacement d.
            weight: its share w in the mean.
            norm: a, by which the displacement of parameters is divided; see `compute_mean`.
            part_group: what the parts of one update have in common, where this is one. A part has the weight of its
                update and norm 1; its sparse tensors are runs of entries, and the others those of its update.
        """
        if not self.has_update(slot):
            self.waiting[slot] = update
            self.weights[slot] = weight, norm, part_group

    def add_next_updates(self, model: Mapping[str, Array], buffers: frozenset[str] = frozenset()) -> None:
        """Adds the received updates that are next in order."""
        while self.cursor < len(self.expected) and self.expected[self.cursor] in self.waiting:
            self._add_to_total(self.expected[self.cursor], model, buffers)
            self.cursor += 1

    def unload_waiting(self, slot: str) -> None:
        """Unloads the decoded tensors of an early update: many may wait."""
        if slot in self.waiting:
            unload_tensors(self.waiting[slot].tensors)

    def add_waiting(self, model: Mapping[str, Array], buffers: frozenset[str] = frozenset()) -> None:
        """Adds the updates that wait, in order; none is added behind them."""
        for slot in self.expected[self.cursor :]:
            if slot in self.waiting:
                self._add_to_total(slot, model, buffers)
        self.cursor = len(self.expected)

    def compute_mean(self, model: Mapping[str, Array], buffers: frozenset[str] = frozenset()) -> dict[str, Array]:
        """Adds the waiting updates in order, and returns the mean displacement, owned by the caller.

        Parameters move by (Σ w a / Σ w) (Σ w d / a) / Σ w, which is the weighted mean of d where all norms a are 1;
        buffers by the weighted mean, counters as in the update with most examples. Where updates come in parts the
        mean of an entry is that over those whose part with it came; an entry of no part stays.
        """
        self.add_waiting(model, buffers)
        if self.weight > 0:
            scale = self.weighted_norm / self.weight
            for name, total in self.total.items():
                if name in self.part_weights:
                    self._divide_parts(total.reshape(-1), self.part_weights[name])
                else:
                    np.divide(total, self.weight, out=total)
                if scale != 1.0 and name not in buffers:
                    np.multiply(total, scale, out=total)
        return {**self.total, **self.integers}

    def _add_to_total(self, slot: str, model: Mapping[str, Array], buffers: frozenset[str]) -> None:
        update, (weight, norm, part_group) = self.waiting.pop(slot), self.weights.pop(slot)
        is_repeated = part_group in self.part_groups
        num_examples = update.metrics.num_examples
        counted = weight * update.share  # what is clipped to a part counts as a part, but for running means
        for name, like in model.items():
            if np.issubdtype(like.dtype, np.inexact):
                # Half floats end at 65504, which a displacement times its number of examples soon exceeds.
                kind = np.promote_types(like.dtype, np.dtype(self.precision))
                displacement = require_tensor(update, name, like)
                if part_group:
                    if is_repeated and not isinstance(displacement, SparseTensor):
                        continue
                    self._add_part_weight(name, displacement, counted)
                add_weighted(self.total, name, displacement, counted if name in buffers else weight / norm, kind)
            elif num_examples > self.integers_examples:
                self.integers[name] = dense_tensor(update, name, like).astype(like.dtype)
        self.integers_examples = max(self.integers_examples, num_examples)
        if not is_repeated:
            self.weight += counted
            self.weighted_norm += counted * norm
        if part_group:
            self.part_groups.add(part_group)
        else:
            self.whole_weight += counted
        self.used[slot] = update.assignment_id
        unload_tensors(update.tensors)

    def _add_part_weight(self, name: str, part: Tensor, weight: float) -> None:
        runs, run = self.part_weights.setdefault(name, {}), _find_run(part)
        runs[run] = runs.get(run, 0.0) + weight

    def _divide_parts(self, total: Array, runs: Mapping[tuple[int, int], float]) -> None:
        """Divides each entry of a flat sum by the weight of the updates that it is of."""
        for start, end in pairwise(sorted({0, total.size, *(bound for run in runs for bound in run)})):
            came = sum(weight for (first, last), weight in runs.items() if first <= start and end <= last)
            if weight := self.whole_weight + came:
                np.divide(total[start:end], weight, out=total[start:end])


def _find_run(part: Tensor) -> tuple[int, int]:
    """Returns where the entries that came of a tensor begin and end."""
    if not isinstance(part, SparseTensor):
        return 0, part.size
    return (int(part.indices[0]), int(part.indices[-1]) + 1) if part.indices.size else (0, 0)


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


def copy_tensors(model: Mapping[str, Array], source: Mapping[str, Array]) -> None:
    """Overwrites a model in place with another of its shapes."""
    for name, tensor in model.items():
        np.copyto(tensor, source[name])


def unload_tensors(tensors: Tensors) -> None:
    """Unloads the decoded tensors of an update."""
    if isinstance(tensors, LazyTensors):
        tensors.unload()


def add_weighted(
    total: dict[str, Array], name: str, displacement: Tensor, weight: float, dtype: np.dtype[Any]
) -> None:
    """Adds weight x displacement to the tensor `name` of `total` in place; a new one has `dtype`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """Computes the model's step from a displacement.

    Attributes:
        kind: one of `SERVER_OPTIMIZERS`.
        learning_rate: η of the server.
        beta1: share of the old direction that is kept.
        beta2: share of the old second moment that is kept, by adam and yogi.
        epsilon: τ of the paper, the degree of adaptivity.
        buffers: tensors that are averaged and never optimised, such as running means.
    """

    kind: str = "none"
    learning_rate: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3
    buffers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.kind not in SERVER_OPTIMIZERS:
            raise ConfigError(f"server.optimizer must be one of {', '.join(SERVER_OPTIMIZERS)}, got {self.kind!r}")

    def step(self, moments: ServerMoments, displacement: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns the step to add to the model.

        Args:
            moments: of the strategy's state, changed in place; empty before the first step.
            displacement: mean displacement by tensor; it may be changed. Integers and buffers pass as they are.
        """
        if self.kind == "none" and self.learning_rate == 1.0:
            return displacement
        return {name: self._compute_step(moments, name, tensor) for name, tensor in displacement.items()}

    def _compute_step(self, moments: ServerMoments, name: str, moved: Array) -> Array:
        if name in self.buffers or not np.issubdtype(moved.dtype, np.inexact):
            return moved
        if self.kind == "none":
            return np.multiply(moved, self.learning_rate, dtype=moved.dtype)
        # In single precision at least: the square of a half float underflows.
        kind, moved = moved.dtype, moved.astype(np.promote_types(moved.dtype, np.float32), copy=False)
        first = _get_moment(moments, f"m/{name}", moved)
        first *= self.beta1
        if self.kind == "momentum":
            first += moved
            return np.multiply(first, self.learning_rate).astype(kind, copy=False)
        first += (1.0 - self.beta1) * moved
        second, square = _get_moment(moments, f"v/{name}", moved), np.square(moved)
        match self.kind:
            case "adagrad":
                second += square
            case "adam":
                second *= self.beta2
                second += (1.0 - self.beta2) * square
            case _:
                second -= (1.0 - self.beta2) * square * np.sign(second - square)
        step: Array = self.learning_rate * first / (np.sqrt(second) + self.epsilon)
        return step.astype(kind, copy=False)


def _get_moment(moments: ServerMoments, key: str, like: Array) -> Array:
    if key not in moments:
        moments[key] = np.zeros_like(like)
    return moments[key]
