"""Takes the messages of neighbours: one thread that accepts, and one for each connection.

Whoever connects is a stranger until its certificate has said who it is, and gets `PeerPace.silence_s` for that. At
most `MAX_STRANGERS` are kept, and of the connections of a neighbour one: the oldest goes, so that neither idle
strangers nor what a dead neighbour left behind keep a neighbour out.
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

from edgefl.device.neighbours.carrier import OnPeerMessage
from edgefl.device.neighbours.peer_frames import Frame, FrameKind, PeerPace, read_frame, write_frame
from edgefl.device.neighbours.peer_tls import PeerTls, shut, wrap
from edgefl.device.neighbours.peer_watch import PeerWatch
from edgefl.errors import NetworkError, PortInUseError

log = logging.getLogger(__name__)

MAX_STRANGERS = 8
BACKLOG = 32
IPV4_ALONE = "0.0.0.0"  # noqa: S104 neighbours are on other machines; every connection is mutual TLS
# After a failed accept, such as for want of file descriptors or threads.
ACCEPT_PAUSE_S = 0.5


class _Inbox:
    """What one neighbour has sent: the newest message that was taken, and the lock under which the next one is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session, self.number = 0, 0

    def is_news(self, frame: Frame) -> bool:
        """Says whether this was not taken before, and remembers it then."""
        if frame.session == self.session and frame.number <= self.number:
            return False
        self.session, self.number = frame.session, frame.number
        return True


class PeerListener:
    """Calls `on_message` with what neighbours send.

    Args:
        tls: see `PeerTls`.
        pace: see `PeerPace`.
        watch: told of what was received and who was refused.
        on_message: see `OnPeerMessage`.
    """

    def __init__(self, *, tls: PeerTls, pace: PeerPace, watch: PeerWatch, on_message: OnPeerMessage) -> None:
        self._tls, self._pace, self._watch, self._on_message = tls, pace, watch, on_message
        self._lock = threading.Lock()
        self._inboxes: dict[str, _Inbox] = {}
        self._strangers: list[ssl.SSLSocket] = []
        self._current: dict[str, ssl.SSLSocket] = {}
        self._threads: set[threading.Thread] = set()
        self._server: socket.socket | None = None
        self._stopping = threading.Event()

    def start(self, host: str, port: int) -> tuple[str, int]:
        """Listens, and returns the address: of port 0, the one that was free.

        Raises:
            PortInUseError: somebody else listens there.
            NetworkError: this machine has no such address.
        """
        self._server = _server(host, port)
        self._spawn(partial(self._accept, self._server), "direct-accept")
        name = self._server.getsockname()
        return name[0], name[1]

    def stop(self) -> None:
        """Closes everything; `join` waits for the threads."""
        self._stopping.set()
        if self._server is not None:
            shut(self._server)
        with self._lock:
            for connection in (*self._strangers, *self._current.values()):
                shut(connection)

    def join(self, timeout_s: float) -> None:
        """Waits until all threads have ended, or so long."""
        until_s = time.monotonic() + timeout_s
        # The one that accepts may have started another since.
        while (threads := self._others()) and (left_s := until_s - time.monotonic()) > 0:
            threads.pop().join(left_s)

    def set_neighbours(self, neighbours: Collection[str]) -> None:
        """Changes who may send; connections of all others are closed."""
        with self._lock:
            self._inboxes = {name: self._inboxes.get(name) or _Inbox() for name in neighbours}
            for name in self._current.keys() - self._inboxes.keys():
                shut(self._current.pop(name))

    def _others(self) -> set[threading.Thread]:
        with self._lock:
            return self._threads - {threading.current_thread()}

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        def body() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=body, name=name, daemon=True)
        # Under the lock, so that nobody waits for a thread that has not started.
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _accept(self, server: socket.socket) -> None:
        with server:
            while not self._stopping.is_set():
                try:
                    plain, address = server.accept()
                    self._begin(plain, str(address[0]))
                except (OSError, RuntimeError, MemoryError) as error:  # no more descriptors, threads or memory
                    if not self._stopping.is_set():
                        self._watch.warn("", "cannot accept connections (%s); trying again", error)
                        self._stopping.wait(ACCEPT_PAUSE_S)

    def _begin(self, plain: socket.socket, host: str) -> None:
        try:
            connection = wrap(plain, self._tls.listening, is_listener=True)
        except OSError:  # it has gone again
            return
        with self._lock:
            if self._stopping.is_set():
                connection.close()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                shut(self._strangers.pop(0))
            self._strangers.append(connection)
        try:
            self._spawn(partial(self._serve, connection, host), "direct-from-stranger")
        except (RuntimeError, MemoryError):
            self._part(connection)
            connection.close()
            raise

    def _serve(self, connection: ssl.SSLSocket, host: str) -> None:
        with connection:
            try:
                peer = self._identify(connection)
            except (OSError, NetworkError) as error:
                self._refuse("a stranger", host, error)
                return
            finally:
                self._part(connection)
            if self._enter(peer, connection):
                threading.current_thread().name = f"direct-from-{peer}"
                self._take_all(peer, connection)
            else:
                self._refuse(peer, host, "it is no neighbour")

    def _part(self, connection: ssl.SSLSocket) -> None:
        """Counts a connection among the strangers no more."""
        with self._lock, contextlib.suppress(ValueError):  # it has gone already to make room
            self._strangers.remove(connection)

    def _identify(self, connection: ssl.SSLSocket) -> str:
        connection.settimeout(self._pace.silence_s)
        connection.do_handshake()
        return self._tls.peer(connection)

    def _refuse(self, peer: str, host: str, why: object) -> None:
        if not self._stopping.is_set():
            self._watch.add("refused")
            self._watch.warn(peer, "refused a connection of %s from %s: %s", peer, host, why)

    def _enter(self, peer: str, connection: ssl.SSLSocket) -> bool:
        """Returns whether this is a neighbour; its connection before this one is over then."""
        with self._lock:
            if peer not in self._inboxes or self._stopping.is_set():
                return False
            older, self._current[peer] = self._current.get(peer), connection
            if older is not None:
                shut(older)
        return True

    def _take_all(self, peer: str, connection: ssl.SSLSocket) -> None:
        try:
            self._answer(connection, Frame(kind=FrameKind.WELCOME))
            while True:
                frame = read_frame(connection, silence_s=self._pace.silence_s, on_piece=self._reassuring(connection))
                self._answer(connection, self._taken(peer, connection, frame))
        except OSError as error:
            log.debug("the connection of %s ended: %s", peer, error)
        except NetworkError as error:
            self._watch.add("malformed")
            self._watch.warn(peer, "closed the connection of %s: %s", peer, error)
        finally:
            with self._lock:
                if self._current.get(peer) is connection:
                    del self._current[peer]

    def _taken(self, peer: str, connection: ssl.SSLSocket, frame: Frame) -> Frame:
        """Returns the answer to a frame, after what it brings was taken."""
        if frame.kind is FrameKind.ALIVE:
            return frame
        if frame.kind is not FrameKind.MESSAGE:
            raise NetworkError(f"a sender must send MESSAGE or ALIVE frames, got {frame.kind.name}")
        self._hand_over(peer, connection, frame)
        return Frame(kind=FrameKind.TAKEN, session=frame.session, number=frame.number)

    def _hand_over(self, peer: str, connection: ssl.SSLSocket, frame: Frame) -> None:
        inbox = self._inboxes.get(peer)
        # A neighbour that has given up a connection and made another finds what it sent there still in our hands.
        if inbox is None or not inbox.lock.acquire(timeout=self._pace.silence_s):
            raise TimeoutError("its last message is still being worked on")
        try:
            if self._current.get(peer) is not connection:
                raise ConnectionError("a newer connection took its place, or it is no neighbour any more")
            if inbox.is_news(frame):
                self._watch.add("received")
                self._call(peer, frame.payload)
            else:
                self._watch.add("repeated")
        finally:
            inbox.lock.release()

    def _call(self, peer: str, payload: bytes) -> None:
        try:
            self._on_message(peer, payload)
        except Exception:
            # The boundary of the carrier: the same message again would fail again, the next one may not.
            log.exception("a message of %s could not be used", peer)

    def _answer(self, connection: ssl.SSLSocket, frame: Frame) -> None:
        write_frame(connection, frame, silence_s=self._pace.silence_s)

    def _reassuring(self, connection: ssl.SSLSocket) -> Callable[[], None]:
        """Returns what says ALIVE now and then while a long message arrives."""
        told_s = time.monotonic()

        def on_piece() -> None:
            nonlocal told_s
            if time.monotonic() - told_s >= self._pace.keep_alive_s:
                self._answer(connection, Frame(kind=FrameKind.ALIVE))
                told_s = time.monotonic()

        return on_piece


def _server(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        if host == "::" and error.errno != errno.EADDRINUSE:
            return _server(IPV4_ALONE, port)  # this kernel may have no IPv6
        kind = PortInUseError if error.errno == errno.EADDRINUSE else NetworkError
        raise kind(f"cannot listen for neighbours at {host or 'any address'}:{port} ({error})") from None
