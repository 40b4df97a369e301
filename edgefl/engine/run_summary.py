"""Metrics and text summaries of a run, and the device metrics of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DEVICE_METRIC_KEYS = ("node_accuracy", "worst_node_accuracy", "disagreement")


def select_device_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of `DEVICE_METRIC_KEYS` that a round's row has; `disagreement` is one of its facts."""
    values = {**row, "disagreement": (row.get("facts") or {}).get("disagreement")}
    return {name: values[name] for name in DEVICE_METRIC_KEYS if values.get(name) is not None}


def compute_run_metrics(rounds: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float | None]:
    """Returns the metrics of a run by the rows of its rounds, oldest first, and its duration.

    The accuracies are those of the last closed round: one in progress when the goal was reached stays open.
    """
    last: Mapping[str, Any] = next((row for row in reversed(rounds) if row["closed_at"] is not None), {})
    return {
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "bytes_up": sum(row["bytes_up"] for row in rounds),
        "bytes_down": sum(row["bytes_down"] for row in rounds),
        "seconds": seconds,
        **select_device_metrics(last),
    }


def format_accuracy(metrics: Mapping[str, Any]) -> str | None:
    """Returns the accuracies of the average model and of the devices' own; None where they have none."""
    mean, worst = metrics.get("node_accuracy"), metrics.get("worst_node_accuracy")
    if mean is None or worst is None:
        return None
    accuracy = metrics.get("accuracy")
    average = "unknown" if accuracy is None else f"{accuracy:.4f}"
    return f"accuracy of the average model {average}, of the nodes {mean:.4f} (worst {worst:.4f})"


def format_run_outcome(run_id: str, status: str, reason: str, metrics: Mapping[str, Any]) -> str:
    """Returns one line: a run's outcome and the quality of its model."""
    accuracies = format_accuracy(metrics)
    if accuracies is None and metrics.get("accuracy") is not None:
        accuracies = f"accuracy {metrics['accuracy']:.4f}"
    return f"run {run_id} {status}: {reason}" + (f"; {accuracies}" if accuracies else "")
