"""Alignment of several sources in time: rows at a fixed rate from the last value of each column, or one per reading.

A span is an uninterrupted sequence of rows. It ends where a row is left out, at a jump of the clock and at a restart,
so that a task whose `group` is the column of spans never makes a window over a gap. Rows are made up for where
readings have times before now, as lines of a file that nobody read for a while: from the values of their own time,
and none twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgefl.device.collect.readings import Reading, Value

JUMP_S = 2.0
MAX_TICKS = 10_000
"""Rows between two readings; more are a gap. After as many of one update the other readings wait."""
MAX_WAITING = 100_000
"""Readings that wait for those of a source which is behind."""


@dataclass(frozen=True, slots=True)
class Row:
    """Values by column, in seconds since 1970; `span` is the number of the uninterrupted sequence."""

    time_s: float
    values: tuple[Value, ...]
    span: int


class SimilarRows:
    """Filter that leaves out rows in which nothing has moved since the last one that was kept (send-on-delta).

    Args:
        columns: names of a row's values.
        tolerances: by column, what a number may move by; what is not named, or is a text, may not change.
    """

    def __init__(self, columns: Sequence[str], tolerances: Mapping[str, float]) -> None:
        self._tolerances = [tolerances.get(name, 0.0) for name in columns]
        self._kept: Row | None = None

    def keep(self, rows: Sequence[Row]) -> list[Row]:
        """Returns the rows that are kept, in their order."""
        kept = list[Row]()
        for row in rows:
            if self._kept is None or row.span != self._kept.span or self._has_moved(self._kept.values, row.values):
                self._kept = row
                kept.append(row)
        return kept

    def _has_moved(self, old: Sequence[Value], new: Sequence[Value]) -> bool:
        return any(
            abs(after - before) > tolerance
            if isinstance(before, float) and isinstance(after, float)
            else before != after
            for before, after, tolerance in zip(old, new, self._tolerances, strict=True)
        )


class JumpDetector:
    """Detector of jumps of a clock.

    Args:
        clock: seconds since 1970; it may jump.
        monotonic: seconds; it does not.
    """

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._offset_s = clock() - monotonic()

    def read(self) -> tuple[float, float]:
        """Returns the time, and by how many seconds it jumped since the last call; 0 for up to `JUMP_S`."""
        now_s = self._clock()
        offset_s = now_s - self._monotonic()
        jump_s, self._offset_s = offset_s - self._offset_s, offset_s
        return now_s, jump_s if abs(jump_s) > JUMP_S else 0.0


class RowMaker:
    """Maker of rows from readings.

    Args:
        columns: of a row, in this order.
        every_s: between rows, which are at its multiples; 0 for a row for each reading.
        hold_s: how long a value counts; later it is missing. With `every_s` 0 a longer pause ends the span.
        drops_missing: whether a row with a missing value is left out; one without any value always is.
        first_span: number of the first span.
        last_row_s: time of the last row that there is already; 0 for none.

    Attributes:
        num_dropped: rows that were left out.
        has_backlog: whether the next call has to come before more readings, of which there are too many for one.
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        every_s: float,
        hold_s: float,
        drops_missing: bool,
        first_span: int = 1,
        last_row_s: float = 0.0,
    ) -> None:
        self._columns, self._every_s, self._hold_s = tuple(columns), every_s, hold_s
        self._drops_missing, self._span = drops_missing, first_span
        self._held: dict[str, tuple[float, Value]] = {}
        self._waiting: list[Reading] = []
        self._next_tick: int | None = None
        self._passed_tick = self._made_tick = math.floor(last_row_s / every_s + 1e-6) if every_s else 0
        self._last_s: float | None = None
        self.num_dropped = 0
        self.has_backlog = False

    @property
    def span(self) -> int:
        """Returns the number of the newest span."""
        return self._span

    @property
    def has_waiting(self) -> bool:
        """Returns whether there are readings that no row has seen yet."""
        return bool(self._waiting)

    def update(self, readings: Sequence[Reading], now_s: float, end_s: float = math.inf) -> list[Row]:
        """Returns the rows up to now, with all readings since the last call; a time after now counts as now.

        Args:
            readings: of all sources.
            now_s: seconds since 1970.
            end_s: up to which all sources were read; rows and readings after it wait.
        """
        if not self._every_s:
            timed = _sort_by_time(readings, now_s)
            return [row for time_s, reading in timed for row in self._make_row(time_s, reading.values)]
        timed = _sort_by_time([*self._waiting, *readings], now_s)
        end_s = now_s if len(timed) > MAX_WAITING else min(end_s, now_s)
        ready = [pair for pair in timed if pair[0] <= end_s]
        self._begin(ready, now_s)
        rows: list[Row] = []
        for index, (time_s, reading) in enumerate(ready):
            rows += self._make_due_rows(time_s, is_included=False)
            self.has_backlog = len(rows) >= MAX_TICKS
            if self.has_backlog:
                self._waiting = [later for _, later in timed[index:]]
                return rows
            for name, value in reading.values.items():
                if time_s >= self._held.get(name, (-math.inf, None))[0]:
                    self._held[name] = time_s, value
        self.has_backlog = False
        self._waiting = [later for _, later in timed[len(ready) :]]
        return rows + self._make_due_rows(end_s, is_included=True)

    def restart(self, newest_span: int = 0) -> None:
        """Forgets all values and ends the span, at a jump of the clock or a pause; the next one is higher."""
        self._held.clear()
        self._next_tick = None
        self._end_span()
        self._span = max(self._span, newest_span + 1)

    def _begin(self, ready: Sequence[tuple[float, Reading]], now_s: float) -> None:
        """Sets the next row: the first from the first reading on that was not made, or the first after now."""
        if self._next_tick is None:
            now_tick = math.floor(now_s / self._every_s)
            self._passed_tick = self._made_tick = min(self._made_tick, now_tick)  # later ones: the clock was set back
            self._next_tick = now_tick + 1
        if ready:
            first_tick = math.ceil(ready[0][0] / self._every_s)
            self._next_tick = min(self._next_tick, max(first_tick, self._made_tick + 1))

    def _make_due_rows(self, end_s: float, *, is_included: bool) -> list[Row]:
        rows: list[Row] = []
        tick = self._next_tick or 0
        last_tick = math.floor(max(end_s, 0.0) / self._every_s)
        if not is_included and last_tick * self._every_s == end_s:
            last_tick -= 1
        if last_tick - tick > MAX_TICKS:
            self._end_span()
            tick = last_tick
        newest_s = max((since_s for since_s, _ in self._held.values()), default=0.0)
        held_tick = min(last_tick, max(tick, math.ceil((newest_s + self._hold_s) / self._every_s)))
        for number in range(tick, held_tick + 1):
            made = self._make_row(number * self._every_s, self._list_held(number * self._every_s))
            if made:
                self._made_tick = number
            elif number <= self._passed_tick:
                self.num_dropped -= 1  # it was counted when it was due
            rows += made
        if held_tick < last_tick:
            self.num_dropped += max(0, last_tick - max(held_tick, self._passed_tick))
            self._end_span()
        self._next_tick = max(tick, last_tick + 1)
        self._passed_tick = max(self._passed_tick, last_tick)
        return rows

    def _list_held(self, time_s: float) -> dict[str, Value]:
        """Returns the values that count at a time."""
        return {name: value for name, (since_s, value) in self._held.items() if 0 <= time_s - since_s <= self._hold_s}

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


def _sort_by_time(readings: Sequence[Reading], now_s: float) -> list[tuple[float, Reading]]:
    return sorted(((min(reading.time_s, now_s), reading) for reading in readings), key=lambda pair: pair[0])
