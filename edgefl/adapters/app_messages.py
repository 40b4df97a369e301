"""What the two halves of an exported app say to each other: a header of JSON, and a body that a codec made."""

from __future__ import annotations

import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from edgefl.errors import NetworkError
from edgefl.types import Json
from edgefl.untrusted import parse_json

RECORD_HEADER = "edgefl"
RECORD_BODY = "body"
_FIELD = "json"


def body_record(body: bytes) -> ArrayRecord:
    """Returns a body as Flower sends it: an array, which it stores once for all nodes and sends in chunks."""
    return ArrayRecord({RECORD_BODY: Array(np.frombuffer(body, np.uint8))})


def pack(header: Json, body: ArrayRecord | None = None) -> RecordDict:
    """Returns the content of a message."""
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        RECORD_HEADER: ConfigRecord({_FIELD: json.dumps(header)})
    }
    if body is not None:
        records[RECORD_BODY] = body
    return RecordDict(records)


def unpack(content: RecordDict) -> tuple[Json, bytes]:
    """Returns header and body of a message, an empty one when it has none.

    Raises:
        NetworkError: the message is none of ours.
    """
    try:
        header = parse_json(str(content.config_records[RECORD_HEADER][_FIELD]))
        arrays = content.array_records.get(RECORD_BODY)
        body = b"" if arrays is None else arrays[RECORD_BODY].numpy().tobytes()
    except (KeyError, TypeError, ValueError) as error:
        raise NetworkError(f"a message without our header or body: {error!r}") from None
    if not isinstance(header, dict):
        raise NetworkError(f"the header of a message must be an object, got a {type(header).__name__}")
    return header, body
