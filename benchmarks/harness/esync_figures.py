"""The five figures of ESync's README: accuracy IID and by class, throughput, traffic, and computing time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, told apart by the colour-blind too; styles tell them apart in print.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442")
STYLES = ("-", "--", "-.", ":")
SHOWN = ("ssgd", "esync budget", "esync live", "asgd", "dc-asgd adaptive", "fedbuff", "drop the slow")


def draw(outcomes: Sequence[Any], out: Path, *, model: str, links: str = "free") -> list[Path]:
    """Writes the figures and returns their files."""
    chosen = {
        (o.cell["strategy"], o.cell["scheme"]): o
        for o in outcomes
        if o.cell["links"] == links and o.cell["strategy"] in SHOWN
    }
    names = [name for name in SHOWN if (name, "iid") in chosen]
    iid = [chosen[name, "iid"] for name in names]
    return [
        _curves([(name, chosen[name, "iid"]) for name in names], out / "accuracy-iid.png", f"{model}, IID"),
        _curves(
            [(name, chosen[name, "sorted"]) for name in names], out / "accuracy-by-class.png", f"{model}, by class"
        ),
        _bars(names, [o.samples_per_s for o in iid], out / "throughput.png", "samples per second"),
        _bars(names, [o.bytes_per_s / 1e6 for o in iid], out / "traffic.png", "MB per second, both directions"),
        _computing(names, [o.computing for o in iid], out / "computing-time.png"),
    ]


def _curves(named: Sequence[tuple[str, Any]], path: Path, title: str) -> Path:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for place, (name, outcome) in enumerate(named):
        seconds, accuracies = zip(*outcome.curve, strict=True)
        axes.plot(
            seconds,
            accuracies,
            label=name,
            color=COLOURS[place % len(COLOURS)],
            linestyle=STYLES[place % len(STYLES)],
            linewidth=1.2,
            alpha=0.9,
        )
    axes.axhline(0.8, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="virtual seconds", ylabel="test accuracy", ylim=(0, 1), title=title)
    axes.legend(fontsize="small", loc="lower right")
    return _saved(figure, path)


def _bars(names: Sequence[str], values: Sequence[float], path: Path, label: str) -> Path:
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    axes.bar(names, values, color=COLOURS[0])
    for place, value in enumerate(values):
        axes.annotate(
            f"{value:,.0f}" if value >= 100 else f"{value:.3g}",
            (place, value),
            ha="center",
            va="bottom",
            fontsize="small",
        )
    axes.set_ylabel(label)
    axes.margins(y=0.12)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", rotation_mode="anchor")
    return _saved(figure, path)


def _computing(names: Sequence[str], shares: Sequence[dict[str, float]], path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    devices = sorted({device for share in shares for device in share})
    width = 0.8 / len(devices)
    for place, device in enumerate(devices):
        places = [group + (place - (len(devices) - 1) / 2) * width for group in range(len(names))]
        axes.bar(places, [share.get(device, 0.0) for share in shares], width, label=device, color=COLOURS[place])
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", rotation_mode="anchor")
    axes.set(ylabel="share of time computing", ylim=(0, 1.05))
    figure.legend(fontsize="x-small", ncols=len(devices), loc="outside upper center")
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
