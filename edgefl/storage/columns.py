"""The columns of each kind of history, in the order in which they are always given. Imports nothing heavy."""

from __future__ import annotations

from types import MappingProxyType

_HEARTBEAT = (
    "device_id", "at", "num_heartbeats", "uptime_s", "clock_skew_s", "temperature_c", "throttled", "cpu_fraction",
    "memory_fraction", "memory_bytes", "disk_free_bytes", "battery_fraction", "power_w", "run", "iteration",
)  # fmt: skip
BY = ("device", "day", "run")
"""What sums can be by; the first is the usual."""
_KEYS = ("run_id", "device_id", "day")

COLUMNS = MappingProxyType(
    {
        "runs": (
            "run_id", "name", "task", "strategy", "status", "reason", "submitted_at", "started_at", "finished_at",
            "seconds", "rounds", "version", "accuracy", "num_assignments", "num_used", "num_late", "num_lost",
            "num_refused", "num_failed", "compute_s", "send_s", "wait_s", "bytes_up", "bytes_down", "max_staleness",
            "max_temperature_c", "energy_j",
        ),
        "rounds": (
            "run_id", "round", "version", "started_at", "closed_at", "num_devices", "num_updates", "train_loss",
            "loss", "accuracy", "source", "bytes_up", "bytes_down", "node_accuracy", "worst_node_accuracy", "facts",
            "seconds", "waited_for", "waited_s",
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
            *_KEYS, "num_used", "num_stale", "stale_fraction", "mean_staleness", "max_staleness",
        ),
        "dropouts": (
            *_KEYS, "num_assignments", "num_used", "num_late", "num_lost", "num_refused", "num_failed",
            "dropout_fraction",
        ),
        "traffic": (*_KEYS, "num_assignments", "bytes_up", "bytes_down", "send_s"),
        "energy": (
            *_KEYS, "num_assignments", "iterations", "compute_s", "energy_j", "energy_j_per_iteration",
            "max_temperature_c",
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
accuracy: a round with what it took to get there: `at_s` since the run's first round began, and bytes of all rounds up
to it. slow: the slowest rounds, with the assignment that each waited for.
heartbeats: rows with `num_heartbeats` above 1 stand for five minutes. devices: sums over the chosen run or all.
"""
SUMMED = frozenset({"stale", "dropouts", "traffic", "energy"})
"""Kinds that are sums by device, day or run; of `_KEYS` they have the one that they are by."""
NOT_NEWEST = frozenset({"devices", "slow", *SUMMED})
"""Kinds whose rows come in an order of their own, of which a limit takes the first; of all others the newest."""
OF_NODES = frozenset({"node_accuracy", "worst_node_accuracy", "disagreement", "facts", "subject"})
"""What people and files are shown only where it is known: it is about devices that have models of their own."""
TEXT = frozenset(
    {
        "run_id", "name", "task", "strategy", "status", "reason", "source", "waited_for", "outcome", "throttled",
        "assignment_id", "device_id", "day", "codec", "role", "presence", "run", "kind",
        "message", "subject",
    }
)  # fmt: skip
STRUCTURED = frozenset({"facts", "metrics", "data", "groups", "examples"})
"""What is text and what is JSON; every other column is a number."""


def columns_of(kind: str, by: str) -> tuple[str, ...]:
    """Returns the columns of a kind: of the keys of sums those that they are by."""
    if kind not in SUMMED:
        return COLUMNS[kind]
    chosen = {"device": "device_id", "day": "day", "run": "run_id"}[by]
    return tuple(name for name in COLUMNS[kind] if name not in _KEYS or name == chosen)


def is_text(kind: str, name: str) -> bool:
    """Says whether a column holds text; `version` does of devices alone, where it is edgefl's."""
    return name in TEXT or (kind == "devices" and name == "version")
