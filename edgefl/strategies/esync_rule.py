"""ESync's rule and its budgets, as pure functions of durations; no clocks of two machines are compared.

Source: Li, Zhou, Yu, Xu, ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data Centers, IEEE TSC
2020, algorithm 2. The budgets that also count the time of an exchange are ours.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SMOOTHINGS = ("median", "ewma", "last")
MEDIAN_OF = 3
EWMA_WEIGHT = 0.5
"""Weight of the newest measurement in the moving average."""
_ROUNDING = 1e-9
"""0.3 / 0.1 is less than 3 in floating point, and three iterations fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a device is: c seconds per iteration, and u seconds to fetch the model and to send the update."""

    seconds_per_iteration: float
    exchange_s: float = 0.0

    @property
    def shortest_s(self) -> float:
        """The time of a round with one iteration."""
        return self.seconds_per_iteration + self.exchange_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """ε: what is left free before the slowest device ends, as a `fraction` of an iteration or in `seconds`.

    The paper has 0.5 s, which costs a fast fleet whole iterations; a fraction does not.
    """

    fraction: float = 0.05
    seconds: float | None = None

    def of(self, seconds_per_iteration: float) -> float:
        return self.fraction * seconds_per_iteration if self.seconds is None else self.seconds


def horizon_s(paces: Mapping[str, Pace]) -> float:
    """Returns T* = max (c + u): when the slowest device is back with one iteration; 0 without devices."""
    return max((pace.shortest_s for pace in paces.values()), default=0.0)


def budgets(
    paces: Mapping[str, Pace], slack: Slack, *, at_least: int = 1, at_most: int | None = None
) -> dict[str, int]:
    """Returns how many iterations each device does so that all are back when the slowest is.

    n = max(1, ⌊(T* - u - ε) / c⌋); the slowest does one.

    Args:
        paces: by device.
        slack: ε.
        at_least: lower bound, also for the slowest.
        at_most: upper bound.
    """
    end_s = horizon_s(paces)
    return {
        device_id: _bounded(_num_fitting(pace, end_s, slack), at_least, at_most) for device_id, pace in paces.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a device is within a round.

    Attributes:
        iterations: k, finished in this round.
        seconds_per_iteration: c, of the last one.
        age_s: how long ago the last one was finished or, before the first, the model was there.
        is_ready: it was told to send, or has sent.
        has_model: it has this round's model.
    """

    iterations: int
    seconds_per_iteration: float
    age_s: float
    is_ready: bool = False
    has_model: bool = True


def slowest(standings: Mapping[str, Standing]) -> str:
    """Returns the device whose iterations take longest, the first of equals."""
    return max(standings, key=lambda device_id: standings[device_id].seconds_per_iteration)


def is_ready(one: Standing, last: Standing, slack_s: float, *, is_last: bool = False) -> bool:
    """Returns the answer to a device's query: READY (send what you have) or not (one more iteration).

    Args:
        one: who asks.
        last: the slowest.
        slack_s: ε.
        is_last: it is the slowest itself that asks.
    """
    if one.iterations == 0 or not last.has_model:
        return False
    rest_s = last.seconds_per_iteration - last.age_s
    return is_last or last.is_ready or one.seconds_per_iteration + slack_s > rest_s


def smoothed(history: Sequence[float], newest: float, smoothing: str) -> list[float]:
    """Returns the measurements to remember; `level` of them is the value to reckon with."""
    match smoothing:
        case "median":
            return [*history[-MEDIAN_OF + 1 :], newest]
        case "ewma" if history:
            return [(1.0 - EWMA_WEIGHT) * history[-1] + EWMA_WEIGHT * newest]
        case _:
            return [newest]


def level(history: Sequence[float]) -> float:
    """Returns the median of what is remembered; the lower one of two, so that one long hiccup does not count."""
    return statistics.median_low(history)


def _num_fitting(pace: Pace, end_s: float, slack: Slack) -> int:
    # A device that measured nothing (a task without work) has no speed; the slowest does one by definition.
    if pace.seconds_per_iteration <= 0 or pace.shortest_s >= end_s:
        return 1
    free_s = end_s - pace.exchange_s - slack.of(pace.seconds_per_iteration)
    return max(1, math.floor(min(free_s / pace.seconds_per_iteration * (1.0 + _ROUNDING), sys.maxsize)))


def _bounded(count: int, at_least: int, at_most: int | None) -> int:
    count = max(at_least, count)
    return count if at_most is None else min(at_most, count)
