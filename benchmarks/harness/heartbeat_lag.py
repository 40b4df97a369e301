"""How long heartbeats are on their way: when each left its device, against when the coordinator noted it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """Of heartbeats that left in one span; those that are lost count in no time."""

    num_sent: int
    num_lost: int
    median_s: float
    p99_s: float
    max_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def lag_of(
    sent: Mapping[str, Sequence[float]], stored: Mapping[tuple[str, int], float], begun_at: float, ended_at: float
) -> Lag:
    """Returns how late heartbeats were.

    Args:
        sent: when each device's heartbeats left, in Unix seconds, by their numbers from 1 on.
        stored: device and number -> when the coordinator noted it, by the same clock.
        begun_at, ended_at: the span in which they left.
    """
    keys = [
        (name, number, at)
        for name, times in sent.items()
        for number, at in enumerate(times, 1)
        if begun_at <= at < ended_at
    ]
    ways_s = [stored[name, number] - at for name, number, at in keys if (name, number) in stored]
    median_s, p99_s, max_s = np.quantile(ways_s, [0.5, 0.99, 1.0]) if ways_s else (np.inf,) * 3
    return Lag(
        num_sent=len(keys),
        num_lost=len(keys) - len(ways_s),
        median_s=float(median_s),
        p99_s=float(p99_s),
        max_s=float(max_s),
    )
