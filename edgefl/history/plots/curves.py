"""Curves over rounds, time and bytes, several runs on one sheet: accuracy, loss, consensus error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from edgefl.errors import NotFoundError
from edgefl.history.plots import style
from edgefl.history.series import RoundSeries
from edgefl.history.thinning import thinned
from edgefl.types import Array

MARKS_PER_LINE = 9
UNEVEN = 5.0
WIDE_RANGE = 50.0
"""A loss that falls by more than this factor is drawn on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """What a panel shows: columns of `RoundSeries` and what each is called, the first of them the main one."""

    label: str
    columns: tuple[tuple[str, str], ...]
    missing: str
    factor: float = 1.0
    scale: str = "linear"  # or log, or auto: log where the range is wide


QUANTITIES = MappingProxyType(
    {
        "accuracy": Quantity(
            label="accuracy (%)",
            columns=(
                ("accuracy", "global model"),
                ("node_accuracy", "mean of the devices"),
                ("worst_node_accuracy", "worst device"),
            ),
            missing="nobody has evaluated it",
            factor=100.0,
        ),
        "loss": Quantity(
            label="loss",
            columns=(("loss", "evaluation"), ("train_loss", "training")),
            missing="nobody has evaluated it, and its devices told none",
            scale="auto",
        ),
        "disagreement": Quantity(
            label="consensus error\n(distance to the mean model,\nrelative to its length)",
            columns=(("disagreement", "consensus error"),),
            missing="its devices share one model, or were always the same",
            scale="log",
        ),
    }
)
_STYLES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")


def draw(series: Sequence[RoundSeries], quantities: Sequence[str], axes: Sequence[str], title: str = "") -> Figure:
    """Returns a sheet with a row for each quantity and a column for each x axis.

    Args:
        series: a run each, told apart by colour and mark.
        quantities: keys of `QUANTITIES`; of each, every run knows something.
        axes: `rounds`, `time` or `bytes`.
        title: above it all; none when empty.

    Raises:
        NotFoundError: a run knows nothing of a quantity.
    """
    shown = [QUANTITIES[name] for name in quantities]
    for name, quantity in zip(quantities, shown, strict=True):
        for run in series:
            if not knows(run, name):
                raise NotFoundError(f"run {run.label} has no {name}: {quantity.missing}")
    figure = style.new_figure(2.7 * len(shown) + 0.9 + 0.2 * len(series), width_inches=_width(axes), title=title)
    grid = figure.subplots(len(shown), len(axes), sharey="row", sharex="col", squeeze=False)
    for row, quantity in zip(grid, shown, strict=True):
        for panel, axis in zip(row, axes, strict=True):
            _draw_panel(panel, series, quantity, axis)
        row[0].set_ylabel(quantity.label)
        _scale(row[0], series, quantity)
    for panel, axis in zip(grid[-1], axes, strict=True):
        panel.set_xlabel(_abscissa(series, axis)[1])
    style.legend_below(figure, _run_entries(series), _kind_entries(series, shown))
    return figure


def knows(run: RoundSeries, name: str) -> bool:
    """Says whether a run knows anything of a quantity."""
    return any(_points(run, column, QUANTITIES[name])[0].size for column, _ in QUANTITIES[name].columns)


def _width(axes: Sequence[str]) -> float:
    return {1: 6.0, 2: 7.5}.get(len(axes), style.WIDTH_INCHES)


def _draw_panel(panel: Axes, series: Sequence[RoundSeries], quantity: Quantity, axis: str) -> None:
    divisor, _ = _abscissa(series, axis)
    for place, run in enumerate(series):
        for role, (column, name) in enumerate(quantity.columns):
            places, values = _points(run, column, quantity)
            if not places.size:
                continue
            panel.plot(
                _x(run, axis)[places] / divisor,
                values,
                linestyle=_STYLES[role],
                linewidth=1.5 if role == 0 else 1.1,
                **_look(place, role=role, num_points=len(places)),
                gid=f"{run.head.run_id} {name}",
            )
    if axis == "rounds":
        style.count_axis(panel)
    elif _is_uneven(series, axis):
        style.logarithmic_axis(panel)
    else:
        panel.locator_params(axis="x", nbins=5)
        panel.set_xlim(left=0)


def _points(run: RoundSeries, column: str, quantity: Quantity) -> tuple[Array, Array]:
    """Returns the places that are drawn, and the values there."""
    values = getattr(run, column) * quantity.factor
    drawn = np.isfinite(values) & ((values > 0) if quantity.scale == "log" else True)
    places = np.flatnonzero(drawn)
    places = places[thinned(values[places])]
    return places, values[places]


def _x(run: RoundSeries, axis: str) -> Array:
    return {"rounds": run.round, "time": run.elapsed_s, "bytes": run.moved_bytes}[axis]


def _is_uneven(series: Sequence[RoundSeries], axis: str) -> bool:
    """Says whether some runs took so much longer than others that these would be a stroke at the left edge."""
    ends = [float(np.max(_x(run, axis))) for run in series]
    return min(float(np.min(_x(run, axis))) for run in series) > 0 and max(ends) > UNEVEN * min(ends)


def _abscissa(series: Sequence[RoundSeries], axis: str) -> tuple[float, str]:
    """Returns by what an x axis is divided, and its label."""
    most = max(float(np.max(_x(run, axis))) for run in series)
    if axis == "rounds":
        return 1.0, "round"
    if axis == "time":
        divisor, unit = style.time_unit(most)
        return divisor, f"time since the start ({unit})"
    divisor, unit = style.bytes_unit(most)
    return divisor, f"sent, up and down ({unit})"


def _look(place: int, *, role: int, num_points: int) -> dict[str, Any]:
    """Returns colour and marks; marks of different runs stand at different places, and side lines have none."""
    return {
        "color": style.COLOURS[place % len(style.COLOURS)],
        "marker": style.MARKS[place % len(style.MARKS)] if role == 0 or num_points == 1 else None,
        # A fraction is one of what is seen, so marks keep their distance on a logarithmic axis too.
        "markevery": None
        if num_points <= MARKS_PER_LINE
        else (place % 4 * 0.25 / MARKS_PER_LINE, 1 / MARKS_PER_LINE),
        "markersize": 4.5,
        "markerfacecolor": "white" if place % 2 else None,
    }


def _scale(panel: Axes, series: Sequence[RoundSeries], quantity: Quantity) -> None:
    values = np.concatenate([_points(run, column, quantity)[1] for run in series for column, _ in quantity.columns])
    low, high = float(np.min(values)), float(np.max(values))
    is_wide = low > 0 and high > WIDE_RANGE * low
    if quantity.scale == "log" or (quantity.scale == "auto" and is_wide):
        panel.set_yscale("log")
    else:
        panel.ticklabel_format(axis="y", useOffset=False)


def _run_entries(series: Sequence[RoundSeries]) -> dict[str, Line2D]:
    return {
        style.literal(run.label): Line2D([], [], **_look(place, role=0, num_points=1))
        for place, run in enumerate(series)
    }


def _kind_entries(series: Sequence[RoundSeries], quantities: Sequence[Quantity]) -> dict[str, Line2D]:
    """Returns what solid, dashed and dotted lines mean where there are several kinds."""
    entries: dict[str, Line2D] = {}
    for quantity in quantities:
        present = [
            (role, name)
            for role, (column, name) in enumerate(quantity.columns)
            if any(run.has(column) for run in series)
        ]
        if len(present) > 1 or present[0][0] > 0:
            for role, name in present:
                text = name if len(quantities) == 1 else f"{quantity.label.partition(' ')[0]}, {name}"
                entries[text] = Line2D([], [], color=style.GREY, linestyle=_STYLES[role])
    return entries
