"""Groups of a least size: nothing that leaves a board is about fewer examples than that.

Values are sorted, and so many at a time are told as one: univariate microaggregation with groups of fixed size, as in
Domingo-Ferrer, Mateo-Sanz, Practical Data-Oriented Microaggregation for Statistical Disclosure Control, 2002.
"""

from __future__ import annotations

import numpy as np

from edgefl.core.types import Array


def compute_extremes(ordered: Array, min_group: int) -> tuple[float, float]:
    """Returns the means of the `min_group` least and largest values; the least and the largest for a group of 1.

    Of fewer than two groups both are the mean: beside the sum of all, ends that overlap would tell single values.

    Args:
        ordered: [n] sorted values, at least `min_group` of them.
        min_group: at least 1.
    """
    size = min_group if len(ordered) >= 2 * min_group else len(ordered)
    means = float(np.mean(ordered[:size])), float(np.mean(ordered[-size:]))
    # Rounding may have put the mean of equal values beyond them, and so one mean beyond the other.
    low, high = (min(max(mean, float(ordered[0])), float(ordered[-1])) for mean in means)
    return min(low, high), max(low, high)


def count_cells(ordered: Array, low: float, high: float, num_cells: int, min_group: int) -> Array:
    """Returns how many values lie in each cell from `low` to `high`, none or at least `min_group`.

    Each group of neighbours counts where its median lies: at the edge of a cell the number of values below is wrong
    by less than `min_group`. Values beyond an end count in the last cell there.

    Args:
        ordered: [n] sorted values, none or at least `min_group` of them.
        low: of the first cell.
        high: of the last cell; where it is not above `low`, all count in the first.
        num_cells: of equal width.
        min_group: at least 1.

    Returns:
        [num_cells] int64, which add up to n.
    """
    counts = np.zeros(num_cells, np.int64)
    num_groups = len(ordered) // min_group
    if not num_groups:
        return counts
    starts = min_group * np.arange(num_groups)
    sizes = np.full(num_groups, min_group)
    sizes[-1] += len(ordered) - min_group * num_groups
    medians = ordered[starts + (sizes - 1) // 2]
    np.add.at(counts, find_cells(medians, low, high, num_cells), sizes)
    return counts


def find_cells(values: Array, low: float, high: float, num_cells: int) -> Array:
    """Returns the cell of each value, 0 to num_cells - 1."""
    if not high > low:
        return np.zeros(len(values), np.int64)
    return np.clip(np.floor((values - low) / (high - low) * num_cells), 0, num_cells - 1).astype(np.int64)


def hide_small_counts(counts: Array, min_group: int) -> Array:
    """Returns counts without those below `min_group`, nor so many that what is left out can be found by subtraction.

    What is left out is nothing, or at least `min_group` in all, or everything.
    """
    kept = np.where(counts >= min_group, counts, 0)
    hidden = int(counts.sum() - kept.sum())
    while 0 < hidden < min_group and kept.any():
        least = int(np.argmin(np.where(kept > 0, kept, np.iinfo(np.int64).max)))
        hidden += int(kept[least])
        kept[least] = 0
    return kept
