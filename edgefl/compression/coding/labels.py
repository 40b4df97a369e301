"""One of a few labels for each value, in about as few bits as their entropy.

Written are the highest label, the length of a Zstandard frame, and the frame. In it stand the labels as digits to the
base of the highest label plus one, as many in a byte as fit, the first the lowest; above 255 they take two bytes.
Labels of neighbouring values are often alike, which makes the frame smaller than the entropy of single ones. Where
they are not, Zstandard finds repetitions that cost more than they save: so there are two frames, one of which hardly
looks for any, and the shorter is sent.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.coding.frames import packed, unpacked
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

_LEVEL = 1
_SETTINGS: tuple[dict[str, int], ...] = ({}, {"window_log": 17, "hash_log": 6, "chain_log": 6})
_NUM_BYTES = 2**8
_MAX_LABEL = 2**16 - 1
_FEW = 16
# The steps of a chunk find its numbers in the cache.
_CHUNK = 2**15
_FRAME_BYTES = 2**10
"""More than a frame takes beside its content, however little that gives way."""


def write_labels(labels: Array) -> list[Array]:
    """Returns the arrays to write for [n] integer labels, each from 0 to 65,535."""
    highest = int(labels.max(initial=0))
    content = _digits(labels, highest + 1).data
    frame = min((packed(content, _LEVEL, **settings) for settings in _SETTINGS), key=len)
    return [varint(highest), varint(frame.size), frame]


def read_labels(reader: Reader, count: int, highest: int) -> Array:
    """Returns the [count] labels, each at most `highest`.

    Raises:
        CodecError: damaged.
    """
    base = reader.varint(min(highest, _MAX_LABEL)) + 1
    num_digits = _digits_of_byte(base)
    num_bytes = 2 * count if base > _NUM_BYTES else -(-count // num_digits)
    frame = reader.take(reader.varint(num_bytes + num_bytes // _NUM_BYTES + _FRAME_BYTES))
    content = unpacked(frame, num_bytes)
    if len(content) != num_bytes:
        raise CodecError(f"payload holds {len(content)} bytes of labels, {num_bytes} are announced")
    found = np.frombuffer(content, dtype=np.uint8 if base <= _NUM_BYTES else "<u2")
    if int(found.max(initial=0)) >= base**num_digits:
        raise CodecError(f"payload holds the labels {int(found.max())}, at most {base**num_digits - 1} is right")
    if num_digits == 1:
        return found
    table = np.stack([np.arange(_NUM_BYTES) // base**place % base for place in range(num_digits)], axis=1)
    return np.take(table.astype(np.uint8), found, axis=0).reshape(-1)[:count]


def count_labels(labels: Array, num_labels: int) -> Array:
    """Returns how often each label occurs, as [num_labels] int64."""
    if num_labels <= _FEW:
        return np.array([np.count_nonzero(labels == label) for label in range(num_labels)], dtype=np.int64)
    counts = np.zeros(num_labels, dtype=np.int64)
    for begin in range(0, labels.size, _CHUNK):
        counts += np.bincount(labels[begin : begin + _CHUNK], minlength=num_labels)
    return counts


def _digits(labels: Array, base: int) -> Array:
    """Returns the content of the frame."""
    if base > _NUM_BYTES:
        return labels.astype("<u2")
    num_digits = _digits_of_byte(base)
    if num_digits == 1:
        return labels.astype(np.uint8)
    content = np.zeros(-(-labels.size // num_digits), dtype=np.uint8)
    for place in range(num_digits):
        digits = labels[place::num_digits].astype(np.uint8)
        content[: digits.size] += digits * np.uint8(base**place)
    return content


def _digits_of_byte(base: int) -> int:
    """Returns how many digits fit in a byte, at least one and at most eight."""
    return next((number for number in range(8, 1, -1) if base**number <= _NUM_BYTES), 1)
