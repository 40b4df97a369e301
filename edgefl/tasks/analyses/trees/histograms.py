"""What a board sums for trees: gradients as whole numbers, by node, column and bin.

Whole numbers add up without rounding, in any order. So trees do not depend on which board has which example.
"""

from __future__ import annotations

import numpy as np

from edgefl.core.types import Array

UNIT_BITS = 32
"""A derivative is a whole multiple of 2^-32 of its unit: the range of the targets, or 1."""
LIMIT_BITS = 36
"""Derivatives are cut to 2^36 of these: sums of 100 million examples fit."""
GRADIENT, HESSIAN, COUNT = 0, 1, 2
"""Places in a histogram's last axis."""


def to_whole(values: Array, exponent: int) -> Array:
    """Returns values as whole multiples of 2^exponent, cut to `LIMIT_BITS`."""
    limit = 2.0**LIMIT_BITS
    return np.clip(np.rint(np.ldexp(values, -exponent)), -limit, limit).astype(np.int64)


def sum_level(
    bins: Array, nodes: Array, derivatives: tuple[Array, Array], shape: tuple[int, int, int], min_group: int
) -> Array:
    """Returns sums of first and second derivatives, and counts, by node, column and bin.

    Only of the nodes of `find_sent_nodes` anything is sent: what is hidden is not in the fleet's sums. Of these the
    examples, in the order of their bins, count in groups of at least `min_group`, each in the bin of its median: no
    bin is about fewer.

    Args:
        bins: [n, columns] bins.
        nodes: [n] number of each example's node in the tree; that of a leaf above the level for one that ended there.
        derivatives: [n] each, whole numbers.
        shape: nodes of the level, columns and bins.
        min_group: at least 1.

    Returns:
        [nodes, columns, bins, 3] int64.
    """
    sums = np.zeros((*shape, 3), np.int64)
    added = np.stack([*derivatives, np.ones(len(nodes), np.int64)], axis=1)
    first = shape[0] - 1
    for node in np.flatnonzero(find_sent_nodes(nodes, shape[0], min_group)[first:]):
        rows = np.flatnonzero(nodes == first + node)
        for column in range(shape[1]):
            own, sent = bins[rows, column], rows
            if min_group > 1:
                order = np.argsort(own, kind="stable")
                own, sent = _group_bins(own[order], min_group), rows[order]
            np.add.at(sums[node, column], own, added[sent])
    return sums


def find_sent_nodes(nodes: Array, width: int, min_group: int) -> Array:
    """Returns of which nodes a board tells sums, [2 * width - 1] bool, of all levels down to one of `width` nodes.

    Those with at least `min_group` examples whose sibling has as many, or none, and whose parent is sent: the sums of
    a parent less those of one child, or of all that lies under it, would tell those of the other.

    Args:
        nodes: [n] number of each example's node or leaf in the tree.
        width: nodes of the last level, a power of 2.
        min_group: at least 1.
    """
    counts = np.bincount(nodes, minlength=2 * width - 1)
    for node in range(len(counts) - 1, 0, -1):
        counts[(node - 1) // 2] += counts[node]
    is_whole = counts >= min_group
    sent = is_whole.copy()
    for left in range(1, len(counts), 2):
        pair = slice(left, left + 2)
        is_safe = sent[left // 2] and bool((is_whole[pair] | (counts[pair] == 0)).all())
        sent[pair] &= is_safe
    return sent


def _group_bins(ordered: Array, min_group: int) -> Array:
    """Returns for each of [n] sorted bins that of the median of its group; groups have `min_group`, the last more."""
    num_groups = len(ordered) // min_group
    groups = np.minimum(np.arange(len(ordered)) // min_group, num_groups - 1)
    starts = np.arange(num_groups) * min_group
    sizes = np.diff([*starts, len(ordered)])
    medians: Array = ordered[starts + (sizes - 1) // 2]
    return medians[groups]


def find_level_fault(sums: Array, *, is_squared: bool) -> str | None:
    """Returns why no examples can have such sums, [nodes, columns, bins, 3]; None where some can."""
    gradients, hessians, counts = (sums[..., place] for place in (GRADIENT, HESSIAN, COUNT))
    if bool(((counts < 0) | (counts > 1 << (62 - LIMIT_BITS))).any()):
        return "the histogram of a tree must count 0 examples or more in each bin, and not too many"
    limit, most = counts << LIMIT_BITS, counts if is_squared else counts << UNIT_BITS
    least = counts if is_squared else np.zeros_like(counts)
    if bool(((gradients < -limit) | (gradients > limit) | (hessians < least) | (hessians > most)).any()):
        return "the histogram of a tree has derivatives of no examples"
    of_columns = sums.sum(axis=2)
    if bool((of_columns != of_columns[:, :1]).any()):
        return "the histograms of a tree's columns are not of the same examples"
    return None
