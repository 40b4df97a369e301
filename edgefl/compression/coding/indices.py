"""Sets of flat indices in nearly as few bits as their entropy.

Written as their number, unless that is none or all a byte that names the form, and the form that is smallest:

    0      each index in as many bits as the largest possible one needs
    1      a bit for every entry of the tensor
    2 + k  the gaps between neighbours, Golomb-Rice coded with parameter k
    64     the distances between neighbours, exp-Golomb coded
    128    is added to one of these where it tells which indices are not there
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.coding.exp_golomb import exp_golomb_cost, read_exp_golomb, write_exp_golomb
from edgefl.compression.coding.masks import distances
from edgefl.compression.coding.rice import (
    MAX_PARAMETER,
    best_rice,
    pack_bits,
    read_bits,
    read_rice_sums,
    tally,
    write_rice,
)
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

_CLASSES_FROM = 64
"""With fewer places the table of classes costs what the classes save."""

_SAMPLED_FROM = 2**16
_RUNS = 16
"""A sample of a mask is this many runs of it, spread over all of it."""

_NEARLY = 0.98

_FIXED, _BITMAP, _RICE, _EXP_GOLOMB, _OTHERS = 0, 1, 2, 64, 128


def write_indices(indices: Array, size: int) -> list[Array]:
    """Returns the arrays to write for strictly ascending int64 `indices` below `size`."""
    count = indices.size
    if count in (0, size):
        return [varint(count)]
    others = 2 * count > size
    listed = _complement(indices, size) if others else indices
    form, parts = _smallest_form(np.diff(listed, prepend=-1), size)
    return [varint(count), _form_byte(form, others), *parts]


def read_indices(reader: Reader, size: int) -> Array:
    """Returns the indices: ascending, unique, [k] int64 below `size`.

    Raises:
        CodecError: damaged.
    """
    count = reader.varint(size)
    if count in (0, size):
        return np.arange(count)
    form = reader.take(1)[0]
    if form & _OTHERS:
        return _complement(_read_form(reader, form ^ _OTHERS, size - count, size), size)
    return _read_form(reader, form, count, size)


def write_mask(mask: Array) -> list[Array]:
    """Returns the arrays to write for the indices of a [size] mask's true values, as `write_indices` does."""
    size, count = mask.size, int(np.count_nonzero(mask))
    if count in (0, size):
        return [varint(count)]
    others = 2 * count > size
    listed = ~mask if others else mask
    if _is_dense(listed):
        return [varint(count), _form_byte(_BITMAP, others), np.packbits(listed, bitorder="little")]
    form, parts = _smallest_form(distances(listed), size)
    return [varint(count), _form_byte(form, others), *parts]


def read_mask(reader: Reader, size: int) -> Array:
    """Returns the [size] mask whose true values are at the indices that were written.

    Raises:
        CodecError: damaged.
    """
    count = reader.varint(size)
    if count in (0, size):
        return np.full(size, count > 0)
    form = reader.take(1)[0]
    others = form & _OTHERS
    num_listed = size - count if others else count
    if form & ~_OTHERS == _BITMAP:
        mask = _read_bits_of(reader, num_listed, size)
        return np.logical_not(mask, out=mask) if others else mask
    mask = np.full(size, bool(others))
    mask[_read_form(reader, form & ~_OTHERS, num_listed, size)] = not others
    return mask


def _form_byte(form: int, others: bool) -> Array:
    return np.array([form | (_OTHERS if others else 0)], dtype=np.uint8)


def _is_dense(mask: Array) -> bool:
    """Says whether a bit for every entry is as small as any form, but for a fiftieth, by a sample; it saves time."""
    if mask.size < _SAMPLED_FROM:
        return False
    rows = mask[: mask.size // _RUNS * _RUNS].reshape(_RUNS, -1)
    sample = rows[:, : _SAMPLED_FROM // _RUNS].reshape(-1)
    places = np.flatnonzero(sample)
    if not 0.2 * sample.size < places.size < 0.8 * sample.size:
        return False
    numbers, counts = tally(np.diff(places, prepend=-1))
    return min(exp_golomb_cost(numbers, counts), best_rice(numbers - 1, counts)[1]) > _NEARLY * sample.size


def _read_form(reader: Reader, form: int, count: int, size: int) -> Array:
    if form == _FIXED:
        return _checked(read_bits(reader, count, _width(size)), size)
    if form == _BITMAP:
        return _read_bitmap(reader, count, size)
    if form == _EXP_GOLOMB:
        return _checked(np.cumsum(read_exp_golomb(reader, count)) - 1, size)
    if form - _RICE > MAX_PARAMETER:
        raise CodecError(f"payload holds indices in form {form}, which this edgefl does not know")
    return read_rice_sums(reader, count, form - _RICE, size - count, gap=1)


def _smallest_form(gaps: Array, size: int) -> tuple[int, list[Array]]:
    """Returns the form that is smallest and its arrays, for the distances between places, the first from -1."""
    numbers, counts = tally(gaps)
    bits = {_FIXED: gaps.size * _width(size), _BITMAP: size}
    if gaps.size >= _CLASSES_FROM:
        bits[_EXP_GOLOMB] = exp_golomb_cost(numbers, counts)
    parameter, cost = best_rice(numbers - 1, counts)
    # The stream's length stands before it: two bytes in most cases.
    bits[_RICE + parameter] = cost + 16
    form = min(bits, key=lambda known: bits[known])
    if form == _FIXED:
        return form, [pack_bits(np.cumsum(gaps) - 1, _width(size))]
    if form == _BITMAP:
        mask = np.zeros(size, dtype=np.uint8)
        mask[np.cumsum(gaps) - 1] = 1
        return form, [np.packbits(mask, bitorder="little")]
    if form == _EXP_GOLOMB:
        return form, write_exp_golomb(gaps)
    return form, write_rice(gaps - 1, form - _RICE)


def _complement(indices: Array, size: int) -> Array:
    """Returns the indices below `size` that are not among the given ones."""
    mask = np.ones(size, dtype=np.bool_)
    mask[indices] = False
    return np.flatnonzero(mask)


def _read_bitmap(reader: Reader, count: int, size: int) -> Array:
    return np.flatnonzero(_read_bits_of(reader, count, size))


def _read_bits_of(reader: Reader, count: int, size: int) -> Array:
    packed = np.frombuffer(reader.take((size + 7) // 8), dtype=np.uint8)
    mask = np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
    found = int(np.count_nonzero(mask))
    if found != count:
        raise CodecError(f"payload marks {found} entries, {count} are announced")
    return mask


def _checked(indices: Array, size: int) -> Array:
    if int(indices[-1]) >= size or (indices.size > 1 and np.any(indices[1:] <= indices[:-1])):
        raise CodecError(f"payload holds indices that do not ascend or are not below {size}")
    return indices


def _width(size: int) -> int:
    return max(1, (size - 1).bit_length())
