"""Flower's records as bytes, between a ServerApp and the ClientApps of boards: JSON, then the data of the arrays.

The format is edgefl's own, so that coordinator and boards may have different versions of Flower. Arrays travel as
Flower serialised them, or as `app_codec` says, which alone unpacks one.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from typing import TYPE_CHECKING, Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from edgefl.core.errors import DataError
from edgefl.core.metrics import MAX_REPLY_METRICS, ReplyMetrics, rank_reply_metric
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json

if TYPE_CHECKING:
    from edgefl.flower.app_codec import ChangeCodec, ModelCodec

_LENGTH = struct.Struct("<I")
_RECORDS, _BYTES = "records", "bytes"
_METRIC_NAME = re.compile(r"[\w. /-]{1,64}\Z", re.ASCII)
_OLDER_METRICS = frozenset({"fitres.metrics", "evaluateres.metrics"})
"""Records in which Flower's older interface sends metrics."""
TRAIN, EVALUATE, QUERY = "train", "evaluate", "query"
"""Kinds of messages: what their types begin with."""
EXAMPLE_NAMES = ("num-examples", "num_examples")
MAX_EXAMPLES, MAX_VALUE = 1e9, 1e12
"""Of a reply, in the history: of its examples, and of the size of a metric."""
Record = ArrayRecord | ConfigRecord | MetricRecord


def encode_message(
    header: Json, content: RecordDict | None = None, codec: ChangeCodec | ModelCodec | None = None
) -> bytes:
    """Returns a header and the records of a message as bytes; with a codec, its arrays in that."""
    blobs: list[bytes] = []
    records = None
    if content is not None:
        records = [_encode_record(name, record, blobs, codec) for name, record in content.items()]
    text = json.dumps({**header, _RECORDS: records}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def decode_message(
    body: bytes, codec: ChangeCodec | None = None, *, is_from_server: bool = False
) -> tuple[Json, RecordDict | None]:
    """Returns header and records, None where it has none.

    Args:
        body: of the message.
        codec: of the reply to a message; None where no changes may be in it.
        is_from_server: its arrays may be in a codec.

    Raises:
        DataError: the bytes are no such message.
    """
    try:
        (length,) = _LENGTH.unpack_from(body)
        header = parse_json(body[_LENGTH.size : _LENGTH.size + length])
        records, blobs = header.pop(_RECORDS), _Blobs(body, _LENGTH.size + length)
        content = None
        if records is not None:
            content = RecordDict(
                dict(_decode_record(record, blobs, codec, is_from_server=is_from_server) for record in records)
            )
        blobs.check_end()
    except (struct.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(f"a Flower message that makes no sense: {str(error)[:200]}") from None
    return cast("Json", header), content


def read_metrics(body: bytes, *, kind: str) -> ReplyMetrics:
    """Returns the numbers of a reply to a message of a kind; none of one that makes no sense."""
    found: dict[str, float] = {}
    try:
        (length,) = _LENGTH.unpack_from(body)
        for name, form, items in parse_json(body[_LENGTH.size : _LENGTH.size + length])[_RECORDS] or ():
            if form == "metrics" or (form == "config" and name in _OLDER_METRICS):
                found |= {key: value for key, value in items.items() if _is_metric(key, value)}
    except (struct.error, ValueError, TypeError, LookupError, AttributeError):
        found = {}
    counts = [found.pop(name, 0.0) for name in EXAMPLE_NAMES]
    values = {name: float(found[name]) for name in sorted(found, key=rank_reply_metric)[:MAX_REPLY_METRICS]}
    prefix = "eval" if kind == EVALUATE else "train"
    loss, accuracy = (
        next((values[name] for name in (f"{prefix}_{word}", f"{prefix}-{word}", word) if name in values), None)
        for word in ("loss", "accuracy")
    )
    return ReplyMetrics(
        is_evaluation=kind == EVALUATE,
        num_examples=int(min(max(0.0, *counts), MAX_EXAMPLES)),
        loss=loss if kind in {TRAIN, EVALUATE} else None,
        accuracy=accuracy if kind == EVALUATE and accuracy is not None and 0 <= accuracy <= 1 else None,
        values=values,
    )


def _is_metric(name: object, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_VALUE
    return is_number and isinstance(name, str) and _METRIC_NAME.match(name) is not None


def encode_envelope(header: Json) -> bytes:
    """Returns what stands in front of a message: what its board must know beside it."""
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text


def split_envelope(body: bytes) -> tuple[Json, bytes]:
    """Returns the header of an envelope, and the message in it.

    Raises:
        DataError: the bytes are no such envelope.
    """
    try:
        (length,) = _LENGTH.unpack_from(body)
        header = parse_json(body[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, ValueError) as error:
        raise DataError(f"a Flower message whose envelope makes no sense: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise DataError("a Flower message whose envelope is no object")
    return header, body[_LENGTH.size + length :]


class _Blobs:
    """Reads the data of arrays, one after the other."""

    def __init__(self, body: bytes, start: int) -> None:
        self._body, self._start = body, start

    def check_end(self) -> None:
        if self._start != len(self._body):
            raise ValueError(f"{len(self._body) - self._start} bytes are left")

    def read(self, length: int) -> bytes:
        data = self._body[self._start : self._start + length] if length >= 0 else b""
        if len(data) != length:
            raise ValueError(f"an array of {length} bytes, of which there are {len(data)}")
        self._start += length
        return data


def _encode_record(
    name: str, record: Record, blobs: list[bytes], codec: ChangeCodec | ModelCodec | None
) -> list[Any]:
    if isinstance(record, ArrayRecord):
        coded, body = (codec and codec.encode(name, record)) or (frozenset[str](), b"")
        exact = {key: array for key, array in record.items() if key not in coded}
        blobs += [array.data for array in exact.values()]
        arrays = [[key, a.dtype, list(a.shape), a.stype, len(a.data)] for key, a in exact.items()]
        if codec is None or not coded:
            return [name, "arrays", arrays]
        blobs.append(body)
        items: Json = {"arrays": arrays, "length": len(body)}
        if codec.kind == "model":  # both ends have the arrays of a reply's message
            items["all"] = [[key, a.dtype, list(a.shape)] for key, a in record.items()]
        return [name, codec.kind, items]
    kind = "metrics" if isinstance(record, MetricRecord) else "config"
    return [name, kind, {key: _encode_value(value) for key, value in record.items()}]


def _decode_record(
    value: list[Any], blobs: _Blobs, codec: ChangeCodec | None, *, is_from_server: bool
) -> tuple[str, Record]:
    name, kind, items = value
    if kind == "arrays":
        return name, ArrayRecord(_decode_arrays(items, blobs))
    if kind == "changes" and codec is not None:
        arrays = _decode_arrays(items["arrays"], blobs)
        return name, codec.decode(name, arrays, blobs.read(items["length"]))
    if kind == "model" and is_from_server:
        from edgefl.flower.app_codec import decode_model  # noqa: PLC0415 only where messages are in a codec

        arrays = _decode_arrays(items["arrays"], blobs)
        return name, decode_model(items["all"], arrays, blobs.read(items["length"]))
    values = {key: _decode_value(one) for key, one in items.items()}
    if kind not in {"metrics", "config"}:
        raise ValueError(f"a record of kind {kind!r:.40}")
    return name, MetricRecord(values) if kind == "metrics" else ConfigRecord(values)


def _decode_arrays(items: list[Any], blobs: _Blobs) -> dict[str, Array]:
    return {key: Array(dtype, tuple(shape), stype, blobs.read(length)) for key, dtype, shape, stype, length in items}


def _encode_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    return [_encode_value(one) for one in value] if isinstance(value, list) else value


def _decode_value(value: Any) -> Any:
    if isinstance(value, dict):
        return base64.b64decode(value[_BYTES], validate=True)
    return [_decode_value(one) for one in value] if isinstance(value, list) else value
