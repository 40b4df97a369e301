import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.core.errors import ConfigError, DataError
from edgefl.tasks.datasets.partitioning import (
    PartitionScheme,
    list_duplicate_holders,
    list_subset_holders,
    parse_scheme,
    partition_rows,
)


def cut(text, labels, devices, *, seed=7, groups=None):
    rng = np.random.default_rng(seed)
    return partition_rows(parse_scheme(text), labels=np.asarray(labels), num_devices=devices, rng=rng, groups=groups)


ONCE = [
    "iid", "contiguous", "by-class", "natural", "dirichlet:0.5", "dirichlet:0.05", "labels:1", "labels:3", "labels:8",
    "classes:2", "classes:8", "shards:1", "shards:2", "shards:5", "power:0.5", "power:2",
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    scheme=st.sampled_from(ONCE),
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=150),
    devices=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_every_sample_goes_to_exactly_one_device_or_the_scheme_is_refused(scheme, labels, devices, seed):
    groups = np.arange(len(labels)) % 7
    try:
        sharding = cut(scheme, labels, devices, seed=seed, groups=groups)
    except ConfigError:
        return
    assert len(sharding.rows) == devices
    assert all(len(rows) for rows in sharding.rows)
    assert sorted(np.concatenate(sharding.rows)) == list(range(len(labels)))


@settings(max_examples=80, deadline=None)
@given(
    n=st.integers(20, 90),
    devices=st.integers(1, 6),
    r=st.integers(1, 6),
    name=st.sampled_from(["redundant", "duplicate"]),
)
def test_every_sample_is_on_exactly_r_devices_and_blocks_agree_between_their_holders(n, devices, r, name):
    try:
        sharding = cut(f"{name}:{r}", np.zeros(n, np.int64), devices)
    except ConfigError:
        assert r > devices or (name == "duplicate" and devices % r)
        return
    assert (np.bincount(np.concatenate(sharding.rows), minlength=n) == r).all()
    content = {}
    for rows, blocks in zip(sharding.rows, sharding.blocks, strict=True):
        assert sum(stop - start for start, stop in blocks.values()) == len(rows)
        for block, (start, stop) in blocks.items():
            assert content.setdefault(block, rows[start:stop].tolist()) == rows[start:stop].tolist()
    assert len(content) == (math.comb(devices, r) if name == "redundant" else devices // r)


def test_any_loss_of_fewer_than_r_devices_leaves_every_block_with_a_holder_and_duplicates_are_neighbours():
    holders = list_subset_holders(5, 3)
    assert all(set(block) - {lost, other} for block in holders for lost in range(5) for other in range(5))
    assert list_duplicate_holders(6, 2) == [(0, 1), (2, 3), (4, 5)]


def test_the_same_seed_cuts_the_same_shards():
    labels = np.arange(200) % 10
    for scheme in ("iid", "by-class", "dirichlet:0.5", "labels:3", "redundant:2", "shards:2"):
        first, again, other = cut(scheme, labels, 4), cut(scheme, labels, 4), cut(scheme, labels, 4, seed=8)
        assert all(np.array_equal(a, b) for a, b in zip(first.rows, again.rows, strict=True))
        assert not all(np.array_equal(a, b) for a, b in zip(first.rows, other.rows, strict=True))


@pytest.mark.parametrize(
    ("scheme", "devices", "classes", "size"),
    [("by-class", 5, 2, 60), ("by-class", 20, 1, 15), ("labels:8", 5, 8, None), ("shards:1", 10, 1, 30)],
)
def test_each_device_has_so_many_classes(scheme, devices, classes, size):
    labels = np.arange(300) % 10
    for rows in cut(scheme, labels, devices).rows:
        assert len(np.unique(labels[rows])) == classes
        assert size in (None, len(rows))


FASHION_LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 6000))


@pytest.mark.parametrize(
    ("devices", "held"),
    [
        (2, [{0: 6000, 1: 6000, 2: 6000, 3: 6000, 4: 6000}, {5: 6000, 6: 6000, 7: 6000, 8: 6000, 9: 6000}]),
        (
            6,
            [
                {0: 6000, 1: 4000}, {1: 2000, 2: 6000, 3: 2000}, {3: 4000, 4: 6000},
                {5: 6000, 6: 4000}, {6: 2000, 7: 6000, 8: 2000}, {8: 4000, 9: 6000},
            ],
        ),
    ],
)  # fmt: skip
def test_sorted_gives_each_device_the_classes_of_esyncs_split_by_class(devices, held):
    rows = cut("sorted", FASHION_LABELS, devices).rows
    found = [np.unique(FASHION_LABELS[part], return_counts=True) for part in rows]
    assert [dict(zip(classes.tolist(), counts.tolist(), strict=True)) for classes, counts in found] == held


def test_sorted_keeps_the_order_of_the_rows_and_leaves_out_what_cannot_be_shared():
    rows = cut("sorted", FASHION_LABELS, 7).rows
    assert [len(part) for part in rows] == [8571] * 7
    assert len(np.unique(np.concatenate(rows))) == 60_000 - 3
    assert (np.diff(rows[0][FASHION_LABELS[rows[0]] == 0]) > 0).all()
    assert all(np.array_equal(a, b) for a, b in zip(rows, cut("sorted", FASHION_LABELS, 7, seed=8).rows, strict=True))


@pytest.mark.parametrize(("fraction", "own"), [(0.0, 1.0), (0.25, 0.775), (1.0, 0.1)])
def test_disorder_deals_a_fraction_of_the_sorted_parts_anew(fraction, own):
    rows = cut(f"disorder:{fraction}", FASHION_LABELS, 10).rows
    assert [len(part) for part in rows] == [6000] * 10
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(60_000))
    kept = [(FASHION_LABELS[part] == device).mean() for device, part in enumerate(rows)]
    assert kept == pytest.approx([own] * 10, abs=0.02)


@pytest.mark.parametrize("name", ["redundant", "duplicate"])
def test_a_chain_cuts_the_blocks_by_its_first_scheme_and_gives_each_to_r_devices(name):
    labels, groups = FASHION_LABELS[:6000], np.arange(6000) % 40
    holders = list_subset_holders(6, 2) if name == "redundant" else list_duplicate_holders(6, 2)
    for first in ("sorted", "disorder:0.2", "labels:4", "natural"):
        chained = cut(f"{first} | {name}:2", labels, 6, groups=groups)
        parts = cut(first, labels, len(holders), groups=groups).rows
        for block, devices in enumerate(holders):
            assert [device for device in range(6) if block in chained.blocks[device]] == list(devices)
            for device in devices:
                assert np.array_equal(chained.rows[device][slice(*chained.blocks[device][block])], parts[block])


def test_shards_k_deals_k_parts_of_the_sorted_rows_to_each_device():
    sharding = cut("shards:2", FASHION_LABELS, 100)
    assert [len(rows) for rows in sharding.rows] == [600] * 100
    classes = [len(np.unique(FASHION_LABELS[rows])) for rows in sharding.rows]
    assert max(classes) == 2
    assert np.mean(classes) > 1.7


def test_a_small_alpha_skews_a_large_one_does_not_and_every_device_has_enough():
    labels = np.arange(4000) % 10

    def skew(alpha):
        parts = [np.bincount(labels[rows], minlength=10) for rows in cut(f"dirichlet:{alpha}", labels, 4).rows]
        return float(np.mean([part.max() / part.sum() for part in parts]))

    assert skew(1000) < 0.13
    assert 0.2 < skew(0.5) < skew(0.05)
    for seed in range(20):
        assert min(len(rows) for rows in cut("dirichlet:0.1", labels[:400], 8, seed=seed).rows) >= 10


def test_natural_keeps_people_whole_and_devices_balanced_one_a_person_in_their_order():
    groups = np.repeat(np.arange(1, 7), [50, 10, 20, 30, 40, 60])
    sharding = cut("natural", np.zeros(210, np.int64), 3, groups=groups)
    assert [sorted(set(groups[rows])) for rows in sharding.rows] == [[1, 3], [2, 6], [4, 5]]
    assert [len(rows) for rows in sharding.rows] == [70, 70, 70]
    groups = np.array([3, 3, 1, 2, 2, 2])
    assert [rows.tolist() for rows in cut("natural", np.zeros(6), 3, groups=groups).rows] == [[2], [3, 4, 5], [0, 1]]


@pytest.mark.parametrize(
    ("scheme", "devices", "message"),
    [
        ("natural", 8, "at most 7 devices, got 8"),
        ("labels:0", 2, "must be finite and above 0"),
        ("shards:0", 2, "must be finite and above 0"),
        ("shards:2", 60, "shards:2 on 60 devices makes 120 parts of 100 examples"),
        ("sorted:2", 2, "must be one of"),
        ("labels:11", 2, r"1 <= K <= 10 \(the number of classes\), got 11"),
        ("labels:2", 4, "4 devices with 2 of 10 classes each would leave classes to nobody"),
        ("redundant:5", 4, r"1 <= R <= 4 \(the number of devices\), got 5"),
        ("redundant:10", 40, "makes 847660528 blocks, at most 10000; use duplicate:10"),
        ("redundant:3", 12, "100 examples cannot fill 220 blocks"),
        ("duplicate:3", 4, "got 4 devices and R = 3"),
        ("iid", 101, r"devices must be 1 to 100 \(the number of examples\), got 101"),
        ("dirichlet:1e-6", 40, "scheme dirichlet leaves device .* of 40 without examples"),
        ("disorder:1.5", 4, "must lie in 0 to 1"),
        ("disorder:1e999", 4, "must lie in 0 to 1"),
        ("dirichlet:e", 4, "needs a number after the colon"),
        ("dirichlet", 4, r"must be one of natural, iid, contiguous, by-class, sorted, disorder:F, dirichlet:A"),
        ("iid:3", 4, "must be one of"),
        ("power:0", 4, "must be finite and above 0"),
        ("power:30", 4, "scheme power leaves device 1 of 4 without examples"),
        ("DirichletPartitioner", 4, "must be one of IidPartitioner, .*, DirichletPartitioner:NUMBER, .* got 'Diri"),
        ("VerticalSizePartitioner", 4, "must be one of IidPartitioner, NaturalIdPartitioner, "),
        ("IidPartitioner:3", 4, "must be one of IidPartitioner"),
        ("sorted|iid", 4, r"'sorted\|iid' must cut blocks before the bar, and say behind it who holds them"),
        ("redundant:2|duplicate:2", 4, "must cut blocks before the bar"),
        ("sorted|sorted|redundant:2", 4, r"must be one of .* got 'sorted\|redundant:2'"),
        ("sorted|", 4, "must be one of .* got ''"),
        (
            "natural|redundant:2",
            5,
            "10 blocks of redundant are cut as 10 devices' shards: natural .* at most 7 devices",
        ),
        ("sorted|redundant:3", 12, "100 examples cannot fill 220 blocks"),
    ],
)
def test_a_scheme_that_cannot_serve_is_one_clear_line(scheme, devices, message):
    with pytest.raises(ConfigError, match=message):
        cut(scheme, np.arange(100) % 10, devices, groups=np.arange(100) % 7)


def test_natural_needs_people():
    with pytest.raises(DataError, match="does not say who its examples come from"):
        cut("natural", np.zeros(10), 2)


def test_a_scheme_is_read_as_it_is_typed():
    assert parse_scheme("dirichlet:0.5") == PartitionScheme(name="dirichlet", parameter=0.5)
    assert parse_scheme("iid") == PartitionScheme(name="iid")
    disorder = PartitionScheme(name="disorder", parameter=0.3)
    assert parse_scheme("disorder:0.3|redundant:2") == PartitionScheme(name="redundant", parameter=2, blocks=disorder)


@pytest.mark.parametrize(
    ("partitioner", "scheme"),
    [
        ("IidPartitioner", "iid"),
        ("NaturalIdPartitioner", "natural"),
        ("DirichletPartitioner:0.5", "dirichlet:0.5"),
        ("PathologicalPartitioner:2", "labels:2"),
        ("ShardPartitioner:2", "shards:2"),
        ("LinearPartitioner", "power:1"),
        ("SquarePartitioner", "power:2"),
    ],
)
def test_a_partitioner_of_flwr_datasets_stands_for_a_scheme(partitioner, scheme):
    assert parse_scheme(partitioner) == parse_scheme(scheme)
    assert parse_scheme(f"{partitioner}|redundant:2").blocks == parse_scheme(scheme)


def test_shares_by_a_power_are_in_proportion_to_it_and_at_random():
    assert [len(rows) for rows in cut("power:1", np.zeros(100), 4).rows] == [10, 20, 30, 40]
    assert [len(rows) for rows in cut("SquarePartitioner", np.zeros(300), 4).rows] == [10, 40, 90, 160]
    (first, *_) = cut("power:1", np.zeros(100), 4).rows
    assert sorted(first) != list(range(10))


def test_classes_are_those_of_the_published_split_of_eight_nodes():
    labels = np.arange(3000) % 10
    missing = [set(range(10)) - set(labels[rows]) for rows in cut("classes:8", labels, 8).rows]
    assert missing == [{0, 9}, {2, 6}, {1, 3}, {7, 8}, {4, 5}, {0, 9}, {2, 6}, {1, 3}]


def test_contiguous_parts_are_the_rows_in_their_order():
    assert [rows.tolist() for rows in cut("contiguous", np.zeros(7, int), 3).rows] == [[0, 1, 2], [3, 4], [5, 6]]


def test_classes_that_nobody_would_hold_are_refused():
    with pytest.raises(ConfigError, match=r"would leave class \d to nobody"):
        cut("classes:3", np.arange(100) % 10, 2)
