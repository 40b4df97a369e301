"""Result, metrics and text summaries of a run, and the device metrics of a round; imports no numbers: fast start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RUN_METRICS = ("accuracy", "loss", "bytes_up", "bytes_down", "seconds")
DEVICE_METRIC_KEYS = ("node_accuracy", "worst_node_accuracy", "disagreement")


def select_device_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns those of `DEVICE_METRIC_KEYS` that a round's row has; `disagreement` is one of its facts."""
    values = {**row, "disagreement": (row.get("facts") or {}).get("disagreement")}
    return {name: values[name] for name in DEVICE_METRIC_KEYS if values.get(name) is not None}


def compute_run_metrics(rounds: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, float | None]:
    """Returns the metrics of a run by the rows of its rounds, oldest first, and its duration.

    The accuracies, and what the task declares as metrics, are those of the last closed round: one in progress when
    the goal was reached stays open.
    """
    last: Mapping[str, Any] = next((row for row in reversed(rounds) if row["closed_at"] is not None), {})
    return {
        **(last.get("metrics") or {}),
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


def format_quality(metrics: Mapping[str, Any]) -> str:
    """Returns the accuracy, or else the loss, and the metrics that the task declares; empty where none is known."""
    name = "loss" if metrics.get("accuracy") is None else "accuracy"
    declared = [name for name in metrics if name not in _RUN_METRICS and name not in DEVICE_METRIC_KEYS]
    known = [one for one in (name, *declared) if metrics.get(one) is not None]
    return ", ".join(f"{one} {metrics[one]:.4f}" for one in known)


def format_run_outcome(run_id: str, status: str, reason: str, metrics: Mapping[str, Any]) -> str:
    """Returns one line: a run's outcome and the quality of its model."""
    quality = format_accuracy(metrics) or format_quality(metrics)
    return f"run {run_id} {status}: {reason}" + (f"; {quality}" if quality else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Outcome of a run on this machine, live or simulated.

    Attributes:
        run_id, status, reason: as in `edgefl run show`.
        metrics: `accuracy` and `loss` of the last version (None when it was not evaluated), those that the task
            declares by their names, `bytes_up`, `bytes_down`, `seconds` from the start of the run to its end, in a
            simulation virtual ones; where devices have models of their own, `node_accuracy`, `worst_node_accuracy`
            and `disagreement` where known.
        rounds, updates, evaluations: rows of the history, oldest first, in the columns of `edgefl history`.
        model: the last model, a safetensors file; None where nothing was trained.
        root: the folder with the database, and of a live run the logs and the shards.
        result: file with the result of a job, or of an analysis that trains nothing; None of a training.
    """

    run_id: str
    status: str
    reason: str
    metrics: Mapping[str, float | None]
    rounds: list[dict[str, Any]]
    updates: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    model: Path | None
    root: Path
    result: Path | None = None

    def __str__(self) -> str:
        return format_run_outcome(self.run_id, self.status, self.reason, self.metrics)
