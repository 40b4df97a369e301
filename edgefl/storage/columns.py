"""The columns of each kind of history, in the order in which they are always given. Imports nothing heavy."""

from __future__ import annotations

from types import MappingProxyType

_HEARTBEAT = (
    "device_id", "at", "num_heartbeats", "uptime_s", "clock_skew_s", "temperature_c", "throttled", "cpu_fraction",
    "memory_fraction", "memory_bytes", "disk_free_bytes", "battery_fraction", "power_w", "run", "iteration",
)  # fmt: skip

COLUMNS = MappingProxyType(
    {
        "rounds": (
            "run_id", "round", "version", "started_at", "closed_at", "num_devices", "num_updates", "train_loss",
            "loss", "accuracy", "source", "bytes_up", "bytes_down", "node_accuracy", "worst_node_accuracy", "facts",
        ),
        "updates": (
            "run_id", "round", "assignment_id", "device_id", "outcome", "base_version", "applied_version",
            "staleness", "iterations", "num_examples", "loss", "compute_s", "send_s", "wait_s", "bytes_up",
            "bytes_down", "codec", "dispatched_at", "received_at", "reason", "metrics",
        ),
        "devices": (
            "device_id", "role", "groups", "presence", "joined_at", "last_seen_at", "removed_at", "version",
            "examples", "num_assignments", "num_used", "compute_s", "send_s", "wait_s", "bytes_up", "bytes_down",
        ),
        "heartbeats": _HEARTBEAT,
        "events": ("at", "kind", "run_id", "device_id", "message", "data"),
        "evaluations": (
            "run_id", "round", "version", "device_id", "source", "loss", "accuracy", "num_examples", "bytes_up",
            "bytes_down", "at", "metrics", "subject",
        ),
    }
)  # fmt: skip
"""Kinds of history and their columns.

rounds: `train_loss` is what the devices saw while training; `loss` and `accuracy` come from the evaluation that
`source` names: the coordinator's if there is one, else the evaluators', else the devices' mean by examples. They are
of the global model; `node_accuracy` is the mean over the devices' own models where each has one, `facts` are figures
of the strategy. evaluations: `subject` is the device whose own model it is, empty for the global one.
heartbeats: rows with `num_heartbeats` above 1 stand for five minutes. devices: sums over the chosen run or all.
"""
OF_NODES = frozenset({"node_accuracy", "worst_node_accuracy", "disagreement", "facts", "subject"})
"""What people and files are shown only where it is known: it is about devices that have models of their own."""
