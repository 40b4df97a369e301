"""Robust rules: against their definitions written out, what they promise, and the memory that they take."""

import math
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl.core.errors import ConfigError
from edgefl.core.types import LazyTensors, SparseTensor
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous import robust
from edgefl.strategies.synchronous.robust import (
    BulyanConfig,
    CentredClippingConfig,
    CoordinateMedianConfig,
    GeometricMedianConfig,
    KrumConfig,
    MultiKrumConfig,
    TrimmedMeanConfig,
    UpdateRows,
    compute_neighbour_weights,
)


def rows_of(matrix):
    """Rows of two tensors, the second of them sparse."""
    matrix = np.asarray(matrix, np.float32)
    half = matrix.shape[1] // 2
    rows = [
        {
            "a": row[:half].reshape(half, 1),
            "b": SparseTensor(indices=np.flatnonzero(row[half:]), values=row[half:][row[half:] != 0],
                              shape=row[half:].shape),
        }
        for row in matrix
    ]  # fmt: skip
    model = {"a": np.zeros((half, 1), np.float32), "b": np.zeros(matrix.shape[1] - half, np.float32)}
    return UpdateRows(rows=rows, model=model)


def flat(step):
    return np.concatenate([step["a"].reshape(-1), step["b"]])


# The definitions, word for word, over a matrix in double precision.


def naive_distances(x):
    return [[float(((p - q) ** 2).sum()) for q in x] for p in x]


def naive_krum_order(x, f):
    scores = []
    for i, to_others in enumerate(naive_distances(x)):
        others = sorted(d for j, d in enumerate(to_others) if j != i)
        scores.append((sum(others[: max(1, len(x) - f - 2)]), sum(others)))
    return sorted(range(len(x)), key=scores.__getitem__)


def naive_krum(x, f):
    return x[naive_krum_order(x, f)[0]]


def naive_multi_krum(x, f):
    return x[naive_krum_order(x, f)[: len(x) - f]].mean(axis=0)


def naive_bulyan(x, f):
    left, selected = list(range(len(x))), []
    while len(selected) < len(x) - 2 * f:
        selected.append(left.pop(naive_krum_order(x[left], f)[0]))
    result = []
    for column in x[selected].T:
        middle = np.median(column)
        result.append(np.mean(sorted(column, key=lambda v: abs(v - middle))[: len(selected) - 2 * f]))
    return np.array(result)


def naive_median(x, f):
    return np.array([sorted(column)[len(x) // 2] for column in x.T])


def naive_trimmed_mean(x, f):
    return np.array([np.mean(sorted(column)[f : len(x) - f]) for column in x.T])


def naive_geometric_median(x, f):
    middle = x.mean(axis=0)
    for _ in range(100):
        weights = 1 / np.maximum(1e-6, np.linalg.norm(x - middle, axis=1))
        middle = (weights[:, None] * x).sum(axis=0) / weights.sum()
    return middle


def naive_centred_clipping(x, f, centre=0.0, radius=2.0):
    middle = np.zeros(x.shape[1]) + centre
    for _ in range(3):
        differences = x - middle
        lengths = np.linalg.norm(differences, axis=1, keepdims=True)
        middle = middle + (differences * np.minimum(1, radius / lengths)).mean(axis=0)
    return middle


@dataclass(frozen=True, kw_only=True)
class Centred:
    """Centred clipping with a centre that is not zero."""

    rule: CentredClippingConfig = field(default_factory=lambda: CentredClippingConfig(radius=2.0))

    def combine(self, rows):
        centre = {name: np.full(like.shape, 0.5, np.float32) for name, like in rows.model.items()}
        return self.rule.combine(UpdateRows(rows=[*rows.rows, centre], model=rows.model))


NUM, ROGUES = 11, 2
RULES = {
    "krum": (KrumConfig(num_rogues=ROGUES), naive_krum),
    "multi-krum": (MultiKrumConfig(num_rogues=ROGUES), naive_multi_krum),
    "bulyan": (BulyanConfig(num_rogues=ROGUES), naive_bulyan),
    "coordinate-median": (CoordinateMedianConfig(), naive_median),
    "trimmed-mean": (TrimmedMeanConfig(trim=ROGUES / NUM), naive_trimmed_mean),
    "geometric-median": (GeometricMedianConfig(), naive_geometric_median),
    "centred-clipping": (Centred(), lambda x, f: naive_centred_clipping(x, f, centre=0.5)),
}
each_rule = pytest.mark.parametrize("name", RULES)
matrices = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).standard_normal((NUM, 6)).astype(np.float32)
)


@each_rule
@given(x=matrices, block=st.sampled_from([1, 4 * NUM * 2, 2**20]), stretch=st.sampled_from([1.0, 1e3]))
@settings(max_examples=25, deadline=None)
def test_a_rule_is_its_definition_however_the_columns_are_cut(name, x, block, stretch):
    rule, naive = RULES[name]
    x[:ROGUES] *= np.float32(stretch)
    expected = naive(x.astype(np.float64), ROGUES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "BLOCK_BYTES", block)
        found = flat(rule.combine(rows_of(x)))
    # The selected update and the entries of sorted columns are themselves; sums are rounded to single precision.
    if name in {"krum", "coordinate-median"}:
        assert np.array_equal(found, expected)
    assert found == pytest.approx(expected, rel=2e-5, abs=2e-5)


@each_rule
@given(x=matrices, seed=st.integers(0, 100))
@settings(max_examples=10, deadline=None)
def test_the_order_of_the_updates_does_not_matter(name, x, seed):
    rule, _ = RULES[name]
    other = x[np.random.default_rng(seed).permutation(NUM)]
    assert flat(rule.combine(rows_of(other))) == pytest.approx(flat(rule.combine(rows_of(x))), rel=1e-4, abs=1e-5)


def test_mixed_rows_are_means_of_the_nearest_and_so_are_their_distances():
    x = np.random.default_rng(3).standard_normal((NUM, 8)).astype(np.float32)
    x[:ROGUES] *= 1e6
    rows = rows_of(x)
    weights = compute_neighbour_weights(rows.distances, ROGUES)
    mixed = np.array([
        x[np.argsort([((p - q) ** 2).sum() for q in x], kind="stable")[: NUM - ROGUES]].mean(axis=0) for p in x
    ], np.float64)  # fmt: skip
    again = rows.mix(weights)
    assert flat(again.combine_columns(lambda columns: columns[5])) == pytest.approx(mixed[5], rel=1e-5, abs=1e-5)
    assert again.distances[2:, 2:] == pytest.approx(np.array(naive_distances(mixed))[2:, 2:], rel=1e-4, abs=1e-5)
    assert flat(again.compute_sum(np.full(NUM, 1 / NUM))) == pytest.approx(mixed.mean(axis=0), rel=1e-4)


def test_fewer_updates_than_a_rule_wants_are_combined_all_the_same():
    for rule, _ in RULES.values():
        for count in (1, 2, 3, 4):
            assert np.isfinite(flat(rule.combine(rows_of(np.ones((count, 4)))))).all()


def test_a_trimmed_mean_of_half_is_refused():
    with pytest.raises(ConfigError, match=r"below 0\.5, got 0\.5"):
        TrimmedMeanConfig(trim=0.5).build(RoundRules())


@dataclass
class Journal:
    """Updates on a disk: how many of them are decoded at a time, and how often."""

    size: int
    in_memory: set[int] = field(default_factory=set)
    num_loads: int = 0

    def update(self, number):
        journal = self

        class Tensors(LazyTensors):
            def unload(self):
                super().unload()
                journal.in_memory.discard(number)

        def load():
            self.num_loads += 1
            self.in_memory.add(number)
            assert self.in_memory == {number}
            rng = np.random.default_rng(number)
            return {"w": rng.standard_normal(self.size, dtype=np.float32)}

        return Tensors(load)


@each_rule
@pytest.mark.parametrize("neighbours", [False, True])
def test_a_round_takes_a_block_and_three_models_however_many_updates_it_has(name, neighbours, monkeypatch):
    rule, _ = RULES[name]
    size, count = 100_000, 20
    monkeypatch.setattr(robust, "BLOCK_BYTES", block := 5 * 4 * size)  # a quarter of the updates
    model, journal = {"w": np.zeros(size, np.float32)}, Journal(size)
    rows = UpdateRows(rows=[journal.update(number) for number in range(count)], model=model)
    tracemalloc.start()
    try:
        if neighbours:
            rows = rows.mix(compute_neighbour_weights(rows.distances, ROGUES))
        rule.combine(rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    num_passes = math.ceil(count * 4 * size / block) + (name == "centred-clipping")
    assert peak < block + 3 * 4 * size + 12 * 8 * count * robust.CHUNK_SIZE
    assert journal.num_loads <= 2 * num_passes * count


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (CoordinateMedianConfig(num_rogues=3), 7),
        (GeometricMedianConfig(num_rogues=3), 7),
        (CentredClippingConfig(num_rogues=0), 1),
        (KrumConfig(num_rogues=3), 9),
        (MultiKrumConfig(num_rogues=3), 9),
        (BulyanConfig(num_rogues=3), 15),
        (TrimmedMeanConfig(num_rogues=3, trim=0.45), 7),
        (TrimmedMeanConfig(num_rogues=0, trim=0.0), 1),
        (TrimmedMeanConfig(num_rogues=2, trim=1e-300), 10**9 + 1),
    ],
)
def test_a_rule_says_how_many_updates_its_promise_needs(rule, needed):
    assert rule.build(RoundRules()).needed_updates == needed


@pytest.mark.parametrize("trim", [0.1, 0.2, 0.3, 0.37])
@pytest.mark.parametrize("num_rogues", [1, 2, 3, 5])
def test_of_so_many_updates_a_trimmed_mean_leaves_out_all_that_may_be_rogue_and_of_one_fewer_it_does_not(
    trim, num_rogues
):
    rule = TrimmedMeanConfig(num_rogues=num_rogues, trim=trim)
    trimmed = [rule.count_trimmed(n) for n in (rule.needed_updates - 1, rule.needed_updates)]
    assert trimmed[0] < num_rogues == min(trimmed[1], num_rogues)


@pytest.mark.parametrize(
    ("rule", "mixed", "rogues_of_ten"),
    [
        (KrumConfig(), [True, True], 1),
        (BulyanConfig(), [True, True], 1),
        (MultiKrumConfig(), [False, False], 1),
        (CoordinateMedianConfig(), [False, True], 2),
        (CoordinateMedianConfig(num_rogues=4), [False, True], 4),
        (TrimmedMeanConfig(trim=0.3), [False, True], 3),
        (TrimmedMeanConfig(neighbours=False), [False, False], 2),
        (GeometricMedianConfig(), [False, False], 1),
    ],
)
def test_rules_mix_neighbours_by_default_where_it_helps_and_for_the_rogues_that_they_promise_to_hold_against(
    rule, mixed, rogues_of_ten
):
    assert [rule.is_mixed(4), rule.is_mixed(5)] == mixed
    assert rule.count_rogues(10) == rogues_of_ten


@pytest.mark.parametrize(("rule", "fewest"), [(KrumConfig, 5), (MultiKrumConfig, 5), (BulyanConfig, 7)])
def test_by_default_a_rule_counts_all_where_its_bound_holds_against_no_rogue(rule, fewest):
    assert [rule().count_rogues(count) for count in (fewest - 1, fewest)] == [0, 1]
    assert [rule(num_rogues=1).count_rogues(count) for count in (fewest - 1, fewest)] == [1, 1]
    assert rule().needed_updates == fewest
