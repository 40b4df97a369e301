"""Alignment of several sources in time: rows at a fixed rate from the last value of each column, or one per reading.

A span is an uninterrupted sequence of rows. It ends where a row is left out, at a jump of the clock and at a restart,
so that a task whose `group` is the column of spans never makes a window over a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgefl.device.collect.readings import Reading, Value

MAX_TICKS = 10_000
"""Rows of one update; more are a gap."""


@dataclass(frozen=True, slots=True)
class Row:
    """Values by column, in seconds since 1970; `span` is the number of the uninterrupted sequence."""

    time_s: float
    values: tuple[Value, ...]
    span: int


class RowMaker:
    """Maker of rows from readings.

    Args:
        columns: of a row, in this order.
        every_s: between rows, which are at its multiples; 0 for a row for each reading.
        hold_s: how long a value counts; later it is missing. With `every_s` 0 a longer pause ends the span.
        drops_missing: whether a row with a missing value is left out; one without any value always is.
        first_span: number of the first span.

    Attributes:
        num_dropped: rows that were left out.
    """

    def __init__(
        self, columns: Sequence[str], *, every_s: float, hold_s: float, drops_missing: bool, first_span: int = 1
    ) -> None:
        self._columns, self._every_s, self._hold_s = tuple(columns), every_s, hold_s
        self._drops_missing, self._span = drops_missing, first_span
        self._held: dict[str, tuple[float, Value]] = {}
        self._next_tick: int | None = None
        self._last_s: float | None = None
        self.num_dropped = 0

    def update(self, readings: Sequence[Reading], now_s: float) -> list[Row]:
        """Returns the rows up to now, with all readings since the last call; a time after now counts as now."""
        timed = sorted(((min(reading.time_s, now_s), reading) for reading in readings), key=lambda pair: pair[0])
        if not self._every_s:
            return [row for time_s, reading in timed for row in self._make_row(time_s, reading.values)]
        if self._next_tick is None:
            self._next_tick = math.floor(now_s / self._every_s) + 1
        rows: list[Row] = []
        for time_s, reading in timed:
            rows += self._make_due_rows(time_s, is_included=False)
            for name, value in reading.values.items():
                if time_s >= self._held.get(name, (-math.inf, None))[0]:
                    self._held[name] = time_s, value
        return rows + self._make_due_rows(now_s, is_included=True)

    def restart(self) -> None:
        """Forgets all values and ends the span, at a jump of the clock or a pause."""
        self._held.clear()
        self._next_tick = None
        self._end_span()

    def _make_due_rows(self, end_s: float, *, is_included: bool) -> list[Row]:
        rows: list[Row] = []
        tick = self._next_tick or 0
        last_tick = math.floor(end_s / self._every_s)
        if not is_included and last_tick * self._every_s == end_s:
            last_tick -= 1
        if last_tick - tick > MAX_TICKS:
            self._end_span()
            tick = last_tick
        for number in range(tick, last_tick + 1):
            time_s = number * self._every_s
            values = {
                name: value for name, (since_s, value) in self._held.items() if time_s - since_s <= self._hold_s
            }
            rows += self._make_row(time_s, values)
        self._next_tick = max(tick, last_tick + 1)
        return rows

    def _make_row(self, time_s: float, by_name: Mapping[str, Value]) -> list[Row]:
        """Returns the row of one time, or none."""
        values = tuple(by_name.get(name) for name in self._columns)
        num_missing = values.count(None)
        if num_missing == len(values) or (num_missing and self._drops_missing):
            self.num_dropped += 1
            self._end_span()
            return []
        if self._last_s is not None and not self._every_s and not 0 <= time_s - self._last_s <= self._hold_s:
            self._end_span()
        self._last_s = time_s
        return [Row(time_s, values, self._span)]

    def _end_span(self) -> None:
        if self._last_s is not None:
            self._span += 1
            self._last_s = None
