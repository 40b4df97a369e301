"""How a run went, in words, and what a round says of the devices' own models where each has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NODE_FIGURES = ("node_accuracy", "worst_node_accuracy", "disagreement")


def node_figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns of `NODE_FIGURES` those that a round's row knows; `disagreement` is one of its facts."""
    known = {**row, "disagreement": (row.get("facts") or {}).get("disagreement")}
    return {name: known[name] for name in NODE_FIGURES if known.get(name) is not None}


def accuracy_in_words(figures: Mapping[str, Any]) -> str | None:
    """Returns how accurate the average model is and the devices' own are; None where they have none."""
    mean, worst = figures.get("node_accuracy"), figures.get("worst_node_accuracy")
    if mean is None or worst is None:
        return None
    accuracy = figures.get("accuracy")
    average = "unknown" if accuracy is None else f"{accuracy:.4f}"
    return f"accuracy of the average model {average}, of the nodes {mean:.4f} (worst {worst:.4f})"


def run_in_words(run_id: str, status: str, reason: str, metrics: Mapping[str, Any]) -> str:
    """Returns one line: how a run ended, and how good its model is."""
    known = accuracy_in_words(metrics)
    if known is None and metrics.get("accuracy") is not None:
        known = f"accuracy {metrics['accuracy']:.4f}"
    return f"run {run_id} {status}: {reason}" + (f"; {known}" if known else "")
