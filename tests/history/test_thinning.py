from __future__ import annotations

import numpy as np

from edgefl.history.thinning import thinned


def test_a_short_curve_keeps_every_point():
    assert thinned(np.arange(10.0), 10).tolist() == list(range(10))


def test_a_long_curve_keeps_its_ends_and_its_extremes():
    values = np.sin(np.arange(100_000) / 500)
    values[77_777], values[12_345] = -3.0, 4.0
    places = thinned(values, 200)
    assert len(places) <= 202
    assert {0, 12_345, 77_777, 99_999} <= set(places.tolist())
    assert places.tolist() == sorted(set(places.tolist()))


def test_each_stretch_of_a_long_curve_shows_how_far_it_swings():
    values = np.tile([0.0, 1.0, -1.0, 0.5], 1000)
    kept = values[thinned(values, 100)]
    assert np.sum(kept == 1.0) >= 50
    assert np.sum(kept == -1.0) >= 50
