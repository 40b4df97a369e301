import numpy as np

from edgefl.storage.queries.downsampling import downsample_indices


def test_a_long_curve_keeps_its_ends_its_extremes_and_how_far_each_stretch_swings():
    assert downsample_indices([np.arange(10.0)], 10) == list(range(10)), "a short one keeps every point"
    values = np.sin(np.arange(100_000) / 500)
    values[77_777], values[12_345] = -3.0, 4.0
    places = downsample_indices([values], 200)
    assert len(places) <= 202
    assert {0, 12_345, 77_777, 99_999} <= set(places)
    assert places == sorted(set(places))
    values = np.tile([0.0, 1.0, -1.0, 0.5], 1000)
    kept = values[downsample_indices([values], 100)]
    assert min(np.sum(kept == 1.0), np.sum(kept == -1.0)) >= 50


def test_places_where_nothing_is_known_are_no_extremes() -> None:
    unknown, known = np.full(100, np.nan), np.arange(100.0)
    known[50] = -1
    assert downsample_indices([unknown, known], 4) == [0, 50, 99]
