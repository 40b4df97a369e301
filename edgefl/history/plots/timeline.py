"""What each device did over some rounds: a bar for computing, sending and waiting, one line a device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from edgefl.errors import NotFoundError, UsageError
from edgefl.history.assignments import Assignments
from edgefl.history.plots import style
from edgefl.history.series import RoundSeries
from edgefl.types import Array

MOST_DEVICES = 40
SLOWEST = 32
"""So many are shown of a fleet of more than `MOST_DEVICES`."""
MOST_ASSIGNMENTS = 20_000
MOST_ROUND_LINES = 60
MOST_ROUND_LABELS = 13
NOTHING_CAME = "brought no update"
# Dark, hatched and light: they stay apart without colour.
LOOKS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "computing": {"facecolor": "#0072B2", "linewidth": 0.0},
        "sending": {"facecolor": "#E69F00", "edgecolor": "#7A5400", "hatch": "//////", "linewidth": 0.0},
        "waiting": {"facecolor": "#DDDDDD", "linewidth": 0.0},
    }
)
Spans = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The devices on the sheet, topmost first, of how many there are."""

    names: tuple[str, ...]
    total: int

    def __str__(self) -> str:
        if len(self.names) == self.total:
            return f"{self.total} device{'s' if self.total > 1 else ''}"
        return f"the {len(self.names)} slowest of {self.total} devices, slowest on top"


def draw(rounds: RoundSeries, work: Assignments, title: str = "") -> Figure:
    """Returns the sheet.

    Args:
        rounds: the rounds that are shown; they say from when to when.
        work: assignments of that time, and of some time before.
        title: in place of the run's name and the rounds.

    Raises:
        NotFoundError: nobody brought an update in that time.
        UsageError: so many assignments that no bar could be told from the next.
    """
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    seen_s = np.fmax(work.dispatched_at, work.received_at + np.nan_to_num(work.wait_s))
    work = work.where((work.dispatched_at <= end_s) & (seen_s >= begin_s))
    if not np.isfinite(work.received_at).any():
        raise NotFoundError(f"run {rounds.label} has no update in {_words(rounds)}, so there is no time line to draw")
    chosen = _choose(work)
    work = work.where(np.isin(work.device, list(chosen.names)))
    if len(work) > MOST_ASSIGNMENTS:
        fit = max(1, len(rounds) * MOST_ASSIGNMENTS // len(work))
        raise UsageError(
            f"{_words(rounds)} hold {len(work)} assignments, and no sheet shows more than {MOST_ASSIGNMENTS}; "
            f"choose fewer rounds, such as --rounds {rounds.round[-1] - fit + 1:.0f}:{rounds.round[-1]:.0f}"
        )
    figure = style.new_figure(
        1.9 + 0.24 * max(4, len(chosen.names)), title=title or f"{rounds.label}: {_words(rounds)}"
    )
    _draw_panel(figure.subplots(), rounds, work, chosen)
    entries: dict[str, Patch | Line2D] = {name: Patch(**look) for name, look in LOOKS.items()}
    if np.isnan(work.received_at).any():
        entries[NOTHING_CAME] = _cross([], [])
    style.legend_below(figure, entries)
    return figure


def _words(rounds: RoundSeries) -> str:
    first, last = rounds.round[0], rounds.round[-1]
    return f"round {first:.0f}" if first == last else f"rounds {first:.0f} to {last:.0f}"


def _choose(work: Assignments) -> _Chosen:
    names = sorted(set(work.device), key=_natural)
    if len(names) <= MOST_DEVICES:
        return _Chosen(names=tuple(names), total=len(names))
    seconds = np.nan_to_num(work.compute_s) + np.nan_to_num(work.send_s)
    mean_s = {name: float(seconds[work.device == name].mean()) for name in names}
    slowest = sorted(names, key=lambda name: -mean_s[name])[:SLOWEST]
    return _Chosen(names=tuple(slowest), total=len(names))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns what sorts pi-9 before pi-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _draw_panel(panel: Axes, rounds: RoundSeries, work: Assignments, chosen: _Chosen) -> None:
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    divisor, unit = style.time_unit(end_s - begin_s)
    for line, name in enumerate(chosen.names):
        own = work.where(work.device == name)
        for activity, spans in device_spans(own.where(np.argsort(own.dispatched_at, kind="stable"))).items():
            clipped = _clipped(spans, begin_s, end_s, divisor)
            if clipped:
                panel.broken_barh(clipped, (line - 0.38, 0.76), **LOOKS[activity], gid=f"{name} {activity}")
        lost = own.dispatched_at[np.isnan(own.received_at) & (own.dispatched_at >= begin_s)]
        if lost.size:
            panel.add_line(_cross((lost - begin_s) / divisor, np.full(lost.shape, line)))
    panel.set_yticks(range(len(chosen.names)), [style.literal(name, 28) for name in chosen.names])
    panel.set(xlim=(0, 1.004 * (end_s - begin_s) / divisor), ylim=(len(chosen.names) - 0.4, -0.6))
    panel.set_xlabel(f"time since round {rounds.round[0]:.0f} began ({unit}); {chosen}")
    panel.grid(visible=False)
    _mark_rounds(panel, rounds, begin_s, divisor)


def device_spans(own: Assignments) -> Spans:
    """Returns when one device computed, sent and waited, as (begin, end) in unix seconds.

    What a device sends and receives is known as one time; it is divided between before and after computing by the
    bytes down and up. It waits from the arrival of its update until that is applied or it is asked again.

    Args:
        own: its assignments by the time at which they went out.
    """
    spans: Spans = {activity: [] for activity in LOOKS}
    shares_down = _share_down(own)
    free_s = -np.inf
    for place in np.flatnonzero(np.isfinite(own.received_at) & np.isfinite(own.dispatched_at)):
        end_s, given_s = float(own.received_at[place]), float(own.dispatched_at[place])
        compute_s, send_s = (float(np.nan_to_num(value[place])) for value in (own.compute_s, own.send_s))
        begin_s = max(given_s, free_s)
        sent_s = max(begin_s, end_s - send_s * (1 - shares_down[place]))
        got_s = min(max(begin_s, sent_s - compute_s), sent_s)
        spans["sending"] += [(begin_s, got_s), (sent_s, end_s)]
        spans["computing"].append((got_s, sent_s))
        next_s = own.dispatched_at[place + 1] if place + 1 < len(own) else np.inf
        until_s = min(end_s + float(np.nan_to_num(own.wait_s[place])), float(next_s))
        spans["waiting"].append((end_s, until_s))
        free_s = end_s
    return spans


def _share_down(own: Assignments) -> Array:
    up, down = np.nan_to_num(own.bytes_up), np.nan_to_num(own.bytes_down)
    share: Array = np.divide(down, up + down, out=np.full(len(own), 0.5), where=up + down > 0)
    return share


def _clipped(
    spans: Sequence[tuple[float, float]], begin_s: float, end_s: float, divisor: float
) -> list[tuple[float, float]]:
    """Returns (begin, length) on the axis of what lies within."""
    cut = [(max(first, begin_s), min(last, end_s)) for first, last in spans]
    return [((first - begin_s) / divisor, (last - first) / divisor) for first, last in cut if last > first]


def _cross(x: Array | list[float], y: Array | list[float]) -> Line2D:
    return Line2D(x, y, linestyle="none", marker="x", color="#D55E00", markersize=6, markeredgewidth=1.6)


def _mark_rounds(panel: Axes, rounds: RoundSeries, begin_s: float, divisor: float) -> None:
    if len(rounds) > MOST_ROUND_LINES:
        return
    ends = (rounds.closed_s - begin_s) / divisor
    for end in ends:
        panel.axvline(end, color="#000000", linewidth=0.6, linestyle=(0, (1, 2)))
    top = panel.secondary_xaxis("top")
    marked = _apart(ends, least=float(ends[-1]) / MOST_ROUND_LABELS)
    top.set_xticks(ends[marked], [f"{value:.0f}" for value in rounds.round[marked]])
    top.set_xlabel("end of round")


def _apart(ends: Array, *, least: float) -> list[int]:
    """Returns the places of ends that are so far apart that their labels do not touch; the last one is among them."""
    chosen = [len(ends) - 1]
    for place in range(len(ends) - 2, -1, -1):
        if ends[chosen[-1]] - ends[place] >= least:
            chosen.append(place)
    return chosen[::-1]
