"""Frame format between boards: 28 bytes of header, then the message.

The sender dials. The receiver sends WELCOME once it has authenticated the sender; then each MESSAGE is answered with
ACK, and each KEEP_ALIVE, which is sent when idle, with KEEP_ALIVE. While a long message arrives its receiver sends
KEEP_ALIVE too, so that a slow link is not mistaken for a dead peer. TLS protects the integrity of the bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from edgefl.core.errors import NetworkError
from edgefl.core.protocol import MAX_PEER_BYTES

MAGIC = b"EFLP"
FRAME_VERSION = 1
HEADER = struct.Struct("<4sHHIQQ")
"""Little-endian: magic, version, kind, length of the payload in bytes, session, number."""
MIN_BYTES_PER_S = 8 * 1024
_CHUNK_BYTES = 16 * 1024


class FrameKind(IntEnum):
    WELCOME = 1
    MESSAGE = 2
    ACK = 3
    KEEP_ALIVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportFrame:
    """Frame; `session` is the sender's random incarnation, `number` grows with its messages; ACK repeats both."""

    kind: FrameKind
    session: int = 0
    number: int = 0
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimeouts:
    """Timeouts for dead peers and reconnects.

    A connection carries a frame at least every `keep_alive_s`, and is closed after `idle_timeout_s` without one;
    connecting and each step of it may take as long. Attempts are at most `max_backoff_s` apart.
    """

    keep_alive_s: float = 2.0
    idle_timeout_s: float = 6.0
    max_backoff_s: float = 5.0


def write_frame(connection: socket.socket, frame: TransportFrame, *, idle_timeout_s: float) -> None:
    """Sends a frame.

    Raises:
        OSError: the connection broke, or accepted nothing for `idle_timeout_s`.
    """
    connection.settimeout(idle_timeout_s)
    payload = memoryview(frame.payload)
    header = HEADER.pack(MAGIC, FRAME_VERSION, frame.kind, len(payload), frame.session, frame.number)
    # A small message is sent in one packet, a large one is not copied.
    connection.sendall(header + payload[:_CHUNK_BYTES])
    if len(payload) > _CHUNK_BYTES:
        connection.sendall(payload[_CHUNK_BYTES:])


def read_frame(
    connection: socket.socket, *, idle_timeout_s: float, on_chunk: Callable[[], None] = lambda: None
) -> TransportFrame:
    """Returns the next frame; memory grows with the received, not with the announced bytes.

    Args:
        connection: to read from.
        idle_timeout_s: how long to wait for the header, and for each chunk of the payload.
        on_chunk: called for each chunk.

    Raises:
        NetworkError: the frame is malformed or too long; nothing more was read.
        OSError: the connection broke, is silent or too slow (TimeoutError), or was closed (ConnectionError).
    """
    started_s = time.monotonic()
    header = _receive_exactly(connection, HEADER.size, started_s + idle_timeout_s, idle_timeout_s, lambda: None)
    frame, length = _parse_header(header)
    if not length:
        return frame
    until_s = time.monotonic() + idle_timeout_s + length / MIN_BYTES_PER_S
    payload = _receive_exactly(connection, length, until_s, idle_timeout_s, on_chunk)
    return TransportFrame(kind=frame.kind, session=frame.session, number=frame.number, payload=payload)


def _parse_header(header: bytes) -> tuple[TransportFrame, int]:
    magic, version, kind, length, session, number = HEADER.unpack(header)
    if magic != MAGIC or version != FRAME_VERSION:
        raise NetworkError(f"a frame must begin with {MAGIC!r} and version {FRAME_VERSION}, got {header[:6]!r}")
    if kind not in set(FrameKind):
        raise NetworkError(f"a frame must be of kind 1 to {len(FrameKind)}, got {kind}")
    max_length = MAX_PEER_BYTES if kind == FrameKind.MESSAGE else 0
    if length > max_length:
        raise NetworkError(f"a {FrameKind(kind).name} frame must have at most {max_length} bytes, got {length}")
    return TransportFrame(kind=FrameKind(kind), session=session, number=number), length


def _receive_exactly(
    connection: socket.socket, num_bytes: int, until_s: float, idle_timeout_s: float, on_chunk: Callable[[], None]
) -> bytes:
    chunks: list[bytes] = []
    while num_bytes:
        remaining_s = until_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("it sends too slowly")
        connection.settimeout(min(remaining_s, idle_timeout_s))
        chunk = connection.recv(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise ConnectionError("it closed the connection")
        chunks.append(chunk)
        num_bytes -= len(chunk)
        on_chunk()
    return b"".join(chunks)
