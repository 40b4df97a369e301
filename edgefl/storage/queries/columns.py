"""Kinds of history: their columns in a fixed order, and filters. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TypedDict

_HEARTBEAT_COLUMNS = (
    "device_id", "at", "num_heartbeats", "uptime_s", "clock_skew_s", "temperature_c", "throttled", "cpu_fraction",
    "memory_fraction", "memory_bytes", "disk_free_bytes", "battery_fraction", "power_w", "run", "iteration",
)  # fmt: skip
GROUPINGS = ("device", "day", "run")
"""Groupings of sums; the first is the default."""
_GROUP_COLUMNS = ("run_id", "device_id", "day")

COLUMNS = MappingProxyType(
    {
        "runs": (
            "run_id", "name", "task", "strategy", "status", "reason", "submitted_at", "started_at", "finished_at",
            "seconds", "rounds", "version", "accuracy", "num_assignments", "num_used", "num_late", "num_lost",
            "num_rejected", "num_failed", "compute_s", "send_s", "wait_s", "bytes_up", "bytes_down", "max_staleness",
            "max_temperature_c", "energy_j",
        ),
        "rounds": (
            "run_id", "round", "version", "started_at", "closed_at", "num_devices", "num_updates", "train_loss",
            "loss", "accuracy", "source", "bytes_up", "bytes_down", "node_accuracy", "worst_node_accuracy", "facts",
            "metrics", "seconds", "waited_for", "waited_s",
        ),
        "accuracy": (
            "run_id", "round", "version", "at_s", "bytes_up", "bytes_down", "accuracy", "loss", "train_loss",
            "source", "node_accuracy", "worst_node_accuracy",
        ),
        "slow": (
            "run_id", "round", "started_at", "seconds", "waited_for", "waited_s", "outcome", "iterations",
            "compute_s", "paced_s", "send_s", "bytes_up", "bytes_down", "max_temperature_c", "throttled",
            "signal_dbm", "link_bits_per_s", "reason",
        ),
        "updates": (
            "run_id", "round", "assignment_id", "device_id", "outcome", "base_version", "applied_version",
            "staleness", "iterations", "num_examples", "loss", "compute_s", "paced_s", "send_s", "wait_s", "bytes_up",
            "bytes_down", "codec", "dispatched_at", "received_at", "ended_at", "reason", "max_temperature_c",
            "throttled", "signal_dbm", "link_bits_per_s", "energy_j", "metrics",
        ),
        "stale": (
            *_GROUP_COLUMNS, "num_used", "num_stale", "stale_fraction", "mean_staleness", "max_staleness",
        ),
        "dropouts": (
            *_GROUP_COLUMNS, "num_assignments", "num_used", "num_late", "num_lost", "num_rejected", "num_failed",
            "dropout_fraction",
        ),
        "traffic": (*_GROUP_COLUMNS, "num_assignments", "bytes_up", "bytes_down", "send_s"),
        "energy": (
            *_GROUP_COLUMNS, "num_assignments", "iterations", "compute_s", "energy_j", "energy_j_per_iteration",
            "max_temperature_c",
        ),
        "devices": (
            "device_id", "role", "groups", "presence", "joined_at", "last_seen_at", "removed_at", "version",
            "examples", "num_assignments", "num_used", "compute_s", "send_s", "wait_s", "bytes_up", "bytes_down",
        ),
        "heartbeats": _HEARTBEAT_COLUMNS,
        "events": ("at", "kind", "run_id", "device_id", "message", "data"),
        "audit": ("id", "at", "actor", "source", "action", "outcome"),
        "evaluations": (
            "run_id", "round", "version", "device_id", "source", "loss", "accuracy", "num_examples", "bytes_up",
            "bytes_down", "at", "metrics", "subject",
        ),
    }
)  # fmt: skip
"""Kinds of history and their columns.

rounds: `train_loss` is the devices' loss while training; `loss` and `accuracy` come from the evaluation in `source`:
the coordinator's if there is one, else the evaluators', else the devices' mean by examples. They are of the global
model; `node_accuracy` is the mean over the devices' own models where each has one, `facts` are figures of the
strategy, `metrics` those that the task declares. evaluations: `subject` is the device whose own model it is, empty
for the global one.
accuracy: a round with its cumulative cost: `at_s` since the run's first round began, and bytes of all rounds up
to it. slow: the slowest rounds, with the assignment that each waited for.
heartbeats: rows with `num_heartbeats` above 1 stand for five minutes. devices: sums over the chosen run or all.
"""
AGGREGATE_KINDS = frozenset({"stale", "dropouts", "traffic", "energy"})
"""Kinds that are sums by device, day or run; of `_GROUP_COLUMNS` they have the one of their grouping."""
SELF_ORDERED_KINDS = frozenset({"devices", "slow", *AGGREGATE_KINDS})
"""Kinds with an order of their own, of which a limit takes the first rows; of all others the newest."""
DEVICE_MODEL_COLUMNS = frozenset({"node_accuracy", "worst_node_accuracy", "disagreement", "facts", "subject"})
"""Columns about devices with models of their own, shown only where they have values."""
TEXT_COLUMNS = frozenset(
    {
        "run_id", "name", "task", "strategy", "status", "reason", "source", "waited_for", "outcome", "throttled",
        "assignment_id", "device_id", "day", "codec", "role", "presence", "run", "kind",
        "message", "subject", "actor", "action",
    }
)  # fmt: skip
JSON_COLUMNS = frozenset({"facts", "metrics", "data", "groups", "examples"})
"""Text and JSON columns; every other column is a number."""


def get_columns(kind: str, group_by: str) -> tuple[str, ...]:
    """Returns the columns of a kind; of the key columns of sums only that of the grouping."""
    if kind not in AGGREGATE_KINDS:
        return COLUMNS[kind]
    key_column = {"device": "device_id", "day": "day", "run": "run_id"}[group_by]
    return tuple(name for name in COLUMNS[kind] if name not in _GROUP_COLUMNS or name == key_column)


def is_text_column(kind: str, name: str) -> bool:
    """Returns whether a column holds text; `version` does of devices alone, where it is edgefl's."""
    return name in TEXT_COLUMNS or (kind == "devices" and name == "version")


class HistoryFilters(TypedDict, total=False):
    """Filters of history rows; absent or None selects all.

    run: a run's id, the beginning of one, its name (the newest run of that name), or `latest`.
    device: a device id; for slow rounds, the device that they waited for.
    since: rows from this time on, unix seconds; for devices, those seen since; sums go by whole days.
    until: rows before this time.
    limit: how many rows at most.
    where: conditions such as `staleness>3`; all of them must hold.
    by: grouping of sums, of `GROUPINGS`.
    """

    run: str | None
    device: str | None
    since: float | None
    until: float | None
    limit: int | None
    where: Sequence[str]
    by: str | None
