"""Figures of a column from its sums and its histogram."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from edgefl.core.types import Array
from edgefl.tasks.metrics.exact_sums import read_sum

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MAX_VISIBLE_CELLS = 32


def describe_column(name: str, counts: Array, sums: Array, extremes: Array) -> dict[str, Any]:
    """Returns count, missing, mean, standard deviation (over n, not n - 1), least and largest value.

    Args:
        name: of the column.
        counts: [2] values that are there, and that are missing.
        sums: [2, WIDTH] exact sums of the values and of their squares.
        extremes: [2] least and largest value.
    """
    count = int(counts[0])
    found = {"name": name, "count": count, "missing": int(counts[1]), **dict.fromkeys(("mean", "std", "min", "max"))}
    total, squares = read_sum(sums[0]), read_sum(sums[1])
    if not count or total is None or squares is None:
        return found
    mean = total / count
    variance = max(squares / count - mean * mean, Fraction(0))
    return {
        **found,
        "mean": float(mean),
        "std": compute_root(variance),
        "min": float(extremes[0]),
        "max": float(extremes[1]),
    }


def compute_root(value: Fraction) -> float:
    """Returns the square root of a number that may be beyond the range of floats."""
    if not value:
        return 0.0
    # To a whole number of 108 bits or more, whose root then has all bits of a float.
    shift = max(0, 108 - value.numerator.bit_length() + value.denominator.bit_length())
    shift += shift % 2
    root = math.isqrt((value.numerator << shift) // value.denominator)
    return float(Fraction(root, 1 << (shift // 2)))


def describe_histogram(counts: Array, low: float, high: float, rank_error: int) -> dict[str, Any]:
    """Returns a histogram of at most `MAX_VISIBLE_CELLS` cells, and quantiles with the bounds of their errors.

    A quantile q lies in the same cell as a value whose rank is q (n - 1), give or take `rank_error`.

    Args:
        counts: [cells] of equal width, with a value at least.
        low: of the first cell.
        high: of the last cell.
        rank_error: most places by which a cell's count of values below it is wrong.
    """
    cells = len(counts)
    width = (high - low) / cells
    ranks = np.concatenate([[0], np.cumsum(counts)])
    edges = [low + width * cell for cell in range(cells)] + [high]
    step = math.ceil(cells / MAX_VISIBLE_CELLS)
    visible = [*range(0, cells, step), cells]
    return {
        "quantiles": {f"{part:g}": compute_quantile(ranks, edges, part) for part in QUANTILES},
        "quantile_error": {"value": width, "rank": rank_error},
        "histogram": {
            "edges": [edges[cell] for cell in visible],
            "counts": [int(ranks[end] - ranks[start]) for start, end in pairwise(visible)],
        },
    }


def compute_quantile(ranks: Array, edges: list[float], part: float) -> float:
    """Returns the value of rank part (n - 1), as if those of a cell lay evenly in it.

    Args:
        ranks: [cells + 1] number of values below each edge, the last one that of all.
        edges: of the cells.
        part: from 0 to 1.
    """
    rank = part * (int(ranks[-1]) - 1)
    cell = int(np.searchsorted(ranks, rank, side="right")) - 1
    inside = (rank - int(ranks[cell]) + 0.5) / int(ranks[cell + 1] - ranks[cell])
    return edges[cell] + inside * (edges[cell + 1] - edges[cell])
