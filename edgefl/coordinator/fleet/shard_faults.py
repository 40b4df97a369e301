"""What a device says of shards that it cannot read, as an event: nobody sits beside a board to read its log."""

from __future__ import annotations

from edgefl.storage.store import Store
from edgefl.types import Json

SHARD_UNREADABLE = "shard-unreadable"
MAX_FAULTS = 8
MAX_CHARS = 200


def shard_faults(facts: Json) -> dict[str, str]:
    """Returns `shard_errors` of a device's capabilities, by task; what is none of it, or too long, is left out."""
    told = facts.get("shard_errors")
    if not isinstance(told, dict):
        return {}
    known = [(str(task), reason) for task, reason in told.items() if isinstance(reason, str)][:MAX_FAULTS]
    return {_line(task): _line(reason) for task, reason in known}


def record_capabilities(store: Store, device_id: str, facts: Json, shards: Json, *, at: float) -> None:
    """Keeps what a device can do; where that is new and data is among it that cannot be read, as an event too.

    Raises:
        NotFoundError: no such device.
    """
    if store.record_capabilities(device_id, facts, shards, at):
        for task, reason in shard_faults(facts).items():
            store.record_event(SHARD_UNREADABLE, f"{task}: {reason}", at=at, device_id=device_id, data={"task": task})


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))[:MAX_CHARS]
