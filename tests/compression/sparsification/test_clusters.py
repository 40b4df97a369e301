"""Clusters of values by sign and size, and how many buckets each gets."""

import numpy as np

from edgefl.compression.sparsification.clusters import (
    Clusters,
    assign_buckets,
    compute_bucket_weights,
    train_clusters,
)


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
