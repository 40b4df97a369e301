"""Signed quantisation levels in nearly as few bits as their entropy.

Of few levels the small ones are frequent. So the places of those that are not zero are coded as a set, then their
signs, then which of them are larger than one as a set among them, and of these the magnitudes less two, Golomb-Rice
coded behind a byte that gives the parameter. What the highest level leaves no doubt about is not written. From 127
levels on few are zero: written are the magnitudes as `labels.py` has it, several times faster for hardly a byte more,
then the signs of those that are not zero.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.coding.indices import read_mask, write_mask
from edgefl.compression.coding.labels import read_labels, write_labels
from edgefl.compression.coding.masks import picked, put
from edgefl.compression.coding.rice import (
    MAX_PARAMETER,
    negate,
    pack_bits,
    read_narrow_bits,
    read_rice,
    rice_parameter,
    write_rice,
)
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array

_MANY = 127


def write_levels(levels: Array, highest: int) -> list[Array]:
    """Returns the arrays to write for [n] integer levels from -highest to highest."""
    if highest >= _MANY:
        magnitudes = np.abs(levels).astype(np.min_scalar_type(highest), copy=False)
        return [*write_labels(magnitudes), pack_bits(picked(levels, magnitudes != 0) < 0, 1)]
    is_there = levels != 0
    parts = write_mask(is_there)
    found = picked(levels, is_there)
    if not found.size:
        return parts
    parts.append(pack_bits(found < 0, 1))
    return (
        parts + _write_magnitudes(np.abs(found).astype(np.min_scalar_type(highest), copy=False), highest)
        if highest > 1
        else parts
    )


def read_levels(reader: Reader, size: int, highest: int) -> Array:
    """Returns the [size] levels as float32.

    Raises:
        CodecError: damaged.
    """
    if highest >= _MANY:
        return _read_many(reader, size, highest)
    levels = np.zeros(size, dtype=np.float32)
    is_there = read_mask(reader, size)
    count = int(np.count_nonzero(is_there))
    if count:
        is_negative = read_narrow_bits(reader, count, 1)
        magnitudes = _read_magnitudes(reader, count, highest)
        negate(magnitudes, is_negative)
        put(magnitudes, is_there, levels)
    return levels


def _read_many(reader: Reader, size: int, highest: int) -> Array:
    magnitudes = read_labels(reader, size, highest)
    is_there = magnitudes != 0
    count = int(np.count_nonzero(is_there))
    levels, is_negative = magnitudes.astype(np.float32), np.zeros(size, dtype=np.uint8)
    put(read_narrow_bits(reader, count, 1), is_there, is_negative)
    negate(levels, is_negative)
    return levels


def _write_magnitudes(magnitudes: Array, highest: int) -> list[Array]:
    is_larger = magnitudes > 1
    parts = write_mask(is_larger)
    rest = picked(magnitudes, is_larger) - 2
    if highest > 2 and rest.size:
        parameter, _ = rice_parameter(rest)
        parts += [np.array([parameter], dtype=np.uint8), *write_rice(rest, parameter)]
    return parts


def _read_magnitudes(reader: Reader, count: int, highest: int) -> Array:
    magnitudes = np.ones(count, dtype=np.float32)
    if highest == 1:
        return magnitudes
    is_larger = read_mask(reader, count)
    magnitudes += is_larger
    num_larger = int(np.count_nonzero(is_larger))
    if highest > 2 and num_larger:
        parameter = reader.take(1)[0]
        if parameter > MAX_PARAMETER:
            raise CodecError(f"payload holds levels with parameter {parameter}, at most {MAX_PARAMETER} are read")
        rest = read_rice(reader, num_larger, parameter, highest - 2)
        put(rest + np.float32(2), is_larger, magnitudes)
    return magnitudes
