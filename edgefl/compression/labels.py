"""One of a few labels for each value, in nearly as few bits as their entropy.

Written are the number of labels that occur, these with the most frequent first, and a byte that names the form:

    0      each one's rank by frequency, in as many bits as the highest one needs
    1      which values do not have the first label as a set, which of those not the second as a set among them, …
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.indices import read_mask, write_mask
from edgefl.compression.masks import looked_up, picked, put
from edgefl.compression.rice import pack_bits, read_narrow_bits
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

_FIXED, _SETS = 0, 1
_MAX_LABELS = 2**10
_FEW = 16
# The steps of a chunk find its numbers in the cache.
_CHUNK = 2**15
_ENDLESS_FROM = 8.0
"""Sets take a pass over the values for each rank: with a mean rank over this the time is not worth the bytes."""


def write_labels(labels: Array) -> list[Array]:
    """Returns the arrays to write for [n] non-negative integer labels, n > 0."""
    counts = count_labels(labels, int(labels.max()) + 1)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    parts = [varint(order.size), *(varint(int(label)) for label in order)]
    if order.size == 1:
        return parts
    ranks = looked_up(_ranks_of(order, counts.size), labels)
    by_frequency = counts[order]
    form = _SETS if _sets_pay(by_frequency) else _FIXED
    coded = _write_sets(ranks, order.size) if form == _SETS else [pack_bits(ranks, _width(order.size))]
    return [*parts, np.array([form], dtype=np.uint8), *coded]


def read_labels(reader: Reader, count: int, highest: int) -> Array:
    """Returns the [count] labels, count > 0, each at most `highest`.

    Raises:
        CodecError: damaged.
    """
    num_labels = reader.varint(min(count, highest + 1, _MAX_LABELS))
    order = np.array([reader.varint(highest) for _ in range(num_labels)], dtype=np.min_scalar_type(highest))
    if not num_labels or np.unique(order).size != num_labels:
        raise CodecError(f"payload lists the labels {order.tolist()}, expected different ones")
    if num_labels == 1:
        return np.full(count, order[0])
    form = reader.take(1)[0]
    if form == _SETS:
        return looked_up(order, _read_sets(reader, count, num_labels))
    if form != _FIXED:
        raise CodecError(f"payload holds labels in form {form}, which this edgefl does not know")
    ranks = read_narrow_bits(reader, count, _width(num_labels))
    if int(ranks.max()) >= num_labels:
        raise CodecError(f"payload holds label number {int(ranks.max())} of {num_labels}")
    return looked_up(order, ranks)


def count_labels(labels: Array, num_labels: int) -> Array:
    """Returns how often each label occurs, as [num_labels] int64."""
    if num_labels <= _FEW:
        return np.array([np.count_nonzero(labels == label) for label in range(num_labels)], dtype=np.int64)
    counts = np.zeros(num_labels, dtype=np.int64)
    for begin in range(0, labels.size, _CHUNK):
        counts += np.bincount(labels[begin : begin + _CHUNK], minlength=num_labels)
    return counts


def _ranks_of(order: Array, num_labels: int) -> Array:
    ranks = np.zeros(num_labels, dtype=np.uint8 if order.size <= 2**8 else np.uint16)
    ranks[order] = np.arange(order.size)
    return ranks


def _sets_pay(by_frequency: Array) -> bool:
    """Says whether the ranks are smaller as sets, and few passes enough."""
    shares = by_frequency / by_frequency.sum()
    entropy = -float(shares @ np.log2(shares))
    mean_rank = float(shares @ np.arange(shares.size))
    # Sets come within a twentieth of the entropy.
    return mean_rank <= _ENDLESS_FROM and 1.05 * entropy < _width(shares.size)


def _write_sets(ranks: Array, num_labels: int) -> list[Array]:
    parts: list[Array] = []
    for rank in range(num_labels - 1):
        is_later = ranks > rank
        parts += write_mask(is_later)
        ranks = picked(ranks, is_later)
    return parts


def _read_sets(reader: Reader, count: int, num_labels: int) -> Array:
    """Returns the ranks: built from the last set to the first, so that each is spread over its own values only."""
    masks, left, num_read = [], count, 0
    for _ in range(num_labels - 1):
        num_read += left
        if num_read > _ENDLESS_FROM * count:
            raise CodecError(f"payload takes over {_ENDLESS_FROM:g} passes for {count} labels")
        masks.append(read_mask(reader, left))
        left = int(np.count_nonzero(masks[-1]))
    ranks = np.zeros(left, dtype=np.uint8 if num_labels <= 2**8 else np.uint16)
    while masks:
        is_later = masks.pop()
        whole = np.zeros(is_later.size, dtype=ranks.dtype)
        put(ranks + 1, is_later, whole)
        ranks = whole
    return ranks


def _width(num_labels: int) -> int:
    return max(1, (num_labels - 1).bit_length())
