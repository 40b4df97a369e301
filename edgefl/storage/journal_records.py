"""What the journal's records say: events and decisions as bytes, and back.

A body is a length u32, that many bytes of JSON, then raw bytes that the JSON refers to by start and length.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from edgefl.errors import JournalError, NotKeptError
from edgefl.storage.state_files import pack_tensors, unpack_tensors
from edgefl.storage.wal import Record, RecordKind
from edgefl.types import (
    Assignment,
    Decision,
    DeviceInfo,
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
    Progress,
    Recall,
    Role,
    Stop,
    Tensors,
    Update,
    UpdateMetrics,
    Vitals,
)
from edgefl.untrusted import parse_json

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The loop began a turn; with what had changed in the fleet's view since the one before.

    Attributes:
        now_s: of the view.
        at: Unix seconds.
        devices: those that came or changed, and None for those that went.
        progress: what devices reported.
        life: of the run, in which all that is given in this turn is given; None in journals that did not say it.
    """

    now_s: float
    at: float
    devices: Mapping[str, DeviceInfo | None] = field(default_factory=dict)
    progress: tuple[Progress, ...] = ()
    life: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How boards were when somebody looked at them in this turn; None for one that had not said."""

    vitals: Mapping[str, Vitals | None]


Entry = Event | Decision | Aggregated | CheckpointMark | Turn | Seen


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


def pack_turn(turn: Turn) -> Packed:
    devices = {name: None if info is None else _shallow(info) for name, info in turn.devices.items()}
    progress = [_shallow(report) for report in turn.progress]
    meta = {"now_s": turn.now_s, "at": turn.at, "devices": devices, "progress": progress, "life": turn.life}
    return _pack(RecordKind.TURN, "", meta)


def pack_seen(seen: Seen) -> Packed:
    vitals = {name: None if known is None else _shallow(known) for name, known in seen.vitals.items()}
    return _pack(RecordKind.VITALS, "", {"vitals": vitals})


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
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, struct.error) as error:
        raise JournalError(
            f"journal {record.path}: record {record.number} ({record.kind.name.lower()}) makes no sense: {error!r}"
        ) from error


def lazy_tensors(
    load: Callable[[], bytes], body_format: str, decode: Decode, loaded: Tensors | None = None
) -> LazyTensors:
    """Returns tensors that are read and decoded at their first use; at their first after a release, if `loaded`."""
    return LazyTensors(lambda: unpack_tensors(load()) if body_format == "tensors" else decode(load()), loaded)


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
    messages, length, read = meta.get("outbox", ()), operator.index(meta["length"]), source.read
    before = operator.index(sum(message["at"][1] for message in messages))
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


def _read_turn(meta: Json, _blob: bytes, _source: _Source) -> Turn:
    devices = {name: None if known is None else _device(known) for name, known in meta["devices"].items()}
    progress = tuple(Progress(**report) for report in meta["progress"])
    life = meta.get("life")
    return Turn(
        now_s=meta["now_s"], at=meta["at"], devices=devices, progress=progress,
        life=None if life is None else operator.index(life),
    )  # fmt: skip


def _device(known: Json) -> DeviceInfo:
    blocks = {task: tuple(numbers) for task, numbers in known["blocks"].items()}
    groups, tasks = tuple(known["groups"]), tuple(known["tasks"])
    return DeviceInfo(**{**known, "role": Role(known["role"]), "groups": groups, "tasks": tasks, "blocks": blocks})


def _read_seen(meta: Json, _blob: bytes, _source: _Source) -> Seen:
    return Seen(vitals={name: None if known is None else Vitals(**known) for name, known in meta["vitals"].items()})


_READERS: dict[RecordKind, Callable[[Json, bytes, _Source], Entry]] = {
    RecordKind.UPDATE: _read_update,
    RecordKind.EVALUATED: lambda meta, _blob, _source: Evaluated(**meta),
    RecordKind.LOST: _read_lost,
    RecordKind.STOP: lambda meta, _blob, _source: Stop(**meta),
    RecordKind.DECISION: _read_decision,
    RecordKind.AGGREGATED: _read_aggregated,
    RecordKind.CHECKPOINT: lambda meta, _blob, _source: CheckpointMark(**meta),
    RecordKind.TURN: _read_turn,
    RecordKind.VITALS: _read_seen,
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
        raise NotKeptError(f"cannot journal a {kind.name.lower()} record: {error}") from error
    return Packed(kind=kind, assignment_id=assignment_id, parts=(_LENGTH.pack(len(text)) + text, *blob))


def _unpack(body: bytes) -> tuple[Any, int]:
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    if start > len(body):
        raise ValueError("its text is cut off")
    return parse_json(body[_LENGTH.size : start]), start


def _shallow(value: Any) -> Json:
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}
