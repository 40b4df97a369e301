"""Runs side by side: throughput, traffic, and the share of the time that devices compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from edgefl.history.plots import style

MOST_BARS = len(style.HATCHES)
"""More devices than this are drawn as a box: quartiles and extremes."""


def bars(names: Sequence[str], parts: Mapping[str, Sequence[float]], label: str, title: str = "") -> Figure:
    """Returns a sheet with one bar a run.

    Args:
        names: of the runs.
        parts: what each bar is made of, by name, a value for each run; their sum stands beside the bar.
        label: what it is, with its unit.
        title: above it; none when empty.
    """
    figure = style.new_figure(1.3 + 0.42 * len(names), width_inches=7.0, title=title)
    panel, begin = figure.subplots(), np.zeros(len(names))
    places = np.arange(len(names))
    for number, values in enumerate(parts.values()):
        panel.barh(places, np.asarray(values), left=begin, height=0.62, **_look(number))
        begin = begin + np.asarray(values)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    for place, total in enumerate(begin):
        panel.annotate(
            style.number(total),
            (total, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            bbox=background,
        )
    panel.margins(x=0.14)
    panel.set(xlabel=label, xlim=(0, None))
    panel.locator_params(axis="x", nbins=6)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    _name_rows(panel, names)
    if len(parts) > 1:
        style.legend_below(figure, {name: Patch(**_look(number)) for number, name in enumerate(parts)})
    return figure


def shares(names: Sequence[str], by_device: Sequence[Mapping[str, float]], label: str, title: str = "") -> Figure:
    """Returns a sheet with a bar for every device of every run, or a box for each run where devices are many.

    Args:
        names: of the runs.
        by_device: of each run, a fraction for every device.
        label: what it is.
        title: above it; none when empty.
    """
    devices = sorted({device for each in by_device for device in each})
    if len(devices) > MOST_BARS:
        return _boxes(names, by_device, label, title)
    height = 0.8 / len(devices)
    figure = style.new_figure(1.5 + max(0.5, 0.15 * len(devices) + 0.15) * len(names), width_inches=7.0, title=title)
    panel = figure.subplots()
    for number, device in enumerate(devices):
        places = np.arange(len(names)) + (number - (len(devices) - 1) / 2) * height
        panel.barh(places, [100 * each.get(device, 0.0) for each in by_device], 0.9 * height, **_look(number))
    panel.set(xlabel=f"{label} (%)", xlim=(0, _most(by_device)))
    _name_rows(panel, names)
    style.legend_below(figure, {style.literal(name): Patch(**_look(place)) for place, name in enumerate(devices)})
    return figure


def _boxes(names: Sequence[str], by_device: Sequence[Mapping[str, float]], label: str, title: str) -> Figure:
    figure = style.new_figure(1.7 + 0.5 * len(names), width_inches=7.0, title=title)
    panel = figure.subplots()
    for place, each in enumerate(by_device):
        low, lower, middle, upper, high = np.percentile(
            [100 * share for share in each.values()], (0, 25, 50, 75, 100)
        )
        panel.hlines(place, low, high, color="#000000", linewidth=1.2)
        panel.vlines((low, high), place - 0.15, place + 0.15, color="#000000", linewidth=1.2)
        panel.barh(place, upper - lower, 0.5, left=lower, facecolor="#BFDCEC", edgecolor=style.COLOURS[0], zorder=3)
        panel.vlines(middle, place - 0.25, place + 0.25, color="#000000", linewidth=2, zorder=4)
    most, least = max(map(len, by_device)), min(map(len, by_device))
    count = f"{most}" if most == least else f"{least} to {most}"
    panel.set(xlabel=f"{label} (%)\n{count} devices: median, box of the middle half, line to the extremes")
    panel.set_xlim(0, _most(by_device))
    _name_rows(panel, names)
    return figure


def _most(by_device: Sequence[Mapping[str, float]]) -> float:
    """Returns where the axis ends: at 100 %, unless a device computed two things at once."""
    return max(100.0, 102.0 * max(share for each in by_device for share in each.values()))


def _look(number: int) -> dict[str, Any]:
    return {
        "facecolor": style.COLOURS[number % len(style.COLOURS)],
        "edgecolor": "white",
        "hatch": style.HATCHES[number % len(style.HATCHES)],
        "linewidth": 0.5,
    }


def _name_rows(panel: Any, names: Sequence[str]) -> None:
    panel.set_yticks(range(len(names)), [style.literal(name, 32) for name in names])
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")
