"""Bar charts that compare runs: throughput, traffic, and share of computing time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from edgefl.history.plots import style

MAX_BARS = len(style.HATCHES)
"""More devices than this are drawn as a box: quartiles and extremes."""


def render_bars(names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str, title: str = "") -> Figure:
    """Returns a sheet with one bar per run.

    Args:
        names: of the runs.
        parts: stacked parts by name, a value for each run; their sum is written beside the bar.
        label: of the quantity, with its unit.
        title: above it; none when empty.
    """
    figure = style.make_figure(1.3 + 0.42 * len(names), width_inches=7.0, title=title)
    panel, offsets = figure.subplots(), np.zeros(len(names))
    positions = np.arange(len(names))
    for number, values in enumerate(parts.values()):
        panel.barh(positions, np.asarray(values), left=offsets, height=0.62, **_make_bar_style(number))
        offsets = offsets + np.asarray(values)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for index, total in enumerate(offsets):
        panel.annotate(
            style.format_number(total),
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
        style.add_legend_below(figure, {name: Patch(**_make_bar_style(number)) for number, name in enumerate(parts)})
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
    figure = style.make_figure(1.5 + max(0.5, 0.15 * len(devices) + 0.15) * len(names), width_inches=7.0, title=title)
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
    style.add_legend_below(
        figure, {style.format_label(name): Patch(**_make_bar_style(index)) for index, name in enumerate(devices)}
    )
    return figure


def _render_boxes(names: Sequence[str], by_device: Sequence[Mapping[str, float]], label: str, title: str) -> Figure:
    figure = style.make_figure(1.7 + 0.5 * len(names), width_inches=7.0, title=title)
    panel = figure.subplots()
    for index, shares in enumerate(by_device):
        low, lower, middle, upper, high = np.percentile(
            [100 * share for share in shares.values()], (0, 25, 50, 75, 100)
        )
        panel.hlines(index, low, high, color="#000000", linewidth=1.2)
        panel.vlines((low, high), index - 0.15, index + 0.15, color="#000000", linewidth=1.2)
        panel.barh(index, upper - lower, 0.5, left=lower, facecolor="#BFDCEC", edgecolor=style.COLOURS[0], zorder=3)
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
        "facecolor": style.COLOURS[number % len(style.COLOURS)],
        "edgecolor": "white",
        "hatch": style.HATCHES[number % len(style.HATCHES)],
        "linewidth": 0.5,
    }


def _set_row_names(panel: Any, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), [style.format_label(name, 32) for name in names])
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
