"""Bucket means of labelled values, and the values that they stand for: the sketch that `lss` sends.

The members of a label, in their order, are cut into runs of nearly equal length, or put into buckets by a hash of
their position. A label with as many buckets as members is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.compression.chunked_indexing import iterate_chunks, select_masked
from edgefl.compression.entropy.levels import count_labels
from edgefl.core.types import Array

# Number of buckets summed at a time, in double precision.
_BUCKET_CHUNK = 2**14
_HASH_CHUNK = 2**16
_HASH_MULTIPLIER, _HASH_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(33)


def compute_sketch(
    flat: Array, labels: Array, sizes: Sequence[int] | Array, *, is_hashed: bool = False
) -> Iterator[Array]:
    """Yields the bucket means of each label with members, except 0, the label of zeros.

    Args:
        flat: [n] float32 values.
        labels: [n] small non-negative integers.
        sizes: number of buckets of each label, from 1 to its number of members.
        is_hashed: whether buckets are by a hash of the position, so that some may be empty, with a mean of zero.
    """
    for label in range(1, len(sizes)):
        is_member = labels == label
        num_members = int(np.count_nonzero(is_member))
        if num_members == sizes[label]:
            if num_members:
                yield select_masked(flat, is_member)
        elif is_hashed:
            yield _compute_hashed_means(flat, is_member, int(sizes[label]))
        else:
            yield _compute_run_means(select_masked(flat, is_member), int(sizes[label]))


def _compute_run_means(members: Array, size: int) -> Array:
    """Returns the [size] means of members that follow one another."""
    bounds = _compute_bucket_starts(members.size, size)
    means = np.empty(size, dtype=np.float32)
    for chunk in iterate_chunks(size, _BUCKET_CHUNK):
        chunk_bounds = bounds[chunk.start : chunk.stop + 1]
        sums = np.add.reduceat(
            members[chunk_bounds[0] : chunk_bounds[-1]], chunk_bounds[:-1] - chunk_bounds[0], dtype=np.float64
        )
        means[chunk] = sums / np.diff(chunk_bounds)
    return means


def _compute_hashed_means(flat: Array, is_member: Array, size: int) -> Array:
    """Returns the [size] means of members with the same hash of their position."""
    sums, counts = np.zeros(size), np.zeros(size)
    for chunk in iterate_chunks(flat.size, _HASH_CHUNK):
        positions = np.flatnonzero(is_member[chunk])
        buckets = _hash_positions(positions, chunk.start, size)
        sums += np.bincount(buckets, flat[chunk][positions], size)
        counts += np.bincount(buckets, minlength=size)
    means: Array = (sums / np.maximum(counts, 1)).astype(np.float32)
    return means


def _hash_positions(positions: Array, start: int, size: int) -> Array:
    """Returns the bucket, below `size`, of each of [k] positions from `start` on."""
    # Multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, 6.4); uint64 wraps around.
    hashes = (positions + start).astype(np.uint64) * _HASH_MULTIPLIER >> _HASH_SHIFT
    buckets: Array = (hashes % np.uint64(size)).astype(np.int64)
    return buckets


def count_members(labels: Array) -> Array:
    """Returns the occurrences of each label by chunk of [n] labels, n > 0, as [chunks, highest label + 1] int64."""
    num_labels = int(labels.max()) + 1
    return np.array([count_labels(labels[chunk], num_labels) for chunk in iterate_chunks(labels.size)])


def estimate_values(labels: Array, counts: Array, tables: Mapping[int, Array], *, is_hashed: bool = False) -> Array:
    """Returns [n] float32 values: the mean of each one's bucket by label, and zero where a label has no table.

    Args:
        labels: [n] small non-negative integers.
        counts: of `count_members`.
        tables: by label the means of its buckets, at most as many as it has members.
        is_hashed: as in `compute_sketch`.
    """
    member_counts = counts.sum(axis=0)
    clusters = {label: _Cluster(means, int(member_counts[label]), is_hashed) for label, means in tables.items()}
    values = np.empty(labels.size, dtype=np.float32)
    for chunk, chunk_counts in zip(iterate_chunks(labels.size), counts.tolist(), strict=True):
        # One stable sort finds the members of all labels, each in their order.
        order = labels[chunk].argsort(kind="stable")
        estimates, end = np.zeros(order.size, dtype=np.float32), 0
        for label, count in enumerate(chunk_counts):
            part = slice(end, end + count)
            if count and label in clusters:
                estimates[part] = clusters[label].estimate_next(order[part], chunk.start)
            end = part.stop
        values[chunk][order] = estimates
    return values


@dataclass(slots=True)
class _Cluster:
    """A label's bucket means, and how many of its members were read."""

    means: Array
    num_members: int
    is_hashed: bool
    num_read: int = 0

    def estimate_next(self, positions: Array, start: int) -> Array:
        """Returns the bucket means of the next members, at `positions` from `start` on."""
        first, end = self.num_read, self.num_read + positions.size
        self.num_read = end
        if self.means.size == self.num_members:
            return self.means[first:end]
        if self.is_hashed:
            return self.means[_hash_positions(positions, start, self.means.size)]
        buckets = slice(_find_bucket(first, self), _find_bucket(end - 1, self) + 1)
        bounds = np.arange(buckets.start, buckets.stop + 1) * self.num_members // self.means.size
        bounds[0], bounds[-1] = first, end
        return np.repeat(self.means[buckets], bounds[1:] - bounds[:-1])


def _find_bucket(number: int, cluster: _Cluster) -> int:
    """Returns the run of a cluster's member: the last one that starts at it or before."""
    return ((number + 1) * cluster.means.size - 1) // cluster.num_members


def _compute_bucket_starts(num_members: int, num_buckets: int) -> Array:
    """Returns the start of each bucket among its cluster's members, and the end of the last."""
    return np.arange(num_buckets + 1) * num_members // num_buckets
