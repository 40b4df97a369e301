"""Sets of flat indices in nearly as few bits as their entropy.

Written are their number, a byte that names the form unless there are none or all, and the smallest form:

    0      each index in as many bits as the largest possible one needs
    1      a bit for every entry of the tensor
    2 + k  the gaps between neighbours, Golomb-Rice coded with parameter k
    64     the distances between neighbours, exp-Golomb coded
    128    is added to one of these where the absent indices are listed
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.chunked_indexing import compute_gaps
from edgefl.compression.entropy.golomb import (
    MAX_PARAMETER,
    compute_exp_golomb_cost,
    count_values,
    pack_bits,
    read_bits,
    read_exp_golomb,
    read_rice_sums,
    select_rice_parameter,
    write_exp_golomb,
    write_rice,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_MIN_EXP_GOLOMB_COUNT = 64
"""With fewer indices the table of classes costs as much as the classes save."""

_MIN_SAMPLED_SIZE = 2**16
_NUM_SAMPLE_RUNS = 16
"""Number of runs in a sample of a mask, spread over all of it."""

_DENSE_THRESHOLD = 0.98

_FIXED, _BITMAP, _RICE, _EXP_GOLOMB, _COMPLEMENT_FLAG = 0, 1, 2, 64, 128


def write_indices(indices: Array, size: int) -> list[Array]:
    """Returns the arrays to write for strictly ascending int64 `indices` below `size`."""
    count = indices.size
    if count in (0, size):
        return [encode_varint(count)]
    is_complement = 2 * count > size
    coded = _compute_complement(indices, size) if is_complement else indices
    form, parts = _encode_smallest_form(np.diff(coded, prepend=-1), size)
    return [encode_varint(count), _encode_form(form, is_complement), *parts]


def read_indices(reader: PayloadReader, size: int) -> Array:
    """Returns the indices: ascending, unique, [k] int64 below `size`.

    Raises:
        CodecError: damaged.
    """
    count = reader.read_varint(size)
    if count in (0, size):
        return np.arange(count)
    form = reader.read_bytes(1)[0]
    if form & _COMPLEMENT_FLAG:
        return _compute_complement(_read_form(reader, form ^ _COMPLEMENT_FLAG, size - count, size), size)
    return _read_form(reader, form, count, size)


def write_mask(mask: Array) -> list[Array]:
    """Returns the arrays to write for the indices of a [size] mask's true values, as `write_indices` does."""
    size, count = mask.size, int(np.count_nonzero(mask))
    if count in (0, size):
        return [encode_varint(count)]
    is_complement = 2 * count > size
    coded = ~mask if is_complement else mask
    if _is_dense(coded):
        return [encode_varint(count), _encode_form(_BITMAP, is_complement), np.packbits(coded, bitorder="little")]
    form, parts = _encode_smallest_form(compute_gaps(coded), size)
    return [encode_varint(count), _encode_form(form, is_complement), *parts]


def read_mask(reader: PayloadReader, size: int) -> Array:
    """Returns the [size] mask of the indices that were written.

    Raises:
        CodecError: damaged.
    """
    count = reader.read_varint(size)
    if count in (0, size):
        return np.full(size, count > 0)
    form = reader.read_bytes(1)[0]
    is_complement = form & _COMPLEMENT_FLAG
    num_listed = size - count if is_complement else count
    if form & ~_COMPLEMENT_FLAG == _BITMAP:
        mask = _read_mask_bits(reader, num_listed, size)
        return np.logical_not(mask, out=mask) if is_complement else mask
    mask = np.full(size, bool(is_complement))
    mask[_read_form(reader, form & ~_COMPLEMENT_FLAG, num_listed, size)] = not is_complement
    return mask


def _encode_form(form: int, is_complement: bool) -> Array:
    return np.array([form | (_COMPLEMENT_FLAG if is_complement else 0)], dtype=np.uint8)


def _is_dense(mask: Array) -> bool:
    """Whether a sampled mask costs about a bit per entry in any form, within a fiftieth; saves time."""
    if mask.size < _MIN_SAMPLED_SIZE:
        return False
    rows = mask[: mask.size // _NUM_SAMPLE_RUNS * _NUM_SAMPLE_RUNS].reshape(_NUM_SAMPLE_RUNS, -1)
    sample = rows[:, : _MIN_SAMPLED_SIZE // _NUM_SAMPLE_RUNS].reshape(-1)
    positions = np.flatnonzero(sample)
    if not 0.2 * sample.size < positions.size < 0.8 * sample.size:
        return False
    numbers, counts = count_values(np.diff(positions, prepend=-1))
    return (
        min(compute_exp_golomb_cost(numbers, counts), select_rice_parameter(numbers - 1, counts)[1])
        > _DENSE_THRESHOLD * sample.size
    )


def _read_form(reader: PayloadReader, form: int, count: int, size: int) -> Array:
    if form == _FIXED:
        return _validate_indices(read_bits(reader, count, _compute_width(size)), size)
    if form == _BITMAP:
        return np.flatnonzero(_read_mask_bits(reader, count, size))
    if form == _EXP_GOLOMB:
        return _validate_indices(np.cumsum(read_exp_golomb(reader, count)) - 1, size)
    if form - _RICE > MAX_PARAMETER:
        raise CodecError(f"payload holds indices in form {form}, which this edgefl does not know")
    return read_rice_sums(reader, count, form - _RICE, size - count, gap=1)


def _encode_smallest_form(gaps: Array, size: int) -> tuple[int, list[Array]]:
    """Returns the smallest form and its arrays, for the distances between indices, the first from -1."""
    numbers, counts = count_values(gaps)
    bits = {_FIXED: gaps.size * _compute_width(size), _BITMAP: size}
    if gaps.size >= _MIN_EXP_GOLOMB_COUNT:
        bits[_EXP_GOLOMB] = compute_exp_golomb_cost(numbers, counts)
    parameter, cost = select_rice_parameter(numbers - 1, counts)
    # The stream's length stands before it: two bytes in most cases.
    bits[_RICE + parameter] = cost + 16
    form = min(bits, key=lambda candidate: bits[candidate])
    if form == _FIXED:
        return form, [pack_bits(np.cumsum(gaps) - 1, _compute_width(size))]
    if form == _BITMAP:
        mask = np.zeros(size, dtype=np.uint8)
        mask[np.cumsum(gaps) - 1] = 1
        return form, [np.packbits(mask, bitorder="little")]
    if form == _EXP_GOLOMB:
        return form, write_exp_golomb(gaps)
    return form, write_rice(gaps - 1, form - _RICE)


def _compute_complement(indices: Array, size: int) -> Array:
    """Returns the indices below `size` that are not among `indices`."""
    mask = np.ones(size, dtype=np.bool_)
    mask[indices] = False
    return np.flatnonzero(mask)


def _read_mask_bits(reader: PayloadReader, count: int, size: int) -> Array:
    packed = np.frombuffer(reader.read_bytes((size + 7) // 8), dtype=np.uint8)
    mask = np.unpackbits(packed, count=size, bitorder="little").view(np.bool_)
    num_marked = int(np.count_nonzero(mask))
    if num_marked != count:
        raise CodecError(f"payload marks {num_marked} entries, {count} are announced")
    return mask


def _validate_indices(indices: Array, size: int) -> Array:
    if int(indices[-1]) >= size or (indices.size > 1 and np.any(indices[1:] <= indices[:-1])):
        raise CodecError(f"payload holds indices that do not ascend or are not below {size}")
    return indices


def _compute_width(size: int) -> int:
    return max(1, (size - 1).bit_length())
