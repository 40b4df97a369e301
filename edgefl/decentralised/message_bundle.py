"""Message bundles: an index for the JSON header, and the message bodies concatenated before a tail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgefl.core.errors import NetworkError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import PeerMessage

MAX_MESSAGES = 4096


def encode_messages(messages: Sequence[PeerMessage], tail: bytes = b"") -> tuple[list[list[Any]], bytes]:
    """Returns the JSON index of the messages, and their bodies followed by `tail`."""
    index = [[*message.edge, message.step, int(message.is_reply), len(message.body)] for message in messages]
    return index, b"".join([*(message.body for message in messages), tail])


def decode_messages(index: Any, body: bytes) -> tuple[tuple[PeerMessage, ...], bytes]:
    """Returns the messages and the bytes after them.

    Raises:
        NetworkError: the index does not fit the body.
    """
    if not isinstance(index, list) or len(index) > MAX_MESSAGES:
        raise NetworkError(f"messages of edges must be a list of at most {MAX_MESSAGES}, got {index!r:.40}")
    messages, start = [], 0
    for entry in index:
        sender, receiver, step, is_reply, length = _parse_entry(entry)
        if start + length > len(body):
            raise NetworkError(f"a message of {length} bytes begins at {start} of a body of {len(body)}")
        messages.append(
            PeerMessage(
                edge=(sender, receiver), step=step, body=body[start : start + length], is_reply=bool(is_reply)
            )
        )
        start += length
    return tuple(messages), body[start:]


def encode_peer_message(run: str, message: PeerMessage) -> bytes:
    """Returns one message in the peer format: a line of JSON, then its body."""
    index, body = encode_messages([message])
    return json.dumps({"v": 1, "run": run, "mail": index}).encode() + b"\n" + body


def decode_peer_message(payload: bytes) -> tuple[str, PeerMessage]:
    """Returns the run and the message.

    Raises:
        NetworkError: the payload is malformed.
    """
    line, _, body = payload.partition(b"\n")
    try:
        header = parse_json(line)
        run, index = header["run"], header["mail"]
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(f"a neighbour's message begins with no JSON of ours: {error}") from None
    messages, tail = decode_messages(index, body)
    if header.get("v") != 1 or not isinstance(run, str) or len(messages) != 1 or tail:
        raise NetworkError("a neighbour's message must be one of version 1, with nothing behind it")
    return run, messages[0]


def _parse_entry(entry: Any) -> tuple[str, str, int, int, int]:
    if isinstance(entry, list) and len(entry) == 5:
        sender, receiver, step, is_reply, length = entry
        numbers = [step, is_reply, length]
        is_whole = all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
        if isinstance(sender, str) and isinstance(receiver, str) and is_whole:
            return sender, receiver, step, is_reply, length
    raise NetworkError(f"a message of an edge must be [sender, receiver, step, reply, bytes], got {entry!r:.80}")
