"""Signed quantisation levels in nearly as few bits as their entropy.

Small levels are frequent. So the places of those that are not zero are coded as a set, then their signs, then which
of them are larger than one as a set among them, and of these the magnitudes less two, Golomb-Rice coded behind a byte
that gives the parameter. What the highest level leaves no doubt about is not written.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.indices import read_indices, write_indices
from edgefl.compression.rice import MAX_PARAMETER, pack_bits, read_bits, read_rice, rice_parameter, write_rice
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array


def write_levels(levels: Array, highest: int) -> list[Array]:
    """Returns the arrays to write for [n] integer levels from -highest to highest."""
    places = np.flatnonzero(levels)
    parts = write_indices(places, levels.size)
    if not places.size:
        return parts
    found = levels[places]
    parts.append(pack_bits(found < 0, 1))
    return parts + _write_magnitudes(np.abs(found), highest) if highest > 1 else parts


def read_levels(reader: Reader, size: int, highest: int) -> Array:
    """Returns the [size] levels as float32.

    Raises:
        CodecError: damaged.
    """
    levels = np.zeros(size, dtype=np.float32)
    places = read_indices(reader, size)
    if places.size:
        is_negative = read_bits(reader, places.size, 1).astype(np.bool_)
        magnitudes = _read_magnitudes(reader, places.size, highest)
        levels[places] = np.where(is_negative, -magnitudes, magnitudes)
    return levels


def _write_magnitudes(magnitudes: Array, highest: int) -> list[Array]:
    larger = np.flatnonzero(magnitudes > 1)
    parts = write_indices(larger, magnitudes.size)
    if highest > 2 and larger.size:
        rest = magnitudes[larger].astype(np.int64) - 2
        parameter, _ = rice_parameter(rest)
        parts += [np.array([parameter], dtype=np.uint8), *write_rice(rest, parameter)]
    return parts


def _read_magnitudes(reader: Reader, count: int, highest: int) -> Array:
    magnitudes = np.ones(count, dtype=np.float32)
    larger = read_indices(reader, count) if highest > 1 else np.arange(0)
    magnitudes[larger] = 2
    if highest > 2 and larger.size:
        parameter = reader.take(1)[0]
        if parameter > MAX_PARAMETER:
            raise CodecError(f"payload holds levels with parameter {parameter}, at most {MAX_PARAMETER} are read")
        magnitudes[larger] += read_rice(reader, larger.size, parameter, highest - 2)
    return magnitudes
