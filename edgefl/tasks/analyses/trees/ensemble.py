"""Trees as arrays, what they predict, and how an example's values become bins.

Nodes are numbered as a heap: 0 is the root, the children of node k are 2 k + 1 and 2 k + 2. An example goes left
where its bin in the node's column is at most the node's bin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgefl.core.types import Array

NO_SPLIT = -1
"""In place of a column: the node is a leaf, or not there."""
LOGISTIC, SQUARED = "logistic", "squared"
MIN_HESSIAN = 1e-16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """Trees of one depth.

    Attributes:
        columns: [trees, 2^depth - 1] column of each node that may be split, `NO_SPLIT` for none.
        bins: likewise, the last bin that goes left.
        values: [trees, 2^(depth + 1) - 1] what a leaf adds to the prediction.
    """

    columns: Array
    bins: Array
    values: Array

    @classmethod
    def create(cls, count: int, depth: int) -> Trees:
        """Returns trees without a split that add nothing."""
        return cls(
            columns=np.full((count, 2**depth - 1), NO_SPLIT, np.int64),
            bins=np.zeros((count, 2**depth - 1), np.int64),
            values=np.zeros((count, 2 ** (depth + 1) - 1)),
        )

    def find_nodes(self, tree: int, bins: Array, depth: int) -> Array:
        """Returns the node of each example after so many levels, or the leaf before; [n] of [n, columns] bins."""
        nodes, rows = np.zeros(len(bins), np.int64), np.arange(len(bins))
        inner = self.columns.shape[1]
        for _ in range(depth):
            columns = np.where(nodes < inner, self.columns[tree, np.minimum(nodes, inner - 1)], NO_SPLIT)
            is_split = columns != NO_SPLIT
            goes_right = bins[rows, np.maximum(columns, 0)] > self.bins[tree, np.minimum(nodes, inner - 1)]
            nodes = np.where(is_split, 2 * nodes + 1 + goes_right, nodes)
        return nodes

    def add_up(self, bins: Array, num_trees: int, base: float) -> Array:
        """Returns the sums of base and leaves over the first trees, [n]."""
        sums = np.full(len(bins), base)
        depth = int(np.log2(self.values.shape[1] + 1)) - 1
        for tree in range(num_trees):
            sums += self.values[tree, self.find_nodes(tree, bins, depth)]
        return sums


def find_bins(values: Array, edges: Array) -> Array:
    """Returns bins, [n, columns], of values, [n, columns]: how many of a column's edges are not above a value.

    Args:
        values: finite.
        edges: [columns, bins - 1], each row ascending.
    """
    return np.stack(
        [np.searchsorted(edges[column], values[:, column], side="right") for column in range(len(edges))], axis=1
    )


def compute_gradients(objective: str, sums: Array, targets: Array) -> tuple[Array, Array, Array]:
    """Returns first and second derivatives of each example's loss by its sum, and the losses."""
    if objective == SQUARED:
        errors = sums - targets
        return errors, np.ones(len(errors)), 0.5 * errors * errors
    shares = 0.5 * (1.0 + np.tanh(0.5 * sums))
    losses = np.maximum(sums, 0.0) - sums * targets + np.log1p(np.exp(-np.abs(sums)))
    return shares - targets, np.maximum(shares * (1.0 - shares), MIN_HESSIAN), losses


def predict(result: Mapping[str, Any], inputs: Array) -> Array:
    """Returns what the trees of a result say: values, or probabilities of the second class; [n].

    Args:
        result: of the analysis `boosted-trees`, read from its JSON.
        inputs: [n, ...] examples of the task.
    """
    sums = add_up_trees(result, inputs)
    shares: Array = 0.5 * (1.0 + np.tanh(0.5 * sums))
    return shares if result["objective"] == LOGISTIC else sums


def add_up_trees(result: Mapping[str, Any], inputs: Array) -> Array:
    """Returns the sums of base and leaves of a result, [n], for inputs [n, ...]."""
    columns: Sequence[int] = result["places"]
    values = inputs.reshape(len(inputs), -1)[:, columns].astype(np.float64)
    return to_trees(result).add_up(find_bins(values, np.array(result["edges"])), result["num_trees"], result["base"])


def to_trees(result: Mapping[str, Any]) -> Trees:
    """Returns the trees of a result."""
    arrays = {name: np.array(result["trees"][name]) for name in ("columns", "bins", "values")}
    return Trees(**arrays)
