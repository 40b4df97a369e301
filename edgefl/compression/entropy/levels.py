"""Signed quantisation levels in nearly as few bits as their entropy.

Of few levels the small ones are frequent. So the indices of the non-zero ones are coded as a set, then their signs,
then those larger than one as a set among them, and of these the magnitudes less two, Golomb-Rice coded behind a byte
with the parameter. Parts determined by the highest level are not written. From 127 levels on few are zero: written
are the magnitudes as in `labels.py`, several times faster for hardly a byte more, then the signs of the non-zero.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.entropy.chunked_indexing import scatter_masked, select_masked
from edgefl.compression.entropy.golomb_rice import (
    MAX_PARAMETER,
    negate_where,
    pack_bits,
    read_narrow_bits,
    read_rice,
    select_rice_parameter,
    write_rice,
)
from edgefl.compression.entropy.indices import read_mask, write_mask
from edgefl.compression.entropy.labels import read_labels, write_labels
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_MIN_LABEL_CODED_LEVELS = 127


def write_levels(levels: Array, highest: int) -> list[Array]:
    """Returns the arrays to write for [n] integer levels from -highest to highest."""
    if highest >= _MIN_LABEL_CODED_LEVELS:
        magnitudes = np.abs(levels).astype(np.min_scalar_type(highest), copy=False)
        return [*write_labels(magnitudes), pack_bits(select_masked(levels, magnitudes != 0) < 0, 1)]
    is_there = levels != 0
    parts = write_mask(is_there)
    non_zero = select_masked(levels, is_there)
    if not non_zero.size:
        return parts
    parts.append(pack_bits(non_zero < 0, 1))
    return (
        parts + _write_magnitudes(np.abs(non_zero).astype(np.min_scalar_type(highest), copy=False), highest)
        if highest > 1
        else parts
    )


def read_levels(reader: PayloadReader, size: int, highest: int) -> Array:
    """Returns the [size] levels as float32.

    Raises:
        CodecError: damaged.
    """
    if highest >= _MIN_LABEL_CODED_LEVELS:
        return _read_label_coded(reader, size, highest)
    levels = np.zeros(size, dtype=np.float32)
    is_there = read_mask(reader, size)
    count = int(np.count_nonzero(is_there))
    if count:
        is_negative = read_narrow_bits(reader, count, 1)
        magnitudes = _read_magnitudes(reader, count, highest)
        negate_where(magnitudes, is_negative)
        scatter_masked(magnitudes, is_there, levels)
    return levels


def _read_label_coded(reader: PayloadReader, size: int, highest: int) -> Array:
    magnitudes = read_labels(reader, size, highest)
    is_there = magnitudes != 0
    count = int(np.count_nonzero(is_there))
    levels, is_negative = magnitudes.astype(np.float32), np.zeros(size, dtype=np.uint8)
    scatter_masked(read_narrow_bits(reader, count, 1), is_there, is_negative)
    negate_where(levels, is_negative)
    return levels


def _write_magnitudes(magnitudes: Array, highest: int) -> list[Array]:
    is_larger = magnitudes > 1
    parts = write_mask(is_larger)
    excess = select_masked(magnitudes, is_larger) - 2
    if highest > 2 and excess.size:
        parameter, _ = select_rice_parameter(excess)
        parts += [np.array([parameter], dtype=np.uint8), *write_rice(excess, parameter)]
    return parts


def _read_magnitudes(reader: PayloadReader, count: int, highest: int) -> Array:
    magnitudes = np.ones(count, dtype=np.float32)
    if highest == 1:
        return magnitudes
    is_larger = read_mask(reader, count)
    magnitudes += is_larger
    num_larger = int(np.count_nonzero(is_larger))
    if highest > 2 and num_larger:
        parameter = reader.read_bytes(1)[0]
        if parameter > MAX_PARAMETER:
            raise CodecError(f"payload holds levels with parameter {parameter}, at most {MAX_PARAMETER} are read")
        excess = read_rice(reader, num_larger, parameter, highest - 2)
        scatter_masked(excess + np.float32(2), is_larger, magnitudes)
    return magnitudes
