"""What must not happen to a program that runs for long: that it grows. Judges series of looks at it; pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIB = 1024 * 1024
MAX_GROWTH = 0.02
"""Of memory, after the warm-up."""
MAX_OFF = 0.15
"""By so much of itself the growth of the database may differ from what is computed."""
MORE_AT_ONCE = 2
"""So many more open files or threads there may be for a moment, or a tenth."""
LEAST = 8
"""Fewer looks than this say nothing: two a quarter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at one process.

    Attributes:
        at_s: seconds since the beginning.
        rss_bytes: all memory that it has mapped and that is there.
        anonymous_bytes: what of it no file is behind: its heap.
        num_handles: open files, sockets and the like.
        num_threads: its threads.
        cpu_s: CPU seconds since it was started, children that have ended included.
    """

    at_s: float
    rss_bytes: int
    anonymous_bytes: int
    num_handles: int
    num_threads: int
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a series went: `line` by a robust line over all of it, `quarters` from its first to its last quarter.

    Both are fractions of what it began with. `first` and `last` are the medians of these quarters.
    """

    line: float
    quarters: float
    first: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many of something there were: medians of the first and the last quarter, maxima of the halves.

    `more` is by how many a robust line grew over all of it: pools of connections breathe, a leak does not.
    """

    first_median: float
    last_median: float
    first_most: int
    last_most: int
    more: float

    @property
    def grew(self) -> bool:
        """Says whether there is one more at the end, or clearly more at once than there had been."""
        return self.more >= 1 or self.last_most > self.first_most + max(MORE_AT_ONCE, self.first_most // 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one process in the time that counts."""

    name: str
    memory: Growth
    heap: Growth
    handles: Count
    threads: Count
    cores: float

    @property
    def problems(self) -> list[str]:
        """Returns a line for everything that grew."""
        found = [
            f"{self.name}: {what} grew by {growth:.2%}, at most {MAX_GROWTH:.0%} is allowed"
            for what, growth in (
                ("memory, by its line,", self.memory.line),
                ("memory, from its first to its last quarter,", self.memory.quarters),
            )
            if growth > MAX_GROWTH
        ]
        for what, count in (("open files", self.handles), ("threads", self.threads)):
            if count.grew:
                found.append(
                    f"{self.name}: {what} grew by {count.more:.1f}: median {count.first_median:g}, then "
                    f"{count.last_median:g}, most {count.first_most}, then {count.last_most}"
                )
        return found


def judge(name: str, looks: Sequence[Look]) -> Verdict:
    """Returns the verdict over looks at one process, those of its warm-up left out.

    Raises:
        ValueError: there are fewer than `LEAST` of them.
    """
    if len(looks) < LEAST:
        raise ValueError(f"{name} was looked at {len(looks)} times after the warm-up, {LEAST} are needed: run longer")
    at_s = [look.at_s for look in looks]
    return Verdict(
        name=name,
        memory=growth(at_s, [look.rss_bytes for look in looks]),
        heap=growth(at_s, [look.anonymous_bytes for look in looks]),
        handles=count(at_s, [look.num_handles for look in looks]),
        threads=count(at_s, [look.num_threads for look in looks]),
        cores=(looks[-1].cpu_s - looks[0].cpu_s) / (at_s[-1] - at_s[0]),
    )


def growth(at_s: Sequence[float], values: Sequence[float]) -> Growth:
    """Returns by what part of itself a series grew."""
    begin, rise = line(at_s, values)
    quarter = len(values) // 4
    first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
    return Growth(line=rise / begin, quarters=last / first - 1, first=first, last=last)


def count(at_s: Sequence[float], values: Sequence[int]) -> Count:
    """Returns how many there were, and how many more there are."""
    quarter, half = len(values) // 4, len(values) // 2
    return Count(
        first_median=statistics.median(values[:quarter]),
        last_median=statistics.median(values[-quarter:]),
        first_most=max(values[:half]),
        last_most=max(values[half:]),
        more=line(at_s, values)[1],
    )


def line(at_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Returns where a line through a series begins, and by how much it rises to the end.

    Its slope is the median of those between all pairs, its height the median of what remains: a quarter of the values
    may be off without moving it.

    Source: Theil, A rank-invariant method of linear and polynomial regression analysis, 1950; Sen, JASA 63, 1968.
    """
    times, series = np.asarray(at_s, dtype=float), np.asarray(values, dtype=float)
    earlier, later = np.triu_indices(len(times), k=1)
    slope = float(np.median((series[later] - series[earlier]) / (times[later] - times[earlier])))
    begin = float(np.median(series - slope * (times - times[0])))
    return begin, slope * float(times[-1] - times[0])


def table(verdicts: Sequence[Verdict]) -> str:
    """Returns verdicts for reading, a line a process."""
    heads = (("RSS MiB", 9), ("line", 9), ("quarters", 10), ("heap MiB", 10), ("line", 9))
    titles = "".join(f"{head:>{width}}" for head, width in heads)
    lines = [f"{'process':16}{titles}{'open files (most)':>22}{'threads (most)':>18}{'cores':>8}"]
    for verdict in verdicts:
        memory, heap = verdict.memory, verdict.heap
        lines.append(
            f"{verdict.name:16}{memory.first / MIB:9.1f}{memory.line:+9.2%}{memory.quarters:+10.2%}"
            f"{heap.first / MIB:10.1f}{heap.line:+9.2%}"
            f"{_counted(verdict.handles):>22}{_counted(verdict.threads):>18}{verdict.cores:8.3f}"
        )
    return "\n".join(lines)


def _counted(of: Count) -> str:
    medians = (
        f"{of.first_median:g}" if of.first_median == of.last_median else f"{of.first_median:g}>{of.last_median:g}"
    )
    return f"{medians} ({of.first_most}, {of.last_most})"
