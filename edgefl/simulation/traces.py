"""What changes on a board while time goes by, as data: values that step, and times of absence."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgefl.types import Array

Steps = tuple[tuple[float, float], ...]
"""(from second, value), in the order of time: the value holds until the next entry."""
Absences = tuple[tuple[float, float], ...]
"""(from second, to second), in the order of time and apart from each other; the last may end at infinity."""


def value_at(steps: Steps, now_s: float) -> float | None:
    """Returns the value that holds at `now_s`; None before the first step."""
    place = bisect.bisect_right(steps, (now_s, math.inf))
    return steps[place - 1][1] if place else None


@dataclass(frozen=True, slots=True)
class Throttle:
    """Turns nominal seconds of work into real ones: from `starts_s[i]` on, all takes `factors[i]` times longer.

    The first start is 0.
    """

    starts_s: tuple[float, ...]
    factors: tuple[float, ...]

    @classmethod
    def of(cls, steps: Iterable[tuple[float, float]]) -> Throttle | None:
        """Returns the throttle of a trace; None for a board that never changes its pace."""
        named = sorted(steps)
        if all(factor == 1.0 for _, factor in named):
            return None
        if not named or named[0][0] > 0:
            named.insert(0, (0.0, 1.0))
        return cls(tuple(start for start, _ in named), tuple(factor for _, factor in named))

    def factor_at(self, now_s: float) -> float:
        return self.factors[max(0, bisect.bisect_right(self.starts_s, now_s) - 1)]

    def end_s(self, start_s: float, work_s: float) -> float:
        """Returns when work of so many nominal seconds that begins at `start_s` is done."""
        place, now_s, left_s = max(0, bisect.bisect_right(self.starts_s, start_s) - 1), start_s, work_s
        while place + 1 < len(self.starts_s):
            span_s = (self.starts_s[place + 1] - now_s) / self.factors[place]
            if left_s <= span_s:
                break
            left_s, place = left_s - span_s, place + 1
            now_s = self.starts_s[place]
        return now_s + left_s * self.factors[place]

    def work_s(self, start_s: float, now_s: float) -> float:
        """Returns the nominal seconds of work that are done from `start_s` to `now_s`."""
        edges = [start_s, *(at for at in self.starts_s if start_s < at < now_s), now_s]
        spans = itertools.pairwise(edges)
        return sum((end - begin) / self.factor_at(begin) for begin, end in spans)


def combined(traces: Sequence[Steps]) -> Steps:
    """Returns the product of several traces of factors; before its first step each counts as 1."""
    times = sorted({at for trace in traces for at, _ in trace})
    return tuple((at, math.prod(value_at(trace, at) or 1.0 for trace in traces)) for at in times)


def summed(traces: Sequence[Steps]) -> Steps:
    """Returns the sum of several traces; before its first step each counts as 0."""
    times = sorted({at for trace in traces for at, _ in trace})
    return tuple((at, math.fsum(value_at(trace, at) or 0.0 for trace in traces)) for at in times)


def merged(absences: Iterable[tuple[float, float]]) -> Absences:
    """Returns the same absences in order, those that touch or overlap as one."""
    whole: list[tuple[float, float]] = []
    for begin, end in sorted(absences):
        if whole and begin <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(whole[-1][1], end)
        else:
            whole.append((begin, end))
    return tuple(whole)


@dataclass(frozen=True, slots=True)
class Pace:
    """Nominal seconds of work by iteration: `ends_s` [m] cumulative, repeated as often as there are iterations."""

    ends_s: Array

    @classmethod
    def steady(cls, iteration_s: float) -> Pace:
        return cls(np.array([iteration_s]))

    @classmethod
    def drawn(cls, iteration_s: float, factors: Array) -> Pace:
        return cls(np.cumsum(iteration_s * factors))

    def work_s(self, iterations: int) -> float:
        """Returns the nominal seconds of the first so many iterations."""
        whole, rest = divmod(iterations, len(self.ends_s))
        return whole * float(self.ends_s[-1]) + (float(self.ends_s[rest - 1]) if rest else 0.0)

    def done(self, work_s: float) -> int:
        """Returns how many iterations are finished after so many nominal seconds."""
        whole = int(work_s // float(self.ends_s[-1]))
        rest_s = work_s - whole * float(self.ends_s[-1])
        return whole * len(self.ends_s) + int(np.searchsorted(self.ends_s, rest_s, side="right"))
