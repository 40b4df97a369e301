"""Figures of any kind, from rows to sheet; the timeline of devices over some rounds."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.core.types import Array
from edgefl.history import AXES, CURVE_KINDS, PLOT_KINDS, comparison, plot_style
from edgefl.history.series import (
    AssignmentArrays,
    HistoryReader,
    RoundRange,
    RoundSeries,
    RunInfo,
    average_runs,
    find_runs,
    read_assignments,
    read_assignments_between,
    read_rounds,
)

log = logging.getLogger(__name__)

DEFAULT_TIMELINE_ROUNDS = 20
"""Rounds in a timeline by default."""
MAX_ASSIGNMENTS_PER_DEVICE = 60
"""Assignments of each device in such a timeline; a decentralised round has many."""

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


def render_figure(  # noqa: PLR0913 the options of a sheet
    source: HistoryReader,
    kind: str | None,
    runs: Sequence[str],
    *,
    rounds: RoundRange | None = None,
    axis: str | None = None,
    title: str = "",
    spread: bool = False,
    references: Sequence[str] = (),
) -> Figure:
    """Returns the sheet.

    Args:
        source: to read from.
        kind: a key of `PLOT_KINDS`; None for accuracy and loss on one sheet.
        runs: texts for `find_run`.
        rounds: range of rounds; None for all, or for a timeline the newest.
        axis: of `AXES`; None for all suitable ones.
        title: above the sheet.
        spread: draws runs that differ in their seed alone as their mean, in a band of their standard deviation.
        references: texts for `find_run`, of runs whose newest value alone is drawn, as a dotted line.

    Raises:
        UsageError: an invalid request.
        NotFoundError: no such run, or a run lacks the data.
    """
    if kind is not None and kind not in PLOT_KINDS:
        raise UsageError(f"there is no sheet {kind!r}; there are {', '.join(PLOT_KINDS)}")
    if axis is not None and kind not in {None, *CURVE_KINDS}:
        raise UsageError(f"--x chooses the axis of {', '.join(CURVE_KINDS)}; {kind} has one of its own")
    if spread and kind not in {None, *CURVE_KINDS}:
        raise UsageError(f"--spread is of {', '.join(CURVE_KINDS)}, not of {kind}")
    if references and kind not in {None, *CURVE_KINDS}:
        raise UsageError(f"--reference is of {', '.join(CURVE_KINDS)}, not of {kind}")
    found = find_runs(source, runs)
    with plot_style.apply_style():
        if kind == "timeline":
            return _render_timeline(source, found, rounds, title)
        series = [read_rounds(source, run, label=label) for label, run in found.items()]
        if kind is not None and kind not in CURVE_KINDS:
            return _RENDERERS[kind](source, series, rounds, title)
        lines = [read_rounds(source, run, label=label) for label, run in find_runs(source, references).items()]
        if spread:
            series, lines = average_runs(series), average_runs(lines)
        series = [_select_rounds(run, rounds) for run in series]
        default_axes = ("rounds", "time") if kind == "disagreement" else AXES
        metrics = (kind,) if kind else _select_known_metrics([*series, *lines])
        return comparison.render_curves(series, metrics, default_axes if axis is None else (axis,), title, lines)


def _select_rounds(series: RoundSeries, rounds: RoundRange | None) -> RoundSeries:
    return series if rounds is None else series.select_rounds(rounds)


def _select_known_metrics(series: Sequence[RoundSeries]) -> tuple[str, ...]:
    """Returns those of accuracy and loss that every run has; logs which is left out."""
    lacking = {
        name: [run.label for run in series if not comparison.has_metric(run, name)] for name in ("accuracy", "loss")
    }
    complete = tuple(name for name, labels in lacking.items() if not labels)
    if not complete:
        labels = lacking["accuracy"]
        raise NotFoundError(
            f"run {labels[0]} has neither accuracy nor loss: {comparison.PLOT_METRICS['accuracy'].missing_reason}"
        )
    for name in lacking.keys() - set(complete):
        log.warning("%s is left out: %s has none", name, ", ".join(lacking[name]))
    return complete


def _render_timeline(
    source: HistoryReader, runs: Mapping[str, RunInfo], selected: RoundRange | None, title: str
) -> Figure:
    if len(runs) != 1:
        raise UsageError(f"a time line shows one run, got {len(runs)}: {', '.join(runs)}")
    ((label, run),) = runs.items()
    newest = DEFAULT_TIMELINE_ROUNDS if selected is None else None
    rounds = _select_rounds(read_rounds(source, run, label=label, newest=newest), selected)
    if selected is None:
        rounds = rounds.select_rounds(RoundRange(first=_find_first_legible_round(rounds)))
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    # Updates of earlier assignments may have arrived within; the look-back is unknown, so one sheet's width is used.
    work = read_assignments_between(source, run.run_id, 2 * begin_s - end_s, np.nextafter(end_s, np.inf))
    return render_timeline(rounds, work, title)


def _find_first_legible_round(rounds: RoundSeries) -> int:
    """Returns the first of the newest rounds whose assignments per device stay legible."""
    per_device = rounds.num_updates / np.fmax(rounds.num_devices, 1)
    since = np.cumsum(per_device[::-1])[::-1]
    legible = rounds.round[since <= MAX_ASSIGNMENTS_PER_DEVICE]
    return int(legible[0] if legible.size else rounds.round[-1])


def _render_throughput(
    source: HistoryReader, series: Sequence[RoundSeries], rounds: RoundRange | None, title: str
) -> Figure:
    totals = [_count_iterations(source, run, rounds) for run in series]
    seconds = [_get_duration_s(_select_rounds(run, rounds)) for run in series]
    sizes = [run.head.batch_size for run in series]
    # Without the batch size of every run, iterations are compared.
    in_samples = all(size is not None for size in sizes)
    rates = [
        total * ((size or 1) if in_samples else 1) / s for total, size, s in zip(totals, sizes, seconds, strict=True)
    ]
    label = "samples trained on (1/s)" if in_samples else "local iterations (1/s)"
    return comparison.render_bars([run.label for run in series], {label: rates}, label, title)


def _count_iterations(source: HistoryReader, run: RoundSeries, rounds: RoundRange | None) -> float:
    work = read_assignments(source, run, rounds)
    total = float(np.nansum(work.iterations[work.is_used]))
    if total <= 0:
        raise NotFoundError(f"run {run.label} has no throughput: no update with local iterations was applied")
    return total


def _render_traffic(
    _source: HistoryReader, series: Sequence[RoundSeries], rounds: RoundRange | None, title: str
) -> Figure:
    selected = [_select_rounds(run, rounds) for run in series]
    up, down = (
        [float(np.nansum(getattr(run, name))) / _get_duration_s(run) for run in selected]
        for name in ("bytes_up", "bytes_down")
    )
    for run, total in zip(selected, np.add(up, down), strict=True):
        if total <= 0:
            raise NotFoundError(f"run {run.label} has no traffic: no byte was counted")
    divisor, unit = plot_style.select_bytes_unit(max(np.add(up, down)))
    parts = {
        "up, from the devices": [rate / divisor for rate in up],
        "down, to the devices": [rate / divisor for rate in down],
    }
    return comparison.render_bars([run.label for run in series], parts, f"traffic of all devices ({unit}/s)", title)


def _render_computing_time(
    source: HistoryReader, series: Sequence[RoundSeries], rounds: RoundRange | None, title: str
) -> Figure:
    by_device = []
    for run in series:
        seconds = _get_duration_s(_select_rounds(run, rounds))
        by_device.append(
            {name: s / seconds for name, s in _sum_compute_s(read_assignments(source, run, rounds)).items()}
        )
        if not any(by_device[-1].values()):
            raise NotFoundError(f"run {run.label} has no computing time: no device told any")
    return comparison.render_shares(
        [run.label for run in series], by_device, "share of the time that a device computes", title
    )


def _sum_compute_s(work: AssignmentArrays) -> dict[str, float]:
    names, indices = np.unique(work.device.astype(str), return_inverse=True)
    sums = np.bincount(indices, weights=np.nan_to_num(work.compute_s), minlength=len(names))
    return dict(zip(map(str, names), map(float, sums), strict=True))


def _render_staleness(
    source: HistoryReader, series: Sequence[RoundSeries], rounds: RoundRange | None, title: str
) -> Figure:
    by_run = {}
    for run in series:
        _select_rounds(run, rounds)
        work = read_assignments(source, run, rounds)
        by_run[run.label] = work.staleness[work.is_used & np.isfinite(work.staleness)]
        if not by_run[run.label].size:
            raise NotFoundError(f"run {run.label} has no staleness: no update was applied")
    return comparison.render_staleness(by_run, title)


def _get_duration_s(run: RoundSeries) -> float:
    """Returns the duration of rounds, for a rate."""
    if run.duration_s <= 0:
        raise NotFoundError(f"the rounds of run {run.label} took no time, so there is no rate to draw")
    return run.duration_s


_RENDERERS = {
    "throughput": _render_throughput,
    "traffic": _render_traffic,
    "computing-time": _render_computing_time,
    "staleness": _render_staleness,
}


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
    num_devices, visible = len(set(work.device)), _select_devices(work)
    work = work.select(np.isin(work.device, visible))
    if len(work) > MAX_ASSIGNMENTS:
        num_rounds = max(1, len(rounds) * MAX_ASSIGNMENTS // len(work))
        raise UsageError(
            f"{_format_rounds(rounds)} hold {len(work)} assignments, and no sheet shows more than {MAX_ASSIGNMENTS}; "
            f"choose fewer rounds, such as --rounds {rounds.round[-1] - num_rounds + 1:.0f}:{rounds.round[-1]:.0f}"
        )
    figure = plot_style.make_figure(
        1.9 + 0.24 * max(4, len(visible)), title=title or f"{rounds.label}: {_format_rounds(rounds)}"
    )
    panel = figure.subplots()
    _draw_devices(panel, rounds, work, visible)
    label = f"the {len(visible)} slowest of {num_devices} devices, slowest on top"
    if len(visible) == num_devices:
        label = f"{num_devices} device{'s' if num_devices > 1 else ''}"
    unit = plot_style.select_time_unit(end_s - begin_s)[1]
    panel.set_xlabel(f"time since round {rounds.round[0]:.0f} began ({unit}); {label}")
    entries: dict[str, Patch | Line2D] = {name: Patch(**patch_style) for name, patch_style in ACTIVITY_STYLES.items()}
    if np.isnan(work.received_at).any():
        entries[NO_UPDATE_LABEL] = _make_cross([], [])
    plot_style.add_legend_below(figure, entries)
    return figure


def _format_rounds(rounds: RoundSeries) -> str:
    first, last = rounds.round[0], rounds.round[-1]
    return f"round {first:.0f}" if first == last else f"rounds {first:.0f} to {last:.0f}"


def _select_devices(work: AssignmentArrays) -> list[str]:
    """Returns the devices on the sheet, topmost first: all, or the slowest of many."""
    names = sorted(set(work.device), key=_natural_sort_key)
    if len(names) <= MAX_DEVICES:
        return names
    seconds = np.nan_to_num(work.compute_s) + np.nan_to_num(work.send_s)
    mean_s = {name: float(seconds[work.device == name].mean()) for name in names}
    return sorted(names, key=lambda name: -mean_s[name])[:NUM_SLOWEST_DEVICES]


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Returns a sort key with pi-9 before pi-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _draw_devices(panel: Axes, rounds: RoundSeries, work: AssignmentArrays, names: Sequence[str]) -> None:
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    divisor, _ = plot_style.select_time_unit(end_s - begin_s)
    for line, name in enumerate(names):
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
    panel.set_yticks(range(len(names)), [plot_style.format_label(name, 28) for name in names])
    panel.set(xlim=(0, 1.004 * (end_s - begin_s) / divisor), ylim=(len(names) - 0.4, -0.6))
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
