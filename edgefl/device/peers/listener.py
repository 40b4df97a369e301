"""Peer listener: one thread accepts connections, one per connection receives messages.

A connection is unauthenticated until its certificate is verified, within `PeerTimeouts.idle_timeout_s`. At most
`MAX_UNAUTHENTICATED` are kept, and one connection per neighbour: the oldest is closed, so that neither idle strangers
nor stale connections of a dead neighbour block a neighbour.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from edgefl.core.errors import NetworkError, PortInUseError
from edgefl.device.peers.peer_connection import (
    FrameKind,
    OnPeerMessage,
    PeerMetrics,
    PeerTimeouts,
    PeerTls,
    TransportFrame,
    read_frame,
    shutdown_socket,
    wrap_tls,
    write_frame,
)

log = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 8
BACKLOG = 32
IPV4_ANY = "0.0.0.0"  # noqa: S104 neighbours are on other machines; every connection is mutual TLS
# After a failed accept, such as without free file descriptors or threads.
ACCEPT_RETRY_S = 0.5


class _ReceivedSequence:
    """Receive state of one neighbour: the newest accepted message, and the lock for the next one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session, self.number = 0, 0

    def record_if_newer(self, frame: TransportFrame) -> bool:
        """Returns whether a frame is new, and records it then."""
        if frame.session == self.session and frame.number <= self.number:
            return False
        self.session, self.number = frame.session, frame.number
        return True


class PeerListener:
    """Listener that calls `on_message` with neighbours' messages.

    Args:
        tls: see `PeerTls`.
        timeouts: see `PeerTimeouts`.
        metrics: counts received messages and rejected connections.
        on_message: see `OnPeerMessage`.
    """

    def __init__(
        self, *, tls: PeerTls, timeouts: PeerTimeouts, metrics: PeerMetrics, on_message: OnPeerMessage
    ) -> None:
        self._tls, self._timeouts, self._metrics, self._on_message = tls, timeouts, metrics, on_message
        self._lock = threading.Lock()
        self._received: dict[str, _ReceivedSequence] = {}
        self._unauthenticated: list[ssl.SSLSocket] = []
        self._connections: dict[str, ssl.SSLSocket] = {}
        self._threads: set[threading.Thread] = set()
        self._server: socket.socket | None = None
        self._stopping = threading.Event()

    def start(self, host: str, port: int) -> tuple[str, int]:
        """Starts listening and returns the address; port 0 selects a free port.

        Raises:
            PortInUseError: the port is taken.
            NetworkError: this machine has no such address.
        """
        self._server = _create_server_socket(host, port)
        self._start_thread(partial(self._accept, self._server), "direct-accept")
        name = self._server.getsockname()
        return name[0], name[1]

    def stop(self) -> None:
        """Closes everything; `join` waits for the threads."""
        self._stopping.set()
        if self._server is not None:
            shutdown_socket(self._server)
        with self._lock:
            for connection in (*self._unauthenticated, *self._connections.values()):
                shutdown_socket(connection)

    def join(self, timeout_s: float) -> None:
        """Waits until all threads have ended, or the timeout."""
        until_s = time.monotonic() + timeout_s
        # The accepting thread may have started another since.
        while (threads := self._other_threads()) and (remaining_s := until_s - time.monotonic()) > 0:
            threads.pop().join(remaining_s)

    def set_peers(self, peers: Collection[str]) -> None:
        """Sets the allowed senders; connections of all others are closed."""
        with self._lock:
            self._received = {name: self._received.get(name) or _ReceivedSequence() for name in peers}
            for name in self._connections.keys() - self._received.keys():
                shutdown_socket(self._connections.pop(name))

    def _other_threads(self) -> set[threading.Thread]:
        with self._lock:
            return self._threads - {threading.current_thread()}

    def _start_thread(self, run: Callable[[], None], name: str) -> None:
        def body() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=body, name=name, daemon=True)
        # Under the lock, so that `join` never sees a thread that has not started.
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _accept(self, server: socket.socket) -> None:
        with server:
            while not self._stopping.is_set():
                try:
                    plain_socket, address = server.accept()
                    self._start_connection(plain_socket, str(address[0]))
                except (OSError, RuntimeError, MemoryError) as error:  # no more descriptors, threads or memory
                    if not self._stopping.is_set():
                        self._metrics.log_warning("", "cannot accept connections (%s); trying again", error)
                        self._stopping.wait(ACCEPT_RETRY_S)

    def _start_connection(self, plain_socket: socket.socket, host: str) -> None:
        try:
            connection = wrap_tls(plain_socket, self._tls.server_context, is_server=True)
        except OSError:  # it was closed meanwhile
            return
        with self._lock:
            if self._stopping.is_set():
                connection.close()
                return
            if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                shutdown_socket(self._unauthenticated.pop(0))
            self._unauthenticated.append(connection)
        try:
            self._start_thread(partial(self._serve, connection, host), "direct-from-stranger")
        except (RuntimeError, MemoryError):
            self._remove_unauthenticated(connection)
            connection.close()
            raise

    def _serve(self, connection: ssl.SSLSocket, host: str) -> None:
        with connection:
            try:
                peer = self._authenticate(connection)
            except (OSError, NetworkError) as error:
                self._reject("a stranger", host, error)
                return
            finally:
                self._remove_unauthenticated(connection)
            if self._register_connection(peer, connection):
                threading.current_thread().name = f"direct-from-{peer}"
                self._receive_messages(peer, connection)
            else:
                self._reject(peer, host, "it is no neighbour")

    def _remove_unauthenticated(self, connection: ssl.SSLSocket) -> None:
        """Removes a connection from the unauthenticated ones."""
        with self._lock, contextlib.suppress(ValueError):  # it was already evicted
            self._unauthenticated.remove(connection)

    def _authenticate(self, connection: ssl.SSLSocket) -> str:
        connection.settimeout(self._timeouts.idle_timeout_s)
        connection.do_handshake()
        return self._tls.verify_peer(connection)

    def _reject(self, peer: str, host: str, reason: object) -> None:
        if not self._stopping.is_set():
            self._metrics.increment("refused")
            self._metrics.log_warning(peer, "refused a connection of %s from %s: %s", peer, host, reason)

    def _register_connection(self, peer: str, connection: ssl.SSLSocket) -> bool:
        """Returns whether `peer` is a neighbour; closes its earlier connection then."""
        with self._lock:
            if peer not in self._received or self._stopping.is_set():
                return False
            older, self._connections[peer] = self._connections.get(peer), connection
            if older is not None:
                shutdown_socket(older)
        return True

    def _receive_messages(self, peer: str, connection: ssl.SSLSocket) -> None:
        try:
            self._send_frame(connection, TransportFrame(kind=FrameKind.WELCOME))
            while True:
                frame = read_frame(
                    connection,
                    idle_timeout_s=self._timeouts.idle_timeout_s,
                    on_chunk=self._make_keep_alive_sender(connection),
                )
                self._send_frame(connection, self._process_frame(peer, connection, frame))
        except OSError as error:
            log.debug("the connection of %s ended: %s", peer, error)
        except NetworkError as error:
            self._metrics.increment("malformed")
            self._metrics.log_warning(peer, "closed the connection of %s: %s", peer, error)
        finally:
            with self._lock:
                if self._connections.get(peer) is connection:
                    del self._connections[peer]

    def _process_frame(self, peer: str, connection: ssl.SSLSocket, frame: TransportFrame) -> TransportFrame:
        """Processes a frame and returns the reply."""
        if frame.kind is FrameKind.KEEP_ALIVE:
            return frame
        if frame.kind is not FrameKind.MESSAGE:
            raise NetworkError(f"a sender must send MESSAGE or KEEP_ALIVE frames, got {frame.kind.name}")
        self._deliver_once(peer, connection, frame)
        return TransportFrame(kind=FrameKind.ACK, session=frame.session, number=frame.number)

    def _deliver_once(self, peer: str, connection: ssl.SSLSocket, frame: TransportFrame) -> None:
        sequence = self._received.get(peer)
        # After a reconnect, the message of the former connection may still be in processing.
        if sequence is None or not sequence.lock.acquire(timeout=self._timeouts.idle_timeout_s):
            raise TimeoutError("its last message is still being worked on")
        try:
            if self._connections.get(peer) is not connection:
                raise ConnectionError("a newer connection took its place, or it is no neighbour any more")
            if sequence.record_if_newer(frame):
                self._metrics.increment("received")
                self._call_handler(peer, frame.payload)
            else:
                self._metrics.increment("repeated")
        finally:
            sequence.lock.release()

    def _call_handler(self, peer: str, payload: bytes) -> None:
        try:
            self._on_message(peer, payload)
        except Exception:  # the boundary of the transport: a repeat would fail again, the next message may not
            log.exception("a message of %s could not be used", peer)

    def _send_frame(self, connection: ssl.SSLSocket, frame: TransportFrame) -> None:
        write_frame(connection, frame, idle_timeout_s=self._timeouts.idle_timeout_s)

    def _make_keep_alive_sender(self, connection: ssl.SSLSocket) -> Callable[[], None]:
        """Returns a callback that sends KEEP_ALIVE periodically while a long message arrives."""
        sent_s = time.monotonic()

        def on_chunk() -> None:
            nonlocal sent_s
            if time.monotonic() - sent_s >= self._timeouts.keep_alive_s:
                self._send_frame(connection, TransportFrame(kind=FrameKind.KEEP_ALIVE))
                sent_s = time.monotonic()

        return on_chunk


def _create_server_socket(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        is_dual_stack = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_dual_stack)
    except OSError as error:
        if host == "::" and error.errno != errno.EADDRINUSE:
            return _create_server_socket(IPV4_ANY, port)  # this kernel may have no IPv6
        error_class = PortInUseError if error.errno == errno.EADDRINUSE else NetworkError
        raise error_class(f"cannot listen for neighbours at {host or 'any address'}:{port} ({error})") from None
