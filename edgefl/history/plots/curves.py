"""Curves over rounds, time and bytes, with several runs on one sheet: accuracy, loss, disagreement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from edgefl.core.errors import NotFoundError
from edgefl.core.types import Array
from edgefl.history.downsampling import downsample_indices
from edgefl.history.plots import style
from edgefl.history.series import RoundSeries

MARKERS_PER_LINE = 9
LOG_AXIS_RATIO = 5.0
LOG_SCALE_RATIO = 50.0
"""A loss that falls by more than this factor is drawn on a logarithmic scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotMetric:
    """A panel's metric: columns of `RoundSeries` with their labels, the main one first."""

    label: str
    columns: tuple[tuple[str, str], ...]
    missing_reason: str
    factor: float = 1.0
    scale: str = "linear"  # or log, or auto: log where the range is wide


PLOT_METRICS = MappingProxyType(
    {
        "accuracy": PlotMetric(
            label="accuracy (%)",
            columns=(
                ("accuracy", "global model"),
                ("node_accuracy", "mean of the devices"),
                ("worst_node_accuracy", "worst device"),
            ),
            missing_reason="nobody has evaluated it",
            factor=100.0,
        ),
        "loss": PlotMetric(
            label="loss",
            columns=(("loss", "evaluation"), ("train_loss", "training")),
            missing_reason="nobody has evaluated it, and its devices told none",
            scale="auto",
        ),
        "disagreement": PlotMetric(
            label="consensus error\n(distance to the mean model,\nrelative to its length)",
            columns=(("disagreement", "consensus error"),),
            missing_reason="its devices share one model, or were always the same",
            scale="log",
        ),
    }
)
_LINE_STYLES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")


def render_curves(
    series: Sequence[RoundSeries], metrics: Sequence[str], axes: Sequence[str], title: str = ""
) -> Figure:
    """Returns a sheet with a row per metric and a column per x axis.

    Args:
        series: one run each, distinguished by colour and mark.
        metrics: keys of `PLOT_METRICS`; every run needs values of each.
        axes: `rounds`, `time` or `bytes`.
        title: above it all; none when empty.

    Raises:
        NotFoundError: a run has no value of a metric.
    """
    plot_metrics = [PLOT_METRICS[name] for name in metrics]
    for name, metric in zip(metrics, plot_metrics, strict=True):
        for run in series:
            if not has_metric(run, name):
                raise NotFoundError(f"run {run.label} has no {name}: {metric.missing_reason}")
    figure = style.make_figure(
        2.7 * len(plot_metrics) + 0.9 + 0.2 * len(series), width_inches=_get_width_inches(axes), title=title
    )
    grid = figure.subplots(len(plot_metrics), len(axes), sharey="row", sharex="col", squeeze=False)
    for row, metric in zip(grid, plot_metrics, strict=True):
        for panel, axis in zip(row, axes, strict=True):
            _draw_panel(panel, series, metric, axis)
        row[0].set_ylabel(metric.label)
        _set_y_scale(row[0], series, metric)
    for panel, axis in zip(grid[-1], axes, strict=True):
        panel.set_xlabel(_get_x_axis(series, axis)[1])
    style.add_legend_below(figure, _make_run_entries(series), _make_line_style_entries(series, plot_metrics))
    return figure


def has_metric(run: RoundSeries, name: str) -> bool:
    """Returns whether a run has any value of a metric."""
    return any(_select_points(run, column, PLOT_METRICS[name])[0].size for column, _ in PLOT_METRICS[name].columns)


def _get_width_inches(axes: Sequence[str]) -> float:
    return {1: 6.0, 2: 7.5}.get(len(axes), style.WIDTH_INCHES)


def _draw_panel(panel: Axes, series: Sequence[RoundSeries], metric: PlotMetric, axis: str) -> None:
    divisor, _ = _get_x_axis(series, axis)
    for number, run in enumerate(series):
        for role, (column, name) in enumerate(metric.columns):
            indices, values = _select_points(run, column, metric)
            if not indices.size:
                continue
            panel.plot(
                _get_x_values(run, axis)[indices] / divisor,
                values,
                linestyle=_LINE_STYLES[role],
                linewidth=1.5 if role == 0 else 1.1,
                **_make_line_style(number, role=role, num_points=len(indices)),
                gid=f"{run.head.run_id} {name}",
            )
    if axis == "rounds":
        style.set_integer_axis(panel)
    elif _is_uneven(series, axis):
        style.set_log_axis(panel)
    else:
        panel.locator_params(axis="x", nbins=5)
        panel.set_xlim(left=0)


def _select_points(run: RoundSeries, column: str, metric: PlotMetric) -> tuple[Array, Array]:
    """Returns the indices to draw, and the values there."""
    values = getattr(run, column) * metric.factor
    is_drawable = np.isfinite(values) & ((values > 0) if metric.scale == "log" else True)
    indices = np.flatnonzero(is_drawable)
    indices = indices[downsample_indices(values[indices])]
    return indices, values[indices]


def _get_x_values(run: RoundSeries, axis: str) -> Array:
    return {"rounds": run.round, "time": run.elapsed_s, "bytes": run.transferred_bytes}[axis]


def _is_uneven(series: Sequence[RoundSeries], axis: str) -> bool:
    """Returns whether some runs are so long that the others would be a stroke at the left edge."""
    ends = [float(np.max(_get_x_values(run, axis))) for run in series]
    return min(float(np.min(_get_x_values(run, axis))) for run in series) > 0 and max(ends) > LOG_AXIS_RATIO * min(
        ends
    )


def _get_x_axis(series: Sequence[RoundSeries], axis: str) -> tuple[float, str]:
    """Returns divisor and label of an x axis."""
    max_value = max(float(np.max(_get_x_values(run, axis))) for run in series)
    if axis == "rounds":
        return 1.0, "round"
    if axis == "time":
        divisor, unit = style.select_time_unit(max_value)
        return divisor, f"time since the start ({unit})"
    divisor, unit = style.select_bytes_unit(max_value)
    return divisor, f"sent, up and down ({unit})"


def _make_line_style(place: int, *, role: int, num_points: int) -> dict[str, Any]:
    """Returns colour and marks; marks are staggered between runs, and secondary lines have none."""
    return {
        "color": style.COLOURS[place % len(style.COLOURS)],
        "marker": style.MARKERS[place % len(style.MARKERS)] if role == 0 or num_points == 1 else None,
        # A fraction refers to the visible length, so marks keep their distance on a logarithmic axis too.
        "markevery": None
        if num_points <= MARKERS_PER_LINE
        else (place % 4 * 0.25 / MARKERS_PER_LINE, 1 / MARKERS_PER_LINE),
        "markersize": 4.5,
        "markerfacecolor": "white" if place % 2 else None,
    }


def _set_y_scale(panel: Axes, series: Sequence[RoundSeries], metric: PlotMetric) -> None:
    values = np.concatenate(
        [_select_points(run, column, metric)[1] for run in series for column, _ in metric.columns]
    )
    low, high = float(np.min(values)), float(np.max(values))
    is_wide = low > 0 and high > LOG_SCALE_RATIO * low
    if metric.scale == "log" or (metric.scale == "auto" and is_wide):
        panel.set_yscale("log")
    else:
        panel.ticklabel_format(axis="y", useOffset=False)


def _make_run_entries(series: Sequence[RoundSeries]) -> dict[str, Line2D]:
    return {
        style.format_label(run.label): Line2D([], [], **_make_line_style(number, role=0, num_points=1))
        for number, run in enumerate(series)
    }


def _make_line_style_entries(series: Sequence[RoundSeries], metrics: Sequence[PlotMetric]) -> dict[str, Line2D]:
    """Returns the legend of solid, dashed and dotted lines where there are several kinds."""
    entries: dict[str, Line2D] = {}
    for metric in metrics:
        used_columns = [
            (role, name)
            for role, (column, name) in enumerate(metric.columns)
            if any(run.has_values(column) for run in series)
        ]
        if len(used_columns) > 1 or used_columns[0][0] > 0:
            for role, name in used_columns:
                text = name if len(metrics) == 1 else f"{metric.label.partition(' ')[0]}, {name}"
                entries[text] = Line2D([], [], color=style.GREY, linestyle=_LINE_STYLES[role])
    return entries
