"""Messages between the parts of a Flower app's run and stock SuperNodes, which know nothing of edgefl."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from edgefl.coordinator.flower.fleet_api import SpooledBody
from edgefl.core import fleet_messages
from edgefl.core.errors import DataError
from edgefl.core.fleet_messages import ObjectTree, parse_protobuf
from edgefl.core.flower_objects import (
    CHUNK,
    compute_object_id,
    encode_chunk,
    encode_object,
    parse_chunk,
    parse_object,
)
from edgefl.core.protocol import CHUNK_BYTES, JOB_LIMITS, JOB_LOG, parse_job_log
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.flower.app_job import MAX_REASON_CHARS, format_label, format_metrics
from edgefl.flower.app_messages import decode_message, encode_message, split_envelope

MAX_TREE_OBJECTS, MAX_TREE_DEPTH = 20_000, 5
"""Of a reply: message, content, record, array, chunk."""
OVERHEAD_BYTES = 1024 * 1024
"""What the objects of a reply may have beside `job.max_part_bytes`: heads, and names."""
MESSAGE, RECORDS, ARRAY = "Message", "RecordDict", "Array"
ARRAYS, CONFIG, METRICS = "ArrayRecord", "ConfigRecord", "MetricRecord"
OBJECT_KINDS: Mapping[str, frozenset[str]] = {
    MESSAGE: frozenset({RECORDS}),
    RECORDS: frozenset({ARRAYS, CONFIG, METRICS}),
    ARRAYS: frozenset({ARRAY}),
    ARRAY: frozenset({CHUNK}),
    CONFIG: frozenset(),
    METRICS: frozenset(),
    CHUNK: frozenset(),
}
"""Kinds of objects, and what each refers to, as Flower writes them: so none can be deep."""
_MAX_SINT64 = 2**63 - 1
_VALUE_KINDS = ((bool, "bool"), (int, "sint64"), (float, "double"), (str, "string"), (bytes, "bytes"))
"""Types of a record's values and their fields, bool before int, which it is, too."""
REPEATED_KEYS = ("assignment", "lineage", "model_sha256", "newest_record")
"""Of an instruction's header, in the reply, as a board's agent repeats them."""


class StockReply:
    """A reply of a stock SuperNode while its objects arrive: apart from all others, in one file if they are large.

    Thread-safe.

    Args:
        message_id: of the reply, and of the first of its objects.
        tree: Flower's tree of its objects; of what it says, their ids count alone.
        max_bytes: of all objects.
        folder: of the file; None for the system's temporary files.

    Raises:
        DataError: it has too many objects, or the first one is another.
    """

    def __init__(self, message_id: str, tree: Any, *, max_bytes: int, folder: Path | None) -> None:
        self.message_id, self.ids, self._max_bytes = message_id, _find_ids(tree), max_bytes
        if tree.object_id != message_id:
            raise DataError(f"a reply is the first of its objects, and {message_id[:40]!r} is not")
        self._missing = set(self.ids)
        self._spans: dict[str, slice] = {}
        self._body = SpooledBody(folder, is_hashed=False)
        self._lock = threading.Lock()

    def list_missing(self) -> list[str]:
        """Returns the ids of the objects that have not arrived."""
        with self._lock:
            return list(self._missing)

    def add(self, object_id: str, content: bytes) -> bool:
        """Adds an object unless it is there; returns whether all are.

        Raises:
            DataError: they are more bytes than the run takes; nothing is kept of this one.
        """
        with self._lock:
            if object_id in self._missing:
                start = self._body.num_bytes
                if start + len(content) > self._max_bytes:
                    raise DataError(f"a reply has at most {self._max_bytes} bytes: raise job.max_part_bytes")
                self._body.append(content)
                self._spans[object_id] = slice(start, self._body.num_bytes)
                self._missing.discard(object_id)
            return not self._missing

    def read(self) -> dict[str, bytes]:
        """Returns the objects by their ids; may wait for the disk."""
        with self._lock:
            whole = self._body.read()
            return {object_id: whole[span] for object_id, span in self._spans.items()}

    def close(self) -> None:
        """Drops what has arrived; what still comes is not kept."""
        with self._lock:
            self._missing.clear()
            self._spans.clear()
            self._body.close()


def _find_ids(tree: Any) -> frozenset[str]:
    """Returns the ids in a tree of objects.

    Raises:
        DataError: it has too many objects, or is too deep.
    """
    ids, pending = list[str](), [(tree, 1)]
    while pending:
        found, depth = pending.pop()
        ids.append(found.object_id)
        if len(ids) > MAX_TREE_OBJECTS or depth > MAX_TREE_DEPTH:
            raise DataError(f"a reply has at most {MAX_TREE_OBJECTS} objects, {MAX_TREE_DEPTH} deep")
        pending += [(child, depth + 1) for child in found.children]
    return frozenset(ids)


@dataclass(slots=True, kw_only=True)
class StockInstruction:
    """A message that a stock SuperNode was sent, and its reply while it arrives.

    Attributes:
        message_id: of the message.
        node_id: of the SuperNode.
        run_id: Flower's, of the run.
        repeated: of its header, what the reply repeats.
        label: what it asks for, such as `train in round 3`.
        max_bytes: of its reply.
        sent_s: when, in seconds of a monotonic clock.
        session_id: of the push of the reply; None before it is announced.
        reply: that is announced; None before.
        error: why the reply cannot be taken.
    """

    message_id: str
    node_id: int
    run_id: int
    repeated: Json
    label: str
    max_bytes: int
    sent_s: float
    session_id: str | None = None
    reply: StockReply | None = None
    error: str = ""

    @classmethod
    def create(cls, header: Mapping[str, Any], part: Json, content: Any, **sent: Any) -> Self:
        """Returns the record of a message, of the instruction's header and its own; `sent` as the attributes."""
        return cls(
            **sent,
            repeated={key: header[key] for key in REPEATED_KEYS if key in header},
            label=format_label(part, content),
            max_bytes=int(header[JOB_LIMITS]["max_part_bytes"]) + OVERHEAD_BYTES,
        )

    @property
    def assignment(self) -> str:
        return str(self.repeated["assignment"])

    def announce(self, message_id: str, tree: Any, *, session_id: str, folder: Path | None) -> list[str]:
        """Takes the tree of the reply, again too where it is the same; returns the ids of the objects to be sent.

        Raises:
            DataError: it is not taken, or is another than before.
        """
        announced = StockReply(message_id, tree, max_bytes=self.max_bytes, folder=folder)
        if self.reply is None:
            self.reply = announced
        elif (self.reply.message_id, self.reply.ids) != (announced.message_id, announced.ids):
            raise DataError("a reply that was announced again has other objects than before")
        self.session_id = session_id
        return self.reply.list_missing()

    def close(self) -> None:
        """Drops what has arrived of the reply."""
        if self.reply is not None:
            self.reply.close()


def encode_objects(metadata: Any, content: RecordDict) -> dict[str, bytes]:
    """Returns the objects of a message by their ids, each behind those that it refers to; the last is the message."""
    objects = dict[str, bytes]()
    names = {name: _encode_record(record, objects) for name, record in content.items()}
    root = _add_object(objects, RECORDS, json.dumps(names).encode(), names.values())
    _add_object(objects, MESSAGE, fleet_messages.Message(metadata=metadata).SerializeToString(), [root])
    return objects


def make_tree(object_id: str, contents: Mapping[str, bytes]) -> Any:
    """Returns the tree of an object and those that it refers to."""
    children = parse_object(contents[object_id]).children
    return ObjectTree(object_id=object_id, children=[make_tree(child, contents) for child in children])


def _add_object(objects: dict[str, bytes], kind: str, body: bytes, children: Any = ()) -> str:
    content = encode_object(kind, body, dict.fromkeys(children))
    object_id = compute_object_id(content)
    objects[object_id] = content
    return object_id


def _encode_record(record: Any, objects: dict[str, bytes]) -> str:
    if isinstance(record, ArrayRecord):
        names = {name: _encode_array(array, objects) for name, array in record.items()}
        return _add_object(objects, ARRAYS, json.dumps(names).encode(), names.values())
    is_metrics = isinstance(record, MetricRecord)
    encoded = (fleet_messages.MetricRecord if is_metrics else fleet_messages.ConfigRecord)()
    for name, value in record.items():
        _set_value(encoded.items.add(key=name).value, value, empty=0.0 if is_metrics else False)
    return _add_object(objects, METRICS if is_metrics else CONFIG, encoded.SerializeToString())


def _encode_array(array: Array, objects: dict[str, bytes]) -> str:
    view = memoryview(array.data)
    chunks = [encode_chunk(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES)]
    ids = [compute_object_id(chunk) for chunk in chunks]
    objects.update(zip(ids, chunks, strict=True))
    places = {object_id: place for place, object_id in enumerate(dict.fromkeys(ids))}
    about = {
        "dtype": array.dtype,
        "shape": list(array.shape),
        "stype": array.stype,
        "arraychunk_ids": [places[object_id] for object_id in ids],
    }
    return _add_object(objects, ARRAY, json.dumps(about).encode(), ids)


def _set_value(target: Any, value: Any, *, empty: bool | float) -> None:
    """Sets a value; `empty` is of the type as which Flower encodes an empty list in this kind of record."""
    values = value if isinstance(value, list) else [value]
    sample = values[0] if values else empty
    name = next(name for kind, name in _VALUE_KINDS if isinstance(sample, kind))
    if name == "sint64" and max(values) > _MAX_SINT64:
        name = "uint64"
    if not isinstance(value, list):
        setattr(target, name, value)
        return
    listed = getattr(target, f"{name.removesuffix('64')}_list")
    listed.SetInParent()
    listed.vals.extend(values)


def _read_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        raise ValueError("a value of no kind")
    found = getattr(value, kind)
    return list(found.vals) if kind.endswith("_list") else found


def decode_objects(
    root: str, contents: Mapping[str, bytes], *, max_bytes: int
) -> tuple[RecordDict | None, tuple[int, str] | None]:
    """Returns the content of a message of these objects, or its error: Flower's code and the reason.

    Raises:
        DataError: it unfolds to more bytes.
        KeyError, IndexError, ValueError, TypeError, AttributeError: an object is missing, or makes no sense.
    """
    if measure_object(root, contents, frozenset({MESSAGE}), {}) > max_bytes:
        raise DataError(f"a reply has at most {max_bytes} bytes: raise job.max_part_bytes")
    found = parse_object(contents[root])
    message = parse_protobuf(fleet_messages.Message, found.body)
    if message.HasField("error"):
        return None, (message.error.code, message.error.reason)
    (records,) = found.children
    names = parse_json(parse_object(contents[records]).body)
    return RecordDict({name: _decode_record(child, contents) for name, child in names.items()}), None


def _decode_record(object_id: str, contents: Mapping[str, bytes]) -> Any:
    found = parse_object(contents[object_id])
    if found.kind == ARRAYS:
        return ArrayRecord({name: _decode_array(child, contents) for name, child in parse_json(found.body).items()})
    is_metrics = found.kind == METRICS
    kind = fleet_messages.MetricRecord if is_metrics else fleet_messages.ConfigRecord
    values = {item.key: _read_value(item.value) for item in parse_protobuf(kind, found.body).items}
    return MetricRecord(values) if is_metrics else ConfigRecord(values)


def _decode_array(object_id: str, contents: Mapping[str, bytes]) -> Array:
    found = parse_object(contents[object_id])
    about = parse_json(found.body)
    data = b"".join(parse_chunk(contents[found.children[place]]) for place in about["arraychunk_ids"])
    return Array(str(about["dtype"]), tuple(about["shape"]), str(about["stype"]), data)


def measure_object(
    object_id: str, contents: Mapping[str, bytes], kinds: frozenset[str], sizes: dict[str, int]
) -> int:
    """Returns the bytes of an object with all that it refers to, each as often as it does.

    Args:
        object_id: of the object.
        contents: of all objects.
        kinds: one of which the object is.
        sizes: of those measured before; it is updated.

    Raises:
        KeyError, IndexError, ValueError, TypeError, AttributeError: an object is missing, or makes no sense.
    """
    content = contents[object_id]
    found = parse_object(content)
    kind, children = found.kind, found.children
    if kind not in kinds:
        raise ValueError(f"a {kind[:40]!r} is where {' or '.join(sorted(kinds)) or 'nothing'} should be")
    if object_id not in sizes:
        referred = list(children)
        if kind == ARRAY:
            referred = [children[i] for i in parse_json(found.body)["arraychunk_ids"]]
        elif kind in {ARRAYS, RECORDS}:
            referred = list(parse_json(found.body).values())
        counts = Counter(referred)
        if counts.keys() != set(children):
            raise ValueError(f"a {kind} refers to other objects than its head names")
        measured = (n * measure_object(child, contents, OBJECT_KINDS[kind], sizes) for child, n in counts.items())
        sizes[object_id] = len(content) + sum(measured)
    return sizes[object_id]


def read_part(body: bytes) -> tuple[Json, Any]:
    """Returns header (`type`, `group`) and content of the message in a part of a Flower app's run.

    Raises:
        DataError: it is no such part.
    """
    _, message = split_envelope(body)
    header, content = decode_message(message, is_from_server=True)
    if content is None or not {"type", "group"} <= header.keys():
        raise DataError("a Flower message without content, type or group")
    return header, content


def encode_stock_reply(
    instruction: StockInstruction, content: Any, error: tuple[int, str] | None, *, elapsed_s: float
) -> tuple[Json, bytes]:
    """Returns header and body of a SuperNode's reply, as a board's would be.

    Args:
        instruction: that it answers.
        content: of the reply; None for an error.
        error: Flower's code and the reason; None where there is none.
        elapsed_s: since the message was sent.
    """
    code, reason = error or (0, "")
    line = f"{instruction.label}: {reason or (format_metrics(content) if content is not None else 'done')}"
    metrics = {"iterations": 1, "num_examples": 0, "loss": None, "compute_s": elapsed_s}
    header = {**instruction.repeated, "metrics": metrics, JOB_LOG: parse_job_log([line])}
    if error is not None:
        return header, encode_message({"error": code, "reason": reason[:MAX_REASON_CHARS]})
    return header, encode_message({}, content)
