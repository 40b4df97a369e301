"""`lss:b`: all parameters as one sketch: values in 2**b clusters, and means of buckets of similar values.

Clusters are of values of one sign, by k-means on most of them, with a separate cluster for the outliers. They are
trained for each update, so that nothing has to be kept or agreed upon, or with `keep` for ten updates.

Source: Fu et al., LSS (CASQ): locality-sensitive sketching of gradients, 2019, arXiv 1905.03113. Differs from the
paper, but with `hash`: a bucket holds members of its cluster that follow one another instead of those with the same
hash. Both sides know the members, so no bucket is empty and none is larger than its neighbours by more than one; and
entries of one layer or filter are of one size, so that on the gradient of a ResNet-18 the error is half of that with
a hash or less.
Differs from the authors' code: a value is an outlier when it is beyond their percentile, and not already when that is
the nearest centre, which would double their number; and zeros, which they count as negative, are a separate cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.chunked_indexing import iterate_chunks
from edgefl.compression.entropy.levels import count_labels, read_labels, write_labels
from edgefl.compression.sparsification.bucket_means import compute_sketch, count_members, estimate_values
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    compute_max_magnitude,
    encode_lossy_tensors,
    is_lossy,
    parse_int_argument,
    read_exact,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensor, Tensors, TensorSpec

OUTLIER_QUANTILE = 0.95
"""Values beyond this quantile of their sign are outliers."""

_MAX_STEPS = 100
_NUM_BINS = 100
_OUTLIER_WEIGHT = 3.0
_MIN_BUCKETS = 10

DEFAULT_FRACTION = 0.05
_MAX_BITS = 6
_MAX_LABEL = 2**_MAX_BITS
_MAX_SAMPLE_SIZE = 100_000

KEPT_UPDATES, RAW_UPDATES = 10, 500
"""Updates with the same clusters, and the first ones that travel whole, as in the authors' code."""

_HASH, _KEEP, _RAW = "hash", "keep", "raw"


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
        for chunk in iterate_chunks(values.size):
            labels[chunk] = self._assign_chunk(values[chunk])
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


@dataclass(frozen=True, slots=True)
class Lss:
    """Sends each value's cluster, and each bucket's mean by the value stage; zeros stay zeros.

    Args:
        bits: 1 to 6; half of the 2**bits clusters are for each sign, and the last of them for its outliers.
        fraction: number of buckets, as a fraction of the number of values.
        is_hashed: buckets are of members with the same hash of their position.
        keeps_clusters: they are trained for every tenth update.
        begins_raw: the first 500 updates have a bucket for every value.

    Sums of buckets are kept, so the sum of all values is; signs never change. Biased: best behind error feedback,
    which keeps the clusters and the number of updates.
    """

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True

    bits: int
    fraction: float = DEFAULT_FRACTION
    is_hashed: bool = False
    keeps_clusters: bool = False
    begins_raw: bool = False

    @classmethod
    def parse(cls, argument: str) -> Self:
        bits, *others = argument.split(":")
        options = [other for other in others if other in (_HASH, _KEEP, _RAW)]
        fractions = [other for other in others if other not in options]
        if len(fractions) > 1 or len(set(options)) < len(options):
            raise CodecError(
                f"codec stage 'lss' takes a fraction, {_HASH}, {_KEEP} and {_RAW}, once each, got lss:{argument:.40}"
            )
        return cls(
            bits=parse_int_argument("lss", bits, 1, _MAX_BITS),
            fraction=_parse_fraction(fractions[0] if fractions else ""),
            is_hashed=_HASH in options,
            keeps_clusters=_KEEP in options,
            begins_raw=_RAW in options,
        )

    @property
    def remembers(self) -> bool:
        return self.keeps_clusters or self.begins_raw

    def encode(
        self,
        tensors: Tensors,
        shapes: ModelSpec,
        values: ValueStage,
        rng: Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterator[Array]:
        runs: list[Array] = []

        def collect(_spec: TensorSpec, array: Array) -> tuple[Array, ...]:
            compute_max_magnitude("lss", array)
            runs.append(array.reshape(-1))
            return ()

        yield from encode_lossy_tensors(tensors, shapes, collect)
        flat = np.concatenate(runs) if runs else np.zeros(0, dtype=np.float32)
        if not flat.size:
            return
        kept = _KeptClusters(f"lss/{shapes[0].name}", {} if memory is None else memory)
        labels, sizes = self._assign_labels(flat, kept, rng)
        yield from write_labels(labels)
        if self.is_hashed and np.any(labels):
            yield encode_varint(0)
        for means in compute_sketch(flat, labels, sizes, is_hashed=self.is_hashed):
            yield encode_varint(means.size)
            yield from values.encode(means, rng)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        decoded: dict[str, Tensor] = {}
        for spec in shapes:
            # Tensors of the sketch get their position now, and their values when it has been read.
            decoded[spec.name] = np.empty(0) if is_lossy(spec) else read_exact(reader, spec, spec.size)
        flat = _read_sketch(reader, sum(spec.size for spec in shapes if is_lossy(spec)), values)
        start = 0
        for spec in shapes:
            if is_lossy(spec):
                decoded[spec.name] = flat[start : start + spec.size]
                start += spec.size
        return {spec.name: np.reshape(decoded[spec.name], spec.shape) for spec in shapes}  # type: ignore[arg-type]

    def _assign_labels(self, flat: Array, kept: _KeptClusters, rng: Generator) -> tuple[Array, Array]:
        """Returns the label of each value and the number of buckets of each label."""
        number = kept.count_update() if self.remembers else 0
        trained = kept.load(2 ** (self.bits - 1)) if self.keeps_clusters and number % KEPT_UPDATES else None
        if trained is None:
            sample = flat if flat.size <= _MAX_SAMPLE_SIZE else flat[rng.integers(0, flat.size, _MAX_SAMPLE_SIZE)]
            clusters = train_clusters(sample, 2 ** (self.bits - 1))
            trained = clusters, compute_bucket_weights(sample, clusters.assign_labels(sample), clusters)
            if self.keeps_clusters:
                kept.save(*trained)
        clusters, weights = trained
        labels = clusters.assign_labels(flat)
        member_counts = count_labels(labels, clusters.num_labels)
        if self.begins_raw and number < RAW_UPDATES:
            return labels, member_counts
        # A cluster that the sample missed is small, and gets its ten buckets.
        weights = np.append(0.0, np.maximum(weights[1:], np.finfo(np.float64).tiny))
        return labels, assign_buckets(int(self.fraction * flat.size), weights, member_counts)


@dataclass(frozen=True, slots=True)
class _KeptClusters:
    """Clusters, weights for buckets and number of updates in a stage's memory, where names begin with `prefix`."""

    prefix: str
    memory: MutableMapping[str, Array]

    def count_update(self) -> int:
        """Returns the number of earlier updates, and counts this one."""
        number = self._find("updates", np.int64, 0)
        self.memory[f"{self.prefix}/updates"] = np.array((0 if number is None else int(number)) + 1, dtype=np.int64)
        return 0 if number is None else int(number)

    def save(self, clusters: Clusters, weights: Array) -> None:
        for name, numbers in (("positive", clusters.positive), ("negative", clusters.negative), ("weights", weights)):
            self.memory[f"{self.prefix}/{name}"] = np.array(numbers, dtype=np.float64)

    def load(self, clusters_per_sign: int) -> tuple[Clusters, Array] | None:
        """Returns what was saved; None where there is none, or of another number of clusters."""
        positive, negative, weights = (
            self._find(name, np.float64, 1) for name in ("positive", "negative", "weights")
        )
        if positive is None or negative is None or weights is None:
            return None
        clusters = Clusters(positive=tuple(positive.tolist()), negative=tuple(negative.tolist()))
        is_fitting = max(positive.size, negative.size) < clusters_per_sign and weights.size == clusters.num_labels
        return (clusters, weights) if is_fitting else None

    def _find(self, name: str, dtype: type[np.number], ndim: int) -> Array | None:
        array = self.memory.get(f"{self.prefix}/{name}")
        return array if array is not None and array.dtype == dtype and array.ndim == ndim else None


def _read_sketch(reader: PayloadReader, size: int, values: type[ValueStage]) -> Array:
    if not size:
        return np.zeros(0, dtype=np.float32)
    labels = read_labels(reader, size, _MAX_LABEL)
    counts = count_members(labels)
    member_counts = counts.sum(axis=0)
    tables: dict[int, Array] = {}
    is_hashed = False
    for label in np.flatnonzero(member_counts[1:]) + 1:
        num_buckets = reader.read_varint(int(member_counts[label]))
        if not num_buckets and not tables and not is_hashed:
            is_hashed = True
            num_buckets = reader.read_varint(int(member_counts[label]))
        if not num_buckets:
            raise CodecError(f"payload holds no bucket for the {member_counts[label]} values of label {label}")
        tables[int(label)] = values.decode(reader, num_buckets)
    return estimate_values(labels, counts, tables, is_hashed=is_hashed)


def _parse_fraction(argument: str) -> float:
    try:
        fraction = float(argument or DEFAULT_FRACTION)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise CodecError(f"codec stage 'lss' needs buckets for a fraction over 0 and at most 1, got {argument}")
    return fraction
