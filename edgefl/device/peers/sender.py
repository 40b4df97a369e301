"""Peer sender: connects to one neighbour, with retries, and sends queued messages."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from edgefl.core.errors import NetworkError
from edgefl.core.types import derive_rng
from edgefl.device.peers.peer_connection import (
    FrameKind,
    PeerMetrics,
    PeerTimeouts,
    PeerTls,
    TransportFrame,
    read_frame,
    shutdown_socket,
    wrap_tls,
    write_frame,
)
from edgefl.system.retries import Backoff

log = logging.getLogger(__name__)

INITIAL_BACKOFF_S = 0.2

SocketAddress = tuple[str, int]

MAX_QUEUED_REPLIES = 4


class PeerSender:
    """Sender with one thread and at most one connection.

    Args:
        device_id: of this device.
        receiver: required device id of the other end.
        tls: see `PeerTls`.
        timeouts: see `PeerTimeouts`.
        metrics: counts deliveries and failures.

    Attributes:
        refused_s: when the last connection was tried, on the monotonic clock, where the neighbour's machine refused
            it, on which no process listened. Else None.
    """

    def __init__(
        self, device_id: str, receiver: str, *, tls: PeerTls, timeouts: PeerTimeouts, metrics: PeerMetrics
    ) -> None:
        self.receiver = receiver
        self.queue = PeerSendQueue(metrics)
        self._tls, self._timeouts, self._metrics = tls, timeouts, metrics
        self._rng = derive_rng("direct", device_id, receiver)
        self._lock = threading.Lock()
        self._address: SocketAddress | None = None
        self._connection: ssl.SSLSocket | None = None
        self._stopping, self._interrupted = threading.Event(), threading.Event()
        self._is_connected, self._has_made_progress = False, False
        self.refused_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"direct-to-{receiver}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end soon; see `join`."""
        self._stopping.set()
        self._interrupt()

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended, or the timeout."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def is_connected(self) -> bool:
        """Returns whether the neighbour has accepted the connection and was alive a moment ago."""
        return self._is_connected

    def set_address(self, address: SocketAddress | None) -> None:
        """Sets the neighbour's address; None if unknown."""
        if address != self._address:
            self._address, self.refused_s = address, None
            self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            if self._connection is not None:
                shutdown_socket(self._connection)
        self.queue.notify()
        self._interrupted.set()

    def _run(self) -> None:
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=self._timeouts.max_backoff_s, rng=self._rng)
        while not self._stopping.is_set():
            self._interrupted.clear()
            self._has_made_progress = False
            address = self._address
            if address is None:
                self._metrics.log_warning(
                    self.receiver, "no address of %s is known; what it is sent waits", self.receiver
                )
            else:
                self._try_connection(address)
            # A neighbour that accepts and then breaks off at once is no success.
            if self._has_made_progress:
                backoff.reset()
            self._interrupted.wait(backoff.next_s())

    def _try_connection(self, address: SocketAddress) -> None:
        try:
            self._run_connection(address)
        except (OSError, ValueError, MemoryError, NetworkError) as error:  # ValueError: an invalid host name
            if address == self._address and not self._stopping.is_set():
                self._log_failure(address, error)

    def _log_failure(self, address: SocketAddress, error: Exception) -> None:
        # Each text is logged once a minute: an unreachable peer must not hide a rejecting one.
        problem = "will not talk to" if isinstance(error, NetworkError) else "cannot reach"
        self._metrics.log_warning(
            self.receiver, problem + " %s at %s:%d (%s); trying again", self.receiver, *address, error
        )

    def _run_connection(self, address: SocketAddress) -> None:
        """Runs one connection until it breaks."""
        tried_s = time.monotonic()
        try:
            plain_socket = socket.create_connection(address, timeout=self._timeouts.idle_timeout_s)
        except OSError as error:
            is_refused = isinstance(error, ConnectionRefusedError) and address == self._address
            self.refused_s = tried_s if is_refused else None
            raise
        self.refused_s = None
        with wrap_tls(plain_socket, self._tls.client_context, is_server=False) as connection:
            with self._lock:
                self._connection = connection
            try:
                # An interrupt before this line found no connection to shut down.
                if not self._interrupted.is_set():
                    self._handshake(connection)
                    self._is_connected = True
                    log.info("connected to %s at %s:%d", self.receiver, *address)
                    self._send_queued(connection)
            finally:
                self._is_connected = False
                with self._lock:
                    self._connection = None

    def _handshake(self, connection: ssl.SSLSocket) -> None:
        """Authenticates both ends; nothing is sent before."""
        connection.settimeout(self._timeouts.idle_timeout_s)
        connection.do_handshake()
        try:
            self._verify_receiver(connection)
        except NetworkError:
            self._metrics.increment("refused")
            raise
        try:
            frame = read_frame(connection, idle_timeout_s=self._timeouts.idle_timeout_s)
        except ConnectionError as error:
            raise NetworkError(f"{error}; is this device a neighbour there?") from None
        if frame.kind is not FrameKind.WELCOME:
            raise NetworkError(f"it began with a {frame.kind.name} frame, WELCOME was due")

    def _verify_receiver(self, connection: ssl.SSLSocket) -> None:
        peer_id = self._tls.verify_peer(connection)
        if peer_id != self.receiver:
            raise NetworkError(f"this is {peer_id!r}; correct the address in the list of hosts")

    def _send_queued(self, connection: ssl.SSLSocket) -> None:
        while not self._interrupted.is_set():
            message = self.queue.get(self._timeouts.keep_alive_s)
            if message is None:
                self._exchange_frames(connection, TransportFrame(kind=FrameKind.KEEP_ALIVE), FrameKind.KEEP_ALIVE)
            else:
                self._send_message(connection, message)
            self._has_made_progress = True

    def _send_message(self, connection: ssl.SSLSocket, message: QueuedMessage) -> None:
        session, number = self.queue.session_id, message.number
        frame = TransportFrame(kind=FrameKind.MESSAGE, session=session, number=number, payload=message.payload)
        reply = self._exchange_frames(connection, frame, FrameKind.ACK)
        if (reply.session, reply.number) != (session, number):
            raise NetworkError(f"it has taken message {reply.number}, {number} was sent")
        self.queue.acknowledge()
        self._metrics.increment("delivered")

    def _exchange_frames(
        self, connection: ssl.SSLSocket, frame: TransportFrame, expected_kind: FrameKind
    ) -> TransportFrame:
        """Sends a frame and returns the reply; KEEP_ALIVE means that the receiver is still busy."""
        write_frame(connection, frame, idle_timeout_s=self._timeouts.idle_timeout_s)
        while True:
            reply = read_frame(connection, idle_timeout_s=self._timeouts.idle_timeout_s)
            if reply.kind is expected_kind:
                return reply
            if reply.kind is not FrameKind.KEEP_ALIVE:
                raise NetworkError(f"it answered with a {reply.kind.name} frame, {expected_kind.name} was due")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMessage:
    """Message that was sent at least once; repeats have the same number."""

    number: int
    payload: bytes = field(repr=False)
    is_state: bool


class PeerSendQueue:
    """Bounded queue, at most two states and `MAX_QUEUED_REPLIES` + 1 replies; one consumer thread."""

    def __init__(self, metrics: PeerMetrics) -> None:
        self.session_id = secrets.randbits(64)
        self._metrics = metrics
        self._changed = threading.Condition()
        self._replies: deque[bytes] = deque()
        self._state: bytes | None = None
        self._in_flight: QueuedMessage | None = None
        self._last_number = 0
        self._is_notified = False

    def put(self, payload: bytes, *, is_reply: bool) -> bool:
        """Queues a message; returns whether there was room. A state replaces the former one."""
        with self._changed:
            if is_reply and len(self._replies) >= MAX_QUEUED_REPLIES:
                return False
            if is_reply:
                self._replies.append(payload)
            else:
                if self._state is not None:
                    self._metrics.increment("superseded")
                self._state = payload
            self._changed.notify_all()
            return True

    def get(self, timeout_s: float) -> QueuedMessage | None:
        """Returns the next message: the unacknowledged one, or a newer state; None if empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_notified or self._has_next(), timeout_s)
            self._is_notified = False
            if self._in_flight is not None and self._in_flight.is_state and self._state is not None:
                self._metrics.increment("superseded")
                self._in_flight = None
            if self._in_flight is None and self._has_next():
                self._last_number += 1
                self._in_flight = self._pop_next()
            return self._in_flight

    def acknowledge(self) -> None:
        """Removes the message of `get`, which the neighbour has acknowledged."""
        with self._changed:
            self._in_flight = None

    def is_empty(self) -> bool:
        """Returns whether nothing is queued or unacknowledged."""
        with self._changed:
            return not self._has_next()

    def notify(self) -> None:
        """Makes the waiting `get`, or else the next one, return."""
        with self._changed:
            self._is_notified = True
            self._changed.notify_all()

    def _has_next(self) -> bool:
        return self._in_flight is not None or bool(self._replies) or self._state is not None

    def _pop_next(self) -> QueuedMessage:
        if self._replies:
            return QueuedMessage(number=self._last_number, payload=self._replies.popleft(), is_state=False)
        payload, self._state = self._state or b"", None
        return QueuedMessage(number=self._last_number, payload=payload, is_state=True)
