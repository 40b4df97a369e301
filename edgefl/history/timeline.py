"""Timeline of devices over some rounds: a bar for computing, sending and waiting, one line per device."""

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

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.core.types import Array
from edgefl.history import plot_style
from edgefl.history.series import AssignmentArrays, RoundSeries

MAX_DEVICES = 40
NUM_SLOWEST_DEVICES = 32
"""Devices shown of a fleet of more than `MAX_DEVICES`."""
MAX_ASSIGNMENTS = 20_000
MAX_ROUND_LINES = 60
MAX_ROUND_LABELS = 13
NO_UPDATE_LABEL = "brought no update"
# Dark, hatched and light: distinguishable without colour.
ACTIVITY_STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "computing": {"facecolor": "#0072B2", "linewidth": 0.0},
        "sending": {"facecolor": "#E69F00", "edgecolor": "#7A5400", "hatch": "//////", "linewidth": 0.0},
        "waiting": {"facecolor": "#DDDDDD", "linewidth": 0.0},
    }
)
ActivitySpans = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SelectedDevices:
    """The devices on the sheet, topmost first, and the total number."""

    names: tuple[str, ...]
    total: int

    def __str__(self) -> str:
        if len(self.names) == self.total:
            return f"{self.total} device{'s' if self.total > 1 else ''}"
        return f"the {len(self.names)} slowest of {self.total} devices, slowest on top"


def render_timeline(rounds: RoundSeries, work: AssignmentArrays, title: str = "") -> Figure:
    """Returns the sheet.

    Args:
        rounds: the rounds to show, which give the time span.
        work: assignments of that time, and of some time before.
        title: replaces the run's name and the rounds.

    Raises:
        NotFoundError: no update in that time.
        UsageError: too many assignments for legible bars.
    """
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    last_s = np.fmax(work.dispatched_at, work.received_at + np.nan_to_num(work.wait_s))
    work = work.select((work.dispatched_at <= end_s) & (last_s >= begin_s))
    if not np.isfinite(work.received_at).any():
        raise NotFoundError(
            f"run {rounds.label} has no update in {_format_rounds(rounds)}, so there is no time line to draw"
        )
    selected = _select_devices(work)
    work = work.select(np.isin(work.device, list(selected.names)))
    if len(work) > MAX_ASSIGNMENTS:
        num_rounds = max(1, len(rounds) * MAX_ASSIGNMENTS // len(work))
        raise UsageError(
            f"{_format_rounds(rounds)} hold {len(work)} assignments, and no sheet shows more than {MAX_ASSIGNMENTS}; "
            f"choose fewer rounds, such as --rounds {rounds.round[-1] - num_rounds + 1:.0f}:{rounds.round[-1]:.0f}"
        )
    figure = plot_style.make_figure(
        1.9 + 0.24 * max(4, len(selected.names)), title=title or f"{rounds.label}: {_format_rounds(rounds)}"
    )
    _draw_panel(figure.subplots(), rounds, work, selected)
    entries: dict[str, Patch | Line2D] = {name: Patch(**patch_style) for name, patch_style in ACTIVITY_STYLES.items()}
    if np.isnan(work.received_at).any():
        entries[NO_UPDATE_LABEL] = _make_cross([], [])
    plot_style.add_legend_below(figure, entries)
    return figure


def _format_rounds(rounds: RoundSeries) -> str:
    first, last = rounds.round[0], rounds.round[-1]
    return f"round {first:.0f}" if first == last else f"rounds {first:.0f} to {last:.0f}"


def _select_devices(work: AssignmentArrays) -> _SelectedDevices:
    names = sorted(set(work.device), key=_natural_sort_key)
    if len(names) <= MAX_DEVICES:
        return _SelectedDevices(names=tuple(names), total=len(names))
    seconds = np.nan_to_num(work.compute_s) + np.nan_to_num(work.send_s)
    mean_s = {name: float(seconds[work.device == name].mean()) for name in names}
    slowest = sorted(names, key=lambda name: -mean_s[name])[:NUM_SLOWEST_DEVICES]
    return _SelectedDevices(names=tuple(slowest), total=len(names))


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key with pi-9 before pi-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _draw_panel(panel: Axes, rounds: RoundSeries, work: AssignmentArrays, selected: _SelectedDevices) -> None:
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    divisor, unit = plot_style.select_time_unit(end_s - begin_s)
    for line, name in enumerate(selected.names):
        device_work = work.select(work.device == name)
        for activity, spans in compute_device_spans(
            device_work.select(np.argsort(device_work.dispatched_at, kind="stable"))
        ).items():
            visible_spans = _clip_spans(spans, begin_s, end_s, divisor)
            if visible_spans:
                panel.broken_barh(
                    visible_spans, (line - 0.38, 0.76), **ACTIVITY_STYLES[activity], gid=f"{name} {activity}"
                )
        lost_at = device_work.dispatched_at[
            np.isnan(device_work.received_at) & (device_work.dispatched_at >= begin_s)
        ]
        if lost_at.size:
            panel.add_line(_make_cross((lost_at - begin_s) / divisor, np.full(lost_at.shape, line)))
    panel.set_yticks(range(len(selected.names)), [plot_style.format_label(name, 28) for name in selected.names])
    panel.set(xlim=(0, 1.004 * (end_s - begin_s) / divisor), ylim=(len(selected.names) - 0.4, -0.6))
    panel.set_xlabel(f"time since round {rounds.round[0]:.0f} began ({unit}); {selected}")
    panel.grid(visible=False)
    _draw_round_marks(panel, rounds, begin_s, divisor)


def compute_device_spans(own: AssignmentArrays) -> ActivitySpans:
    """Returns the spans in which one device computed, sent and waited, as (begin, end) in unix seconds.

    Send and receive times are recorded as one sum; it is divided between before and after computing by the bytes
    down and up. A device waits from the arrival of its update until that is applied or it is asked again.

    Args:
        own: its assignments in order of dispatch.
    """
    spans: ActivitySpans = {activity: [] for activity in ACTIVITY_STYLES}
    shares_down = _compute_download_share(own)
    free_s = -np.inf
    for index in np.flatnonzero(np.isfinite(own.received_at) & np.isfinite(own.dispatched_at)):
        end_s, dispatched_s = float(own.received_at[index]), float(own.dispatched_at[index])
        compute_s, send_s = (float(np.nan_to_num(value[index])) for value in (own.compute_s, own.send_s))
        begin_s = max(dispatched_s, free_s)
        sent_s = max(begin_s, end_s - send_s * (1 - shares_down[index]))
        received_s = min(max(begin_s, sent_s - compute_s), sent_s)
        spans["sending"] += [(begin_s, received_s), (sent_s, end_s)]
        spans["computing"].append((received_s, sent_s))
        next_s = own.dispatched_at[index + 1] if index + 1 < len(own) else np.inf
        until_s = min(end_s + float(np.nan_to_num(own.wait_s[index])), float(next_s))
        spans["waiting"].append((end_s, until_s))
        free_s = end_s
    return spans


def _compute_download_share(own: AssignmentArrays) -> Array:
    up, down = np.nan_to_num(own.bytes_up), np.nan_to_num(own.bytes_down)
    share: Array = np.divide(down, up + down, out=np.full(len(own), 0.5), where=up + down > 0)
    return share


def _clip_spans(
    spans: Sequence[tuple[float, float]], begin_s: float, end_s: float, divisor: float
) -> list[tuple[float, float]]:
    """Returns (begin, length) on the axis of the parts within the range."""
    clipped = [(max(first, begin_s), min(last, end_s)) for first, last in spans]
    return [((first - begin_s) / divisor, (last - first) / divisor) for first, last in clipped if last > first]


def _make_cross(x: Array | list[float], y: Array | list[float]) -> Line2D:
    return Line2D(x, y, linestyle="none", marker="x", color="#D55E00", markersize=6, markeredgewidth=1.6)


def _draw_round_marks(panel: Axes, rounds: RoundSeries, begin_s: float, divisor: float) -> None:
    if len(rounds) > MAX_ROUND_LINES:
        return
    ends = (rounds.closed_s - begin_s) / divisor
    for end in ends:
        panel.axvline(end, color="#000000", linewidth=0.6, linestyle=(0, (1, 2)))
    top = panel.secondary_xaxis("top")
    labelled = _select_spaced(ends, min_distance=float(ends[-1]) / MAX_ROUND_LABELS)
    top.set_xticks(ends[labelled], [f"{value:.0f}" for value in rounds.round[labelled]])
    top.set_xlabel("end of round")


def _select_spaced(ends: Array, *, min_distance: float) -> list[int]:
    """Returns the indices of ends spaced widely enough for their labels, the last one included."""
    indices = [len(ends) - 1]
    for index in range(len(ends) - 2, -1, -1):
        if ends[indices[-1]] - ends[index] >= min_distance:
            indices.append(index)
    return indices[::-1]
