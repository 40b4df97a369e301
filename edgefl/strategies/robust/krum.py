"""Krum and Multi-Krum: the update, or the mean of the m updates, with the least sum of distances to its neighbours.

The score of an update is the sum of its squared distances to its n - f - 2 nearest others; it holds for n >= 2 f + 3.
All updates of a round are in memory while they are combined.

Source: Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with Adversaries: Byzantine Tolerant Gradient
Descent, NeurIPS 2017, section 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgefl.core.types import Array, Update
from edgefl.strategies.round_strategy import RoundStrategy
from edgefl.strategies.strategy_config import RoundRules, check_at_least
from edgefl.strategies.synchronous.round_state import RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class KrumConfig(RoundStrategy):
    """Settings of a run with `krum`; `num_rogues` is f."""

    num_rogues: int = 1

    summary: ClassVar[str] = "Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017, section 4."

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        return _average(updates, select_krum(compute_distances(updates), self.num_rogues, 1))

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        check_at_least("num_rogues", self.num_rogues, 0)
        return RoundStrategy.build(self, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrumConfig(RoundStrategy):
    """Settings of a run with `multi-krum`; `num_rogues` is f, and the n - f best updates are averaged."""

    num_rogues: int = 1

    summary: ClassVar[str] = "Multi-Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017."

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        count = max(1, len(updates) - self.num_rogues)
        return _average(updates, select_krum(compute_distances(updates), self.num_rogues, count))

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        check_at_least("num_rogues", self.num_rogues, 0)
        return RoundStrategy.build(self, rules)


def compute_distances(updates: Sequence[Update]) -> Array:
    """Returns the [n, n] squared distances between updates, over their float tensors."""
    distances = np.zeros((len(updates), len(updates)))
    for first in range(len(updates)):
        for second in range(first):
            total = 0.0
            for name, tensor in updates[first].tensors.items():
                left, right = np.asarray(tensor), np.asarray(updates[second].tensors[name])
                if left.dtype.kind == "f":
                    difference = (left.astype(np.float64) - right).reshape(-1)
                    total += float(difference @ difference)
            distances[first, second] = distances[second, first] = total
    return distances


def select_krum(distances: Array, num_rogues: int, count: int) -> list[int]:
    """Returns the `count` updates of least score, in their order; of equal ones the first."""
    num_neighbours = max(1, len(distances) - num_rogues - 2)
    scores = np.sort(distances, axis=1)[:, 1 : 1 + num_neighbours].sum(axis=1)
    return sorted(int(index) for index in np.argsort(scores, kind="stable")[:count])


def _average(updates: Sequence[Update], selected: Sequence[int]) -> Mapping[str, Array]:
    names = updates[0].tensors
    return {name: np.mean([np.asarray(updates[index].tensors[name]) for index in selected], axis=0) for name in names}
