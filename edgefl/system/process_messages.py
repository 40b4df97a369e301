"""Messages between this process and a child over its standard streams: a JSON object and a body."""

from __future__ import annotations

import json
import struct
from typing import IO

from edgefl.core.safe_parsing import parse_message
from edgefl.core.types import Json

MAX_HEADER_BYTES = 1024 * 1024
_LENGTHS = struct.Struct("<II")


class MessageSizeError(ValueError):
    """The body of a message is longer than its reader takes."""

    def __init__(self, num_bytes: int, max_bytes: int) -> None:
        super().__init__(f"a message of {num_bytes} bytes, at most {max_bytes} are read")
        self.num_bytes = num_bytes


def write_message(file: IO[bytes], header: Json, body: bytes = b"") -> None:
    """Writes one message; `OSError` propagates."""
    text = json.dumps(header).encode()
    file.write(_LENGTHS.pack(len(text), len(body)) + text)
    file.write(body)
    file.flush()


def read_message(file: IO[bytes], max_body_bytes: int) -> tuple[Json, bytes] | None:
    """Returns the next message, None at the end.

    Raises:
        MessageSizeError: its body is longer than `max_body_bytes`.
        ValueError: it is cut off, its header is too long or no JSON object.
    """
    lengths = file.read(_LENGTHS.size)
    if not lengths:
        return None
    if len(lengths) < _LENGTHS.size:
        raise ValueError("a message is cut off")
    header_bytes, body_bytes = _LENGTHS.unpack(lengths)
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"a message whose header has {header_bytes} bytes, at most {MAX_HEADER_BYTES} are read")
    if body_bytes > max_body_bytes:
        raise MessageSizeError(body_bytes, max_body_bytes)
    text, body = file.read(header_bytes), file.read(body_bytes)
    if len(text) < header_bytes or len(body) < body_bytes:
        raise ValueError("a message is cut off")
    header = parse_message(text)
    if not isinstance(header, dict):
        raise ValueError("a message is no JSON object")  # noqa: TRY004 of what it was parsed from
    return header, body
