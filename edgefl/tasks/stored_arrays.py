"""Rows that stay in their file: an array larger than a board's memory, of which batches are read.

Rows are read by offset and not mapped: mapped pages count as the process's memory until they are given back, and a
mapped file that becomes shorter ends the process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import IO, Any, TypeGuard, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.random import Generator

from edgefl.core.errors import DataError
from edgefl.core.named_arrays import NamedArrays, list_arrays
from edgefl.core.types import Array, Dataset

MAX_BYTES_IN_MEMORY = 32 * 1024**2
"""Bytes of a shard up to which it is held in memory; the inputs of a larger one stay in files."""
BLOCK_BYTES = 512 * 1024
"""Bytes of consecutive rows that are read at once, and keep together in an epoch."""
BUFFER_BYTES = 32 * BLOCK_BYTES
"""Bytes of rows that are in memory while batches are made of them."""
MAX_GAP_BYTES = 64 * 1024
"""Bytes between two rows that are rather read than skipped."""
ORDER_BYTES = 64
"""Bytes that the order of rows takes for each of them while they are read: of short rows more than the rows."""


class FileRows:
    """Rows of an array in a file, which stays open, and so readable, as long as this is used.

    Args:
        descriptor: of the file; this duplicates it.
        name: of the file, for messages.
        offset: of the first row, in bytes.
        shape: [n, ...] of the array, whose rows lie one after the other.
        dtype: of its numbers.
    """

    def __init__(self, descriptor: int, name: str, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype, self._name, self._offset = shape, dtype, name, offset
        self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Array:
        """Returns the rows [start, stop).

        Raises:
            DataError: the file became shorter, or cannot be read.
        """
        start, stop, _ = rows.indices(len(self))
        found = np.empty((max(0, stop - start), *self.shape[1:]), self.dtype)
        room = memoryview(cast("Any", found.reshape(-1).view(np.uint8)))
        place = self._offset + start * (found.nbytes // max(1, len(found)))
        while room:
            try:
                num_read = os.preadv(self._descriptor, [room], place)
            except OSError as error:
                raise DataError(f"{self._name} cannot be read: {error.strerror}") from None
            if not num_read:
                raise DataError(f"{self._name} became shorter while it was in use; copy it again")
            room, place = room[num_read:], place + num_read
        return found


class StoredArray(NDArrayOperatorsMixin):
    """An array [n, ...] in files, or chosen rows of it; rows are read when they are indexed.

    All else that an array can do reads it whole.

    Args:
        parts: one after the other, of rows of one shape; those of small files may be in memory.
        rows: numbers of rows, in order; None for all.
    """

    def __init__(self, parts: Sequence[FileRows | Array], rows: Array | None = None) -> None:
        self._parts, self._rows = tuple(parts), rows
        self._ends = np.cumsum([len(part) for part in parts])
        self.dtype = np.result_type(*(part.dtype for part in parts)) if len(parts) > 1 else parts[0].dtype
        self.shape = (int(self._ends[-1]) if rows is None else len(rows), *parts[0].shape[1:])
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return int(self.shape[0])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, at least 1."""
        return max(1, self.nbytes // max(1, len(self)))

    def to_array(self) -> Array:
        """Returns itself, for those who index rows of an array and need not know where they are."""
        return cast("Array", self)

    def select(self, rows: Array | slice) -> Array:
        """Returns these rows of it, still in their files."""
        kind = _find_number_type(self._ends[-1])
        return StoredArray(self._parts, self._find_rows(rows).astype(kind, copy=False)).to_array()

    @classmethod
    def concatenate(cls, arrays: Sequence[Array]) -> Array:
        """Returns the rows of all arrays, of which some may be in files."""
        whole = [StoredArray([array]) if not is_stored(array) else array for array in arrays]
        assert all(array._rows is None for array in whole)  # noqa: SLF001 files are put together before a choice of rows
        return cls([part for array in whole for part in array._parts]).to_array()  # noqa: SLF001 likewise

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) or (isinstance(key, np.ndarray) and key.ndim == 1):
            return self._read(self._find_rows(key))
        return np.asarray(self)[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("an array in a file cannot be had without a copy")
        whole: Array = self[:]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return getattr(ufunc, method)(*(np.asarray(one) if is_stored(one) else one for one in inputs), **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def _find_rows(self, rows: Array | slice) -> Array:
        """Returns the numbers of rows among those of all parts; raises as an array's index."""
        if isinstance(rows, slice):
            chosen = np.arange(*rows.indices(len(self)), dtype=_find_number_type(len(self)))
        else:
            if rows.dtype == bool and len(rows) != len(self):
                raise IndexError(f"a mask of {len(rows)} rows for {len(self)}")
            is_mask = rows.dtype == bool
            chosen = np.arange(len(self), dtype=_find_number_type(len(self)))[rows] if is_mask else rows
            if len(chosen) and not (-len(self) <= chosen.min() and chosen.max() < len(self)):
                raise IndexError(f"rows {chosen.min()} to {chosen.max()} of {len(self)}")
            if len(chosen) and chosen.min() < 0:
                chosen = np.where(chosen < 0, chosen + len(self), chosen)
        found: Array = chosen if self._rows is None else self._rows[chosen]
        return found

    def _read(self, rows: Array) -> Array:
        """Returns rows by number: near ones together, and no more than a block at once."""
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        block_rows = max(1, BLOCK_BYTES // self.row_bytes)
        whose = np.searchsorted(self._ends, ordered, side="right")
        is_new = np.diff(ordered) > max(1, MAX_GAP_BYTES // self.row_bytes)
        is_new |= np.diff(ordered // block_rows) > 0
        is_new |= np.diff(whose) > 0
        for run in np.split(np.arange(len(rows)), np.flatnonzero(is_new) + 1) if len(rows) else ():
            part = self._parts[whose[run[0]]]
            numbers = ordered[run] - (self._ends[whose[run[0]]] - len(part))
            found[order[run]] = part[int(numbers[0]) : int(numbers[-1]) + 1][numbers - numbers[0]]
        return found


def _find_number_type(count: int) -> type[np.integer[Any]]:
    """Returns a type for so many rows' numbers: of a shard of small rows they take much of the memory."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


class RowBuffer:
    """Rows that are read one after the other: in memory while they are few, then in a temporary file without a name.

    The file lies in /var/tmp, since /tmp is memory on many boards, or where the process may write; its room is free
    again when its rows are no longer used.
    """

    def __init__(self, max_bytes: int = MAX_BYTES_IN_MEMORY) -> None:
        self._max_bytes = max_bytes
        self._blocks: list[Array] = []
        self._file: IO[bytes] | None = None
        self._num_rows, self._num_bytes = 0, 0

    def add(self, rows: Array) -> None:
        """Adds rows of the same shape and type as those before.

        Raises:
            DataError: there is no room for them.
        """
        self._num_rows, self._num_bytes = self._num_rows + len(rows), self._num_bytes + rows.nbytes
        self._blocks.append(rows)
        if self._file is None and self._num_bytes <= self._max_bytes:
            return
        try:
            self._file = self._file or _open_temporary()
            for block in self._blocks:
                self._file.write(np.ascontiguousarray(block).data)
        except OSError as error:
            raise DataError(
                f"a large shard needs a temporary file of {self._num_bytes} bytes and more: {error.strerror}; make "
                "room, or give the board a part of it"
            ) from None
        self._blocks = [rows[:0]]

    def finish(self) -> Array:
        """Returns all rows, of which there must be one."""
        if self._file is None:
            return self._join()
        (like,) = self._blocks
        with self._file as file:
            file.flush()
            shape = (self._num_rows, *like.shape[1:])
            return StoredArray([FileRows(file.fileno(), "a temporary file", 0, shape, like.dtype)]).to_array()

    def _join(self) -> Array:
        """Returns the blocks as one array; each is given back when it is copied, so that none is there twice."""
        joined = np.empty((self._num_rows, *self._blocks[0].shape[1:]), self._blocks[0].dtype)
        stop = self._num_rows
        while self._blocks:
            block = self._blocks.pop()
            joined[stop - len(block) : stop] = block
            stop -= len(block)
        return joined


def _open_temporary() -> IO[bytes]:
    with contextlib.suppress(OSError):
        return tempfile.TemporaryFile(dir="/var/tmp")
    return tempfile.TemporaryFile()


def is_stored(array: object) -> TypeGuard[StoredArray]:
    """Returns whether an array lies in files, or one of arrays by name."""
    if isinstance(array, NamedArrays):
        return any(isinstance(one, StoredArray) for one in list_arrays(array))
    return isinstance(array, StoredArray)


def select_rows(data: Dataset, rows: Array | slice) -> Dataset:
    """Returns the examples of these rows, as `Dataset.take`; inputs in files stay there."""
    if not is_stored(data.inputs):
        return data.take(rows)
    without = replace(data, inputs=np.empty((len(data), 0), np.uint8)).take(rows)
    return replace(without, inputs=_select(data.inputs, rows))


def _select(inputs: Any, rows: Array | slice) -> Any:
    if isinstance(inputs, NamedArrays):
        return inputs.map(lambda array: _select(array, rows))
    return inputs.select(rows) if isinstance(inputs, StoredArray) else inputs[rows]


def iterate_blocks(array: Array) -> Iterator[Array]:
    """Yields the rows of an array, of one in files a block at a time."""
    num_rows = max(1, len(array) if not is_stored(array) else BLOCK_BYTES // array.row_bytes)
    for start in range(0, len(array), num_rows):
        yield array[start : start + num_rows]


def iterate_stored_batches(data: Dataset, batch_size: int, rng: Generator) -> Iterator[Dataset]:
    """Yields batches of one epoch of examples in files: every example once, one batch may be short.

    Blocks of consecutive rows come in random order, and the rows of `BUFFER_BYTES` of them are shuffled, so that the
    file is read in long pieces.
    """
    assert is_stored(data.inputs)
    row_bytes = data.inputs.row_bytes
    block_rows = max(1, BLOCK_BYTES // row_bytes)
    buffer_rows = max(1, BUFFER_BYTES // (row_bytes + ORDER_BYTES) // batch_size) * batch_size
    starts = rng.permutation(-(-len(data) // block_rows)) * block_rows
    blocks = (np.arange(start, min(start + block_rows, len(data))) for start in starts)
    for rows in _regroup(blocks, buffer_rows):
        plain = Dataset.take(data, rows)
        # As of the data's own class: if it augments, batches are augmented and not the buffer.
        held = replace(data, **{item.name: getattr(plain, item.name) for item in fields(Dataset)})
        shuffled = rng.permutation(len(held))
        for start in range(0, len(held), batch_size):
            yield held.take(shuffled[start : start + batch_size])
        del plain, held  # before the next is read


def _regroup(blocks: Iterator[Array], size: int) -> Iterator[Array]:
    """Yields the numbers of all blocks in order, `size` at a time, and last what is left."""
    waiting = np.empty(0, np.int64)
    for block in blocks:
        waiting = np.concatenate([waiting, block])
        while len(waiting) >= size:
            yield waiting[:size]
            waiting = waiting[size:]
    if len(waiting):
        yield waiting
