"""Histograms of the applied updates' staleness, one panel per run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from edgefl.core.types import Array
from edgefl.history.plots import style

MAX_BINS = 40
MIN_AXIS_VERSIONS = 5
"""Minimum axis length: one bar across the sheet would look like a mistake."""


def render_staleness(by_run: Mapping[str, Array], title: str = "") -> Figure:
    """Returns a sheet with a panel for each run, all on the same axes.

    Args:
        by_run: staleness of each run's applied updates, in versions; at least one each.
        title: above it; none when empty.
    """
    max_staleness = max(int(values.max()) for values in by_run.values())
    width = -(-(max_staleness + 1) // MAX_BINS)
    edges = np.arange(0, max_staleness + 1 + width, width) - 0.5
    figure = style.make_figure(1.3 + 1.65 * len(by_run), width_inches=6.5, title=title)
    grid = figure.subplots(len(by_run), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for index, (panel, (name, values)) in enumerate(zip(grid, by_run.items(), strict=True)):
        counts, _ = np.histogram(values, edges)
        panel.bar(
            edges[:-1] + width / 2,
            100 * counts / len(values),
            0.86 * width,
            color=style.COLOURS[index % len(style.COLOURS)],
        )
        panel.axvline(float(values.mean()), color="#000000", linestyle="--", linewidth=1.2)
        panel.set_title(
            f"{style.format_label(name)}\n{len(values):,} updates, mean {values.mean():.3g} (dashed), "
            f"95 % within {np.percentile(values, 95):.0f}, most {values.max():.0f}",
            loc="left",
        )
        panel.grid(visible=False, axis="x")
    grid[-1].set_xlim(-0.8, max(float(edges[-1]) + 0.3, MIN_AXIS_VERSIONS + 0.8))
    style.set_integer_axis(grid[-1], 10)
    step = "" if width == 1 else f", {width} to a bar"
    grid[-1].set_xlabel(f"staleness (versions between a model and its update{step})")
    figure.supylabel("share of the applied updates (%)", fontsize=10)
    return figure
