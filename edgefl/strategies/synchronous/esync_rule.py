"""ESync's rule and budgets as pure functions of durations, without comparing clocks of two machines.

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
MEDIAN_WINDOW = 3
EWMA_WEIGHT = 0.5
"""Weight of the newest measurement in the moving average."""
_ROUNDING = 1e-9
"""0.3 / 0.1 is less than 3 in floating point, and three iterations fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTiming:
    """Timing of a device: c seconds per iteration, and u seconds of model download and update upload."""

    seconds_per_iteration: float
    exchange_s: float = 0.0

    @property
    def min_round_s(self) -> float:
        """The duration of a round with one iteration."""
        return self.seconds_per_iteration + self.exchange_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """ε: slack before the slowest device ends, as a `fraction` of an iteration or in `seconds`.

    The paper has 0.5 s, which costs a fast fleet whole iterations; a fraction does not.
    """

    fraction: float = 0.05
    seconds: float | None = None

    def to_seconds(self, seconds_per_iteration: float) -> float:
        return self.fraction * seconds_per_iteration if self.seconds is None else self.seconds


def compute_horizon_s(timings: Mapping[str, DeviceTiming]) -> float:
    """Returns T* = max (c + u): when the slowest device returns with one iteration; 0 without devices."""
    return max((pace.min_round_s for pace in timings.values()), default=0.0)


def compute_budgets(
    timings: Mapping[str, DeviceTiming], slack: Slack, *, min_iterations: int = 1, max_iterations: int | None = None
) -> dict[str, int]:
    """Returns the iterations of each device so that all return when the slowest does.

    n = max(1, ⌊(T* - u - ε) / c⌋); the slowest does one.

    Args:
        timings: by device.
        slack: ε.
        min_iterations: lower bound, also for the slowest.
        max_iterations: upper bound.
    """
    end_s = compute_horizon_s(timings)
    return {
        device_id: _clamp(_count_fitting(pace, end_s, slack), min_iterations, max_iterations)
        for device_id, pace in timings.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoundProgress:
    """Progress of a device within a round.

    Attributes:
        iterations: k, finished in this round.
        seconds_per_iteration: c, of the last one.
        age_s: time since the last one was finished or, before the first, since the model arrived.
        is_ready: it was recalled, or has sent its update.
        has_model: it has this round's model.
    """

    iterations: int
    seconds_per_iteration: float
    age_s: float
    is_ready: bool = False
    has_model: bool = True


def find_slowest(progress: Mapping[str, DeviceRoundProgress]) -> str:
    """Returns the device with the longest iterations, the first of equals."""
    return max(progress, key=lambda device_id: progress[device_id].seconds_per_iteration)


def is_ready(
    device: DeviceRoundProgress, slowest_device: DeviceRoundProgress, slack_s: float, *, is_slowest: bool = False
) -> bool:
    """Returns the answer to a device's query: READY (send what you have) or not (one more iteration).

    Args:
        device: the querying one.
        slowest_device: the slowest.
        slack_s: ε.
        is_slowest: the query is the slowest's own.
    """
    if device.iterations == 0 or not slowest_device.has_model:
        return False
    rest_s = slowest_device.seconds_per_iteration - slowest_device.age_s
    return is_slowest or slowest_device.is_ready or device.seconds_per_iteration + slack_s > rest_s


def add_measurement(history: Sequence[float], newest: float, smoothing: str) -> list[float]:
    """Returns the measurements to keep, for `compute_estimate`."""
    match smoothing:
        case "median":
            return [*history[-MEDIAN_WINDOW + 1 :], newest]
        case "ewma" if history:
            return [(1.0 - EWMA_WEIGHT) * history[-1] + EWMA_WEIGHT * newest]
        case _:
            return [newest]


def compute_estimate(history: Sequence[float]) -> float:
    """Returns the median of the measurements; the lower of two, so that one long outlier does not count."""
    return statistics.median_low(history)


def _count_fitting(timing: DeviceTiming, end_s: float, slack: Slack) -> int:
    # A device without measurements (a task without work) has no speed; the slowest does one by definition.
    if timing.seconds_per_iteration <= 0 or timing.min_round_s >= end_s:
        return 1
    free_s = end_s - timing.exchange_s - slack.to_seconds(timing.seconds_per_iteration)
    return max(1, math.floor(min(free_s / timing.seconds_per_iteration * (1.0 + _ROUNDING), sys.maxsize)))


def _clamp(count: int, minimum: int, maximum: int | None) -> int:
    count = max(minimum, count)
    return count if maximum is None else min(maximum, count)
