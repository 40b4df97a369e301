"""Clusters of values, and the sketch made of them."""

import numpy as np
import pytest

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.entropy.levels import write_labels
from edgefl.compression.sparsification.bucket_means import compute_sketch, count_members, estimate_values
from edgefl.compression.sparsification.lss import (
    Clusters,
    assign_buckets,
    compute_bucket_weights,
    train_clusters,
)
from edgefl.compression.wire import encode_varint, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, TensorSpec


def test_zeros_positive_and_negative_values_are_apart_and_bounds_belong_below() -> None:
    clusters = Clusters(positive=(1.0, 5.0), negative=(2.0,))
    values = np.array([0, -0.0, 0.5, 1, 1.1, 5, 9, -1e-9, -2, -2.1], dtype=np.float32)
    assert clusters.assign_labels(values).tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 4, 5]
    assert clusters.num_labels == 6


def test_the_last_cluster_of_a_sign_is_what_is_beyond_its_95th_percentile() -> None:
    values = np.concatenate([np.arange(1, 101), -np.arange(1, 101) * 10]).astype(np.float32)
    clusters = train_clusters(values, 2)
    assert np.count_nonzero(clusters.assign_labels(values) == 2) == 5
    assert sorted(values[clusters.assign_labels(values) == 4]) == [-1000, -990, -980, -970, -960]


def test_k_means_finds_groups_that_are_apart() -> None:
    values = np.concatenate([np.full(500, v) for v in (1.0, 2.0, 10.0)] + [np.full(50, 99.0)]).astype(np.float32)
    clusters = train_clusters(values, 4)
    assert [set(clusters.assign_labels(values[values == v])) for v in (1, 2, 10, 99)] == [{1}, {2}, {3}, {4}]


def test_one_sign_alone_equal_values_and_nothing_at_all_have_clusters_too() -> None:
    for sample in (np.ones(9), -np.ones(9), np.zeros(9), np.zeros(0), np.array([1e-45, 3e38])):
        values = sample.astype(np.float32)
        labels = train_clusters(values, 4).assign_labels(values)
        assert np.array_equal(labels == 0, values == 0)
    clusters = train_clusters(np.ones(9, dtype=np.float32), 4)
    # What the sample did not have gets a label nevertheless.
    assert clusters.assign_labels(np.array([-1], dtype=np.float32)).tolist() == [clusters.num_labels - 1]


def test_clusters_do_not_depend_on_the_order_of_the_sample() -> None:
    sample = np.random.default_rng(1).standard_t(3, 5000).astype(np.float32)
    assert train_clusters(sample, 4) == train_clusters(sample[::-1], 4)


def test_outliers_claim_most_buckets() -> None:
    sample = np.random.default_rng(1).standard_t(3, 50_000).astype(np.float32)
    clusters = train_clusters(sample, 2)
    weights = compute_bucket_weights(sample, clusters.assign_labels(sample), clusters)
    assert weights[0] == 0
    assert weights[2] > 5 * weights[1]
    assert weights[4] > 5 * weights[3]


def test_buckets_are_shared_by_weight_with_ten_at_least_and_never_more_than_members() -> None:
    weights, members = np.array([0, 1.0, 3.0, 1e-9]), np.array([500, 1000, 1000, 1000])
    assert assign_buckets(410, weights, members).tolist() == [0, 104, 295, 10]
    # The second is full, so that the rest goes to the others.
    assert assign_buckets(600, weights, np.array([500, 1000, 100, 1000])).tolist() == [0, 489, 100, 10]
    assert assign_buckets(1, weights, np.array([0, 4, 1000, 0])).tolist() == [0, 4, 10, 0]
    assert assign_buckets(10**6, weights, members).tolist() == [0, 1000, 1000, 1000]


SHAPES: ModelSpec = (TensorSpec(name="a", shape=(40, 25)), TensorSpec(name="b", shape=(500,)))


def heavy_tailed(size: int, seed: int = 1) -> Array:
    return (1e-3 * np.random.default_rng(seed).standard_t(3, size)).astype(np.float32)


def tensors(seed: int = 1) -> dict[str, Array]:
    return {spec.name: heavy_tailed(spec.size, seed).reshape(spec.shape) for spec in SHAPES}


def flat(found: object) -> Array:
    assert isinstance(found, dict)
    return np.concatenate([np.asarray(tensor, dtype=np.float64).reshape(-1) for tensor in found.values()])


def decoded(spec: str, given: dict[str, Array]) -> Array:
    codec = make_codec(spec, SHAPES)
    return flat(codec.decode(codec.encode(given, np.random.default_rng(1))))


def tables_of(values: Array, labels: Array, sizes: list[int]) -> dict[int, Array]:
    used = [label for label in range(1, len(sizes)) if np.any(labels == label)]
    return dict(zip(used, compute_sketch(values, labels, sizes), strict=True))


def estimated(labels: Array, tables: dict[int, Array], *, is_hashed: bool = False) -> Array:
    return estimate_values(labels, count_members(labels), tables, is_hashed=is_hashed)


HAND = np.array([1, 3, 10, -2, -4], dtype=np.float32)


def test_the_hand_example() -> None:
    labels = Clusters(positive=(5.0,), negative=()).assign_labels(HAND)
    assert labels.tolist() == [1, 1, 2, 3, 3]
    found = estimated(labels, tables_of(HAND, labels, [0, 1, 1, 1]))
    assert found.tolist() == [2, 2, 10, -3, -3]
    assert found.sum() == HAND.sum() == 8


def test_l1_the_sum_of_every_bucket_is_kept() -> None:
    values = heavy_tailed(1003)
    labels, sizes = np.where(values > 0, 1, 2), [0, 7, 5]
    found = estimated(labels, tables_of(values, labels, sizes))
    for label, num_buckets in ((1, 7), (2, 5)):
        members, means = values[labels == label].astype(np.float64), found[labels == label].astype(np.float64)
        runs = np.split(np.arange(members.size), np.flatnonzero(np.diff(means)) + 1)
        assert len(runs) == num_buckets
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        for run in runs:
            assert members[run].sum() == pytest.approx(means[run].sum(), rel=1e-5)


@pytest.mark.parametrize("spec", ["lss:1", "lss:2", "lss:3:0.2|fp16", "lss:6|int8"])
def test_l2_no_sign_changes_and_nothing_leaves_the_range_of_its_sign(spec: str) -> None:
    given = tensors() | {"b": np.where(np.arange(500) % 3 == 0, 0, heavy_tailed(500, 2)).astype(np.float32)}
    values, found = flat(given), decoded(spec, given)
    assert np.all((np.sign(found) == np.sign(values)) | (found == 0))
    assert not np.any(found[values == 0])
    assert found.max() <= values.max() * 1.01
    assert found.min() >= values.min() * 1.01


def test_l2_an_estimate_is_within_the_values_of_its_cluster() -> None:
    values = heavy_tailed(2000)
    labels = Clusters(positive=(1e-3, 2e-3), negative=(1e-3,)).assign_labels(values)
    found = estimated(labels, tables_of(values, labels, [0, 3, 3, 3, 3, 3]))
    for label in range(1, 6):
        members = values[labels == label]
        assert members.min() <= found[labels == label].min() <= found[labels == label].max() <= members.max()


def test_l3_as_many_buckets_as_values_lose_nothing() -> None:
    assert np.array_equal(decoded("lss:2:1", tensors()), flat(tensors()))


def test_l6_the_mean_of_tables_decodes_to_the_mean_of_decodings_where_clusters_are_the_same() -> None:
    labels, sizes = np.random.default_rng(1).integers(1, 4, 900), [0, 30, 7, 1]
    workers = [tables_of(heavy_tailed(900, seed), labels, sizes) for seed in range(4)]
    merged = {label: np.mean([tables[label] for tables in workers], axis=0) for label in (1, 2, 3)}
    mean = np.mean([estimated(labels, tables) for tables in workers], axis=0)
    np.testing.assert_allclose(estimated(labels, merged), mean, rtol=1e-5, atol=1e-9)


def test_weighted_sums_of_tables_decode_to_the_weighted_sum_of_decodings_where_labels_are_the_same() -> None:
    labels, sizes, weights = np.random.default_rng(1).integers(0, 4, 900), [0, 30, 7, 1], np.array([0.5, 3, -1, 40.0])
    workers = [tables_of(heavy_tailed(900, seed), labels, sizes) for seed in range(4)]
    merged = {
        label: sum(weight * tables[label] for weight, tables in zip(weights, workers, strict=True))
        for label in (1, 2, 3)
    }
    total = sum(weight * estimated(labels, tables) for weight, tables in zip(weights, workers, strict=True))
    np.testing.assert_allclose(estimated(labels, merged), total, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spec", ["lss:1", "lss:2:1", "lss:4", "lss:6:0.2"])
def test_values_far_apart_have_the_means_of_their_buckets_too(spec: str) -> None:
    """Far apart: in different chunks, of 2**15 values."""
    size, bits = 100_003, int(spec[4])
    values = heavy_tailed(size) * np.repeat(np.float32([1, 0, 100]), [40_000, 20_003, 40_000])
    clusters = train_clusters(values, 2 ** (bits - 1))
    labels = clusters.assign_labels(values)
    members = np.bincount(labels, minlength=clusters.num_labels)
    weights = compute_bucket_weights(values, labels, clusters)
    sizes = assign_buckets(int(float(spec[6:] or 0.05) * size), weights, members)
    tables = tables_of(values, labels, sizes.tolist())
    found = estimated(labels, tables)
    for label, means in tables.items():
        runs = np.arange(means.size + 1) * members[label] // means.size
        assert np.array_equal(found[labels == label], np.repeat(means, np.diff(runs)))
    assert not found[labels == 0].any()
    assert np.array_equal(found, values) == (spec == "lss:2:1")


def test_outliers_come_through_where_buckets_are_few() -> None:
    values = flat(tensors())
    found = decoded("lss:2:0.1", tensors())
    large = np.argsort(-np.abs(values))[:50]
    np.testing.assert_allclose(found[large], values[large], rtol=1e-6)


def test_a_sparse_tensor_and_one_sign_alone_are_no_trouble() -> None:
    shapes = (TensorSpec(name="w", shape=(6,)),)
    codec = make_codec("lss:2", shapes)
    given = {"w": SparseTensor(indices=np.array([1, 4]), values=np.array([2, 5], dtype=np.float32), shape=(6,))}
    assert flat(codec.decode(codec.encode(given, np.random.default_rng(1)))).tolist() == [0, 2, 0, 0, 5, 0]


def test_a_hash_of_the_position_chooses_buckets_whose_sums_are_kept() -> None:
    values, labels = heavy_tailed(1003), np.full(1003, 1)
    (means,) = compute_sketch(values, labels, [0, 40], is_hashed=True)
    found = estimated(labels, {1: means}, is_hashed=True)
    assert found.sum() == pytest.approx(values.sum(), rel=1e-4)
    for mean in np.unique(found):
        members = np.flatnonzero(found == mean)
        assert mean == pytest.approx(values[members].mean(), rel=1e-5)
        assert np.ptp(members) > 200  # far from each other, and not a run
    counts = np.unique(found, return_counts=True)[1]
    assert 36 <= counts.size <= 40
    assert counts.max() < 60


def test_hashed_sketches_decode_as_estimated_and_are_worse_where_neighbours_are_alike() -> None:
    smooth = {"a": np.linspace(1, 2, 1000, dtype=np.float32).reshape(40, 25), "b": np.zeros(500, np.float32)}
    errors = [np.linalg.norm(decoded(spec, smooth) - flat(smooth)) for spec in ("lss:1:0.1", "lss:1:0.1:hash")]
    assert 0 < 3 * errors[0] < errors[1]
    assert not decoded("lss:2:hash", {"a": np.zeros((40, 25), np.float32), "b": np.zeros(500, np.float32)}).any()


def updates(spec: str, count: int, memory: dict[str, Array]) -> list[Array]:
    codec, luck = make_codec(spec, SHAPES), np.random.default_rng(1)
    return [flat(codec.decode(codec.encode(tensors(seed), luck, memory=memory))) for seed in range(count)]


def test_clusters_are_kept_for_ten_updates_and_trained_anew_for_the_eleventh() -> None:
    codec, memory, kept = make_codec("ef|lss:2:keep", SHAPES), {}, []
    for seed in range(11):
        codec.encode(tensors(seed), np.random.default_rng(1), memory=memory)
        kept.append(memory["lss/a/positive"].tolist())
    assert all(bounds == kept[0] for bounds in kept[:10])
    assert kept[10] != kept[0]
    assert memory["lss/a/updates"] == 11


def test_the_first_500_updates_travel_whole() -> None:
    memory: dict[str, Array] = {"lss/a/updates": np.array(498, dtype=np.int64)}
    found = updates("ef|lss:2:raw", 3, memory)
    assert [bool(np.array_equal(one, flat(tensors(seed)))) for seed, one in enumerate(found)] == [True, True, False]


@pytest.mark.parametrize("name", ["lss/a/positive", "lss/a/negative", "lss/a/weights", "lss/a/updates"])
def test_a_memory_of_another_argument_counts_as_none(name: str) -> None:
    memory: dict[str, Array] = {}
    updates("ef|lss:3:keep", 2, memory)
    before = dict(memory)
    for wrong in (np.zeros(99), np.zeros((2, 2)), np.zeros(3, dtype=np.float32)):
        memory = {**before, name: wrong}
        updates("ef|lss:3:keep", 1, memory)
        assert memory["lss/a/weights"].size == 3 + memory["lss/a/positive"].size + memory["lss/a/negative"].size


def test_no_bucket_twice_is_damage() -> None:
    parts = [*write_labels(np.ones(1500, dtype=np.uint8)), encode_varint(0), encode_varint(0)]
    with pytest.raises(CodecError, match="holds no bucket for the 1500 values of label 1"):
        decode_body(write_frame([19], 2, parts), SHAPES)
