"""Figures of the ISVR benchmark: accuracy by iterations and bytes, at the end, by learning rate, codec and loss."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from harness.isvr_cell import ONE_NODE, Outcome, interval, of_average, of_nodes

# Okabe and Ito's colours, told apart by the colour-blind too; styles and marks tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#000000", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#999999")
STYLES = ("-", "--", "-.", ":")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
CURVES = ("PDMM-ISVR", "ADMM-ISVR", "DSGD", "AD-PSGD", "K-GT", "D-PSGD", "D2", "gradient tracking")
FLOOR = 0.3
"""What lies lower is not shown in full."""
LEAST_SPAN = 0.03


def draw_curves(outcomes: Mapping[str, Outcome], title: str, path: Path) -> Path:
    """Draws the mean model's accuracy, of one seed, over local iterations and over megabytes on each edge."""
    figure, (by_iterations, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    lowest = []
    for place, name in enumerate(CURVES):
        if name not in outcomes:
            continue
        outcome = outcomes[name]
        points = range(1, len(outcome.curve) + 1)
        style = {"color": COLOURS[place], "linestyle": STYLES[place % len(STYLES)], "linewidth": 1.4}
        of_run = [point / len(outcome.curve) for point in points]
        by_iterations.plot([outcome.cell["iterations"] * each for each in of_run], outcome.curve, label=name, **style)
        by_bytes.plot([outcome.bytes_per_edge / 1e6 * each for each in of_run], outcome.curve, **style)
        lowest.append(min(outcome.curve))
    for outcome in outcomes.values():
        if outcome.cell["method"] == ONE_NODE:
            for axes in (by_iterations, by_bytes):
                line = axes.axhline(outcome.average, color="grey", linewidth=0.8)
            line.set_label("one node, at the end")
    by_iterations.set(xlabel="local iterations of each node", ylabel="test accuracy of the mean model", title=title)
    by_bytes.set(xlabel="MB on each edge, both directions")
    _scale_by_logarithm(by_bytes)
    by_iterations.set_ylim(bottom=max(FLOOR, min(lowest, default=0)) - 0.01)
    for axes in (by_iterations, by_bytes):
        axes.grid(visible=True, linewidth=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return _saved(figure, path)


def draw_accuracies(
    tuned: Mapping[str, Sequence[Outcome]], untuned: Mapping[str, Sequence[Outcome]], title: str, path: Path
) -> Path:
    """Draws where each variant ends: its nodes and their interval over seeds, the worst one, and the mean model."""
    names = list(tuned)[::-1]
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(names) + 1.6), layout="constrained")
    for place, name in enumerate(names):
        found = tuned[name]
        nodes, worst = statistics.fmean(map(of_nodes, found)), statistics.fmean(min(each.nodes) for each in found)
        axes.plot([worst, nodes], [place, place], color="#999999", linewidth=1, zorder=1)
        margin = interval([of_nodes(each) for each in found]) or 0.0
        first = not place
        axes.errorbar(nodes, place, xerr=margin, fmt="o", color=COLOURS[0], capsize=3, markersize=5,
                      label="nodes, tuned" if first else None)  # fmt: skip
        axes.plot(worst, place, "|", color="#999999", markersize=9, label="worst node, tuned" if first else None)
        axes.plot(statistics.fmean(map(of_average, found)), place, "D", color=COLOURS[1], fillstyle="none",
                  markersize=6, label="mean model, tuned" if first else None)  # fmt: skip
    plain = [
        (statistics.fmean(map(of_nodes, untuned[name])), place) for place, name in enumerate(names) if name in untuned
    ]
    if plain:
        axes.plot(*zip(*plain, strict=True), "x", color=COLOURS[2], markersize=6, label="nodes, 0.1 constant")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="test accuracy", title=title)
    axes.grid(visible=True, axis="x", linewidth=0.3)
    figure.legend(fontsize="small", loc="outside lower center", ncols=4)
    return _saved(figure, path)


def draw_rates(searched: Mapping[str, Sequence[Outcome]], title: str, path: Path) -> Path:
    """Draws what the nodes of each variant gave at every learning rate and decay that was tried."""
    columns = 4
    rows = -(-len(searched) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(11, 2.3 * rows + 0.6), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for place in range(len(searched), grid.size):
        grid.flat[place].set_axis_off()
        grid.flat[place - columns].tick_params(labelbottom=True)
    for axes, (name, outcomes) in zip(grid.flat, searched.items(), strict=False):
        for place, decay in enumerate(("constant", "linear", "inverse-sqrt")):
            points = sorted((each.cell["rate"], of_nodes(each)) for each in outcomes if each.cell["decay"] == decay)
            if points:
                axes.plot(*zip(*points, strict=True), color=COLOURS[place], marker=MARKS[place], markersize=4,
                          linestyle=STYLES[place], linewidth=1, label=decay)  # fmt: skip
        axes.set_title(name, fontsize="small")
        axes.set(xscale="log")
        axes.grid(visible=True, linewidth=0.3)
    grid[0, 0].set_ylim(bottom=0.6)
    figure.supxlabel("learning rate at first")
    figure.supylabel("test accuracy of the nodes")
    figure.suptitle(title)
    labelled = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labelled.values(), labelled, fontsize="small", loc="outside upper right", ncols=3)
    return _saved(figure, path)


def draw_codecs(known: Mapping[str, Sequence[Outcome]], path: Path) -> Path:
    """Draws the accuracy of the nodes over the bytes that a codec left."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, (name, found) in enumerate(known.items()):
        nodes = [of_nodes(each) for each in found]
        megabytes = statistics.fmean(each.bytes_per_edge for each in found) / 1e6
        axes.errorbar(megabytes, statistics.fmean(nodes), yerr=interval(nodes) or 0.0, color=COLOURS[place],
                      marker=MARKS[place], capsize=3, linestyle="none", label=name)  # fmt: skip
    axes.set(xlabel="MB on each edge, both directions", ylabel="test accuracy of the nodes")
    _scale_by_logarithm(axes)
    axes.set(title="ADMM-ISVR on the ring, codecs along the edges")
    # Differences of a tenth of a point are those of seeds, and are not to fill the figure.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, (low + high - LEAST_SPAN) / 2), max(high, (low + high + LEAST_SPAN) / 2))
    axes.grid(visible=True, which="both", linewidth=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return _saved(figure, path)


def draw_losses(known: Mapping[tuple[str, float], Sequence[Outcome]], path: Path) -> Path:
    """Draws the accuracy of the nodes over the fraction of messages that are lost."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for place, name in enumerate(dict.fromkeys(name for name, _ in known)):
        points = {loss: [of_nodes(each) for each in found] for (own, loss), found in known.items() if own == name}
        axes.errorbar(
            list(points),
            [statistics.fmean(nodes) for nodes in points.values()],
            yerr=[interval(nodes) or 0.0 for nodes in points.values()],
            color=COLOURS[place],
            linestyle=STYLES[place % len(STYLES)],
            marker=MARKS[place],
            capsize=3,
            linewidth=1.2,
            label=name,
        )
    axes.set(xlabel="fraction of the messages lost", ylabel="test accuracy of the nodes", title="ring")
    axes.grid(visible=True, linewidth=0.3)
    figure.legend(fontsize="small", loc="outside right upper")
    return _saved(figure, path)


def _scale_by_logarithm(axes: Any) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
