"""A strategy: the mean of updates that are clipped to the median of their norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.core.types import Array, Update
from edgefl.strategies.round_strategy import RoundStrategy


@dataclass(frozen=True, kw_only=True)
class ClippedMean(RoundStrategy):
    """Averages updates after scaling down those whose norm is above `limit` times the median norm of the round."""

    limit: float = 1.5

    def combine(self, updates: Sequence[Update]) -> dict[str, Array]:
        """Returns by how much the model moves: every tensor of it, of its shape."""
        norms = [
            np.sqrt(sum(float(np.sum(np.square(tensor))) for tensor in update.tensors.values())) for update in updates
        ]
        bound = self.limit * float(np.median(norms))
        scales = [min(1.0, bound / norm) if norm > 0 else 1.0 for norm in norms]
        return {
            name: sum(scale * update.tensors[name] for scale, update in zip(scales, updates, strict=True))
            / len(updates)
            for name in updates[0].tensors
        }
