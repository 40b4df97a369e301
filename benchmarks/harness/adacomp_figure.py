"""Accuracy over updates, and over the bytes that they took, a line for each variant of the AdaComp benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

STYLES = ("-", "--", "-.", ":")


def draw(outcomes: Mapping[str, tuple[int, Any]], target: float, path: Path) -> Path:
    """Writes the figure and returns its file.

    Args:
        outcomes: of each variant, how many updates lie between two evaluations, and an outcome.
        target: the accuracy that was to be held, drawn as a line.
        path: the PNG file.
    """
    figure, (by_updates, by_bytes) = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for place, (name, (step, outcome)) in enumerate(outcomes.items()):
        updates = [step * number for number in range(1, len(outcome.accuracies) + 1)]
        # Bytes stand until the target was held, or of all: an update takes the same throughout, within a few percent.
        mb_per_update = outcome.bytes_up / 1e6 / (outcome.held_at or outcome.updates)
        style = {"color": plt.get_cmap("tab10")(place % 10), "linestyle": STYLES[place // 10 % len(STYLES)]}
        by_updates.plot(updates, outcome.accuracies, label=name, linewidth=1.2, **style)
        by_bytes.plot([each * mb_per_update for each in updates], outcome.accuracies, linewidth=1.2, **style)
    for axes, label in ((by_updates, "updates"), (by_bytes, "MB sent by all devices")):
        axes.axhline(target, color="grey", linewidth=0.8)
        axes.set(xscale="log", xlabel=label)
        axes.grid(visible=True, linewidth=0.3)
    by_updates.set(ylabel="test accuracy", ylim=(0.1, 1))
    figure.legend(fontsize="x-small", loc="outside right upper")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
