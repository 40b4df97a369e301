"""Coordinate-wise median and trimmed mean: each entry of the step follows from the sorted entries of the updates.

With n updates, f of them arbitrary, the median holds for f < n/2, the mean trimmed by β for f <= β n. Updates weigh
the same, whatever their number of examples. All updates of a round are in memory while they are combined.

Source: Yin, Chen, Ramchandran, Bartlett, Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
ICML 2018, definitions 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Update
from edgefl.strategies.round_strategy import RoundStrategy
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.round_state import RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinateMedianConfig(RoundStrategy):
    """Settings of a run with `coordinate-median`: those of local training."""

    summary: ClassVar[str] = "Coordinate-wise median: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018."

    def combine(self, updates: Sequence[Update]) -> Mapping[str, Array]:
        return {name: np.median(_stack(updates, name), axis=0) for name in updates[0].tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimmedMeanConfig(RoundStrategy):
    """Settings of a run with `trimmed-mean`; `trim` is β, the part that is left out at either end, rounded up."""

    trim: float = 0.2

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

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        if not 0 <= self.trim < 0.5:
            raise ConfigError(f"strategy.trim must be at least 0 and below 0.5, got {self.trim!r}")
        return RoundStrategy.build(self, rules)


def _stack(updates: Sequence[Update], name: str) -> Array:
    stacked: Any = np.stack([np.asarray(update.tensors[name]) for update in updates])
    return np.asarray(stacked, np.float32 if stacked.dtype == np.float16 else stacked.dtype)
