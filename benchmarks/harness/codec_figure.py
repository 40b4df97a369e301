"""Accuracy over the bytes sent up, a colour for each family of codecs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

STYLES = ("-", "--", "-.", ":")


def draw(outcomes: Sequence[Any], path: Path) -> Path:
    """Writes the figure and returns its file."""
    figure, axes = plt.subplots(figsize=(9, 5.4), layout="constrained")
    families = list(dict.fromkeys(o.cell["family"] for o in outcomes))
    drawn: dict[str, int] = {}
    for outcome in outcomes:
        family = outcome.cell["family"]
        place = drawn[family] = drawn.get(family, -1) + 1
        if not outcome.curve:
            continue
        sent, accuracies = zip(*outcome.curve, strict=True)
        axes.plot(
            [num_bytes / 1e6 for num_bytes in sent],
            accuracies,
            label=outcome.cell["spec"],
            color=plt.get_cmap("tab20")(families.index(family) % 20),
            linestyle=STYLES[place % len(STYLES)],
            linewidth=1.2,
        )
    axes.set(xscale="log", xlabel="MB sent by all devices", ylabel="test accuracy", ylim=(0.1, 0.95))
    axes.grid(visible=True, linewidth=0.3)
    figure.legend(fontsize="x-small", loc="outside right upper")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
