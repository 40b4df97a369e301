"""Drift of columns: indices by hand, and the statistic against SciPy's."""

import itertools

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError, EdgeflError
from edgefl.core.types import Dataset
from edgefl.tasks.datasets.drift import (
    compute_index,
    compute_ks,
    compute_mmd,
    compute_psi,
    measure_drift,
    measure_feature_drift,
    measure_joint_drift,
)
from edgefl.tasks.registry import make_task


def test_the_index_is_that_of_smoothed_shares():
    # Cells up to 1 and above: (2 + 1/2) / (4 + 1) and one half of the reference, (1 + 1/2) / 5 and 7/10 of the newer.
    expected = (0.3 - 0.5) * np.log(0.3 / 0.5) + (0.7 - 0.5) * np.log(0.7 / 0.5)
    assert compute_index(np.array([2, 2]), np.array([1, 3])) == pytest.approx(expected, rel=1e-12)
    assert compute_index(np.array([7]), np.array([9])) == 0


def test_the_cells_are_quantiles_of_the_reference_and_a_missing_value_has_its_own():
    reference, newer = np.arange(100.0), np.arange(50.0, 150.0)
    lower_half = compute_index(np.full(10, 10), np.array([0] * 5 + [10] * 4 + [60]))
    assert compute_psi(reference, newer) == pytest.approx(lower_half, rel=1e-12)
    missing = np.append(np.arange(90.0), np.full(10, np.nan))
    with_missing = compute_index(np.array([10] * 10 + [0]), np.array([10] * 9 + [0, 10]))
    assert compute_psi(reference, missing) == pytest.approx(with_missing, rel=1e-12)


def test_equal_data_has_no_drift_and_more_distance_has_more():
    values = np.random.default_rng(1).normal(size=1000)
    found = [compute_psi(values, values + shift) for shift in (0, 0.2, 1, 5)]
    assert found[0] == 0
    assert found == sorted(found)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("newer", [0.0, 2.0])
def test_a_constant_column_that_becomes_another_constant_is_found_on_either_side(newer):
    assert compute_psi(np.ones(50), np.full(50, newer)) > 1
    assert compute_psi(np.ones(50), np.ones(20)) == 0


def test_the_statistic_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats", reason="needs scipy: pip install '.[demo]'")
    rng = np.random.default_rng(2)
    for old, new in (
        (rng.normal(size=211), rng.normal(0.3, 2, size=97)),
        (rng.integers(0, 4, 80).astype(float), rng.integers(1, 5, 33).astype(float)),
        (np.array([1.0]), np.array([1.0, 2.0])),
    ):
        assert compute_ks(old, new) == pytest.approx(stats.ks_2samp(old, new).statistic, abs=1e-9)
        assert compute_ks(new, old) == compute_ks(old, new)
    assert compute_ks(np.array([1.0, np.nan]), np.array([1.0])) == 0
    assert compute_ks(np.array([np.nan]), np.array([1.0])) is None


def test_columns_of_a_series_are_its_channels_and_the_largest_drift_comes_first():
    task = make_task("series", {"columns": "x,y", "window": 4, "target": "state", "labels": "calm,shaking"})
    windows = np.random.default_rng(3).normal(size=(60, 2, 4)).astype(np.float32)
    old = Dataset(inputs=windows, targets=np.arange(60) % 2)
    moved = windows.copy()
    moved[:, 1] += 3
    found = measure_drift(task, old, Dataset(inputs=moved, targets=np.zeros(60, np.int64)))
    assert [column.name for column in found] == ["y", "target", "x"]
    assert (found[0].num_newer, found[1].num_newer) == (240, 60)
    assert found[0].ks == compute_ks(windows[:, 1].reshape(-1), moved[:, 1].reshape(-1))
    assert (found[1].ks, found[2].psi, found[2].ks) == (None, 0, 0)
    assert [column.name for column in measure_drift(task, old, old, columns="y")] == ["y"]


def test_examples_without_a_label_are_of_no_class():
    task, rng = make_task("digits", {}), np.random.default_rng(3)

    def make(num_labelled, num_unlabelled):
        targets = np.append(np.arange(num_labelled) % 10, np.zeros(num_unlabelled, int))
        weak = np.arange(len(targets)) >= num_labelled
        pictures = rng.integers(0, 255, (len(targets), 8, 8), np.uint8)
        return Dataset(inputs=pictures, targets=targets, weak=weak, weights=np.where(weak, 0, 1).astype(np.float32))

    def find_classes(*sides, **options):
        return [column for column in measure_drift(task, *sides, **options) if column.name == "target"]

    (classes,) = find_classes(make(200, 0), make(100, 500))
    assert (classes.num_reference, classes.num_newer, classes.psi) == (200, 100, 0.0)
    assert len(measure_drift(task, make(200, 0), make(0, 500))) == 64
    assert find_classes(make(200, 0), make(0, 500)) == []
    assert find_classes(make(200, 0), make(19, 500), min_labelled=20) == []
    assert find_classes(make(19, 500), make(200, 0), min_labelled=20) == []
    assert find_classes(make(200, 0), make(20, 500), min_labelled=20)
    assert find_classes(make(5, 0), make(20, 500), min_labelled=20), "all of them have one"


def test_what_cannot_be_compared_is_refused():
    task = make_task("table", {"columns": "a", "target": "b"})
    some = Dataset(inputs=np.ones((3, 1), np.float32), targets=np.ones(3, np.float32))
    with pytest.raises(DataError, match="the newer data must have an example at least"):
        measure_drift(task, some, some.take(slice(0)))
    with pytest.raises(ConfigError, match="bins must be 2 to 1000, got 1"):
        measure_drift(task, some, some, bins=1)
    with pytest.raises(ConfigError, match="--columns: there is no column"):
        measure_drift(task, some, some, columns="c")


def estimate_plainly(reference, newer):
    """The estimate as the paper writes it, pair by pair."""
    both = [*reference, *newer]
    distances = [np.linalg.norm(one - other) for one, other in itertools.combinations(both, 2)]
    median = np.median(distances) or np.median([distance for distance in distances if distance > 0])

    def compare(one, other):
        return np.exp(-(np.linalg.norm(one - other) ** 2) / (2 * median**2))

    within = [
        sum(compare(side[i], side[j]) for i, j in itertools.permutations(range(len(side)), 2))
        / (len(side) * (len(side) - 1))
        for side in (reference, newer)
    ]
    crossing = sum(compare(one, other) for one in reference for other in newer) / (len(reference) * len(newer))
    return sum(within) - 2 * crossing


def test_the_discrepancy_is_the_unbiased_estimate_of_the_paper():
    rng = np.random.default_rng(4)
    few_values = rng.random((24, 2)) > 0.95, rng.random((29, 2)) > 0.9
    alike = np.repeat(rng.normal(size=(8, 1, 30)), 9, axis=1)
    alike[:, :2] += rng.random((8, 2, 30))
    for old, new in (
        (rng.normal(size=(23, 3)), rng.normal(0.4, 2, size=(17, 3))),
        (rng.normal(size=(2, 1)), rng.normal(size=(5, 1))),
        (rng.normal(1e5, 1, size=(9, 2)), rng.normal(1e5, 2, size=(8, 2))),
        *((one, np.vstack([one, one[:1] - 1])) for one in alike),
        tuple(side.astype(float) for side in few_values),
    ):
        assert compute_mmd(old, new)[0] == pytest.approx(estimate_plainly(old, new), abs=1e-9)
    assert compute_mmd(np.ones((4, 2)), np.ones((5, 2))) == (pytest.approx(0, abs=1e-12), 1)


def test_the_p_value_of_equal_distributions_is_small_as_seldom_as_it_says():
    rng = np.random.default_rng(5)
    found = np.array([compute_mmd(rng.normal(size=(20, 2)), rng.normal(size=(30, 2))) for _ in range(60)])
    assert abs(found[:, 0].mean()) < 0.015, "no bias"
    assert 1 <= (found[:, 1] <= 0.1).sum() <= 14
    assert 18 <= (found[:, 1] <= 0.5).sum() <= 42


def joint(old, new, **bounds):
    task = make_task("table", {"columns": "a,b", "target": "c", "labels": "x,y"})
    sides = [Dataset(inputs=side, targets=np.zeros(len(side), int)) for side in (old, new)]
    return measure_joint_drift(task, *sides, **bounds)


def test_columns_that_no_longer_go_together_are_found_where_each_is_as_before():
    rng = np.random.default_rng(6)
    old, new = rng.normal(size=(400, 2)), rng.normal(size=(300, 2))
    old[:, 1] += 2 * old[:, 0]
    new[:, 1] -= 2 * new[:, 0]
    found = joint(old, new)
    assert (found.num_reference, found.num_newer, found.p_value) == (400, 300, 1 / 500)
    assert joint(old[:200], old[200:]).p_value > 0.05
    in_other_units = joint(old * [1e250, 1e-300], new * [1e250, 1e-300])
    assert in_other_units.mmd == pytest.approx(found.mmd, abs=1e-9)


def test_what_is_missing_or_constant_counts_and_a_single_example_is_not_compared():
    rng = np.random.default_rng(7)
    old, new = rng.normal(size=(60, 2)), rng.normal(size=(60, 2))
    gaps = np.where((np.arange(60) % 2 == 0)[:, None] & [True, False], np.nan, new)
    assert joint(old, gaps).p_value == 1 / 500
    assert joint(np.where(old == old[0], np.inf, old), new).p_value > 0.05
    assert joint(np.ones((60, 2)), np.full((60, 2), 1 + 1e-9)).p_value == 1 / 500
    assert joint(np.full((60, 2), np.nan), np.full((60, 2), np.nan)).p_value == 1
    assert (joint(old, new[:1]).num_newer, joint(old, new[:1]).mmd) == (1, None)


def test_only_samples_are_compared_at_once():
    rows = np.random.default_rng(8).normal(size=(900, 2))
    assert (joint(rows, rows).num_newer, joint(rows, rows).p_value > 0.5) == (500, True)
    assert joint(rows, rows, max_numbers=50).num_reference == 25
    assert joint(rows, rows, max_examples=30).num_newer == 30


def make_seeing_task(**options):
    table = {"columns": "a,b", "target": "c", "labels": "no,yes"}
    return make_task("table", {**table, **(options or {"hidden": 4})})


def test_the_drift_of_features_is_what_the_last_layer_sees_and_nothing_else():
    """The hidden layer looks at the first column alone, so that the second may do what it likes."""
    task, rng = make_seeing_task(), np.random.default_rng(4)
    model = {spec.name: np.zeros(spec.shape, np.float32) for spec in task.shapes()}
    first = next(spec.name for spec in task.shapes() if len(spec.shape) == 2)
    rows = [spec.shape for spec in task.shapes() if spec.name == first] == [(4, 2)]
    model[first][(slice(None), 0) if rows else 0] = [1.0, -1.0, 2.0, 0.5]

    def drift(shift):
        old, new = rng.normal(size=(200, 2)).astype(np.float32), rng.normal(size=(200, 2)).astype(np.float32)
        sides = [Dataset(inputs=values, targets=np.zeros(200, int)) for values in (old, new + np.float32(shift))]
        return measure_feature_drift(task, model, *sides), measure_joint_drift(task, *sides)

    unseen, seen = drift([0, 3]), drift([3, 0])
    assert (unseen[1].p_value, seen[1].p_value) == (1 / 500, 1 / 500), "columns show both"
    assert unseen[0].p_value > 0.05
    assert (seen[0].p_value, seen[0].num_newer) == (1 / 500, 200)
    assert seen[0].mmd > 0.1


def test_of_wide_features_fewer_examples_are_compared_and_never_fewer_than_two():
    task, rng = make_seeing_task(hidden=1000), np.random.default_rng(9)
    data = Dataset(inputs=rng.normal(size=(300, 2)).astype(np.float32), targets=np.zeros(300, int))
    model = task.init(7)
    assert measure_feature_drift(task, model, data, data, max_numbers=50_000).num_newer == 50
    assert measure_feature_drift(task, model, data, data, max_numbers=10).num_reference == 2
    assert measure_feature_drift(task, model, data, data, max_examples=20).num_reference == 20


def test_features_need_a_hidden_layer_examples_and_the_tensors_of_the_task():
    data = Dataset(inputs=np.ones((3, 2), np.float32), targets=np.zeros(3, int))
    task = make_seeing_task(model="linear")
    model = {spec.name: np.zeros(spec.shape, np.float32) for spec in task.shapes()}
    with pytest.raises(ConfigError, match=r"cannot be cut before its last layer|freezes nothing"):
        measure_feature_drift(task, model, data, data)
    with pytest.raises(DataError, match="the newer data must have an example at least"):
        measure_feature_drift(make_seeing_task(), make_seeing_task().init(7), data, data.take(slice(0)))
    with pytest.raises(EdgeflError, match=r"weight|tensor"):
        measure_feature_drift(make_seeing_task(), model, data, data)


def test_features_of_a_network_of_torch_are_those_before_its_last_layer():
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    task = make_task("fashion-mnist", {"model": "cnn-small"})
    inputs = np.random.default_rng(5).integers(0, 255, (40, 28, 28), np.uint8)
    sides = [Dataset(inputs=side, targets=np.zeros(20, int)) for side in (inputs[:20] // 8, inputs[20:])]
    found = measure_feature_drift(task, task.init(7), *sides)
    assert (found.num_reference, found.num_newer, found.p_value) == (20, 20, 1 / 500)
