"""Shard errors that devices report, recorded as events."""

from __future__ import annotations

from edgefl.core.types import Json
from edgefl.storage.store import Store

SHARD_UNREADABLE = "shard-unreadable"
MAX_SHARD_ERRORS = 8
MAX_ERROR_CHARS = 200


def parse_shard_errors(facts: Json) -> dict[str, str]:
    """Returns `shard_errors` of a device's capabilities, by task; drops invalid entries, and shortens long ones."""
    reported = facts.get("shard_errors")
    if not isinstance(reported, dict):
        return {}
    errors = [(str(task), reason) for task, reason in reported.items() if isinstance(reason, str)][:MAX_SHARD_ERRORS]
    return {_sanitise_line(task): _sanitise_line(reason) for task, reason in errors}


def record_capabilities(store: Store, device_id: str, facts: Json, shards: Json, *, at: float) -> None:
    """Stores a device's capabilities; if they are new, also records their shard errors as events.

    Raises:
        NotFoundError: no such device.
    """
    if store.record_capabilities(device_id, facts, shards, at):
        for task, reason in parse_shard_errors(facts).items():
            store.record_event(SHARD_UNREADABLE, f"{task}: {reason}", at=at, device_id=device_id, data={"task": task})


def _sanitise_line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:MAX_ERROR_CHARS]
