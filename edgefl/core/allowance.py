"""Allowance of a board: how long its hours still last, and what its budgets still allow, as it reports.

Its coordinator plans with it: whom it chooses, for how much, until when. It only ever asks a board for less: the
board judges each work by itself, so that an allowance that is wrong costs nobody else anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgefl.core.conditions import MAX_RUN_CHARS, USE_KINDS, USE_UNITS, Blocker

PERIODS = ("day", "month")
MAX_AMOUNT = 1e18
MIN_RATE = 1e-9
"""What is used, or done, in a second; what a board says of less is not known."""
MAX_SECONDS = 1e8
"""Three years; what a board says of a later time counts as this."""
SAME_S = 30.0
"""Ends of hours that are nearer to each other are the same: reports travel, and clocks are set."""
WORK_MARGIN = 1.25
"""How much longer than measured a work may take, and yet fit."""
SAME_LEFT = 0.01
"""Of the limit of a budget: what is left varies by less, with the margin that a board keeps."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Present hours of a board.

    Attributes:
        ends_s: when they end.
        reopens_s: when the next begin; None where that is not known.
    """

    ends_s: float
    reopens_s: float | None = None

    def is_past(self, now_s: float) -> bool:
        """Returns whether the next hours have begun, of which nothing is known."""
        return self.reopens_s is not None and now_s >= self.reopens_s

    def shift(self, by_s: float) -> Window:
        """Returns it on a clock that is ahead by so many seconds."""
        return Window(ends_s=self.ends_s + by_s, reopens_s=None if self.reopens_s is None else self.reopens_s + by_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLeft:
    """What is left of one budget.

    Attributes:
        kind: of `USE_KINDS`.
        period: day or month.
        left: bytes, processor seconds, joules or bytes that a work may use, from 0 on.
        limit: of all of the period.
        renews_s: when the period ends.
        per_s: what a second of work has used lately; None of bytes on the network, and where it is not known.
    """

    kind: str
    period: str
    left: float
    limit: float
    renews_s: float
    per_s: float | None = None

    def explain(self, needed: float) -> str:
        """Returns in words that so much does not fit."""
        unit, name = USE_UNITS[self.kind]
        if needed > self.limit:
            return (
                f"its {self.limit / unit:.4g} {name} a {self.period} hold no work, which may use {needed / unit:.4g}"
            )
        return (
            f"it has {self.left / unit:.4g} of {self.limit / unit:.4g} {name} of this {self.period} left, "
            f"and one work may use {needed / unit:.4g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCost:
    """What a work is expected to cost a board.

    Attributes:
        seconds: of computing, 0 on; None where it is not known.
        download_s: before the computing.
        num_bytes: of model and update together.
    """

    seconds: float | None
    download_s: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Times are on the clock of whoever holds it; in a report they count from its sending.

    Attributes:
        window: the hours of the board's owner; None where nothing ends them.
        run: whose hours are in `run_window`; empty for none.
        run_window: of a run's own conditions.
        budgets: those that the owner has set.
    """

    window: Window | None = None
    run: str = ""
    run_window: Window | None = None
    budgets: tuple[BudgetLeft, ...] = ()

    @classmethod
    def from_fields(cls, value: Mapping[str, Any]) -> Allowance:
        """Returns the allowance that `dataclasses.asdict` was called with."""
        windows = {name: value[name] and Window(**value[name]) for name in ("window", "run_window")}
        return cls(run=value["run"], budgets=tuple(BudgetLeft(**budget) for budget in value["budgets"]), **windows)

    @property
    def is_empty(self) -> bool:
        """Whether it limits nothing."""
        return self.window is None and self.run_window is None and not self.budgets

    def shift(self, by_s: float) -> Allowance:
        """Returns it on a clock that is ahead by so many seconds."""
        return replace(
            self,
            window=self.window and self.window.shift(by_s),
            run_window=self.run_window and self.run_window.shift(by_s),
            budgets=tuple(replace(budget, renews_s=budget.renews_s + by_s) for budget in self.budgets),
        )

    def select_run(self, run_id: str) -> Allowance:
        """Returns it for one run, whose hours limit those of the owner; those of another run count for nothing."""
        windows = [self.window, self.run_window if self.run == run_id else None]
        first = min((window for window in windows if window is not None), key=lambda w: w.ends_s, default=None)
        return replace(self, window=first, run="", run_window=None)

    def is_within(self, former: Allowance | None) -> bool:
        """Returns whether it has the same hours as one before, on the same clock, and no more of any budget.

        More by up to `SAME_LEFT` is no more.
        """
        if former is None or self.run != former.run:
            return False
        for name in ("window", "run_window"):
            ends_s = [
                math.inf if window is None else window.ends_s
                for window in (getattr(former, name), getattr(self, name))
            ]
            if ends_s[0] != ends_s[1] and not abs(ends_s[0] - ends_s[1]) <= SAME_S:
                return False
        known = {(budget.kind, budget.period): budget for budget in former.budgets}
        return all(
            (before := known.get((budget.kind, budget.period))) is not None
            and budget.left <= before.left + SAME_LEFT * budget.limit
            and budget.limit == before.limit
            for budget in self.budgets
        )

    def find_shortage(self, cost: WorkCost, now_s: float) -> Blocker | None:
        """Returns what does not hold a work that begins now; None where everything does.

        `free_at_s` is when it may, on the clock of the allowance.
        """
        if self.window is not None and cost.seconds is not None and not self.window.is_past(now_s):
            left_s, needed_s = self.window.ends_s - now_s, cost.download_s + WORK_MARGIN * cost.seconds
            if needed_s > left_s:
                reason = (
                    f"its hours end in {format_duration(left_s)}, and one work may take {format_duration(needed_s)}"
                )
                return Blocker(kind="hours", reason=reason, free_at_s=self.window.reopens_s)
        for budget in self.budgets:
            needed = _compute_needed(budget, cost)
            if needed > budget.left and now_s < budget.renews_s:
                renews_s = budget.renews_s if needed <= budget.limit else None
                return Blocker(kind="budget", reason=budget.explain(needed), free_at_s=renews_s)
        return None

    def count_fitting(self, seconds_per_iteration: float, now_s: float, *, download_s: float = 0.0) -> int | None:
        """Returns how many iterations of a work that begins now fit; None where nothing limits them.

        Args:
            seconds_per_iteration: above 0.
            now_s: on the clock of the allowance.
            download_s: before the first.
        """
        limits_s = [budget.left / budget.per_s for budget in self.budgets if budget.per_s and now_s < budget.renews_s]
        if self.window is not None and not self.window.is_past(now_s):
            limits_s.append(self.window.ends_s - now_s - download_s)
        if not limits_s:
            return None
        fitting = min(limits_s) / (WORK_MARGIN * seconds_per_iteration) * (1.0 + _ROUNDING)
        return max(0, math.floor(min(fitting, MAX_AMOUNT)))

    def to_json(self) -> dict[str, Any]:
        """Returns it as a heartbeat and a reply carry it; its times count from now."""
        values: dict[str, Any] = {
            "window": _window_to_json(self.window),
            "run": self.run or None,
            "run_window": _window_to_json(self.run_window),
        }
        for budget in self.budgets:
            period = values.setdefault(budget.period, {"renews_s": round(budget.renews_s)})
            per_s = None if budget.per_s is None else float(f"{budget.per_s:.4g}")
            period[budget.kind] = [math.floor(budget.left), math.ceil(budget.limit), per_s]
        return {name: value for name, value in values.items() if value is not None}

    def describe(self, now_s: float) -> str:
        """Returns it in one line for people; empty where nothing is limited."""
        ends_s = [window.ends_s for window in (self.window, self.run_window) if window is not None]
        parts = [f"{format_duration(min(ends_s) - now_s)} of its hours"] if ends_s else []
        for budget in self.budgets:
            unit, name = USE_UNITS[budget.kind]
            parts.append(f"{budget.left / unit:.4g} of {budget.limit / unit:.4g} {name} of this {budget.period}")
        return ", ".join(parts)


def parse_allowance(value: object) -> Allowance | None:
    """Returns what another machine reports, bounded; None where it reports none, or anything that makes no sense."""
    if not isinstance(value, Mapping):
        return None
    run = value.get("run", "")
    try:
        allowance = Allowance(
            window=_parse_window(value.get("window")),
            run=run[:MAX_RUN_CHARS] if isinstance(run, str) else "",
            run_window=_parse_window(value.get("run_window")),
            budgets=tuple(budget for period in PERIODS for budget in _parse_budgets(period, value.get(period))),
        )
    except (TypeError, ValueError, KeyError):
        return None
    return None if allowance.is_empty else allowance


def format_duration(seconds: float) -> str:
    """Returns a duration in words, such as 5.5 h."""
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(0.0, seconds):.2g} s"


def _compute_needed(budget: BudgetLeft, cost: WorkCost) -> float:
    """Returns what a work may use of a budget; 0 where that is not known."""
    if budget.kind == "traffic":
        return cost.num_bytes
    return WORK_MARGIN * (cost.seconds or 0.0) * (budget.per_s or 0.0)


def _window_to_json(window: Window | None) -> list[int | None] | None:
    if window is None:
        return None
    return [max(0, math.floor(window.ends_s)), None if window.reopens_s is None else round(window.reopens_s)]


def _parse_window(value: object) -> Window | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise TypeError("no list")
    ends_s, reopens_s = value
    return Window(ends_s=_parse_seconds(ends_s), reopens_s=None if reopens_s is None else _parse_seconds(reopens_s))


def _parse_budgets(period: str, value: object) -> Iterator[BudgetLeft]:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TypeError("no object")
    renews_s = _parse_seconds(value["renews_s"])
    for kind in USE_KINDS:
        if kind in value:
            left, limit, per_s = value[kind]
            yield BudgetLeft(
                kind=kind,
                period=period,
                left=_parse_amount(left),
                limit=_parse_amount(limit),
                renews_s=renews_s,
                per_s=_parse_rate(kind, per_s),
            )


def _parse_rate(kind: str, per_s: object) -> float | None:
    """Returns what a second of work uses of a budget; None where that is not known, as of bytes on the network."""
    rate = None if per_s is None else _parse_amount(per_s)
    return None if rate is None or kind == "traffic" or rate < MIN_RATE else rate


def _parse_seconds(value: object) -> float:
    return min(MAX_SECONDS, _parse_amount(value))


def _parse_amount(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_AMOUNT:
        raise ValueError(f"must be a number from 0 on, got {value!r:.40}")
    return float(value)
