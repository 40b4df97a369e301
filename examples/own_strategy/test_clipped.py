"""A strategy is pure, without clock or network: a test gives it updates and looks at what it returns."""

from types import SimpleNamespace

import numpy as np
from clipped import ClippedMean


def update_of(value: float) -> SimpleNamespace:
    return SimpleNamespace(tensors={"w": np.array([value, 0.0], np.float32)})


def test_an_update_of_a_thousand_times_the_size_counts_as_one_and_a_half() -> None:
    moved = ClippedMean(limit=1.5).combine([update_of(1.0), update_of(1.0), update_of(1000.0)])
    np.testing.assert_allclose(moved["w"], [(1.0 + 1.0 + 1.5) / 3, 0.0], rtol=1e-6)


def test_updates_of_like_size_are_averaged() -> None:
    moved = ClippedMean().combine([update_of(1.0), update_of(-1.0), update_of(0.3)])
    np.testing.assert_allclose(moved["w"], [0.1, 0.0], atol=1e-6)
