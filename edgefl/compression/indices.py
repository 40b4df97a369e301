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

from edgefl.compression.exp_golomb import exp_golomb_bits, read_exp_golomb, write_exp_golomb
from edgefl.compression.rice import MAX_PARAMETER, pack_bits, read_bits, read_rice_sums, rice_parameter, write_rice
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

_CLASSES_FROM = 64
"""With fewer places the table of classes costs what the classes save."""

_FIXED, _BITMAP, _RICE, _EXP_GOLOMB, _OTHERS = 0, 1, 2, 64, 128


def write_indices(indices: Array, size: int) -> list[Array]:
    """Returns the arrays to write for strictly ascending int64 `indices` below `size`."""
    count = indices.size
    if count in (0, size):
        return [varint(count)]
    others = _OTHERS if 2 * count > size else 0
    form, parts = _smallest_form(_complement(indices, size) if others else indices, size)
    return [varint(count), np.array([form | others], dtype=np.uint8), *parts]


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


def _read_form(reader: Reader, form: int, count: int, size: int) -> Array:
    if form == _FIXED:
        return _checked(read_bits(reader, count, _width(size)), size)
    if form == _BITMAP:
        return _read_bitmap(reader, count, size)
    if form == _EXP_GOLOMB:
        return _checked(np.cumsum(read_exp_golomb(reader, count)) - 1, size)
    if form - _RICE > MAX_PARAMETER:
        raise CodecError(f"payload holds indices in form {form}, which this edgefl does not know")
    return read_rice_sums(reader, count, form - _RICE, size - count) + np.arange(count)


def _smallest_form(indices: Array, size: int) -> tuple[int, list[Array]]:
    count = indices.size
    distances = np.diff(indices, prepend=-1)
    bits = {_FIXED: count * _width(size), _BITMAP: size}
    if count >= _CLASSES_FROM:
        bits[_EXP_GOLOMB] = exp_golomb_bits(distances)
    parameter, cost = rice_parameter(distances - 1)
    # The stream's length stands before it: two bytes in most cases.
    bits[_RICE + parameter] = cost + 16
    form = min(bits, key=lambda known: bits[known])
    if form == _FIXED:
        return form, [pack_bits(indices, _width(size))]
    if form == _BITMAP:
        mask = np.zeros(size, dtype=np.uint8)
        mask[indices] = 1
        return form, [np.packbits(mask, bitorder="little")]
    if form == _EXP_GOLOMB:
        return form, write_exp_golomb(distances)
    return form, write_rice(distances - 1, form - _RICE)


def _complement(indices: Array, size: int) -> Array:
    """Returns the indices below `size` that are not among the given ones."""
    mask = np.ones(size, dtype=np.bool_)
    mask[indices] = False
    return np.flatnonzero(mask)


def _read_bitmap(reader: Reader, count: int, size: int) -> Array:
    packed = np.frombuffer(reader.take((size + 7) // 8), dtype=np.uint8)
    mask = np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
    found = int(np.count_nonzero(mask))
    if found != count:
        raise CodecError(f"payload marks {found} entries, {count} are announced")
    return np.flatnonzero(mask)


def _checked(indices: Array, size: int) -> Array:
    if int(indices[-1]) >= size or np.any(np.diff(indices) <= 0):
        raise CodecError(f"payload holds indices that do not ascend or are not below {size}")
    return indices


def _width(size: int) -> int:
    return max(1, (size - 1).bit_length())
