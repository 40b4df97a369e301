"""Values of one sign in clusters: k-means on most of them, and a cluster of their own for the outliers.

Source: Fu et al., LSS (CASQ), 2019, arXiv 1905.03113. Differs from the authors' code: a value belongs to the outliers
when it is beyond their percentile, and not already when that is the nearest centre, which would double their number;
and zeros, which they count as negative, are a cluster of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.types import Array

TAIL = 0.95
"""Outliers of a sign are what is beyond this quantile of it."""

_MAX_STEPS = 100
_BINS = 100
_TAIL_SHARE = 3.0
_FEWEST = 10
# The steps of a chunk find its numbers in the cache.
_CHUNK = 2**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """Bounds between the clusters of positive values and, by magnitude, of negative ones.

    Label 0 is for zeros; then come the positive clusters from the smallest magnitudes to the largest, then the
    negative ones. A value on a bound belongs below it.
    """

    positive: tuple[float, ...]
    negative: tuple[float, ...]

    @property
    def num_labels(self) -> int:
        return 3 + len(self.positive) + len(self.negative)

    def labels(self, values: Array) -> Array:
        """Returns the label of each of [n] float32 values as [n] uint8."""
        labels = np.empty(values.size, dtype=np.uint8)
        for begin in range(0, values.size, _CHUNK):
            labels[begin : begin + _CHUNK] = self._labels(values[begin : begin + _CHUNK])
        return labels

    def _labels(self, values: Array) -> Array:
        positive, negative = np.ones(values.size, np.uint8), np.full(values.size, 2 + len(self.positive), np.uint8)
        for bound in self.positive:
            positive += values > np.float32(bound)
        for bound in self.negative:
            negative += values < np.float32(-bound)
        positive *= values > 0
        negative *= values < 0
        return positive + negative


def train_clusters(sample: Array, per_sign: int) -> Clusters:
    """Returns clusters that fit a sample of float32 values; `per_sign` for each sign, one where it does not occur."""
    return Clusters(positive=_bounds(sample[sample > 0], per_sign), negative=_bounds(-sample[sample < 0], per_sign))


def bucket_weights(sample: Array, labels: Array, clusters: Clusters) -> Array:
    """Returns the claim of each label to buckets: the entropy of its values times their mean magnitude.

    Outliers count three times: they are what an update is about, and differ most among each other.
    """
    weights = np.zeros(clusters.num_labels)
    for label in range(1, clusters.num_labels):
        members = np.abs(sample[labels == label], dtype=np.float64)
        if members.size:
            weights[label] = members.mean() * (1 + _entropy(members))
    weights[1 + len(clusters.positive)] *= _TAIL_SHARE if clusters.positive else 1
    weights[-1] *= _TAIL_SHARE if clusters.negative else 1
    return weights


def share_buckets(budget: int, weights: Array, members: Array) -> Array:
    """Returns how many buckets each label gets: by weight, at least ten, and never more than it has members.

    Args:
        budget: how many there are; more are given where ten each take more.
        weights: [labels] claims, 0 for a label that gets none.
        members: [labels] numbers of values.
    """
    sizes = np.where(weights > 0, np.minimum(_FEWEST, members), 0)
    while True:
        claims = np.where(sizes < members, weights, 0.0)
        left = budget - int(sizes.sum())
        if left <= 0 or not claims.any():
            return sizes
        given = np.minimum((left * (claims / claims.sum())).astype(np.int64), members - sizes)
        if not given.any():
            return sizes
        sizes = sizes + given


def _bounds(magnitudes: Array, per_sign: int) -> tuple[float, ...]:
    """Returns the ascending bounds of up to `per_sign` clusters of positive numbers."""
    if per_sign == 1 or not magnitudes.size:
        return ()
    ordered = np.sort(magnitudes).astype(np.float64)
    tail = float(ordered[int(TAIL * (ordered.size - 1))])
    centres = _k_means(ordered[ordered <= tail], per_sign - 1)
    between = (centres[1:] + centres[:-1]) / 2
    return (*(float(bound) for bound in between), tail)


def _k_means(ordered: Array, count: int) -> Array:
    """Returns the centres that Lloyd's steps lead to from the quantiles of [n] ascending numbers, n > 0."""
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centres = np.unique(ordered[(np.arange(count) * 2 + 1) * ordered.size // (2 * count)])
    for _ in range(_MAX_STEPS):
        inner = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2, side="right")
        ends = np.unique(np.concatenate([[0], inner, [ordered.size]]))
        moved = np.diff(sums[ends]) / np.diff(ends)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres


def _entropy(magnitudes: Array) -> float:
    """Returns the bits of a histogram of [n] numbers, n > 0."""
    smallest, span = magnitudes.min(), np.ptp(magnitudes)
    if not span > 0:
        return 0.0
    bins = np.minimum((magnitudes - smallest) / span * _BINS, _BINS - 1).astype(np.int64)
    shares = np.bincount(bins) / magnitudes.size
    shares = shares[shares > 0]
    return -float(shares @ np.log2(shares))
