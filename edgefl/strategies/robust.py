"""Robust rules: what fewer than half of the devices send moves the model by a bounded amount.

Krum and Multi-Krum: the update, or the mean of the m updates, with the least sum of squared distances to its
n - f - 2 nearest others; it holds for n >= 2 f + 3. Source: Blanchard, El Mhamdi, Guerraoui, Stainer, Machine
Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017, section 4.

Coordinate-wise median and trimmed mean: each entry of the step follows from the sorted entries of the updates. With n
updates, f of them arbitrary, the median holds for f < n/2, the mean trimmed by β for f <= β n. Source: Yin, Chen,
Ramchandran, Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018,
definitions 1 and 2.

Updates weigh the same, whatever their number of examples. All updates of a round are in memory while they are
combined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from edgefl.core.types import Array, Update
from edgefl.strategies.round_strategy import RoundStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class KrumConfig(RoundStrategy):
    """Settings of a run with `krum`; `num_rogues` is f."""

    num_rogues: int = field(default=1, metadata={"at_least": 0})

    summary: ClassVar[str] = "Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017, section 4."

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        return _average(updates, select_krum(compute_distances(updates), self.num_rogues, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiKrumConfig(RoundStrategy):
    """Settings of a run with `multi-krum`; `num_rogues` is f, and the n - f best updates are averaged."""

    num_rogues: int = field(default=1, metadata={"at_least": 0})

    summary: ClassVar[str] = "Multi-Krum: Blanchard et al., Machine Learning with Adversaries, NeurIPS 2017."

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        count = max(1, len(updates) - self.num_rogues)
        return _average(updates, select_krum(compute_distances(updates), self.num_rogues, count))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedianConfig(RoundStrategy):
    """Settings of a run with `coordinate-median`: those of local training."""

    summary: ClassVar[str] = "Coordinate-wise median: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018."

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        return {name: np.median(_stack(updates, name), axis=0) for name in updates[0].tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMeanConfig(RoundStrategy):
    """Settings of a run with `trimmed-mean`; `trim` is β, the part that is left out at either end, rounded up."""

    trim: float = field(default=0.2, metadata={"at_least": 0, "below": 0.5})

    summary: ClassVar[str] = (
        "Coordinate-wise trimmed mean: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018."
    )

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        num_updates = len(updates)
        num_trimmed = min(math.ceil(self.trim * num_updates - 1e-9), (num_updates - 1) // 2)
        return {
            name: np.sort(_stack(updates, name), axis=0)[num_trimmed : num_updates - num_trimmed].mean(axis=0)
            for name in updates[0].tensors
        }


def _stack(updates: Sequence[Update], name: str) -> Array:
    stacked: Any = np.stack([np.asarray(update.tensors[name]) for update in updates])
    return np.asarray(stacked, np.float32 if stacked.dtype == np.float16 else stacked.dtype)
