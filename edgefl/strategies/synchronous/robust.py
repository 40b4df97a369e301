"""Robust rules: what fewer than half of the devices send moves the model by a bounded amount.

With n updates, f of them arbitrary:

- Krum and Multi-Krum: the update, or the mean of the n - f updates, with the least sum of squared distances to its
  n - f - 2 nearest others, for n >= 2 f + 3. Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with
  Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017, section 4.
- Coordinate-wise median (f < n/2) and trimmed mean (f <= β n). Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust
  Distributed Learning: Towards Optimal Statistical Rates, ICML 2018, definitions 1 and 2.
- Bulyan: of n - 2 f updates that Krum selects one after the other, the n - 4 f entries nearest to their median, for
  n >= 4 f + 3. El Mhamdi, Guerraoui, Rouault, The Hidden Vulnerability of Distributed Learning in Byzantium, ICML
  2018, section 4.
- Geometric median, by the smoothed Weiszfeld algorithm, f < n/2. Pillutla, Kakade, Harchaoui, Robust Aggregation for
  Federated Learning, IEEE TSP 2022, algorithm 2.
- Centred clipping: the mean of the updates' differences to the step before, each cut to a length, f < n/2.
  Karimireddy, He, Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021, algorithm 2.

With `neighbours` each update is first replaced by the mean of the n - f updates nearest to it, itself among them,
which helps where the devices' data differ: one update, or the median of entries that few devices move, follows some
devices' data only. A rule that holds against f rogues still does, with its own f. Allouah et al., Fixing by Mixing: A
Recipe for Optimal Byzantine ML under Heterogeneity, AISTATS 2023, algorithm 1, lemma 1.

Updates weigh the same, whatever their number of examples. All points that these rules go through are weighted sums of
the updates, so their distances follow from those between the updates; see `UpdateRows` for the memory that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from edgefl.core.types import Array, SparseTensor, Tensor, Tensors, Update
from edgefl.strategies.aggregation import ServerMoments, add_weighted, unload_tensors
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly

BLOCK_BYTES = 128 * 2**20
"""Most bytes of a block of columns, over all rows."""
CHUNK_SIZE = 2**14
"""Columns that are sorted or subtracted at a time: they stay in the cache."""

Block = list[tuple[str, int, int]]
"""Name, start and stop of parts of flat tensors."""

_CENTRE = "centre/"
"""Prefix of the tensors of the step before, in the state's moments."""

_MANY_UPDATES = 1e9

_LEAST_CHANGE = 1e-9


@dataclass(frozen=True, slots=True)
class Columns:
    """Entries `start` to `stop` of the flat tensor `name`, [n, stop - start]: those of each row."""

    name: str
    start: int
    values: Array

    @property
    def stop(self) -> int:
        return self.start + int(self.values.shape[1])


@dataclass(slots=True, kw_only=True)
class UpdateRows:
    """The updates of a round as the rows of a matrix that is never in memory as a whole.

    A row is decoded when it is needed and unloaded again. Rules read the matrix in three ways: the distances of its
    rows, a weighted sum of them, and blocks of columns. A weighted sum needs one row at a time. Distances and columns
    need all rows at once, so a pass decodes each row and copies its part of the columns, `BLOCK_BYTES` at most; there
    are as many passes as blocks. A matrix that fits into one block is decoded once and kept.

    Rows may be mixed: replaced by weighted sums of rows. Their distances follow from those of the rows, without a
    pass: for weights u and v that both add up to 1, |Xu - Xv|^2 = -(u - v)' D (u - v) / 2, where D has the squared
    distances.

    Attributes:
        rows: one mapping of tensors each, in the shapes of `model`.
        model: tensors by name; `distances` are over those with floating-point numbers.
        mixing: [m, n] weights, each row of which adds up to 1; None for the rows themselves.
    """

    rows: Sequence[Tensors]
    model: Mapping[str, Array]
    mixing: Array | None = None
    _distances: Array | None = field(default=None, repr=False)
    _kept: list[Columns] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.rows if self.mixing is None else self.mixing)

    @property
    def distances(self) -> Array:
        """The [m, m] squared distances between (mixed) rows."""
        if self._distances is None:
            self._distances = np.zeros((len(self.rows), len(self.rows)))
            for columns in self._iterate_columns():
                if self.model[columns.name].dtype.kind == "f":
                    _add_distances(self._distances, columns.values)
        return self._distances if self.mixing is None else mix_distances(self._distances, self.mixing)

    def mix(self, weights: Array) -> UpdateRows:
        """Returns the rows `weights` @ rows; the sums of [m, len(self)] `weights` are 1."""
        mixing = weights if self.mixing is None else weights @ self.mixing
        return UpdateRows(
            rows=self.rows, model=self.model, mixing=mixing, _distances=self._distances, _kept=self._kept
        )

    def compute_sum(self, weights: Array) -> dict[str, Array]:
        """Returns the sum of `weights` [len(self)] times the rows, in single precision at least."""
        if self.mixing is not None:
            weights = weights @ self.mixing
        total = {name: np.zeros(like.shape, _promote(like)) for name, like in self.model.items()}
        for row, weight in zip(self.rows, weights, strict=True):
            if weight:
                for name, summed in total.items():
                    add_weighted(total, name, row[name], float(weight), summed.dtype)
                unload_tensors(row)
        return total

    def combine_columns(self, combine: Callable[[Array], Array]) -> dict[str, Array]:
        """Returns what `combine` makes of each column: [m, c] to [c]."""
        combined = {name: np.empty(like.size, _promote(like)) for name, like in self.model.items()}
        for columns in self._iterate_columns():
            mixing = None if self.mixing is None else self.mixing.astype(columns.values.dtype)
            for start in range(0, columns.stop - columns.start, CHUNK_SIZE):
                chunk = columns.values[:, start : start + CHUNK_SIZE]
                first = columns.start + start
                result = combine(chunk if mixing is None else mixing @ chunk)
                combined[columns.name][first : first + chunk.shape[1]] = result
        return {name: combined[name].reshape(like.shape) for name, like in self.model.items()}

    def _iterate_columns(self) -> Iterator[Columns]:
        blocks = list(self._plan_blocks())
        if len(blocks) == 1:
            self._kept = self._kept or self._load_block(blocks[0], np.empty(self._count_bytes(blocks[0]), np.uint8))
            yield from self._kept
            return
        buffer = np.empty(max(map(self._count_bytes, blocks)), np.uint8)
        for block in blocks:
            yield from self._load_block(block, buffer)

    def _plan_blocks(self) -> Iterator[Block]:
        """Yields the parts of tensors that make up a block."""
        block, room = Block(), BLOCK_BYTES
        for name, like in self.model.items():
            num_bytes, start = len(self.rows) * _promote(like).itemsize, 0
            while start < like.size:
                if room < num_bytes and block:
                    yield block
                    block, room = Block(), BLOCK_BYTES
                stop = min(like.size, start + max(1, room // num_bytes))
                block.append((name, start, stop))
                room -= (stop - start) * num_bytes
                start = stop
        yield block

    def _count_bytes(self, block: Block) -> int:
        return sum(
            len(self.rows) * _promote(self.model[name]).itemsize * (stop - start) for name, start, stop in block
        )

    def _load_block(self, block: Block, buffer: Array) -> list[Columns]:
        """Returns the block's columns in `buffer`; each row is decoded once."""
        loaded, offset = [], 0
        # The widest numbers first, so that all are aligned.
        for name, start, stop in sorted(block, key=lambda part: -_promote(self.model[part[0]]).itemsize):
            kind, shape = _promote(self.model[name]), (len(self.rows), stop - start)
            end = offset + kind.itemsize * shape[0] * shape[1]
            loaded.append(Columns(name, start, buffer[offset:end].view(kind).reshape(shape)))
            offset = end
        for number, row in enumerate(self.rows):
            for columns in loaded:
                columns.values[number] = _flatten(row[columns.name])[columns.start : columns.stop]
            unload_tensors(row)
        return loaded


def mix_distances(distances: Array, weights: Array) -> Array:
    """Returns the [m, m] squared distances between weighted sums of rows.

    Args:
        distances: [n, n], squared, between the rows.
        weights: [m, n], each row of which adds up to 1.
    """
    mixed = np.zeros((len(weights), len(weights)))
    for number, row in enumerate(weights):
        differences = row - weights
        mixed[number] = np.einsum("ij,ij->i", differences @ distances, differences)
    return np.maximum(-0.5 * mixed, 0.0)


def _promote(like: Array) -> np.dtype[Any]:
    return np.promote_types(like.dtype, np.float32)


def _flatten(tensor: Tensor) -> Array:
    return (tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)).reshape(-1)


def _add_distances(distances: Array, values: Array) -> None:
    """Adds the squared distances between rows over some [n, c] columns, in place, in double precision."""
    for start in range(0, values.shape[1], CHUNK_SIZE):
        chunk = values[:, start : start + CHUNK_SIZE].astype(np.float64)
        for first in range(1, len(chunk)):
            differences = chunk[:first] - chunk[first]
            squares = np.einsum("ij,ij->i", differences, differences)
            distances[first, :first] += squares
            distances[:first, first] += squares


MIN_MIXED = 5
"""Of fewer updates every one has the same neighbours, and what another device has learnt is lost in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustConfig(StrategyConfig):
    """Settings of all robust rules, beside those of local training.

    Attributes:
        num_rogues: f; more than the number of updates allows counts as what it allows. None is one where a round has
            as many updates as the rule's bound needs for it, otherwise none.
        neighbours: mix each update with those nearest to it first; None does from `MIN_MIXED` updates on.
    """

    num_rogues: int | None = field(default=None, metadata={"at_least": 0})
    neighbours: bool | None = False

    has_centre: ClassVar[bool] = False
    """Whether the step of the round before is a row, behind those of the updates."""

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        """Returns the model's displacement, in single precision at least."""
        raise NotImplementedError

    @property
    def needed_updates(self) -> int:
        """n, from which on the rule holds against f rogues, one by default."""
        return self.count_needed(1 if self.num_rogues is None else self.num_rogues)

    def count_needed(self, num_rogues: int) -> int:
        """Returns n, from which on the rule holds against so many rogues."""
        return 2 * num_rogues + 1

    def is_mixed(self, num_updates: int) -> bool:
        """Returns whether so many updates are mixed with their neighbours."""
        return num_updates >= MIN_MIXED if self.neighbours is None else self.neighbours

    def count_rogues(self, num_updates: int) -> int:
        """Returns f for a round of so many updates: fewer than half of them."""
        num_rogues = int(num_updates >= self.count_needed(1)) if self.num_rogues is None else self.num_rogues
        return min(num_rogues, (num_updates - 1) // 2)

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        """Returns the strategy that plays the rounds."""
        return self.make(RobustStrategy, rules, compute_weight=weight_uniformly, rule=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustStrategy(SynchronousStrategy[RoundState]):
    """Rounds whose updates wait, not decoded, until a rule combines them."""

    rule: RobustConfig

    should_keep_updates = True

    @property
    def needed_updates(self) -> int:
        return self.rule.needed_updates

    def compute_displacement(self, state: RoundState, current_round: OpenRound) -> Mapping[str, Array]:
        rows = self._make_rows(state, current_round.pop_updates())
        step = self.rule.combine(rows)
        if self.rule.has_centre:
            state.moments.update({_CENTRE + name: tensor.copy() for name, tensor in step.items()})
        return {name: to_kind(step[name], like) for name, like in state.model.items()}

    def _make_rows(self, state: RoundState, updates: Sequence[Update]) -> UpdateRows:
        sources: list[Tensors] = [update.tensors for update in updates]
        if self.rule.has_centre:
            sources.append(_get_centre(state.moments, state.model))
        rows = UpdateRows(rows=sources, model=state.model)
        count = len(updates)
        if not self.rule.is_mixed(count):
            return rows
        mixing = np.eye(len(rows))
        mixing[:count, :count] = compute_neighbour_weights(
            rows.distances[:count, :count], self.rule.count_rogues(count)
        )
        return rows.mix(mixing)


def _get_centre(moments: ServerMoments, model: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the step before; zero in the first round."""
    zero = np.zeros((), np.float32)
    return {name: moments.get(_CENTRE + name, np.broadcast_to(zero, like.shape)) for name, like in model.items()}


def to_kind(step: Array, like: Array) -> Array:
    """Returns a displacement in the type of a tensor of the model; of counters, rounded."""
    return (np.rint(step) if like.dtype.kind in "iu" else step).astype(like.dtype, copy=False)


def compute_neighbour_weights(distances: Array, num_rogues: int) -> Array:
    """Returns the [n, n] weights with which each row becomes the mean of the n - f nearest to it."""
    count = len(distances) - num_rogues
    nearest = np.argsort(distances, axis=1, kind="stable")[:, :count]
    weights = np.zeros_like(distances)
    np.put_along_axis(weights, nearest, 1.0 / count, axis=1)
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class KrumConfig(RobustConfig):
    """Settings of a run with `krum`.

    `neighbours` is on by default: one update alone follows one device's data, the mean of those nearest to it that of
    all. Without it this is the paper's Krum.
    """

    neighbours: bool = True

    summary: ClassVar[str] = "Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017, section 4."

    def count_needed(self, num_rogues: int) -> int:
        return 2 * num_rogues + 3

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        num_rogues = self.count_rogues(len(rows))
        return rows.compute_sum(_weight_equally(select_krum(rows.distances, num_rogues, 1), len(rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrumConfig(KrumConfig):
    """Settings of a run with `multi-krum`; the n - f best updates are averaged."""

    neighbours: bool = False

    summary: ClassVar[str] = "Multi-Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017."

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        num_rogues = self.count_rogues(len(rows))
        selected = select_krum(rows.distances, num_rogues, len(rows) - num_rogues)
        return rows.compute_sum(_weight_equally(selected, len(rows)))


def select_krum(distances: Array, num_rogues: int, count: int) -> list[int]:
    """Returns the `count` updates of least score, in their order; of equal ones those nearer to all.

    Args:
        distances: [n, n], squared.
        num_rogues: f.
        count: at most n.
    """
    num_neighbours = max(1, len(distances) - num_rogues - 2)
    scores = np.sort(distances, axis=1)[:, 1 : 1 + num_neighbours].sum(axis=1)
    # With one neighbour, two that are nearest to each other always have the same score.
    return sorted(int(index) for index in np.lexsort((distances.sum(axis=1), scores))[:count])


def _weight_equally(selected: Sequence[int], num_rows: int) -> Array:
    weights = np.zeros(num_rows)
    weights[selected] = 1.0 / len(selected)
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class BulyanConfig(RobustConfig):
    """Settings of a run with `bulyan`; with fewer than 4 f + 3 updates at least one entry is left of each.

    `neighbours` is on by default, as with `krum`: fewer than 4 f + 3 updates leave one.
    """

    neighbours: bool = True

    summary: ClassVar[str] = (
        "Bulyan: El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018."
    )

    def count_needed(self, num_rogues: int) -> int:
        return 4 * num_rogues + 3

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        num_rogues = self.count_rogues(len(rows))
        selected = select_bulyan(rows.distances, num_rogues)
        count = max(1, len(selected) - 2 * num_rogues)
        return rows.mix(np.eye(len(rows))[selected]).combine_columns(
            lambda columns: compute_mean_around_median(columns, count)
        )


def select_bulyan(distances: Array, num_rogues: int) -> list[int]:
    """Returns the n - 2 f updates that Krum selects, each among those that are left."""
    left, selected = list(range(len(distances))), list[int]()
    for _ in range(len(distances) - 2 * num_rogues):
        (best,) = select_krum(distances[np.ix_(left, left)], num_rogues, 1)
        selected.append(left.pop(best))
    return sorted(selected)


def compute_mean_around_median(columns: Array, count: int) -> Array:
    """Returns the mean of the `count` entries of each column that are nearest to its median."""
    ordered = np.sort(columns, axis=0)
    nearest = np.argsort(np.abs(ordered - np.median(ordered, axis=0)), axis=0, kind="stable")[:count]
    mean: Array = np.take_along_axis(ordered, nearest, axis=0).mean(axis=0)
    return mean


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedianConfig(RobustConfig):
    """Settings of a run with `coordinate-median`.

    By default five updates and more are mixed with their neighbours, for `num_rogues` or a fifth: the median of
    an entry that fewer than half of the devices have data for is what the others' updates do to it.
    """

    neighbours: bool | None = None

    summary: ClassVar[str] = "Coordinate-wise median: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018."

    def count_rogues(self, num_updates: int) -> int:
        if self.num_rogues is not None:
            return RobustConfig.count_rogues(self, num_updates)
        return math.ceil(num_updates / 5) if num_updates > 2 else 0

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        return rows.combine_columns(lambda columns: np.median(columns, axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMeanConfig(RobustConfig):
    """Settings of a run with `trimmed-mean`; `trim` is β, the part that is left out at either end, rounded up.

    By default five updates and more are mixed with their neighbours, for as many rogues as are left out at one end.
    """

    neighbours: bool | None = None
    trim: float = field(default=0.2, metadata={"at_least": 0, "below": 0.5})

    summary: ClassVar[str] = (
        "Coordinate-wise trimmed mean: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018."
    )

    def count_needed(self, num_rogues: int) -> int:
        most = (num_rogues - 1) / self.trim if self.trim and num_rogues else 0.0
        return max(2 * num_rogues + 1, math.floor(min(most, _MANY_UPDATES) + 1e-6) + 1)

    def count_rogues(self, num_updates: int) -> int:
        return self.count_trimmed(num_updates)

    def count_trimmed(self, num_rows: int) -> int:
        """Returns how many updates are left out at either end."""
        return min(math.ceil(self.trim * num_rows - 1e-9), (num_rows - 1) // 2)

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        num_rows, num_trimmed = len(rows), self.count_trimmed(len(rows))
        return rows.combine_columns(
            lambda columns: np.sort(columns, axis=0)[num_trimmed : num_rows - num_trimmed].mean(axis=0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometricMedianConfig(RobustConfig):
    """Settings of a run with `geometric-median`.

    Attributes:
        smoothing: the distance below which an update weighs no more for being nearer.
        weiszfeld_steps: most of them; it ends sooner where a step changes the weights by less than 1e-9. One costs
            the square of the number of updates, however large the model is.
    """

    smoothing: float = field(default=1e-6, metadata={"above": 0})
    weiszfeld_steps: int = field(default=100, metadata={"at_least": 1, "at_most": 10_000})

    summary: ClassVar[str] = "Geometric median: Pillutla et al., Robust Aggregation for Federated Learning, 2022."

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        return rows.compute_sum(compute_median_weights(rows.distances, self.smoothing, self.weiszfeld_steps))


def compute_median_weights(distances: Array, smoothing: float, max_steps: int) -> Array:
    """Returns the weights [n] of rows whose sum is their geometric median; `distances` are squared."""
    count = len(distances)
    weights = np.full(count, 1.0 / count)
    for _ in range(max_steps):
        parts = 1.0 / np.maximum(smoothing, measure_from_sum(distances, weights))
        previous, weights = weights, parts / parts.sum()
        if np.abs(weights - previous).max() < _LEAST_CHANGE:
            break
    return weights


def measure_from_sum(distances: Array, weights: Array) -> Array:
    """Returns how far each row is from a weighted sum of them: [n]; `distances` are squared, `weights` sum to 1."""
    to_rows = distances @ weights
    lengths: Array = np.sqrt(np.maximum(to_rows - 0.5 * (weights @ to_rows), 0.0))
    return lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class CentredClippingConfig(RobustConfig):
    """Settings of a run with `centred-clipping`.

    The centre is the step of the round before, which the coordinator keeps. The paper's momentum is that of the
    devices: with `momentum` and `keep_optimizer` each keeps its velocity from round to round, so that a rogue's push
    stands out against updates that vary little.

    Attributes:
        radius: τ, the most by which an update may differ from the centre; None for the updates' median difference.
        clipping_steps: how often the clipped mean becomes the centre of the next.
    """

    radius: float | None = field(default=None, metadata={"above": 0})
    clipping_steps: int = field(default=3, metadata={"at_least": 1, "at_most": 1000})

    has_centre: ClassVar[bool] = True
    summary: ClassVar[str] = "Centred clipping: Karimireddy et al., Learning from History, ICML 2021."

    def combine(self, rows: UpdateRows) -> Mapping[str, Array]:
        return rows.compute_sum(compute_clipping_weights(rows.distances, self.radius, self.clipping_steps))


def compute_clipping_weights(distances: Array, radius: float | None, num_steps: int) -> Array:
    """Returns the weights [n + 1] of n updates and, last, the centre, whose sum is the clipped mean.

    Args:
        distances: [n + 1, n + 1], squared.
        radius: most length of a difference; None for the lower median, anew in each step.
        num_steps: at least 1.
    """
    count = len(distances) - 1
    weights = np.zeros(count + 1)
    weights[-1] = 1.0
    for _ in range(num_steps):
        lengths = measure_from_sum(distances, weights)[:-1]
        limit = np.sort(lengths)[(count - 1) // 2] if radius is None else radius
        shares = np.minimum(1.0, limit / np.maximum(lengths, np.finfo(float).tiny)) / count
        weights *= 1.0 - shares.sum()
        weights[:-1] += shares
    return weights
