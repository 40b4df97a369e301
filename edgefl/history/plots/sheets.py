"""Any kind of sheet, from rows to figure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from edgefl.errors import NotFoundError, UsageError
from edgefl.history.assignments import Assignments, read_assignments, read_between
from edgefl.history.plots import comparison, curves, staleness, style, timeline
from edgefl.history.plots.names import AXES, CURVES, KINDS
from edgefl.history.series import RoundRange, RoundSeries, RunHead, Source, find_runs, read_rounds

log = logging.getLogger(__name__)

NEWEST_ROUNDS = 20
"""What a time line shows of a run when nobody says which rounds."""
MOST_IN_A_LINE = 60
"""Assignments of each device on such a time line; a decentralised round has many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What somebody wants to see.

    Attributes:
        kind: a key of `KINDS`; None for accuracy and loss on one sheet.
        runs: as a person names them.
        rounds: which of them; None for all, or for a time line the newest.
        axis: of `AXES`; None for all that make sense.
        title: above the sheet.
    """

    kind: str | None = None
    runs: tuple[str, ...] = ("latest",)
    rounds: RoundRange | None = None
    axis: str | None = None
    title: str = ""


def draw(source: Source, wish: Wish) -> Figure:
    """Returns the sheet.

    Raises:
        UsageError: the wish makes no sense.
        NotFoundError: there is no such run, or a run has not what was asked for.
    """
    if wish.kind is not None and wish.kind not in KINDS:
        raise UsageError(f"there is no sheet {wish.kind!r}; there are {', '.join(KINDS)}")
    if wish.axis is not None and wish.kind not in {None, *CURVES}:
        raise UsageError(f"--x chooses the axis of {', '.join(CURVES)}; {wish.kind} has one of its own")
    runs = find_runs(source, wish.runs)
    with style.styled():
        if wish.kind is None or wish.kind in CURVES:
            return _curves(source, runs, wish)
        if wish.kind == "timeline":
            return _timeline(source, runs, wish)
        series = [read_rounds(source, head, label=label) for label, head in runs.items()]
        return _FROM_ROUNDS[wish.kind](source, series, wish)


def _within(series: RoundSeries, wish: Wish) -> RoundSeries:
    return series if wish.rounds is None else series.within(wish.rounds)


def _curves(source: Source, runs: dict[str, RunHead], wish: Wish) -> Figure:
    series = [_within(read_rounds(source, head, label=label), wish) for label, head in runs.items()]
    usual = ("rounds", "time") if wish.kind == "disagreement" else AXES
    axes = usual if wish.axis is None else (wish.axis,)
    quantities = (wish.kind,) if wish.kind else _known(series)
    return curves.draw(series, quantities, axes, wish.title)


def _known(series: Sequence[RoundSeries]) -> tuple[str, ...]:
    """Returns accuracy and loss, as far as every run knows them; says which is left out."""
    lacking = {name: [run.label for run in series if not curves.knows(run, name)] for name in ("accuracy", "loss")}
    known = tuple(name for name, labels in lacking.items() if not labels)
    if not known:
        labels = lacking["accuracy"]
        raise NotFoundError(f"run {labels[0]} has neither accuracy nor loss: {curves.QUANTITIES['accuracy'].missing}")
    for name in lacking.keys() - set(known):
        log.warning("%s is left out: %s has none", name, ", ".join(lacking[name]))
    return known


def _timeline(source: Source, runs: dict[str, RunHead], wish: Wish) -> Figure:
    if len(runs) != 1:
        raise UsageError(f"a time line shows one run, got {len(runs)}: {', '.join(runs)}")
    ((label, head),) = runs.items()
    newest = NEWEST_ROUNDS if wish.rounds is None else None
    rounds = _within(read_rounds(source, head, label=label, newest=newest), wish)
    if wish.rounds is None:
        rounds = rounds.within(RoundRange(first=_first_legible(rounds)))
    begin_s, end_s = float(np.min(rounds.started_s)), float(np.max(rounds.closed_s))
    # What went out before may have come within; how long before nobody knows, so as long as the sheet is wide.
    work = read_between(source, head.run_id, 2 * begin_s - end_s, np.nextafter(end_s, np.inf))
    return timeline.draw(rounds, work, wish.title)


def _first_legible(rounds: RoundSeries) -> int:
    """Returns the first of the newest rounds in which no device does more than can be told apart."""
    each = rounds.num_updates / np.fmax(rounds.num_devices, 1)
    since = np.cumsum(each[::-1])[::-1]
    legible = rounds.round[since <= MOST_IN_A_LINE]
    return int(legible[0] if legible.size else rounds.round[-1])


def _throughput(source: Source, series: Sequence[RoundSeries], wish: Wish) -> Figure:
    totals = [_iterations(source, run, wish) for run in series]
    seconds = [_seconds(_within(run, wish)) for run in series]
    sizes = [run.head.batch_size for run in series]
    # Where nobody knows the batch size of a run, runs are compared by what is known of all.
    in_samples = all(size is not None for size in sizes)
    rates = [
        total * ((size or 1) if in_samples else 1) / s for total, size, s in zip(totals, sizes, seconds, strict=True)
    ]
    label = "samples trained on (1/s)" if in_samples else "local iterations (1/s)"
    return comparison.bars([run.label for run in series], {label: rates}, label, wish.title)


def _iterations(source: Source, run: RoundSeries, wish: Wish) -> float:
    work = read_assignments(source, run, wish.rounds)
    total = float(np.nansum(work.iterations[work.is_used]))
    if total <= 0:
        raise NotFoundError(f"run {run.label} has no throughput: no update with local iterations was applied")
    return total


def _traffic(_source: Source, series: Sequence[RoundSeries], wish: Wish) -> Figure:
    shown = [_within(run, wish) for run in series]
    up, down = (
        [float(np.nansum(getattr(run, name))) / _seconds(run) for run in shown] for name in ("bytes_up", "bytes_down")
    )
    for run, total in zip(shown, np.add(up, down), strict=True):
        if total <= 0:
            raise NotFoundError(f"run {run.label} has no traffic: no byte was counted")
    divisor, unit = style.bytes_unit(max(np.add(up, down)))
    parts = {
        "up, from the devices": [rate / divisor for rate in up],
        "down, to the devices": [rate / divisor for rate in down],
    }
    return comparison.bars([run.label for run in series], parts, f"traffic of all devices ({unit}/s)", wish.title)


def _computing_time(source: Source, series: Sequence[RoundSeries], wish: Wish) -> Figure:
    by_device = []
    for run in series:
        seconds = _seconds(_within(run, wish))
        by_device.append(
            {name: s / seconds for name, s in _compute_s(read_assignments(source, run, wish.rounds)).items()}
        )
        if not any(by_device[-1].values()):
            raise NotFoundError(f"run {run.label} has no computing time: no device told any")
    return comparison.shares(
        [run.label for run in series], by_device, "share of the time that a device computes", wish.title
    )


def _compute_s(work: Assignments) -> dict[str, float]:
    names, places = np.unique(work.device.astype(str), return_inverse=True)
    sums = np.bincount(places, weights=np.nan_to_num(work.compute_s), minlength=len(names))
    return dict(zip(map(str, names), map(float, sums), strict=True))


def _staleness(source: Source, series: Sequence[RoundSeries], wish: Wish) -> Figure:
    by_run = {}
    for run in series:
        _within(run, wish)
        work = read_assignments(source, run, wish.rounds)
        by_run[run.label] = work.staleness[work.is_used & np.isfinite(work.staleness)]
        if not by_run[run.label].size:
            raise NotFoundError(f"run {run.label} has no staleness: no update was applied")
    return staleness.draw(by_run, wish.title)


def _seconds(run: RoundSeries) -> float:
    """Returns how long rounds took, for a rate."""
    if run.duration_s <= 0:
        raise NotFoundError(f"the rounds of run {run.label} took no time, so there is no rate to draw")
    return run.duration_s


_FROM_ROUNDS = {
    "throughput": _throughput,
    "traffic": _traffic,
    "computing-time": _computing_time,
    "staleness": _staleness,
}
