"""Sheets that compare runs: curves over rounds, time and bytes; bars; histograms of staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from edgefl.core.errors import NotFoundError
from edgefl.core.types import Array
from edgefl.history import plot_style
from edgefl.history.series import RoundSeries
from edgefl.storage.queries.dashboard import downsample_indices

MARKERS_PER_LINE = 9
BAND_OPACITY = 0.2
MAX_POINTS = 2000
"""Of a line; its extremes are always drawn."""
LOG_AXIS_RATIO = 5.0
LOG_SCALE_RATIO = 50.0
"""A loss that falls by more than this factor is drawn on a logarithmic scale."""

_LINE_STYLES: tuple[Literal["-", "--", ":"], ...] = ("-", "--", ":")

MAX_BARS = len(plot_style.HATCHES)
"""More devices than this are drawn as a box: quartiles and extremes."""

MAX_BINS = 40
MIN_AXIS_VERSIONS = 5
"""Minimum axis length: one bar across the sheet would look like a mistake."""


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


def render_curves(
    series: Sequence[RoundSeries],
    metrics: Sequence[str],
    axes: Sequence[str],
    title: str = "",
    references: Sequence[RoundSeries] = (),
) -> Figure:
    """Returns a sheet with a row per metric and a column per x axis.

    Args:
        series: one run each, distinguished by colour and mark.
        metrics: keys of `PLOT_METRICS`; every run needs values of each.
        axes: `rounds`, `time` or `bytes`.
        title: above it all; none when empty.
        references: runs of which the newest value alone is drawn, as a dotted line across each panel.

    Raises:
        NotFoundError: a run has no value of a metric.
    """
    plot_metrics = [PLOT_METRICS[name] for name in metrics]
    for name, metric in zip(metrics, plot_metrics, strict=True):
        for run in (*series, *references):
            if not has_metric(run, name):
                raise NotFoundError(f"run {run.label} has no {name}: {metric.missing_reason}")
    figure = plot_style.make_figure(
        2.7 * len(plot_metrics) + 0.9 + 0.2 * (len(series) + len(references)),
        width_inches=_get_width_inches(axes),
        title=title,
    )
    grid = figure.subplots(len(plot_metrics), len(axes), sharey="row", sharex="col", squeeze=False)
    for row, metric in zip(grid, plot_metrics, strict=True):
        for panel, axis in zip(row, axes, strict=True):
            _draw_panel(panel, series, metric, axis)
            for number, run in enumerate(references):
                panel.axhline(
                    _find_newest_value(run, metric),
                    gid=f"{run.head.run_id} reference",
                    **_make_reference_style(number),
                )
        row[0].set_ylabel(metric.label)
        _set_y_scale(row[0], (*series, *references), metric)
    for panel, axis in zip(grid[-1], axes, strict=True):
        panel.set_xlabel(_get_x_axis(series, axis)[1])
    entries = _make_run_entries(series) | {
        plot_style.format_label(f"{run.label}, at its end"): Line2D([], [], **_make_reference_style(number))
        for number, run in enumerate(references)
    }
    plot_style.add_legend_below(figure, entries, _make_line_style_entries(series, plot_metrics))
    return figure


def _make_reference_style(number: int) -> dict[str, Any]:
    """Returns the style of a reference's line: dotted, and grey, lighter than any curve's."""
    return {"color": plot_style.GREY, "linestyle": (0, (1, 2 + 2 * number)), "linewidth": 1.3}


def _find_newest_value(run: RoundSeries, metric: PlotMetric) -> float:
    found = (_select_points(run, column, metric)[1] for column, _ in metric.columns)
    return float(next(values[-1] for values in found if values.size))


def has_metric(run: RoundSeries, name: str) -> bool:
    """Returns whether a run has any value of a metric."""
    return any(_select_points(run, column, PLOT_METRICS[name])[0].size for column, _ in PLOT_METRICS[name].columns)


def _get_width_inches(axes: Sequence[str]) -> float:
    return {1: 6.0, 2: 7.5}.get(len(axes), plot_style.WIDTH_INCHES)


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
                **_make_curve_style(number, role=role, num_points=len(indices)),
                gid=f"{run.head.run_id} {name}",
            )
            if column in run.spread:
                band = run.spread[column][indices] * metric.factor
                panel.fill_between(
                    _get_x_values(run, axis)[indices] / divisor,
                    values - band,
                    values + band,
                    color=plot_style.COLOURS[number % len(plot_style.COLOURS)],
                    alpha=BAND_OPACITY,
                    linewidth=0,
                )
    if axis == "rounds":
        plot_style.set_integer_axis(panel)
    elif _is_uneven(series, axis):
        plot_style.set_log_axis(panel)
    else:
        panel.locator_params(axis="x", nbins=5)
        panel.set_xlim(left=0)


def _select_points(run: RoundSeries, column: str, metric: PlotMetric) -> tuple[Array, Array]:
    """Returns the indices to draw, and the values there."""
    values = getattr(run, column) * metric.factor
    is_drawable = np.isfinite(values) & ((values > 0) if metric.scale == "log" else True)
    indices = np.flatnonzero(is_drawable)
    indices = indices[downsample_indices([values[indices]], MAX_POINTS)]
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
        divisor, unit = plot_style.select_time_unit(max_value)
        return divisor, f"time since the start ({unit})"
    divisor, unit = plot_style.select_bytes_unit(max_value)
    return divisor, f"sent, up and down ({unit})"


def _make_curve_style(place: int, *, role: int, num_points: int) -> dict[str, Any]:
    """Returns colour and marks; marks are staggered between runs, and secondary lines have none."""
    return {
        "color": plot_style.COLOURS[place % len(plot_style.COLOURS)],
        "marker": plot_style.MARKERS[place % len(plot_style.MARKERS)] if role == 0 or num_points == 1 else None,
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
        plot_style.format_label(run.label): Line2D([], [], **_make_curve_style(number, role=0, num_points=1))
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
                entries[text] = Line2D([], [], color=plot_style.GREY, linestyle=_LINE_STYLES[role])
    return entries


def render_bars(names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str, title: str = "") -> Figure:
    """Returns a sheet with one bar per run.

    Args:
        names: of the runs.
        parts: stacked parts by name, a value for each run; their sum is written beside the bar.
        label: of the quantity, with its unit.
        title: above it; none when empty.
    """
    figure = plot_style.make_figure(1.3 + 0.42 * len(names), width_inches=7.0, title=title)
    panel, offsets = figure.subplots(), np.zeros(len(names))
    positions = np.arange(len(names))
    for number, values in enumerate(parts.values()):
        panel.barh(positions, np.asarray(values), left=offsets, height=0.62, **_make_bar_style(number))
        offsets = offsets + np.asarray(values)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for index, total in enumerate(offsets):
        panel.annotate(
            plot_style.format_number(total),
            (total, index),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            bbox=background,
        )
    panel.margins(x=0.14)
    panel.set(xlabel=label, xlim=(0, None))
    panel.locator_params(axis="x", nbins=6)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    _set_row_names(panel, names)
    if len(parts) > 1:
        plot_style.add_legend_below(
            figure, {name: Patch(**_make_bar_style(number)) for number, name in enumerate(parts)}
        )
    return figure


def render_shares(
    names: Sequence[str], by_device: Sequence[Mapping[str, float]], label: str, title: str = ""
) -> Figure:
    """Returns a sheet with a bar per device and run, or a box per run where devices are many.

    Args:
        names: of the runs.
        by_device: a fraction for every device, per run.
        label: of the quantity.
        title: above it; none when empty.
    """
    devices = sorted({device for shares in by_device for device in shares})
    if len(devices) > MAX_BARS:
        return _render_boxes(names, by_device, label, title)
    height = 0.8 / len(devices)
    figure = plot_style.make_figure(
        1.5 + max(0.5, 0.15 * len(devices) + 0.15) * len(names), width_inches=7.0, title=title
    )
    panel = figure.subplots()
    for number, device in enumerate(devices):
        positions = np.arange(len(names)) + (number - (len(devices) - 1) / 2) * height
        panel.barh(
            positions,
            [100 * shares.get(device, 0.0) for shares in by_device],
            0.9 * height,
            **_make_bar_style(number),
        )
    panel.set(xlabel=f"{label} (%)", xlim=(0, _get_axis_limit(by_device)))
    _set_row_names(panel, names)
    plot_style.add_legend_below(
        figure, {plot_style.format_label(name): Patch(**_make_bar_style(index)) for index, name in enumerate(devices)}
    )
    return figure


def _render_boxes(names: Sequence[str], by_device: Sequence[Mapping[str, float]], label: str, title: str) -> Figure:
    figure = plot_style.make_figure(1.7 + 0.5 * len(names), width_inches=7.0, title=title)
    panel = figure.subplots()
    for index, shares in enumerate(by_device):
        low, lower, middle, upper, high = np.percentile(
            [100 * share for share in shares.values()], (0, 25, 50, 75, 100)
        )
        panel.hlines(index, low, high, color="#000000", linewidth=1.2)
        panel.vlines((low, high), index - 0.15, index + 0.15, color="#000000", linewidth=1.2)
        panel.barh(
            index, upper - lower, 0.5, left=lower, facecolor="#BFDCEC", edgecolor=plot_style.COLOURS[0], zorder=3
        )
        panel.vlines(middle, index - 0.25, index + 0.25, color="#000000", linewidth=2, zorder=4)
    max_devices, min_devices = max(map(len, by_device)), min(map(len, by_device))
    count = f"{max_devices}" if max_devices == min_devices else f"{min_devices} to {max_devices}"
    panel.set(xlabel=f"{label} (%)\n{count} devices: median, box of the middle half, line to the extremes")
    panel.set_xlim(0, _get_axis_limit(by_device))
    _set_row_names(panel, names)
    return figure


def _get_axis_limit(by_device: Sequence[Mapping[str, float]]) -> float:
    """Returns the axis limit: 100 %, or more where a device computed two things at once."""
    return max(100.0, 102.0 * max(share for shares in by_device for share in shares.values()))


def _make_bar_style(number: int) -> dict[str, Any]:
    return {
        "facecolor": plot_style.COLOURS[number % len(plot_style.COLOURS)],
        "edgecolor": "white",
        "hatch": plot_style.HATCHES[number % len(plot_style.HATCHES)],
        "linewidth": 0.5,
    }


def _set_row_names(panel: Any, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), [plot_style.format_label(name, 32) for name in names])
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")


def render_staleness(by_run: Mapping[str, Array], title: str = "") -> Figure:
    """Returns a sheet with a panel for each run, all on the same axes.

    Args:
        by_run: staleness of each run's applied updates, in versions; at least one each.
        title: above it; none when empty.
    """
    max_staleness = max(int(values.max()) for values in by_run.values())
    width = -(-(max_staleness + 1) // MAX_BINS)
    edges = np.arange(0, max_staleness + 1 + width, width) - 0.5
    figure = plot_style.make_figure(1.3 + 1.65 * len(by_run), width_inches=6.5, title=title)
    grid = figure.subplots(len(by_run), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for index, (panel, (name, values)) in enumerate(zip(grid, by_run.items(), strict=True)):
        counts, _ = np.histogram(values, edges)
        panel.bar(
            edges[:-1] + width / 2,
            100 * counts / len(values),
            0.86 * width,
            color=plot_style.COLOURS[index % len(plot_style.COLOURS)],
        )
        panel.axvline(float(values.mean()), color="#000000", linestyle="--", linewidth=1.2)
        panel.set_title(
            f"{plot_style.format_label(name)}\n{len(values):,} updates, mean {values.mean():.3g} (dashed), "
            f"95 % within {np.percentile(values, 95):.0f}, most {values.max():.0f}",
            loc="left",
        )
        panel.grid(visible=False, axis="x")
    grid[-1].set_xlim(-0.8, max(float(edges[-1]) + 0.3, MIN_AXIS_VERSIONS + 0.8))
    plot_style.set_integer_axis(grid[-1], 10)
    step = "" if width == 1 else f", {width} to a bar"
    grid[-1].set_xlabel(f"staleness (versions between a model and its update{step})")
    figure.supylabel("share of the applied updates (%)", fontsize=10)
    return figure
