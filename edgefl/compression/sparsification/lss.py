"""`lss:b`: all parameters as one sketch: values in 2**b clusters, and means of buckets of similar values.

Source: Fu et al., LSS (CASQ): locality-sensitive sketching of gradients, 2019, arXiv 1905.03113. Differs from the
paper: a bucket holds members of its cluster that follow one another instead of those with the same hash. Both sides
know the members, so no bucket is empty and none is larger than its neighbours by more than one; and entries of one
layer or filter are of one size, so that on the gradient of a ResNet-18 the error is half of that with a hash or less.
Clusters are trained for each update, so that nothing has to be kept or agreed upon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.chunked_indexing import scatter_masked, select_masked
from edgefl.compression.entropy.labels import count_labels, read_labels, write_labels
from edgefl.compression.sparsification.clusters import assign_buckets, compute_bucket_weights, train_clusters
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    add_tensor_name_to_errors,
    compute_max_magnitude,
    is_lossy,
    parse_int_argument,
    read_exact,
    to_spec_array,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensor, Tensors

DEFAULT_FRACTION = 0.05
_MAX_BITS = 6
_MAX_LABEL = 2**_MAX_BITS
_MAX_SAMPLE_SIZE = 100_000
# Number of buckets summed at a time, in double precision.
_CHUNK = 2**14


@dataclass(frozen=True, slots=True)
class Lss:
    """Sends each value's cluster, and each bucket's mean by the value stage; zeros stay zeros.

    Args:
        bits: 1 to 6; half of the 2**bits clusters are for each sign, and the last of them for its outliers.
        fraction: number of buckets, as a fraction of the number of values.

    Sums of buckets are kept, so the sum of all values is; signs never change. Biased: best behind error feedback.
    """

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = False
    is_contraction: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True

    bits: int
    fraction: float = DEFAULT_FRACTION

    @classmethod
    def parse(cls, argument: str) -> Self:
        bits, _, fraction = argument.partition(":")
        return cls(bits=parse_int_argument("lss", bits, 1, _MAX_BITS), fraction=_parse_fraction(fraction))

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        runs = []
        for spec in shapes:
            array = to_spec_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with add_tensor_name_to_errors(spec):
                compute_max_magnitude("lss", array)
            runs.append(array.reshape(-1))
        flat = np.concatenate(runs) if runs else np.zeros(0, dtype=np.float32)
        if not flat.size:
            return
        labels, sizes = self._assign_labels(flat, rng)
        yield from write_labels(labels)
        for means in compute_sketch(flat, labels, sizes):
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

    def _assign_labels(self, flat: Array, rng: Generator) -> tuple[Array, Array]:
        """Returns the label of each value and the number of buckets of each label."""
        sample = flat if flat.size <= _MAX_SAMPLE_SIZE else flat[rng.integers(0, flat.size, _MAX_SAMPLE_SIZE)]
        clusters = train_clusters(sample, 2 ** (self.bits - 1))
        weights = compute_bucket_weights(sample, clusters.assign_labels(sample), clusters)
        labels = clusters.assign_labels(flat)
        member_counts = count_labels(labels, clusters.num_labels)
        # A cluster that the sample missed is small, and gets its ten buckets.
        weights[1:] = np.maximum(weights[1:], np.finfo(np.float64).tiny)
        return labels, assign_buckets(int(self.fraction * flat.size), weights, member_counts)


def compute_sketch(flat: Array, labels: Array, sizes: Sequence[int] | Array) -> Iterator[Array]:
    """Yields the bucket means of each label with members, except 0, the label of zeros.

    Args:
        flat: [n] float32 values.
        labels: [n] small non-negative integers.
        sizes: number of buckets of each label, from 1 to its number of members.
    """
    for label in range(1, len(sizes)):
        members = select_masked(flat, labels == label)
        if members.size == sizes[label]:
            if members.size:
                yield members
            continue
        bounds = _compute_bounds(members.size, int(sizes[label]))
        means = np.empty(int(sizes[label]), dtype=np.float32)
        for start in range(0, means.size, _CHUNK):
            chunk_bounds = bounds[start : start + _CHUNK + 1]
            sums = np.add.reduceat(
                members[chunk_bounds[0] : chunk_bounds[-1]], chunk_bounds[:-1] - chunk_bounds[0], dtype=np.float64
            )
            means[start : start + _CHUNK] = sums / np.diff(chunk_bounds)
        yield means


def estimate_values(labels: Array, tables: dict[int, Array]) -> Array:
    """Returns [n] float32 values: the mean of each one's bucket by label, and zero for label 0."""
    values = np.zeros(labels.size, dtype=np.float32)
    for label, means in tables.items():
        is_member = labels == label
        num_members = int(np.count_nonzero(is_member))
        is_exact = means.size == num_members
        estimates = means if is_exact else np.repeat(means, np.diff(_compute_bounds(num_members, means.size)))
        scatter_masked(estimates, is_member, values)
    return values


def _read_sketch(reader: PayloadReader, size: int, values: type[ValueStage]) -> Array:
    if not size:
        return np.zeros(0, dtype=np.float32)
    labels = read_labels(reader, size, _MAX_LABEL)
    member_counts = count_labels(labels, int(labels.max()) + 1)
    tables = {}
    for label in np.flatnonzero(member_counts[1:]) + 1:
        num_buckets = reader.read_varint(int(member_counts[label]))
        if not num_buckets:
            raise CodecError(f"payload holds no bucket for the {member_counts[label]} values of label {label}")
        tables[int(label)] = values.decode(reader, num_buckets)
    return estimate_values(labels, tables)


def _compute_bounds(num_members: int, num_buckets: int) -> Array:
    """Returns the start of each bucket among its cluster's members, and the end of the last."""
    return np.arange(num_buckets + 1) * num_members // num_buckets


def _parse_fraction(argument: str) -> float:
    try:
        fraction = float(argument or DEFAULT_FRACTION)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction <= 1:
        raise CodecError(f"codec stage 'lss' needs buckets for a fraction over 0 and at most 1, got {argument}")
    return fraction
