"""Clusters of values of one sign: k-means on most of them, and a separate cluster for the outliers.

Source: Fu et al., LSS (CASQ), 2019, arXiv 1905.03113. Differs from the authors' code: a value is an outlier when it
is beyond their percentile, and not already when that is the nearest centre, which would double their number; and
zeros, which they count as negative, are a separate cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.core.types import Array

OUTLIER_QUANTILE = 0.95
"""Values beyond this quantile of their sign are outliers."""

_MAX_STEPS = 100
_NUM_BINS = 100
_OUTLIER_WEIGHT = 3.0
_MIN_BUCKETS = 10
# A chunk's numbers stay in the cache.
_CHUNK = 2**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Clusters:
    """Bounds between the clusters of positive values and, by magnitude, of negative ones.

    Label 0 is for zeros; the positive clusters follow from the smallest magnitudes to the largest, then the
    negative ones. A value on a bound belongs below it.
    """

    positive: tuple[float, ...]
    negative: tuple[float, ...]

    @property
    def num_labels(self) -> int:
        return 3 + len(self.positive) + len(self.negative)

    def assign_labels(self, values: Array) -> Array:
        """Returns the label of each of [n] float32 values as [n] uint8."""
        labels = np.empty(values.size, dtype=np.uint8)
        for start in range(0, values.size, _CHUNK):
            labels[start : start + _CHUNK] = self._assign_chunk(values[start : start + _CHUNK])
        return labels

    def _assign_chunk(self, values: Array) -> Array:
        positive, negative = np.ones(values.size, np.uint8), np.full(values.size, 2 + len(self.positive), np.uint8)
        for bound in self.positive:
            positive += values > np.float32(bound)
        for bound in self.negative:
            negative += values < np.float32(-bound)
        positive *= values > 0
        negative *= values < 0
        return positive + negative


def train_clusters(sample: Array, clusters_per_sign: int) -> Clusters:
    """Returns clusters fitted to float32 samples; `clusters_per_sign` each, one for an absent sign.

    There are `clusters_per_sign` for each sign, one where it does not occur.
    """
    return Clusters(
        positive=_compute_bounds(sample[sample > 0], clusters_per_sign),
        negative=_compute_bounds(-sample[sample < 0], clusters_per_sign),
    )


def compute_bucket_weights(sample: Array, labels: Array, clusters: Clusters) -> Array:
    """Returns each label's weight for buckets: its values' entropy times their mean magnitude.

    Outliers count three times: they dominate an update, and differ most among each other.
    """
    weights = np.zeros(clusters.num_labels)
    for label in range(1, clusters.num_labels):
        magnitudes = np.abs(sample[labels == label], dtype=np.float64)
        if magnitudes.size:
            weights[label] = magnitudes.mean() * (1 + _compute_entropy(magnitudes))
    weights[1 + len(clusters.positive)] *= _OUTLIER_WEIGHT if clusters.positive else 1
    weights[-1] *= _OUTLIER_WEIGHT if clusters.negative else 1
    return weights


def assign_buckets(budget: int, weights: Array, members: Array) -> Array:
    """Returns the number of buckets per label: by weight, at least ten, at most its members.

    Args:
        budget: their total; exceeded where ten each take more.
        weights: [labels] weights, 0 for a label that gets none.
        members: [labels] numbers of values.
    """
    sizes = np.where(weights > 0, np.minimum(_MIN_BUCKETS, members), 0)
    while True:
        open_weights = np.where(sizes < members, weights, 0.0)
        remaining = budget - int(sizes.sum())
        if remaining <= 0 or not open_weights.any():
            return sizes
        increments = np.minimum((remaining * (open_weights / open_weights.sum())).astype(np.int64), members - sizes)
        if not increments.any():
            return sizes
        sizes = sizes + increments


def _compute_bounds(magnitudes: Array, clusters_per_sign: int) -> tuple[float, ...]:
    """Returns the ascending bounds of up to `clusters_per_sign` clusters of positive numbers."""
    if clusters_per_sign == 1 or not magnitudes.size:
        return ()
    ordered = np.sort(magnitudes).astype(np.float64)
    tail = float(ordered[int(OUTLIER_QUANTILE * (ordered.size - 1))])
    centres = _compute_centres(ordered[ordered <= tail], clusters_per_sign - 1)
    midpoints = (centres[1:] + centres[:-1]) / 2
    return (*(float(bound) for bound in midpoints), tail)


def _compute_centres(ordered: Array, count: int) -> Array:
    """Returns the centres of Lloyd's algorithm, started at the quantiles of [n] ascending numbers, n > 0."""
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    centres = np.unique(ordered[(np.arange(count) * 2 + 1) * ordered.size // (2 * count)])
    for _ in range(_MAX_STEPS):
        inner = np.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2, side="right")
        bounds = np.unique(np.concatenate([[0], inner, [ordered.size]]))
        new_centres = np.diff(sums[bounds]) / np.diff(bounds)
        if np.array_equal(new_centres, centres):
            break
        centres = new_centres
    return centres


def _compute_entropy(magnitudes: Array) -> float:
    """Returns the bits of a histogram of [n] numbers, n > 0."""
    smallest, span = magnitudes.min(), np.ptp(magnitudes)
    if not span > 0:
        return 0.0
    bins = np.minimum((magnitudes - smallest) / span * _NUM_BINS, _NUM_BINS - 1).astype(np.int64)
    shares = np.bincount(bins) / magnitudes.size
    shares = shares[shares > 0]
    return -float(shares @ np.log2(shares))
