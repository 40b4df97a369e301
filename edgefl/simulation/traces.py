"""Values of a device over time, as data: step functions, and absences."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.core.types import Array

StepTrace = tuple[tuple[float, float], ...]
"""(from second, value), in the order of time: the value holds until the next entry."""
Absences = tuple[tuple[float, float], ...]
"""(from second, to second), in the order of time and apart from each other; the last may end at infinity."""


def value_at(steps: StepTrace, now_s: float) -> float | None:
    """Returns the value at `now_s`; None before the first step."""
    index = bisect.bisect_right(steps, (now_s, math.inf))
    return steps[index - 1][1] if index else None


@dataclass(frozen=True, slots=True)
class SlowdownTrace:
    """Maps nominal seconds of work to real ones: from `starts_s[i]` on, slower by `factors[i]`.

    The first start is 0.
    """

    starts_s: tuple[float, ...]
    factors: tuple[float, ...]

    @classmethod
    def from_steps(cls, steps: Iterable[tuple[float, float]]) -> SlowdownTrace | None:
        """Returns the slowdown of a trace; None for a constant speed."""
        ordered = sorted(steps)
        if all(factor == 1.0 for _, factor in ordered):
            return None
        if not ordered or ordered[0][0] > 0:
            ordered.insert(0, (0.0, 1.0))
        return cls(tuple(start for start, _ in ordered), tuple(factor for _, factor in ordered))

    def factor_at(self, now_s: float) -> float:
        return self.factors[max(0, bisect.bisect_right(self.starts_s, now_s) - 1)]

    def compute_end_s(self, start_s: float, work_s: float) -> float:
        """Returns the end of `work_s` nominal seconds of work that start at `start_s`."""
        index, now_s, remaining_s = max(0, bisect.bisect_right(self.starts_s, start_s) - 1), start_s, work_s
        while index + 1 < len(self.starts_s):
            span_s = (self.starts_s[index + 1] - now_s) / self.factors[index]
            if remaining_s <= span_s:
                break
            remaining_s, index = remaining_s - span_s, index + 1
            now_s = self.starts_s[index]
        return now_s + remaining_s * self.factors[index]

    def compute_work_s(self, start_s: float, now_s: float) -> float:
        """Returns the nominal seconds of work done from `start_s` to `now_s`."""
        edges = [start_s, *(at for at in self.starts_s if start_s < at < now_s), now_s]
        spans = itertools.pairwise(edges)
        return sum((end - start) / self.factor_at(start) for start, end in spans)


def multiply_traces(traces: Sequence[StepTrace]) -> StepTrace:
    """Returns the product of several traces of factors; before its first step each counts as 1."""
    times = sorted({at for trace in traces for at, _ in trace})
    return tuple((at, math.prod(value_at(trace, at) or 1.0 for trace in traces)) for at in times)


def add_traces(traces: Sequence[StepTrace]) -> StepTrace:
    """Returns the sum of several traces; before its first step each counts as 0."""
    times = sorted({at for trace in traces for at, _ in trace})
    return tuple((at, math.fsum(value_at(trace, at) or 0.0 for trace in traces)) for at in times)


def merge_absences(absences: Iterable[tuple[float, float]]) -> Absences:
    """Returns the same absences in order, touching and overlapping ones merged."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(absences):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class IterationTimes:
    """Nominal seconds of work by iteration: `ends_s` [m] cumulative, repeated as often as there are iterations."""

    ends_s: Array

    @classmethod
    def from_constant(cls, iteration_s: float) -> IterationTimes:
        return cls(np.array([iteration_s]))

    @classmethod
    def from_factors(cls, iteration_s: float, factors: Array) -> IterationTimes:
        return cls(np.cumsum(iteration_s * factors))

    def compute_work_s(self, iterations: int) -> float:
        """Returns the nominal seconds of the first `iterations`."""
        num_cycles, remainder = divmod(iterations, len(self.ends_s))
        return num_cycles * float(self.ends_s[-1]) + (float(self.ends_s[remainder - 1]) if remainder else 0.0)

    def count_iterations(self, work_s: float) -> int:
        """Returns the number of iterations finished within `work_s` nominal seconds."""
        num_cycles = int(work_s // float(self.ends_s[-1]))
        remainder_s = work_s - num_cycles * float(self.ends_s[-1])
        return num_cycles * len(self.ends_s) + int(np.searchsorted(self.ends_s, remainder_s, side="right"))
