"""One of a few labels for each value, in about as few bits as their entropy.

Written are the highest label, the length of a Zstandard frame, and the frame. It contains the labels as digits to the
base of the highest label plus one, as many in a byte as fit, the first the lowest; above 255 they take two bytes.
Labels of neighbouring values are often alike, which makes the frame smaller than the entropy of single ones. Where
they are not, Zstandard finds repetitions that cost more than they save: so there are two frames, one of which hardly
looks for any, and the shorter is sent.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.entropy.zstd_frames import compress, decompress
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

_ZSTD_LEVEL = 1
_ZSTD_SETTINGS: tuple[dict[str, int], ...] = ({}, {"window_log": 17, "hash_log": 6, "chain_log": 6})
_NUM_BYTE_VALUES = 2**8
_MAX_LABEL = 2**16 - 1
_MAX_FEW_LABELS = 16
# A chunk's numbers stay in the cache.
_CHUNK = 2**15
_MAX_FRAME_OVERHEAD_BYTES = 2**10
"""Upper limit of a frame's overhead over its content, even if incompressible."""


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
    for start in range(0, labels.size, _CHUNK):
        counts += np.bincount(labels[start : start + _CHUNK], minlength=num_labels)
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
