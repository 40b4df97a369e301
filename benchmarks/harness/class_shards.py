"""Who holds which classes: the two cuts of the ISVR benchmark, for eight nodes and ten classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from edgefl.core.types import Array

NUM_NODES, NUM_CLASSES = 8, 10
THREE_OF_TEN = tuple((node, (node + 1) % 8, 8 if node < 4 else 9) for node in range(NUM_NODES))
"""The cut that separates the methods: a node knows three classes, and a neighbour on the ring one or two of them."""
_ORDER = (7, 8, 2, 6, 4, 5, 1, 3, 0, 9)
EIGHT_OF_TEN = tuple(tuple(_ORDER[(4 * node + step) % NUM_CLASSES] for step in range(8)) for node in range(NUM_NODES))
"""The published one: a node lacks two classes. Source: Niwa et al., ICML 2021."""
CUTS = {"3 of 10": THREE_OF_TEN, "8 of 10": EIGHT_OF_TEN}


def class_shards(labels: Array, cut: Sequence[Sequence[int]], rng: Generator) -> list[Array]:
    """Returns the row numbers of each node; every class is dealt in near-equal parts among the nodes that hold it."""
    rows: list[list[Array]] = [[] for _ in cut]
    for label in range(NUM_CLASSES):
        holders = [node for node, classes in enumerate(cut) if label in classes]
        mixed = rng.permutation(np.flatnonzero(labels == label))
        for holder, part in zip(holders, np.array_split(mixed, len(holders)), strict=True):
            rows[holder].append(part)
    return [np.sort(np.concatenate(parts)) for parts in rows]
