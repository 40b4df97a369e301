"""Figures beside what they are measured against, in one form for all parts of `coordinator_costs.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure; `aim` is an upper bound, or a lower one where more is better, or None where there is none."""

    part: str
    what: str
    value: float
    unit: str
    aim: float | None = None
    more_is_better: bool = False

    @property
    def is_met(self) -> bool:
        if self.aim is None:
            return True
        return self.value >= self.aim if self.more_is_better else self.value <= self.aim

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_met": self.is_met}

    def __str__(self) -> str:
        bound = "" if self.aim is None else f"  (aim: {'at least' if self.more_is_better else 'at most'} {self.aim:g}"
        verdict = "" if self.aim is None else f", {'met' if self.is_met else 'MISSED'})"
        return f"  {self.what:66} {self.value:12,.4g} {self.unit}{bound}{verdict}"


def interleaved(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Returns CPU seconds of this process for each way, as often as asked, each way once in every turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            begun_s = time.process_time()
            run()
            times[name].append(time.process_time() - begun_s)
    return times


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Returns the median of the ratios turn by turn: what slows a whole turn down leaves them as they are."""
    return statistics.median(own / other for own, other in zip(ours, others, strict=True))
