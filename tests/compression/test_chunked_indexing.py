"""Selecting, writing and looking up by chunks, against plain indexing."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from edgefl.compression.chunked_indexing import compute_gaps, gather, scatter_masked, select_masked
from edgefl.core.types import Array

SIZES = (0, 1, 7, 65_535, 65_536, 65_537, 200_001)


def mask_of(size: int, share: float) -> Array:
    mask: Array = np.random.default_rng(size).random(size) < share
    return mask


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.00002, 0.5, 1.0])
def test_what_is_picked_put_back_and_how_far_apart_it_lies_is_what_indexing_gives(size: int, share: float) -> None:
    mask, values = mask_of(size, share), np.arange(size, dtype=np.int32)
    assert np.array_equal(select_masked(values, mask), values[mask])
    out, expected = np.full(size, -1.0), np.full(size, -1.0)
    scatter_masked(select_masked(values, mask), mask, out)
    expected[mask] = values[mask]
    assert np.array_equal(out, expected)

    assert np.array_equal(compute_gaps(mask), np.diff(np.flatnonzero(mask), prepend=-1))


def test_a_table_is_looked_up() -> None:
    places = np.random.default_rng(1).integers(0, 5, 100_000).astype(np.uint8)
    table = np.array([3.0, 1.0, 4.0, 1.5, 9.0], dtype=np.float32)
    assert np.array_equal(gather(table, places), table[places])


def test_picking_takes_little_more_memory_than_what_is_picked() -> None:
    mask, values = mask_of(4_000_000, 0.5), np.zeros(4_000_000, dtype=np.float32)
    tracemalloc.start()
    found = select_masked(values, mask)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.2 * found.nbytes
