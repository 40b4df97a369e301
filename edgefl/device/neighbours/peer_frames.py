"""Frames from board to board: 28 bytes of header, then the message.

The board that has something to send dials. The other one says WELCOME once it knows who that is; then each MESSAGE is
answered with TAKEN, and each ALIVE, which is sent when there is nothing else to say, with ALIVE. While a long message
arrives its receiver says ALIVE too, so that a slow link is not mistaken for a dead peer. TLS has checked the bytes.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from edgefl.errors import NetworkError
from edgefl.protocol import MAX_PEER_BYTES

MAGIC = b"EFLP"
FRAME_VERSION = 1
HEADER = struct.Struct("<4sHHIQQ")
"""Little-endian: magic, version, kind, length of the payload in bytes, session, number."""
SLOWEST_BYTES_PER_S = 8 * 1024
_PIECE_BYTES = 16 * 1024


class FrameKind(IntEnum):
    WELCOME = 1
    MESSAGE = 2
    TAKEN = 3
    ALIVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """`session` is a sender's life, drawn at random, and `number` grows with its messages; TAKEN repeats both."""

    kind: FrameKind
    session: int = 0
    number: int = 0
    payload: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPace:
    """How fast a dead peer is noticed and tried again.

    A connection gets a sign of life every `keep_alive_s`, and is given up after `silence_s` without one; connecting
    and each step of it may take as long. Attempts are at most `max_backoff_s` apart.
    """

    keep_alive_s: float = 2.0
    silence_s: float = 6.0
    max_backoff_s: float = 5.0


def write_frame(connection: socket.socket, frame: Frame, *, silence_s: float) -> None:
    """Sends a frame.

    Raises:
        OSError: the connection broke, or took nothing for `silence_s`.
    """
    connection.settimeout(silence_s)
    payload = memoryview(frame.payload)
    header = HEADER.pack(MAGIC, FRAME_VERSION, frame.kind, len(payload), frame.session, frame.number)
    # A small message leaves in one packet, a large one is not copied.
    connection.sendall(header + payload[:_PIECE_BYTES])
    if len(payload) > _PIECE_BYTES:
        connection.sendall(payload[_PIECE_BYTES:])


def read_frame(connection: socket.socket, *, silence_s: float, on_piece: Callable[[], None] = lambda: None) -> Frame:
    """Returns the next frame; memory grows with what has arrived, not with what was announced.

    Args:
        connection: where it comes from.
        silence_s: how long to wait for the header, and for each piece of the payload.
        on_piece: called for each piece.

    Raises:
        NetworkError: this is no frame of ours, or one that is too long; nothing more was read.
        OSError: the connection broke, is silent or too slow (TimeoutError), or was closed (ConnectionError).
    """
    started_s = time.monotonic()
    header = _read(connection, HEADER.size, started_s + silence_s, silence_s, lambda: None)
    frame, length = _parse(header)
    if not length:
        return frame
    until_s = time.monotonic() + silence_s + length / SLOWEST_BYTES_PER_S
    payload = _read(connection, length, until_s, silence_s, on_piece)
    return Frame(kind=frame.kind, session=frame.session, number=frame.number, payload=payload)


def _parse(header: bytes) -> tuple[Frame, int]:
    magic, version, kind, length, session, number = HEADER.unpack(header)
    if magic != MAGIC or version != FRAME_VERSION:
        raise NetworkError(f"a frame must begin with {MAGIC!r} and version {FRAME_VERSION}, got {header[:6]!r}")
    if kind not in set(FrameKind):
        raise NetworkError(f"a frame must be of kind 1 to {len(FrameKind)}, got {kind}")
    most = MAX_PEER_BYTES if kind == FrameKind.MESSAGE else 0
    if length > most:
        raise NetworkError(f"a {FrameKind(kind).name} frame must have at most {most} bytes, got {length}")
    return Frame(kind=FrameKind(kind), session=session, number=number), length


def _read(
    connection: socket.socket, count: int, until_s: float, silence_s: float, on_piece: Callable[[], None]
) -> bytes:
    pieces: list[bytes] = []
    while count:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it sends too slowly")
        connection.settimeout(min(left_s, silence_s))
        piece = connection.recv(min(count, _PIECE_BYTES))
        if not piece:
            raise ConnectionError("it closed the connection")
        pieces.append(piece)
        count -= len(piece)
        on_piece()
    return b"".join(pieces)
