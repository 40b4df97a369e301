"""Who holds which classes: the two cuts of the ISVR benchmark, for eight nodes and ten classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from edgefl.core.types import Array
from edgefl.tasks.datasets.partitioning import list_consecutive_classes, partition_by_holders

NUM_NODES, NUM_CLASSES = 8, 10
THREE_OF_TEN = tuple((node, (node + 1) % 8, 8 if node < 4 else 9) for node in range(NUM_NODES))
"""The cut that separates the methods: a node knows three classes, and a neighbour on the ring one or two of them."""
EIGHT_OF_TEN = tuple(map(tuple, list_consecutive_classes(np.arange(NUM_CLASSES), NUM_NODES, 8)))
"""The published one: a node lacks two classes. Source: Niwa et al., ICML 2021."""
CUTS = {"3 of 10": THREE_OF_TEN, "8 of 10": EIGHT_OF_TEN}


def class_shards(labels: Array, cut: Sequence[Sequence[int]], rng: Generator) -> list[Array]:
    """Returns the row numbers of each node; every class is dealt in near-equal parts among the nodes that hold it."""
    return [np.sort(rows) for rows in partition_by_holders(labels, cut, rng)]
