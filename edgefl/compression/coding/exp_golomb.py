"""Positive integers of very unequal size in few bits: exp-Golomb codes with the classes in order of their frequency.

A number v is of class c = floor(log2(v)); written are the class, in unary as its rank among the classes by frequency,
and the lowest c bits. Gaps between the largest entries of a real gradient need a third less than with Golomb-Rice:
they come in clusters (a row of a dense layer, a filter), so tiny and huge gaps are frequent and others are not. As in
`rice.py` the parts are streams of their own: the number of classes, the classes most frequent first a byte each, the
unary stream, then the low bits of each class from the lowest up.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.coding.masks import looked_up, picked, put
from edgefl.compression.coding.rice import pack_bits, read_bits, read_unary, tally, write_unary
from edgefl.compression.wire import Reader, varint
from edgefl.errors import CodecError
from edgefl.types import Array

MAX_CLASSES = 32

_CHUNK = 2**15


def exp_golomb_bits(values: Array) -> int:
    """Returns how many bits [n] values, n > 0 and each from 1 to 2**32 - 1, take."""
    return exp_golomb_cost(*tally(values))


def exp_golomb_cost(numbers: Array, counts: Array) -> int:
    """Returns what `exp_golomb_bits` does, of what `tally` gives."""
    counts = np.bincount(_classes(numbers), weights=counts).astype(np.int64)
    by_frequency = np.sort(counts[counts > 0])[::-1]
    ranks = np.arange(1, by_frequency.size + 1)
    return int(by_frequency @ ranks + counts @ np.arange(counts.size)) + 8 * (by_frequency.size + 3)


def write_exp_golomb(values: Array) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0 and each from 1 to 2**32 - 1."""
    classes = _classes(values)
    counts = _counts(classes)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    ranks = np.zeros(MAX_CLASSES, dtype=np.uint8)
    ranks[order] = np.arange(order.size)
    low_bits = [pack_bits(picked(values, classes == each), each) for each in np.flatnonzero(counts).tolist()]
    return [varint(order.size), order.astype(np.uint8), *write_unary(looked_up(ranks, classes)), *low_bits]


def read_exp_golomb(reader: Reader, count: int) -> Array:
    """Returns the [count] int64 values that `write_exp_golomb` wrote.

    Raises:
        CodecError: damaged.
    """
    order = np.frombuffer(reader.take(reader.varint(MAX_CLASSES)), dtype=np.uint8)
    if np.any(order >= MAX_CLASSES) or len(set(order.tolist())) < order.size:
        raise CodecError(f"payload lists the classes {order.tolist()}, expected different ones below {MAX_CLASSES}")
    ranks = np.diff(read_unary(reader, count, count * order.size), prepend=-1) - 1
    if np.any(ranks >= order.size):
        raise CodecError(f"payload holds class number {int(ranks.max())} of {order.size}")
    classes = order[ranks]
    counts = _counts(classes) if count else np.zeros(0)
    values = np.empty(count, dtype=np.int64)
    for each in np.flatnonzero(counts).tolist():
        put((1 << each) + read_bits(reader, int(counts[each]), each), classes == each, values)
    return values


def _classes(values: Array) -> Array:
    """Returns floor(log2(v)) of each value, exactly."""
    classes = np.empty(values.size, dtype=np.uint8)
    for begin in range(0, values.size, _CHUNK):
        classes[begin : begin + _CHUNK] = np.frexp(values[begin : begin + _CHUNK].astype(np.float64))[1] - 1
    return classes


def _counts(classes: Array) -> Array:
    numbers, found = tally(classes)
    counts = np.zeros(MAX_CLASSES, dtype=np.int64)
    counts[numbers] = found
    return counts
