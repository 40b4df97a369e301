"""Labels, and signed quantisation levels, in nearly as few bits as their entropy.

Labels, one of a few for each value: written are the highest label, the length of a Zstandard frame, and the frame. It
contains the labels as digits to the base of the highest label plus one, as many in a byte as fit, the first the
lowest; above 255 they take two bytes. Labels of neighbouring values are often alike, which makes the frame smaller
than the entropy of single ones. Where they are not, Zstandard finds repetitions that cost more than they save: so
there are two frames, one of which hardly looks for any, and the shorter is sent.

Of few levels the small ones are frequent. So the indices of the non-zero ones are coded as a set, then their signs,
then those larger than one as a set among them, and of these the magnitudes less two, Golomb-Rice coded behind a byte
with the parameter. Parts determined by the highest level are not written. From 127 levels on few are zero: written
are the magnitudes as labels, several times faster for hardly a byte more, then the signs of the non-zero.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.chunked_indexing import iterate_chunks, scatter_masked, select_masked
from edgefl.compression.entropy.golomb import (
    MAX_PARAMETER,
    count_values,
    negate_where,
    pack_bits,
    read_narrow_bits,
    read_rice,
    select_rice_parameter,
    write_rice,
)
from edgefl.compression.entropy.indices import read_mask, write_mask
from edgefl.compression.entropy.zstd import compress, decompress
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_ZSTD_LEVEL = 1
_ZSTD_SETTINGS: tuple[dict[str, int], ...] = ({}, {"window_log": 17, "hash_log": 6, "chain_log": 6})
_NUM_BYTE_VALUES = 2**8
_MAX_LABEL = 2**16 - 1
_MAX_FEW_LABELS = 16
_MAX_FRAME_OVERHEAD_BYTES = 2**10
"""Upper limit of a frame's overhead over its content, even if incompressible."""

_MIN_LABEL_CODED_LEVELS = 127


def write_labels(labels: Array) -> list[Array]:
    """Returns the arrays to write for [n] integer labels, each from 0 to 65,535."""
    highest = int(labels.max(initial=0))
    content = _encode_digits(labels, highest + 1).data
    frame = min((compress(content, _ZSTD_LEVEL, **settings) for settings in _ZSTD_SETTINGS), key=len)
    return [encode_varint(highest), encode_varint(frame.size), frame]


def read_labels(reader: PayloadReader, count: int, highest: int) -> Array:
    """Returns the [count] labels, each at most `highest`.

    Raises:
        CodecError: damaged.
    """
    base = reader.read_varint(min(highest, _MAX_LABEL)) + 1
    num_digits = _count_digits_per_byte(base)
    num_bytes = 2 * count if base > _NUM_BYTE_VALUES else -(-count // num_digits)
    frame = reader.read_bytes(
        reader.read_varint(num_bytes + num_bytes // _NUM_BYTE_VALUES + _MAX_FRAME_OVERHEAD_BYTES)
    )
    content = decompress(frame, num_bytes)
    if len(content) != num_bytes:
        raise CodecError(f"payload holds {len(content)} bytes of labels, {num_bytes} are announced")
    packed = np.frombuffer(content, dtype=np.uint8 if base <= _NUM_BYTE_VALUES else "<u2")
    if int(packed.max(initial=0)) >= base**num_digits:
        raise CodecError(f"payload holds the labels {int(packed.max())}, at most {base**num_digits - 1} is right")
    if num_digits == 1:
        return packed
    table = np.stack([np.arange(_NUM_BYTE_VALUES) // base**position % base for position in range(num_digits)], axis=1)
    return np.take(table.astype(np.uint8), packed, axis=0).reshape(-1)[:count]


def count_labels(labels: Array, num_labels: int) -> Array:
    """Returns the occurrences of each label, as [num_labels] int64."""
    if num_labels <= _MAX_FEW_LABELS:
        return np.array([np.count_nonzero(labels == label) for label in range(num_labels)], dtype=np.int64)
    counts = np.zeros(num_labels, dtype=np.int64)
    for chunk in iterate_chunks(labels.size):
        counts += np.bincount(labels[chunk], minlength=num_labels)
    return counts


def _encode_digits(labels: Array, base: int) -> Array:
    """Returns the content of the frame."""
    if base > _NUM_BYTE_VALUES:
        return labels.astype("<u2")
    num_digits = _count_digits_per_byte(base)
    if num_digits == 1:
        return labels.astype(np.uint8)
    content = np.zeros(-(-labels.size // num_digits), dtype=np.uint8)
    for position in range(num_digits):
        digits = labels[position::num_digits].astype(np.uint8)
        content[: digits.size] += digits * np.uint8(base**position)
    return content


def _count_digits_per_byte(base: int) -> int:
    """Returns the number of digits per byte, from one to eight."""
    return next((number for number in range(8, 1, -1) if base**number <= _NUM_BYTE_VALUES), 1)


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
        parameter, _ = select_rice_parameter(*count_values(excess))
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
