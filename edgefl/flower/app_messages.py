"""Messages between the ServerApp and ClientApp of an exported app: a JSON header and a codec body."""

from __future__ import annotations

import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from edgefl.core.errors import NetworkError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json

RECORD_HEADER = "edgefl"
RECORD_BODY = "body"
_FIELD = "json"


def make_body_record(body: bytes) -> ArrayRecord:
    """Returns a body as the array that Flower stores once for all nodes and sends in chunks."""
    return ArrayRecord({RECORD_BODY: Array(np.frombuffer(body, np.uint8))})


def encode_content(header: Json, body: ArrayRecord | None = None) -> RecordDict:
    """Returns the content of a message."""
    records: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        RECORD_HEADER: ConfigRecord({_FIELD: json.dumps(header)})
    }
    if body is not None:
        records[RECORD_BODY] = body
    return RecordDict(records)


def decode_content(content: RecordDict) -> tuple[Json, bytes]:
    """Returns header and body of a message, an empty one when it has none.

    Raises:
        NetworkError: not an edgefl message.
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
