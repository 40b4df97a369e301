"""The updates of a round as the rows of a matrix that is never in memory as a whole.

A row is decoded when it is needed and unloaded again. Rules read the matrix in three ways: the distances of its rows,
a weighted sum of them, and blocks of columns. A weighted sum needs one row at a time. Distances and columns need all
rows at once, so a pass decodes each row and copies its part of the columns, at most `BLOCK_BYTES` in all; there are
as many passes as blocks. A matrix that fits into one block is decoded once and kept.

Rows may be mixed: replaced by weighted sums of rows. Their distances follow from those of the rows, without a pass:
for weights u and v that both add up to 1, |Xu - Xv|^2 = -(u - v)' D (u - v) / 2, where D has the squared distances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgefl.core.types import Array, SparseTensor, Tensor, Tensors
from edgefl.strategies.aggregation import add_weighted, unload_tensors

BLOCK_BYTES = 128 * 2**20
"""Most bytes of a block of columns, over all rows."""
CHUNK_SIZE = 2**14
"""Columns that are sorted or subtracted at a time: they stay in the cache."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Entries `start` to `stop` of the flat tensor `name`, [n, stop - start]: those of each row."""

    name: str
    start: int
    values: Array

    @property
    def stop(self) -> int:
        return self.start + int(self.values.shape[1])


Block = list[tuple[str, int, int]]
"""Name, start and stop of parts of flat tensors."""


@dataclass(slots=True, kw_only=True)
class UpdateRows:
    """Rows over the tensors of a model.

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
