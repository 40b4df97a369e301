"""Growth of a tree level by level from histograms of gradients: edges of bins, best splits, values of leaves.

Source: Chen, Guestrin, XGBoost: A Scalable Tree Boosting System, KDD 2016, sections 2.2 and 3. Differs from the
paper: bins are chosen once for all trees, and no value is missing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.core.types import Array
from edgefl.tasks.analyses.trees.ensemble import Trees

MIN_GAIN = 1e-6
"""Least gain of a split: with less, rounding would decide."""
LAST_EDGE = float(np.finfo(np.float64).max)
"""Edge of a bin that no value reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What keeps trees small: l2 on leaves, the least gain, the least sum of second derivatives, and the step."""

    l2: float
    min_gain: float
    min_child_weight: float
    learning_rate: float

    def compute_value(self, gradient: float, hessian: float) -> float:
        """Returns what a leaf adds to predictions."""
        divisor = hessian + self.l2
        return -self.learning_rate * gradient / divisor if divisor > 0 else 0.0

    def compute_scores(self, gradients: Array, hessians: Array) -> Array:
        """Returns by how much leaves with these sums lower the loss, twice."""
        divisors = hessians + self.l2
        scores: Array = np.divide(gradients * gradients, divisors, out=np.zeros_like(gradients), where=divisors > 0)
        return scores


def choose_edges(counts: Array, low: float, high: float, num_bins: int) -> Array:
    """Returns the edges of a column's bins, of about as many values each; [num_bins - 1], ascending.

    Args:
        counts: [cells] of equal width.
        low: of the first cell.
        high: of the last cell.
        num_bins: of which the last may be empty.
    """
    edges = np.full(num_bins - 1, LAST_EDGE)
    used = np.flatnonzero(counts)
    if len(used) > 1:
        below = np.cumsum(counts)[used[:-1]]  # values below each border between cells that have some
        borders = (used[:-1] + 1 + used[1:]) / 2
        if len(borders) >= num_bins:
            ranks = np.arange(1, num_bins) * (int(counts.sum()) / num_bins)
            borders = borders[np.unique(np.minimum(np.searchsorted(below, ranks), len(borders) - 1))]
        edges[: len(borders)] = low + borders * ((high - low) / len(counts))
    return edges


def grow_level(trees: Trees, tree: int, level: int, sums: Array, penalties: Penalties) -> None:
    """Splits the nodes of one level of a tree in place, where that gains.

    Args:
        trees: with the levels above.
        tree: its number.
        level: 0 is the root's.
        sums: [nodes of the level, columns, bins, 2] sums of first and second derivatives.
        penalties: of splits and leaves.
    """
    first = 2**level - 1
    for place in range(2**level):
        total = sums[place, 0].sum(axis=0)
        if level == 0:
            trees.values[tree, 0] = penalties.compute_value(*map(float, total))
        found = find_split(sums[place], penalties)
        if found is None:
            continue
        node, (column, last_bin) = first + place, found
        left = sums[place, column, : last_bin + 1].sum(axis=0)
        trees.columns[tree, node], trees.bins[tree, node] = column, last_bin
        trees.values[tree, node] = 0.0
        for child, part in ((2 * node + 1, left), (2 * node + 2, total - left)):
            trees.values[tree, child] = penalties.compute_value(*map(float, part))


def find_split(sums: Array, penalties: Penalties) -> tuple[int, int] | None:
    """Returns column and last bin on the left of the best split, the first of equals; None where none gains.

    Args:
        sums: [columns, bins, 2] sums of first and second derivatives of a node's examples.
        penalties: of splits.
    """
    left = np.cumsum(sums, axis=1)[:, :-1]
    total = sums[0].sum(axis=0)
    right = total - left
    gains = penalties.compute_scores(left[..., 0], left[..., 1]) + penalties.compute_scores(
        right[..., 0], right[..., 1]
    )
    gains = 0.5 * (gains - penalties.compute_scores(total[:1], total[1:])) - penalties.min_gain
    is_heavy = (left[..., 1] >= penalties.min_child_weight) & (right[..., 1] >= penalties.min_child_weight)
    gains = np.where(is_heavy, gains, -np.inf)
    best = int(np.argmax(gains))
    if not gains.size or gains.reshape(-1)[best] <= MIN_GAIN:
        return None
    column, last_bin = divmod(best, gains.shape[1])
    return column, last_bin
