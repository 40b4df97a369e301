"""What the journal's records say: events and decisions as bytes, and back.

A body is a length u32, that many bytes of JSON, then raw bytes that the JSON refers to by start and length.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from edgefl.errors import JournalError
from edgefl.storage.state_files import pack_tensors, unpack_tensors
from edgefl.storage.wal import Record, RecordKind
from edgefl.types import (
    Assignment,
    Decision,
    EdgeMessage,
    Evaluated,
    Evaluation,
    Event,
    Json,
    LazyTensors,
    LocalPlan,
    Lost,
    NodePlan,
    Order,
    Outcome,
    Recall,
    Stop,
    Tensors,
    Update,
    UpdateMetrics,
)

Decode = Callable[[bytes], Tensors]
"""Turns the codec body of an update into tensors."""

_LENGTH = struct.Struct("<I")
_ORDERS: dict[str, type[Assignment | Evaluation | Recall]] = {
    "assignment": Assignment,
    "evaluation": Evaluation,
    "recall": Recall,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """The loop made `version` of the updates of these assignments."""

    version: int
    assignment_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMark:
    """A checkpoint that contains every record up to `last_record` was written to the file of this hash."""

    sha256: str
    last_record: int


Entry = Event | Decision | Aggregated | CheckpointMark


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A record before it is written. The update's tensors begin at byte `tensors_at` of the joined parts."""

    kind: RecordKind
    assignment_id: str
    parts: tuple[bytes, ...]
    tensors_at: int = 0


def pack_event(event: Event) -> Packed | None:
    """Returns the record of an event, None for one that no replay needs (progress, a device that joined)."""
    match event:
        case Update():
            return _pack_update(event)
        case Evaluated():
            return _pack(
                RecordKind.EVALUATED, event.assignment_id, {**_shallow(event), "metrics": dict(event.metrics)}
            )
        case Lost():
            return _pack(RecordKind.LOST, event.assignment_id, _shallow(event))
        case Stop():
            return _pack(RecordKind.STOP, "", _shallow(event))
    return None


def pack_decision(decision: Decision) -> Packed:
    blob: list[bytes] = []
    orders = [_order_to_json(order, blob) for order in decision.orders]
    return _pack(RecordKind.DECISION, "", {"orders": orders, "next_wake_s": decision.next_wake_s}, blob)


def pack_aggregated(version: int, assignment_ids: Sequence[str]) -> Packed:
    return _pack(RecordKind.AGGREGATED, "", {"version": version, "assignment_ids": list(assignment_ids)})


def pack_checkpoint(mark: CheckpointMark) -> Packed:
    return _pack(RecordKind.CHECKPOINT, "", asdict(mark))


def entry_of(record: Record, decode: Decode, read: Callable[[int, int], bytes]) -> Entry:
    """Returns what a record says.

    Args:
        record: from the journal.
        decode: for the bodies of updates, when somebody asks for their tensors.
        read: (start, length) within the record's body, from the file; so nothing of a body stays in memory.

    Raises:
        JournalError: the record is whole but makes no sense.
    """
    try:
        meta, start = _unpack(record.body)
        return _READERS[record.kind](meta, record.body[start:], _Source(record, start, decode, read))
    except (KeyError, TypeError, ValueError, IndexError, struct.error) as error:
        raise JournalError(
            f"journal {record.path}: record {record.number} ({record.kind.name.lower()}) makes no sense: {error!r}"
        ) from error


def lazy_tensors(load: Callable[[], bytes], body_format: str, decode: Decode) -> LazyTensors:
    """Returns tensors that are read and decoded at their first use."""
    return LazyTensors(lambda: unpack_tensors(load()) if body_format == "tensors" else decode(load()))


@dataclass(frozen=True, slots=True)
class _Source:
    record: Record
    start: int
    decode: Decode
    read: Callable[[int, int], bytes]


def _pack_update(update: Update) -> Packed:
    body = update.body if update.body is not None else pack_tensors(update.tensors)
    blob: list[bytes] = []
    outbox = [_message_to_json(message, blob) for message in update.outbox]
    meta = {
        "device_id": update.device_id,
        "base_version": update.base_version,
        "received_s": update.received_s,
        "metrics": {**_shallow(update.metrics), "extra": dict(update.metrics.extra)},
        "format": update_format(update),
        "length": len(body),
        "outbox": outbox,
    }
    packed = _pack(RecordKind.UPDATE, update.assignment_id, meta, [*blob, body])
    return Packed(
        kind=packed.kind, assignment_id=packed.assignment_id, parts=packed.parts,
        tensors_at=sum(len(part) for part in packed.parts) - len(body),
    )  # fmt: skip


def update_format(update: Update) -> str:
    """Returns how the journal keeps an update: its codec body as it came, or plain tensors if it has none."""
    return "codec" if update.body is not None else "tensors"


def _read_update(meta: Json, blob: bytes, source: _Source) -> Update:
    # Messages lie before the body; journals that know of none hold the body alone.
    messages, length, read = meta.get("outbox", ()), meta["length"], source.read
    before = sum(message["at"][1] for message in messages)
    if before + length != len(blob):
        raise ValueError(f"a body of {length} bytes was kept behind {before} of messages, {len(blob)} are there")
    start = source.start + before
    return Update(
        assignment_id=source.record.assignment_id,
        device_id=meta["device_id"],
        base_version=meta["base_version"],
        received_s=meta["received_s"],
        metrics=UpdateMetrics(**meta["metrics"]),
        tensors=lazy_tensors(lambda: read(start, length), meta["format"], source.decode),
        outbox=tuple(_message_from_json(message, blob) for message in messages),
    )


def _read_lost(meta: Json, _blob: bytes, _source: _Source) -> Lost:
    return Lost(**{**meta, "outcome": Outcome(meta["outcome"])})


def _read_decision(meta: Json, blob: bytes, _source: _Source) -> Decision:
    orders = tuple(_order_from_json(order, blob) for order in meta["orders"])
    return Decision(orders=orders, next_wake_s=meta["next_wake_s"])


def _read_aggregated(meta: Json, _blob: bytes, _source: _Source) -> Aggregated:
    return Aggregated(version=meta["version"], assignment_ids=tuple(meta["assignment_ids"]))


_READERS: dict[RecordKind, Callable[[Json, bytes, _Source], Entry]] = {
    RecordKind.UPDATE: _read_update,
    RecordKind.EVALUATED: lambda meta, _blob, _source: Evaluated(**meta),
    RecordKind.LOST: _read_lost,
    RecordKind.STOP: lambda meta, _blob, _source: Stop(**meta),
    RecordKind.DECISION: _read_decision,
    RecordKind.AGGREGATED: _read_aggregated,
    RecordKind.CHECKPOINT: lambda meta, _blob, _source: CheckpointMark(**meta),
}


def _order_to_json(order: Order, blob: list[bytes]) -> Json:
    name = next(name for name, kind in _ORDERS.items() if isinstance(order, kind))
    value = _shallow(order)
    if isinstance(order, Assignment):
        plan = order.plan
        inbox = [_message_to_json(message, blob) for message in plan.inbox]
        node = None if plan.node is None else asdict(plan.node)
        value["plan"] = {**_shallow(plan), "options": dict(plan.options), "inbox": inbox, "node": node}
    return {"order": name, **value}


def _order_from_json(value: Json, blob: bytes) -> Order:
    values = dict(value)
    kind = _ORDERS[values.pop("order")]
    if kind is Assignment:
        plan = values["plan"]
        inbox = tuple(_message_from_json(message, blob) for message in plan["inbox"])
        values["plan"] = LocalPlan(**{**plan, "inbox": inbox, "node": _node_plan(plan.get("node"))})
        values["settled"] = tuple(values["settled"])
    return kind(**values)


def _node_plan(value: Json | None) -> NodePlan | None:
    return None if value is None else NodePlan.from_json(value)


def _message_to_json(message: EdgeMessage, blob: list[bytes]) -> Json:
    at = _append(blob, message.body)
    return {"edge": message.edge, "step": message.step, "is_reply": message.is_reply, "at": at}


def _message_from_json(value: Json, blob: bytes) -> EdgeMessage:
    start, length = value["at"]
    if start + length > len(blob):
        raise ValueError("an edge message lies outside of its record")
    first, second = value["edge"]
    return EdgeMessage(
        edge=(first, second),
        step=value["step"],
        body=blob[start : start + length],
        is_reply=value.get("is_reply", False),
    )


def _append(blob: list[bytes], body: bytes) -> tuple[int, int]:
    start = sum(len(part) for part in blob)
    blob.append(body)
    return start, len(body)


def _pack(kind: RecordKind, assignment_id: str, meta: Json, blob: Sequence[bytes] = ()) -> Packed:
    try:
        text = json.dumps(meta, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise JournalError(f"cannot journal a {kind.name.lower()} record: {error}") from error
    return Packed(kind=kind, assignment_id=assignment_id, parts=(_LENGTH.pack(len(text)) + text, *blob))


def _unpack(body: bytes) -> tuple[Any, int]:
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    if start > len(body):
        raise ValueError("its text is cut off")
    return json.loads(body[_LENGTH.size : start]), start


def _shallow(value: Any) -> Json:
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}
