"""Messages of edges beside something else in one body: a list for the JSON with it, and the bodies in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgefl.errors import NetworkError
from edgefl.types import EdgeMessage
from edgefl.untrusted import parse_json

MOST_MESSAGES = 4096


def pack_mail(messages: Sequence[EdgeMessage], rest: bytes = b"") -> tuple[list[list[Any]], bytes]:
    """Returns what the JSON says of the messages, and their bodies followed by `rest`."""
    told = [[*each.edge, each.step, int(each.is_reply), len(each.body)] for each in messages]
    return told, b"".join([*(each.body for each in messages), rest])


def unpack_mail(told: Any, body: bytes) -> tuple[tuple[EdgeMessage, ...], bytes]:
    """Returns the messages and what comes after them.

    Raises:
        NetworkError: what is told does not fit the body.
    """
    if not isinstance(told, list) or len(told) > MOST_MESSAGES:
        raise NetworkError(f"messages of edges must be a list of at most {MOST_MESSAGES}, got {told!r:.40}")
    messages, start = [], 0
    for entry in told:
        sender, receiver, step, is_reply, length = _checked(entry)
        if start + length > len(body):
            raise NetworkError(f"a message of {length} bytes begins at {start} of a body of {len(body)}")
        messages.append(
            EdgeMessage(
                edge=(sender, receiver), step=step, body=body[start : start + length], is_reply=bool(is_reply)
            )
        )
        start += length
    return tuple(messages), body[start:]


def pack_peer(run: str, message: EdgeMessage) -> bytes:
    """Returns one message as devices send it to each other: a line of JSON, then its body."""
    told, body = pack_mail([message])
    return json.dumps({"v": 1, "run": run, "mail": told}).encode() + b"\n" + body


def unpack_peer(payload: bytes) -> tuple[str, EdgeMessage]:
    """Returns the run and the message.

    Raises:
        NetworkError: it is none.
    """
    line, _, body = payload.partition(b"\n")
    try:
        header = parse_json(line)
        run, told = header["run"], header["mail"]
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(f"a neighbour's message begins with no JSON of ours: {error}") from None
    messages, rest = unpack_mail(told, body)
    if header.get("v") != 1 or not isinstance(run, str) or len(messages) != 1 or rest:
        raise NetworkError("a neighbour's message must be one of version 1, with nothing behind it")
    return run, messages[0]


def _checked(entry: Any) -> tuple[str, str, int, int, int]:
    if isinstance(entry, list) and len(entry) == 5:
        sender, receiver, step, is_reply, length = entry
        numbers = [step, is_reply, length]
        is_whole = all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
        if isinstance(sender, str) and isinstance(receiver, str) and is_whole:
            return sender, receiver, step, is_reply, length
    raise NetworkError(f"a message of an edge must be [sender, receiver, step, reply, bytes], got {entry!r:.80}")
