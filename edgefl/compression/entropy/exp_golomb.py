"""Exp-Golomb codes for positive integers of very unequal size, classes ordered by frequency.

A number v is of class c = floor(log2(v)); written are the class, in unary as its rank among the classes by frequency,
and the lowest c bits. Gaps between the largest entries of a real gradient need a third less than with Golomb-Rice:
they come in clusters (a row of a dense layer, a filter), so tiny and huge gaps are frequent and others are not. As in
`golomb_rice.py` the parts are separate streams: the number of classes, the classes most frequent first a byte each,
the unary stream, then the low bits of each class from the lowest up.
"""

from __future__ import annotations

import numpy as np

from edgefl.compression.entropy.chunked_indexing import gather, scatter_masked, select_masked
from edgefl.compression.entropy.golomb_rice import count_values, pack_bits, read_bits, read_unary, write_unary
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

MAX_CLASSES = 32

_CHUNK = 2**15


def count_exp_golomb_bits(values: Array) -> int:
    """Returns the number of bits for [n] values, n > 0 and each from 1 to 2**32 - 1."""
    return compute_exp_golomb_cost(*count_values(values))


def compute_exp_golomb_cost(numbers: Array, counts: Array) -> int:
    """Returns the same as `count_exp_golomb_bits`, from the result of `count_values`."""
    counts = np.bincount(_compute_classes(numbers), weights=counts).astype(np.int64)
    by_frequency = np.sort(counts[counts > 0])[::-1]
    ranks = np.arange(1, by_frequency.size + 1)
    return int(by_frequency @ ranks + counts @ np.arange(counts.size)) + 8 * (by_frequency.size + 3)


def write_exp_golomb(values: Array) -> list[Array]:
    """Returns the arrays to write for [n] values, n > 0 and each from 1 to 2**32 - 1."""
    classes = _compute_classes(values)
    counts = _count_classes(classes)
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    ranks = np.zeros(MAX_CLASSES, dtype=np.uint8)
    ranks[order] = np.arange(order.size)
    low_bits = [
        pack_bits(select_masked(values, classes == bit_class), bit_class)
        for bit_class in np.flatnonzero(counts).tolist()
    ]
    return [encode_varint(order.size), order.astype(np.uint8), *write_unary(gather(ranks, classes)), *low_bits]


def read_exp_golomb(reader: PayloadReader, count: int) -> Array:
    """Returns the [count] int64 values that `write_exp_golomb` wrote.

    Raises:
        CodecError: damaged.
    """
    order = np.frombuffer(reader.read_bytes(reader.read_varint(MAX_CLASSES)), dtype=np.uint8)
    if np.any(order >= MAX_CLASSES) or len(set(order.tolist())) < order.size:
        raise CodecError(f"payload lists the classes {order.tolist()}, expected different ones below {MAX_CLASSES}")
    ranks = np.diff(read_unary(reader, count, count * order.size), prepend=-1) - 1
    if np.any(ranks >= order.size):
        raise CodecError(f"payload holds class number {int(ranks.max())} of {order.size}")
    classes = order[ranks]
    counts = _count_classes(classes) if count else np.zeros(0)
    values = np.empty(count, dtype=np.int64)
    for bit_class in np.flatnonzero(counts).tolist():
        scatter_masked(
            (1 << bit_class) + read_bits(reader, int(counts[bit_class]), bit_class), classes == bit_class, values
        )
    return values


def _compute_classes(values: Array) -> Array:
    """Returns floor(log2(v)) of each value, exactly."""
    classes = np.empty(values.size, dtype=np.uint8)
    for start in range(0, values.size, _CHUNK):
        classes[start : start + _CHUNK] = np.frexp(values[start : start + _CHUNK].astype(np.float64))[1] - 1
    return classes


def _count_classes(classes: Array) -> Array:
    numbers, occurrences = count_values(classes)
    counts = np.zeros(MAX_CLASSES, dtype=np.int64)
    counts[numbers] = occurrences
    return counts
