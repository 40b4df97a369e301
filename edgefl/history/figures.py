"""Figures of any kind, from rows to sheet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.history import comparison, plot_style, timeline
from edgefl.history.plot_options import AXES, CURVE_KINDS, PLOT_KINDS
from edgefl.history.series import (
    AssignmentArrays,
    HistoryReader,
    RoundRange,
    RoundSeries,
    RunInfo,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotRequest:
    """Specification of a plot.

    Attributes:
        kind: a key of `KINDS`; None for accuracy and loss on one sheet.
        runs: texts for `find_run`.
        rounds: range of rounds; None for all, or for a timeline the newest.
        axis: of `AXES`; None for all suitable ones.
        title: above the sheet.
    """

    kind: str | None = None
    runs: tuple[str, ...] = ("latest",)
    rounds: RoundRange | None = None
    axis: str | None = None
    title: str = ""


def render_figure(source: HistoryReader, request: PlotRequest) -> Figure:
    """Returns the sheet.

    Raises:
        UsageError: an invalid request.
        NotFoundError: no such run, or a run lacks the data.
    """
    if request.kind is not None and request.kind not in PLOT_KINDS:
        raise UsageError(f"there is no sheet {request.kind!r}; there are {', '.join(PLOT_KINDS)}")
    if request.axis is not None and request.kind not in {None, *CURVE_KINDS}:
        raise UsageError(f"--x chooses the axis of {', '.join(CURVE_KINDS)}; {request.kind} has one of its own")
    runs = find_runs(source, request.runs)
    with plot_style.apply_style():
        if request.kind is None or request.kind in CURVE_KINDS:
            return _render_curves(source, runs, request)
        if request.kind == "timeline":
            return _render_timeline(source, runs, request)
        series = [read_rounds(source, run, label=label) for label, run in runs.items()]
        return _RENDERERS[request.kind](source, series, request)


def _select_rounds(series: RoundSeries, request: PlotRequest) -> RoundSeries:
    return series if request.rounds is None else series.select_rounds(request.rounds)


def _render_curves(source: HistoryReader, runs: dict[str, RunInfo], request: PlotRequest) -> Figure:
    series = [_select_rounds(read_rounds(source, run, label=label), request) for label, run in runs.items()]
    default_axes = ("rounds", "time") if request.kind == "disagreement" else AXES
    axes = default_axes if request.axis is None else (request.axis,)
    quantities = (request.kind,) if request.kind else _select_known_metrics(series)
    return comparison.render_curves(series, quantities, axes, request.title)


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


def _render_timeline(source: HistoryReader, runs: dict[str, RunInfo], request: PlotRequest) -> Figure:
    if len(runs) != 1:
        raise UsageError(f"a time line shows one run, got {len(runs)}: {', '.join(runs)}")
    ((label, run),) = runs.items()
    newest = DEFAULT_TIMELINE_ROUNDS if request.rounds is None else None
    rounds = _select_rounds(read_rounds(source, run, label=label, newest=newest), request)
    if request.rounds is None:
        rounds = rounds.select_rounds(RoundRange(first=_find_first_legible_round(rounds)))
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    # Updates of earlier assignments may have arrived within; the look-back is unknown, so one sheet's width is used.
    work = read_assignments_between(source, run.run_id, 2 * begin_s - end_s, np.nextafter(end_s, np.inf))
    return timeline.render_timeline(rounds, work, request.title)


def _find_first_legible_round(rounds: RoundSeries) -> int:
    """Returns the first of the newest rounds whose assignments per device stay legible."""
    per_device = rounds.num_updates / np.fmax(rounds.num_devices, 1)
    since = np.cumsum(per_device[::-1])[::-1]
    legible = rounds.round[since <= MAX_ASSIGNMENTS_PER_DEVICE]
    return int(legible[0] if legible.size else rounds.round[-1])


def _render_throughput(source: HistoryReader, series: Sequence[RoundSeries], request: PlotRequest) -> Figure:
    totals = [_count_iterations(source, run, request) for run in series]
    seconds = [_get_duration_s(_select_rounds(run, request)) for run in series]
    sizes = [run.head.batch_size for run in series]
    # Without the batch size of every run, iterations are compared.
    in_samples = all(size is not None for size in sizes)
    rates = [
        total * ((size or 1) if in_samples else 1) / s for total, size, s in zip(totals, sizes, seconds, strict=True)
    ]
    label = "samples trained on (1/s)" if in_samples else "local iterations (1/s)"
    return comparison.render_bars([run.label for run in series], {label: rates}, label, request.title)


def _count_iterations(source: HistoryReader, run: RoundSeries, request: PlotRequest) -> float:
    work = read_assignments(source, run, request.rounds)
    total = float(np.nansum(work.iterations[work.is_used]))
    if total <= 0:
        raise NotFoundError(f"run {run.label} has no throughput: no update with local iterations was applied")
    return total


def _render_traffic(_source: HistoryReader, series: Sequence[RoundSeries], request: PlotRequest) -> Figure:
    selected = [_select_rounds(run, request) for run in series]
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
    return comparison.render_bars(
        [run.label for run in series], parts, f"traffic of all devices ({unit}/s)", request.title
    )


def _render_computing_time(source: HistoryReader, series: Sequence[RoundSeries], request: PlotRequest) -> Figure:
    by_device = []
    for run in series:
        seconds = _get_duration_s(_select_rounds(run, request))
        by_device.append(
            {name: s / seconds for name, s in _sum_compute_s(read_assignments(source, run, request.rounds)).items()}
        )
        if not any(by_device[-1].values()):
            raise NotFoundError(f"run {run.label} has no computing time: no device told any")
    return comparison.render_shares(
        [run.label for run in series], by_device, "share of the time that a device computes", request.title
    )


def _sum_compute_s(work: AssignmentArrays) -> dict[str, float]:
    names, indices = np.unique(work.device.astype(str), return_inverse=True)
    sums = np.bincount(indices, weights=np.nan_to_num(work.compute_s), minlength=len(names))
    return dict(zip(map(str, names), map(float, sums), strict=True))


def _render_staleness(source: HistoryReader, series: Sequence[RoundSeries], request: PlotRequest) -> Figure:
    by_run = {}
    for run in series:
        _select_rounds(run, request)
        work = read_assignments(source, run, request.rounds)
        by_run[run.label] = work.staleness[work.is_used & np.isfinite(work.staleness)]
        if not by_run[run.label].size:
            raise NotFoundError(f"run {run.label} has no staleness: no update was applied")
    return comparison.render_staleness(by_run, request.title)


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
