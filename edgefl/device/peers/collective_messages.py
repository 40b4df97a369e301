"""Messages between members of a collective: chunks of an all-reduce, that a member has begun, or has given up."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from edgefl.core.errors import NetworkError

HEADER = struct.Struct("<16s8sBIIQ")
"""Little-endian: group, session of the sender's process, kind, number of the all-reduce, step, entry."""
CHUNK, ABORT, GREETING = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMessage:
    """A chunk of a group's all-reduce, or that its sender has given up, or has begun."""

    group: bytes
    session: bytes
    reduction: int = 0
    step: int = 0
    start: int = 0
    values: bytes = field(default=b"", repr=False)
    is_abort: bool = False
    is_greeting: bool = False


def encode_message(message: ChunkMessage) -> bytes:
    """Returns the bytes of a message."""
    kind = ABORT if message.is_abort else GREETING if message.is_greeting else CHUNK
    header = HEADER.pack(message.group, message.session, kind, message.reduction, message.step, message.start)
    return header + message.values


def decode_message(payload: bytes) -> ChunkMessage:
    """Returns the message in bytes.

    Raises:
        NetworkError: it is cut off, or of another kind.
    """
    if len(payload) < HEADER.size:
        raise NetworkError(f"a chunk must have {HEADER.size} bytes or more, got {len(payload)}")
    group, session, kind, reduction, step, start = HEADER.unpack_from(payload)
    if kind not in {CHUNK, ABORT, GREETING}:
        raise NetworkError(f"a message between members must be of kind {CHUNK} to {GREETING}, got {kind}")
    return ChunkMessage(
        group=group,
        session=session,
        reduction=reduction,
        step=step,
        start=start,
        values=payload[HEADER.size :],
        is_abort=kind == ABORT,
        is_greeting=kind == GREETING,
    )
