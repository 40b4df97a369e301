"""Encoding of the journal's records: events and decisions as bytes, and back.

A body is a length u32, that many bytes of JSON, then raw bytes that the JSON refers to by start and length.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from edgefl.core.allowance import Allowance
from edgefl.core.errors import JournalError, NotKeptError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import (
    Decision,
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    HealthMetrics,
    Instruction,
    InstructionFailed,
    Json,
    LazyTensors,
    PeerMessage,
    Progress,
    Role,
    StopRequested,
    Tensors,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.storage.journal.file_format import JournalRecord, RecordKind
from edgefl.storage.state_serialisation import decode_tensors, encode_tensors

DecodeUpdate = Callable[[bytes], Tensors]
"""Decodes the codec body of an update to tensors."""

_LENGTH = struct.Struct("<I")
_INSTRUCTION_TYPES: dict[str, type[TrainInstruction | EvaluateInstruction | FinishEarlyInstruction]] = {
    "train": TrainInstruction,
    "evaluate": EvaluateInstruction,
    "finish-early": FinishEarlyInstruction,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation:
    """An aggregation of these assignments' updates to `version`."""

    version: int
    assignment_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMark:
    """A checkpoint of every record up to `last_record`, in the file of this hash."""

    sha256: str
    last_record: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnStarted:
    """Start of a turn of the loop, with the changes of the fleet's view since the one before.

    Attributes:
        now_s: of the view.
        at: Unix seconds.
        devices: joined or changed ones, and None for those that left.
        progress: reported by devices.
        incarnation: of the run, for all instructions of this turn.
    """

    now_s: float
    at: float
    devices: Mapping[str, DeviceInfo | None] = field(default_factory=dict)
    progress: tuple[Progress, ...] = ()
    incarnation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthObserved:
    """Hardware health of boards as read in this turn; None for one without a report."""

    health: Mapping[str, HealthMetrics | None]


JournalEntry = Event | Decision | Aggregation | CheckpointMark | TurnStarted | HealthObserved


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRecord:
    """An encoded record; the update's tensors begin at byte `tensors_offset` of the joined parts."""

    kind: RecordKind
    assignment_id: str
    parts: tuple[bytes, ...]
    tensors_offset: int = 0


def encode_event(event: Event) -> EncodedRecord | None:
    """Returns the record of an event, None for one that replay does not need (progress, a joined device)."""
    match event:
        case Update():
            return _encode_update(event)
        case EvaluateResult():
            return _encode_record(
                RecordKind.EVALUATION,
                event.assignment_id,
                {name: value for name, value in _to_shallow_dict(event).items() if name != "sums"}
                | {"metrics": dict(event.metrics)},
                [event.sums],
            )
        case InstructionFailed():
            return _encode_record(RecordKind.INSTRUCTION_FAILED, event.assignment_id, _to_shallow_dict(event))
        case StopRequested():
            return _encode_record(RecordKind.STOP, "", _to_shallow_dict(event))
    return None


def encode_decision(decision: Decision) -> EncodedRecord:
    blob: list[bytes] = []
    instructions = [_instruction_to_json(instruction, blob) for instruction in decision.instructions]
    return _encode_record(
        RecordKind.DECISION, "", {"orders": instructions, "next_wake_s": decision.next_wake_s}, blob
    )


def encode_aggregation(version: int, assignment_ids: Sequence[str]) -> EncodedRecord:
    return _encode_record(RecordKind.AGGREGATION, "", {"version": version, "assignment_ids": list(assignment_ids)})


def encode_turn(turn: TurnStarted) -> EncodedRecord:
    devices = {name: None if info is None else _device_to_json(info) for name, info in turn.devices.items()}
    progress = [_to_shallow_dict(report) for report in turn.progress]
    meta = {
        "now_s": turn.now_s,
        "at": turn.at,
        "devices": devices,
        "progress": progress,
        "incarnation": turn.incarnation,
    }
    return _encode_record(RecordKind.TURN, "", meta)


def encode_health(observed: HealthObserved) -> EncodedRecord:
    health = {
        name: None if metrics is None else _to_shallow_dict(metrics) for name, metrics in observed.health.items()
    }
    return _encode_record(RecordKind.HEALTH, "", {"health": health})


def encode_checkpoint(mark: CheckpointMark) -> EncodedRecord:
    return _encode_record(RecordKind.CHECKPOINT, "", asdict(mark))


def decode_record(
    record: JournalRecord, decode: DecodeUpdate, read_body: Callable[[int, int], bytes]
) -> JournalEntry:
    """Returns the entry in a record.

    Args:
        record: from the journal.
        decode: for the bodies of updates, at the first access of their tensors.
        read_body: (start, length) within the record's body, from the file; so no body stays in memory.

    Raises:
        JournalError: the record is intact but invalid.
    """
    try:
        meta, start = _decode_header(record.body)
        if record.kind == RecordKind.UPDATE:
            return _decode_update(record, meta, start, decode, read_body)
        return _DECODERS[record.kind](meta, record.body[start:])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, struct.error) as error:
        raise JournalError(
            f"journal {record.path}: record {record.number} ({record.kind.label}) makes no sense: {error!r}"
        ) from error


def make_lazy_tensors(
    load: Callable[[], bytes], body_format: str, decode: DecodeUpdate, loaded: Tensors | None = None
) -> LazyTensors:
    """Returns tensors that are read and decoded at their first access; with `loaded`, after an unload."""
    return LazyTensors(lambda: decode_tensors(load()) if body_format == "tensors" else decode(load()), loaded)


def _encode_update(update: Update) -> EncodedRecord:
    body = update.body if update.body is not None else encode_tensors(update.tensors)
    blob: list[bytes] = []
    messages = [_message_to_json(message, blob) for message in update.messages]
    meta = {
        "device_id": update.device_id,
        "base_version": update.base_version,
        "received_s": update.received_s,
        "metrics": _metrics_to_json(update.metrics),
        "format": get_body_format(update),
        "length": len(body),
        "messages": messages,
    }
    encoded = _encode_record(RecordKind.UPDATE, update.assignment_id, meta, [*blob, body])
    return EncodedRecord(
        kind=encoded.kind, assignment_id=encoded.assignment_id, parts=encoded.parts,
        tensors_offset=sum(len(part) for part in encoded.parts) - len(body),
    )  # fmt: skip


def _metrics_to_json(metrics: UpdateMetrics) -> Json:
    """Returns the measurements; without boards, which an older release does not know, where there are none."""
    values = {**_to_shallow_dict(metrics), "extra": dict(metrics.extra)}
    return values if metrics.boards else {name: value for name, value in values.items() if name != "boards"}


def get_body_format(update: Update) -> str:
    """Returns the journal's format of an update: its codec body as received, or plain tensors without one."""
    return "codec" if update.body is not None else "tensors"


def _decode_update(
    record: JournalRecord, meta: Json, start: int, decode: DecodeUpdate, read: Callable[[int, int], bytes]
) -> Update:
    # Messages lie before the body.
    messages, length, blob = meta["messages"], operator.index(meta["length"]), record.body[start:]
    message_bytes = operator.index(sum(message["at"][1] for message in messages))
    if message_bytes + length != len(blob):
        raise ValueError(
            f"a body of {length} bytes was kept behind {message_bytes} of messages, {len(blob)} are there"
        )
    tensors_start = start + message_bytes
    return Update(
        assignment_id=record.assignment_id,
        device_id=meta["device_id"],
        base_version=meta["base_version"],
        received_s=meta["received_s"],
        metrics=UpdateMetrics(**meta["metrics"]),
        tensors=make_lazy_tensors(lambda: read(tensors_start, length), meta["format"], decode),
        messages=tuple(_message_from_json(message, blob) for message in messages),
    )


def _decode_decision(meta: Json, blob: bytes) -> Decision:
    instructions = tuple(_instruction_from_json(instruction, blob) for instruction in meta["orders"])
    return Decision(instructions=instructions, next_wake_s=meta["next_wake_s"])


def _decode_turn(meta: Json, _blob: bytes) -> TurnStarted:
    devices = {
        name: None if device is None else _device_from_json(device) for name, device in meta["devices"].items()
    }
    progress = tuple(Progress(**report) for report in meta["progress"])
    return TurnStarted(
        now_s=meta["now_s"], at=meta["at"], devices=devices, progress=progress,
        incarnation=operator.index(meta["incarnation"]),
    )  # fmt: skip


def _device_to_json(info: DeviceInfo) -> Json:
    value = _to_shallow_dict(info)
    allowance = value.pop("allowance")
    return value if allowance is None else {**value, "allowance": asdict(allowance)}


def _device_from_json(known: Json) -> DeviceInfo:
    allowance = known.get("allowance")
    return DeviceInfo(
        **{
            **known,
            "role": Role(known["role"]),
            "groups": tuple(known["groups"]),
            "tasks": tuple(known["tasks"]),
            "blocks": {task: tuple(numbers) for task, numbers in known["blocks"].items()},
            "allowance": None if allowance is None else Allowance.from_fields(allowance),
        }
    )


def _decode_health(meta: Json, _blob: bytes) -> HealthObserved:
    return HealthObserved(
        health={
            name: None if metrics is None else HealthMetrics(**metrics) for name, metrics in meta["health"].items()
        }
    )


_DECODERS: dict[RecordKind, Callable[[Json, bytes], JournalEntry]] = {
    RecordKind.EVALUATION: lambda meta, sums: EvaluateResult(**meta, sums=sums),
    RecordKind.INSTRUCTION_FAILED: lambda meta, _blob: InstructionFailed(
        **{**meta, "outcome": UpdateStatus(meta["outcome"])}
    ),
    RecordKind.STOP: lambda meta, _blob: StopRequested(**meta),
    RecordKind.DECISION: _decode_decision,
    RecordKind.AGGREGATION: lambda meta, _blob: Aggregation(
        version=meta["version"], assignment_ids=tuple(meta["assignment_ids"])
    ),
    RecordKind.CHECKPOINT: lambda meta, _blob: CheckpointMark(**meta),
    RecordKind.TURN: _decode_turn,
    RecordKind.HEALTH: _decode_health,
}


def _instruction_to_json(instruction: Instruction, blob: list[bytes]) -> Json:
    name = next(name for name, kind in _INSTRUCTION_TYPES.items() if isinstance(instruction, kind))
    value = _to_shallow_dict(instruction)
    if isinstance(instruction, TrainInstruction):
        plan = instruction.plan
        messages = [_message_to_json(message, blob) for message in plan.messages]
        value["plan"] = {
            **_to_shallow_dict(plan),
            "options": dict(plan.options),
            "messages": messages,
            "node": None if plan.node is None else asdict(plan.node),
            "collective": None if plan.collective is None else asdict(plan.collective),
            "secure": None if plan.secure is None else asdict(plan.secure),
        }
    return {"kind": name, **value}


def _instruction_from_json(value: Json, blob: bytes) -> Instruction:
    values = dict(value)
    kind = _INSTRUCTION_TYPES[values.pop("kind")]
    if kind is TrainInstruction:
        plan = values["plan"]
        messages = tuple(_message_from_json(message, blob) for message in plan["messages"])
        values["plan"] = TrainConfig.from_json(plan, messages)
        values["used_assignments"] = tuple(values["used_assignments"])
    return kind(**values)


def _message_to_json(message: PeerMessage, blob: list[bytes]) -> Json:
    body_range = sum(len(part) for part in blob), len(message.body)
    blob.append(message.body)
    return {"edge": message.edge, "step": message.step, "is_reply": message.is_reply, "at": body_range}


def _message_from_json(value: Json, blob: bytes) -> PeerMessage:
    start, length = value["at"]
    if start + length > len(blob):
        raise ValueError("an edge message lies outside of its record")
    first, second = value["edge"]
    return PeerMessage(
        edge=(first, second),
        step=value["step"],
        body=blob[start : start + length],
        is_reply=value["is_reply"],
    )


def _encode_record(kind: RecordKind, assignment_id: str, meta: Json, blob: Sequence[bytes] = ()) -> EncodedRecord:
    try:
        text = json.dumps(meta, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise NotKeptError(f"cannot journal a {kind.label} record: {error}") from error
    return EncodedRecord(kind=kind, assignment_id=assignment_id, parts=(_LENGTH.pack(len(text)) + text, *blob))


def _decode_header(body: bytes) -> tuple[Any, int]:
    (length,) = _LENGTH.unpack_from(body)
    start = _LENGTH.size + length
    if start > len(body):
        raise ValueError("its text is cut off")
    return parse_json(body[_LENGTH.size : start]), start


def _to_shallow_dict(value: Any) -> Json:
    return {entry.name: getattr(value, entry.name) for entry in fields(value)}
