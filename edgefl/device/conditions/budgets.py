"""Budgets of a board: what training has used in this day and month, on disk before it is used.

The time of budgets is the clock's at start, and then that of the kernel since boot: it never goes back, and a clock
that is set gives no new budget. It is set forward only where the coordinator's clock agrees.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Any

from edgefl.core.allowance import PERIODS, BudgetLeft
from edgefl.core.conditions import (
    USE_KINDS,
    USE_UNITS,
    Blocker,
    Conditions,
    find_period,
    find_period_end_s,
    find_zone,
)
from edgefl.core.errors import StoreError
from edgefl.core.protocol import INLINE_BODY_BYTES
from edgefl.core.safe_parsing import parse_json
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

USAGE_FILE = "budgets.json"
MAX_SKEW_S = 300.0
"""By how much the clocks of board and coordinator may differ where they agree."""
FIRST_MARGINS: Mapping[str, float] = {
    "traffic": 2.0 * INLINE_BODY_BYTES,
    "processor": 5.0,
    "energy": 50.0,
    "written": 1e6,
}
"""What the first step of a work may use: bytes both ways, processor seconds, joules, bytes written."""
MARGIN_DECAY = 0.95
SLICE = 8.0
"""How many steps are charged ahead at once, so that the card is written seldom."""
SLICE_FRACTION = 0.02
"""And for how much of a budget at most, as a kill loses it."""
SAVE_INTERVAL_S = 3600.0
"""How much of the time of budgets a reboot may lose."""
MAX_TIME_S = 1e11
"""Of a clock; the year 5138."""
ALL = 1e17
"""What is used where the file is damaged."""


def read_boot_time_s() -> float:
    """Returns the seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Clocks of a board; `boot_id` names the boot in which `boot_time` counts seconds."""

    boot_id: str
    wall: Callable[[], float] = time.time
    boot_time: Callable[[], float] = read_boot_time_s


class BudgetUsage:
    """Usage of budgets, in one file of the state directory. Not thread-safe.

    What is on disk is never less than what was used: a use is charged ahead with a margin, and a process that is
    killed has used all of that. What could not be written is written by the next call that charges or finds.

    Args:
        folder: state directory of the board.
        clocks: of the board.
        is_agent: whether it may write; any other process only reads.

    Raises:
        StoreError: of its methods that charge or find: the card is full, or broken.
    """

    def __init__(self, folder: Path, clocks: Clocks, *, is_agent: bool = True) -> None:
        self._path, self._clocks, self._is_agent = folder / USAGE_FILE, clocks, is_agent
        self._used: dict[str, dict[str, float]] = {name: {} for name in PERIODS}
        self._period = dict.fromkeys(PERIODS, "")
        self._rolled: tuple[tzinfo | None, float] = None, -math.inf
        self._ahead: dict[str, float] = {}
        self._margins = dict(FIRST_MARGINS)
        self._anchor_s, self._anchor_boot_s = clocks.wall(), clocks.boot_time()
        self._unsaved: dict[str, float] | None = None
        self._is_new_boot = True
        self._load()
        self._saved_s = self.now_s

    @property
    def now_s(self) -> float:
        """Returns the time of budgets in Unix seconds; it never goes back."""
        return self._anchor_s + max(0.0, self._clocks.boot_time() - self._anchor_boot_s)

    def keep_time(self) -> None:
        """Saves the time of budgets in a new boot, as the clock may be set before anything is used."""
        if self._is_new_boot:
            with contextlib.suppress(StoreError):  # a full card: it is written by the next call that charges or finds
                self._save(self._get_ahead())

    def set_forward(self, skew_s: float) -> None:
        """Sets the time to the clock's where that is ahead and the coordinator's, `skew_s` later, agrees."""
        wall_s = self._clocks.wall()
        if abs(skew_s) <= MAX_SKEW_S and wall_s > self.now_s:
            self._anchor_s, self._anchor_boot_s = wall_s, self._clocks.boot_time()

    def find_blocker(self, conditions: Conditions, *, needed: Mapping[str, float] | None = None) -> Blocker | None:
        """Returns which budget has no room for the next step; None where all have.

        Args:
            conditions: with the budgets.
            needed: what the next step uses, by `USE_KINDS`; those of the largest so far for None.
        """
        if not conditions.budgets:
            return None
        zone = find_zone(conditions.zone)
        self._roll(zone)
        if self._unsaved is not None or self.now_s - self._saved_s > SAVE_INTERVAL_S:
            self._save(self._get_ahead())
        for period, limits in conditions.budgets.items():
            for kind, limit in limits.items():
                step = min(self._margins[kind], limit / 2) if needed is None else needed.get(kind, 0.0)
                if self._used[period].get(kind, 0.0) + step > limit:
                    return self._make_blocker(period, kind, limit, zone)
        return None

    def charge(self, conditions: Conditions, used: Mapping[str, float]) -> None:
        """Records a use; on disk, with a margin for the next, before this returns."""
        if not conditions.budgets:
            return
        self._roll(find_zone(conditions.zone))
        for kind, amount in used.items():
            if kind == "traffic":
                self._margins[kind] = max(self._margins[kind], 2 * amount)
            for period in PERIODS:
                self._used[period][kind] = self._used[period].get(kind, 0.0) + amount
            self._ahead[kind] = self._ahead.get(kind, 0.0) - amount
        is_short = any(self._ahead[kind] < self._get_least_ahead(kind) for kind in used)
        if is_short or self._unsaved is not None:
            self._save(self._get_ahead() | {kind: self._compute_ahead(conditions, kind) for kind in used})

    def record_step(self, used: Mapping[str, float]) -> None:
        """Records what one step of a work has used; the next must have room for twice the largest."""
        for kind, amount in used.items():
            self._margins[kind] = max(MARGIN_DECAY * self._margins[kind], 2 * amount, FIRST_MARGINS[kind])

    def settle(self, conditions: Conditions) -> None:
        """Gives back what was charged ahead, at the end of a work."""
        if conditions.budgets and self._ahead:
            self._save({})

    def _get_ahead(self) -> dict[str, float]:
        """Returns what to charge ahead: what could not be written yet, else what is on disk."""
        return self._ahead if self._unsaved is None else self._unsaved

    def _get_least_ahead(self, kind: str) -> float:
        """Returns the least that is charged ahead: the next step; transfers are charged before they begin."""
        return 0.0 if kind == "traffic" else self._margins[kind]

    def _compute_ahead(self, conditions: Conditions, kind: str) -> float:
        """Returns what to charge ahead: some steps, as few as fit into a part of the least budget."""
        limits = [limits[kind] for limits in conditions.budgets.values() if kind in limits]
        least = self._get_least_ahead(kind)
        return max(least, min([SLICE * least, *(SLICE_FRACTION * limit for limit in limits)]))

    def list_left(self, conditions: Conditions, rates: Mapping[str, float]) -> tuple[BudgetLeft, ...]:
        """Returns what a work may use of every budget; times count from now.

        Args:
            conditions: with the budgets.
            rates: what a second of work uses, by `USE_KINDS`; those that are not known are missing.
        """
        zone = find_zone(conditions.zone)
        self._roll(zone)
        return tuple(
            BudgetLeft(
                kind=kind,
                period=period,
                left=self._compute_left(kind, limit - self._used[period].get(kind, 0.0), limit),
                limit=limit,
                renews_s=find_period_end_s(period, self.now_s, zone) - self.now_s,
                per_s=rates.get(kind),
            )
            for period, limits in conditions.budgets.items()
            for kind, limit in limits.items()
        )

    def _compute_left(self, kind: str, unused: float, limit: float) -> float:
        """Returns what a work may use: after each of its steps a margin must be left, or before its transfers."""
        margin = min(self._margins[kind], limit / 2)
        if kind == "traffic":
            return unused if unused >= margin else 0.0
        return max(0.0, unused - margin)

    def describe(self, conditions: Conditions) -> dict[str, str]:
        """Returns used and limit of every budget, for people."""
        self._roll(find_zone(conditions.zone))
        return {
            f"{kind} a {period}": f"{self._used[period].get(kind, 0.0) / unit:.4g} of {limit / unit:g} {name}"
            for period, limits in conditions.budgets.items()
            for kind, limit in limits.items()
            for unit, name in [USE_UNITS[kind]]
        }

    def _make_blocker(self, period: str, kind: str, limit: float, zone: tzinfo | None) -> Blocker:
        unit, name = USE_UNITS[kind]
        reason = f"its {limit / unit:g} {name} of this {period} are used up"
        if self._used[period].get(kind, 0.0) >= ALL:
            reason = f"{self._path.name} was damaged, so the budgets of this {period} count as used up"
        free_in_s = find_period_end_s(period, self.now_s, zone) - self.now_s
        return Blocker(kind="budget", reason=reason, free_at_s=self._clocks.wall() + free_in_s)

    def _roll(self, zone: tzinfo | None) -> None:
        """Begins a new day or month; never an earlier one."""
        rolled_zone, day_end_s = self._rolled
        if zone is rolled_zone and self.now_s < day_end_s:
            return
        self._rolled, is_new = (zone, find_period_end_s("day", self.now_s, zone)), False
        for name in PERIODS:
            current = find_period(name, self.now_s, zone)
            if current > self._period[name]:
                if self._period[name]:
                    self._used[name], is_new = dict.fromkeys(self._ahead, 0.0), True
                self._period[name] = current
        if is_new and self._ahead:  # what a work has charged ahead is used in the new period, too
            self._save(self._get_ahead())

    def _load(self) -> None:
        try:
            value = parse_json(self._path.read_bytes())
            self._apply(value)
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("%s is damaged (%s): budgets count as used up", self._path, error)
            self._used = {name: dict.fromkeys(USE_KINDS, ALL) for name in PERIODS}
            self._roll(None)
            with contextlib.suppress(StoreError):  # a full card: written later
                self._save({})

    def _apply(self, value: Any) -> None:
        found = {name: dict(value["used"][name]) for name in PERIODS}
        used = {name: {kind: _parse_amount(found[name].get(kind, 0)) for kind in USE_KINDS} for name in PERIODS}
        period = {name: str(value["period"][name])[:10] for name in PERIODS}
        time_s, boot_s = (_parse_amount(value[name], MAX_TIME_S) for name in ("time_s", "boot_s"))
        if value["boot_id"] == self._clocks.boot_id and boot_s <= self._anchor_boot_s:
            self._anchor_s, self._is_new_boot = time_s + self._anchor_boot_s - boot_s, False
        else:
            self._anchor_s = max(self._anchor_s, time_s)
        margins = {kind: _parse_amount(value["margins"].get(kind, first)) for kind, first in FIRST_MARGINS.items()}
        self._used, self._period, self._margins = used, period, margins

    def _save(self, ahead: dict[str, float]) -> None:
        """Writes the use with what is charged ahead, which counts only once it is on disk."""
        if not self._is_agent:
            return
        self._unsaved = ahead
        used = {
            name: {kind: amount + ahead.get(kind, 0.0) for kind, amount in amounts.items()}
            for name, amounts in self._used.items()
        }
        boot_s = self._clocks.boot_time()
        value = {
            "v": 1, "used": used, "period": self._period, "margins": self._margins,
            "time_s": self.now_s, "boot_s": boot_s, "boot_id": self._clocks.boot_id,
        }  # fmt: skip
        write_atomic(self._path, json.dumps(value).encode())
        self._ahead, self._saved_s, self._unsaved = ahead, self.now_s, None


def _parse_amount(value: object, limit: float = 1e18) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < limit:
        raise ValueError(f"must be a number from 0 on, got {value!r:.40}")
    return float(value)
