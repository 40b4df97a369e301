"""The five figures of ESync's README: accuracy IID and by class, throughput, traffic, and computing time.

They look as those of `edgefl history plot`; here a line stands where the target is, and time is logarithmic.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from edgefl.history import comparison, plot_style

SHOWN = ("ssgd", "esync budget", "esync live", "asgd", "dc-asgd adaptive", "fedbuff", "drop the slow")
TARGET = 0.8
LINE_STYLES = ("-", "--", "-.", ":")


def draw(outcomes: Sequence[Any], out: Path, *, model: str, alone: str | None = None) -> list[Path]:
    """Writes the figures and returns their files.

    Args:
        outcomes: with free links, one of each strategy and scheme.
        out: an existing folder.
        model: named in the titles.
        alone: the strategy whose last accuracy is drawn as a dotted line.
    """
    chosen = {(o.cell["strategy"], o.cell["scheme"]): o for o in outcomes}
    levels = {scheme: None if alone is None else chosen[alone, scheme].last_accuracy for scheme in ("iid", "sorted")}
    names = [name for name in SHOWN if (name, "iid") in chosen]
    iid = [chosen[name, "iid"] for name in names]
    sorted_too = [(name, chosen[name, "sorted"]) for name in names]
    samples, megabytes = [o.samples_per_s for o in iid], [o.bytes_per_s / 1e6 for o in iid]
    with plot_style.apply_style():
        figures = {
            "accuracy-iid.png": _curves(list(zip(names, iid, strict=True)), f"{model}, IID", levels["iid"]),
            "accuracy-by-class.png": _curves(sorted_too, f"{model}, by class", levels["sorted"]),
            "throughput.png": comparison.render_bars(names, {"samples": samples}, "samples trained on (1/s)"),
            "traffic.png": comparison.render_bars(
                names, {"both": megabytes}, "traffic of all devices, both directions (MB/s)"
            ),
            "computing-time.png": comparison.render_shares(
                names, [o.computing for o in iid], "share of the time that a device computes"
            ),
        }
    for name, figure in figures.items():
        (out / name).write_bytes(plot_style.encode_figure(figure, ".png"))
    return [out / name for name in figures]


def _curves(named: Sequence[tuple[str, Any]], title: str, level: float | None) -> Figure:
    figure = plot_style.make_figure(4.6, width_inches=7.0, title=title)
    axes = figure.subplots()
    for place, (name, outcome) in enumerate(named):
        seconds, accuracies = zip(*outcome.curve, strict=True)
        axes.plot(
            seconds,
            [100 * accuracy for accuracy in accuracies],
            label=name,
            color=plot_style.COLOURS[place % len(plot_style.COLOURS)],
            linestyle=LINE_STYLES[place % len(LINE_STYLES)],
            linewidth=1.2,
            alpha=0.9,
        )
    axes.axhline(100 * TARGET, color="grey", linewidth=0.8)
    if level is not None:
        axes.axhline(100 * level, color="black", linewidth=0.8, linestyle=":", label="one device, all data")
    plot_style.set_log_axis(axes)
    axes.set(xlabel="virtual time (s)", ylabel="test accuracy (%)", ylim=(0, 100))
    handles, labels = axes.get_legend_handles_labels()
    plot_style.add_legend_below(figure, dict(zip(labels, handles, strict=True)))
    return figure
