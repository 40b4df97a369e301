"""Drift of columns: indices by hand, and the statistic against SciPy's."""

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Dataset
from edgefl.tasks.datasets.drift import compute_index, compute_ks, compute_psi, measure_drift
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


def test_what_cannot_be_compared_is_refused():
    task = make_task("table", {"columns": "a", "target": "b"})
    some = Dataset(inputs=np.ones((3, 1), np.float32), targets=np.ones(3, np.float32))
    with pytest.raises(DataError, match="the newer data must have an example at least"):
        measure_drift(task, some, some.take(slice(0)))
    with pytest.raises(ConfigError, match="bins must be 2 to 1000, got 1"):
        measure_drift(task, some, some, bins=1)
    with pytest.raises(ConfigError, match="--columns: there is no column"):
        measure_drift(task, some, some, columns="c")
