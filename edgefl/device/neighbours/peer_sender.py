"""Brings messages to one neighbour: dials it, over and over while it is away, and sends what waits."""

from __future__ import annotations

import logging
import socket
import ssl
import threading

from edgefl.device.neighbours.peer_frames import Frame, FrameKind, PeerPace, read_frame, write_frame
from edgefl.device.neighbours.peer_queue import Letter, PeerQueue
from edgefl.device.neighbours.peer_tls import PeerTls, shut, wrap
from edgefl.device.neighbours.peer_watch import PeerWatch
from edgefl.errors import NetworkError
from edgefl.types import derived_rng

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.1

Address = tuple[str, int]


class PeerSender:
    """One thread and at most one connection.

    Args:
        device_id: who sends.
        receiver: the device id that the other end must have.
        tls: see `PeerTls`.
        pace: see `PeerPace`.
        watch: told of what was delivered and what went wrong.
    """

    def __init__(self, device_id: str, receiver: str, *, tls: PeerTls, pace: PeerPace, watch: PeerWatch) -> None:
        self.receiver = receiver
        self.queue = PeerQueue(watch)
        self._tls, self._pace, self._watch = tls, pace, watch
        self._rng = derived_rng("direct", device_id, receiver)
        self._lock = threading.Lock()
        self._address: Address | None = None
        self._connection: ssl.SSLSocket | None = None
        self._stopping, self._nudged = threading.Event(), threading.Event()
        self._is_connected, self._was_useful = False, False
        self._thread = threading.Thread(target=self._run, name=f"direct-to-{receiver}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Makes the thread end soon; `join` waits for that."""
        self._stopping.set()
        self._interrupt()

    def join(self, timeout_s: float) -> None:
        """Waits until the thread has ended, or so long."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, timeout_s))

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def is_connected(self) -> bool:
        """Says whether the neighbour has let us in and was there a moment ago."""
        return self._is_connected

    def set_address(self, address: Address | None) -> None:
        """Changes where the neighbour is; None: nobody knows."""
        if address != self._address:
            self._address = address
            self._interrupt()

    def _interrupt(self) -> None:
        with self._lock:
            if self._connection is not None:
                shut(self._connection)
        self.queue.wake()
        self._nudged.set()

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            self._nudged.clear()
            self._was_useful = False
            address = self._address
            if address is None:
                self._watch.warn(self.receiver, "no address of %s is known; what it is sent waits", self.receiver)
            else:
                self._attempt(address)
            # A neighbour that lets us in and then breaks off at once is no success.
            backoff_s = FIRST_BACKOFF_S if self._was_useful else min(2 * backoff_s, self._pace.max_backoff_s)
            self._nudged.wait(backoff_s * self._rng.uniform(0.5, 1.0))

    def _attempt(self, address: Address) -> None:
        try:
            self._hold_connection(address)
        except (OSError, ValueError, MemoryError, NetworkError) as error:  # ValueError: a name no host can have
            if address == self._address and not self._stopping.is_set():
                self._complain(address, error)

    def _complain(self, address: Address, error: Exception) -> None:
        # Each text is told once a minute: that nobody answers must not hide who does.
        what = "will not talk to" if isinstance(error, NetworkError) else "cannot reach"
        self._watch.warn(self.receiver, what + " %s at %s:%d (%s); trying again", self.receiver, *address, error)

    def _hold_connection(self, address: Address) -> None:
        """Sends over one connection until it breaks."""
        plain = socket.create_connection(address, timeout=self._pace.silence_s)
        with wrap(plain, self._tls.dialling, is_listener=False) as connection:
            with self._lock:
                self._connection = connection
            try:
                # What has interrupted us before this line found no connection to shut.
                if not self._nudged.is_set():
                    self._meet(connection)
                    self._is_connected = True
                    log.info("connected to %s at %s:%d", self.receiver, *address)
                    self._deliver(connection)
            finally:
                self._is_connected = False
                with self._lock:
                    self._connection = None

    def _meet(self, connection: ssl.SSLSocket) -> None:
        """Returns when both ends know each other; until then nothing of ours is sent."""
        connection.settimeout(self._pace.silence_s)
        connection.do_handshake()
        try:
            self._check_name(connection)
        except NetworkError:
            self._watch.add("refused")
            raise
        try:
            frame = read_frame(connection, silence_s=self._pace.silence_s)
        except ConnectionError as error:
            raise NetworkError(f"{error}; is this device a neighbour there?") from None
        if frame.kind is not FrameKind.WELCOME:
            raise NetworkError(f"it began with a {frame.kind.name} frame, WELCOME was due")

    def _check_name(self, connection: ssl.SSLSocket) -> None:
        found = self._tls.peer(connection)
        if found != self.receiver:
            raise NetworkError(f"this is {found!r}; correct the address in the list of hosts")

    def _deliver(self, connection: ssl.SSLSocket) -> None:
        while not self._nudged.is_set():
            letter = self.queue.next(self._pace.keep_alive_s)
            if letter is None:
                self._ask(connection, Frame(kind=FrameKind.ALIVE), FrameKind.ALIVE)
            else:
                self._send(connection, letter)
            self._was_useful = True

    def _send(self, connection: ssl.SSLSocket, letter: Letter) -> None:
        session, number = self.queue.session, letter.number
        frame = Frame(kind=FrameKind.MESSAGE, session=session, number=number, payload=letter.payload)
        answer = self._ask(connection, frame, FrameKind.TAKEN)
        if (answer.session, answer.number) != (session, number):
            raise NetworkError(f"it has taken message {answer.number}, {number} was sent")
        self.queue.taken()
        self._watch.add("delivered")

    def _ask(self, connection: ssl.SSLSocket, frame: Frame, due: FrameKind) -> Frame:
        """Sends a frame and returns the answer; a receiver that says ALIVE is still at it."""
        write_frame(connection, frame, silence_s=self._pace.silence_s)
        while True:
            answer = read_frame(connection, silence_s=self._pace.silence_s)
            if answer.kind is due:
                return answer
            if answer.kind is not FrameKind.ALIVE:
                raise NetworkError(f"it answered with a {answer.kind.name} frame, {due.name} was due")
