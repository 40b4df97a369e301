"""The largest by magnitude, exactly, whatever the order of equals and the length."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.sparsification.top_k import find_top_k
from edgefl.core.errors import CodecError
from edgefl.core.types import Array


def by_sorting(flat: Array, count: int) -> list[int]:
    """What a stable sort by falling magnitude gives."""
    return sorted(np.argsort(-np.abs(flat), kind="stable")[:count].tolist())


def test_keeps_the_largest_by_magnitude_not_by_value() -> None:
    assert find_top_k(np.array([0.1, -0.5, 0.3, -0.2, 0.05], dtype=np.float32), 2).tolist() == [1, 2]


def test_the_lowest_index_wins_among_equals() -> None:
    flat = np.array([1, -2, 2, 0, -2, 2], dtype=np.float32)
    assert find_top_k(flat, 2).tolist() == [1, 2]
    assert find_top_k(flat, 5).tolist() == [0, 1, 2, 4, 5]
    assert find_top_k(np.zeros(5, dtype=np.float32), 3).tolist() == [0, 1, 2]


@settings(deadline=None)
@given(strategies.lists(strategies.integers(-4, 4), max_size=40), strategies.integers(0, 45))
def test_agrees_with_a_sort_where_there_are_many_equals(numbers: list[int], count: int) -> None:
    flat = np.array(numbers, dtype=np.float32)
    assert find_top_k(flat, count).tolist() == by_sorting(flat, count)


@pytest.mark.parametrize("count", [1, 3000, 150_000])
@pytest.mark.parametrize("kind", ["normal", "few values", "sorted", "one large in every sample", "zeros"])
def test_agrees_with_a_sort_where_a_sample_narrows_the_search(kind: str, count: int) -> None:
    rng, size = np.random.default_rng(8), 200_000
    flat = {
        "normal": rng.normal(size=size),
        "few values": rng.integers(-3, 4, size=size),
        "sorted": np.arange(size),
        # The sample takes every 12th entry: it sees the large ones only, and a floor taken from it is too high.
        "one large in every sample": np.where(np.arange(size) % 12 == 0, 100.0, rng.normal(size=size)),
        "zeros": np.zeros(size),
    }[kind].astype(np.float32)
    assert find_top_k(flat, count).tolist() == by_sorting(flat, count)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_have_no_rank_are_refused(value: float) -> None:
    with pytest.raises(CodecError, match="topk carries finite numbers, got"):
        find_top_k(np.array([1, value], dtype=np.float32), 1)
