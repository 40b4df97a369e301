"""How memory, open files, threads and folders went, as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl

mpl.use("agg")
from matplotlib import pyplot as plt

from harness.soak_verdict import MIB

if TYPE_CHECKING:
    from harness.soak_samples import Sampler

PANELS = (("memory, MiB", "rss_bytes", MIB), ("open files", "num_handles", 1), ("threads", "num_threads", 1))


def draw(folder: Path, sampler: Sampler, from_s: float) -> Path:
    """Writes `soak.png` and returns its path; a line marks the end of the warm-up."""
    figure, axes = plt.subplots(4, 1, figsize=(9, 12), sharex=True, layout="constrained")
    for panel, (title, name, unit) in zip(axes, PANELS, strict=False):
        for process, looks in sorted(sampler.looks.items()):
            minutes = [look.at_s / 60 for look in looks]
            panel.plot(minutes, [getattr(look, name) / unit for look in looks], label=process, linewidth=1)
        panel.set(ylabel=title, ylim=(0, None))
    for place, sizes in sampler.sizes.items():
        axes[3].plot([at_s / 60 for at_s, _ in sizes], [size / 1e6 for _, size in sizes], label=place, linewidth=1)
    axes[3].set(ylabel="MB on disk", xlabel="minutes", ylim=(0, None))
    for panel in axes:
        panel.axvline(from_s / 60, color="black", linewidth=0.6, linestyle=":")
        panel.grid(visible=True, linewidth=0.3)
    axes[0].legend(fontsize="x-small", ncols=5)
    axes[3].legend(fontsize="x-small", ncols=3)
    path = folder / "soak.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
