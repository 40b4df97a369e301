"""The device's end of MQTT: says that it is there, hears the bell and commands, and comes back for ever.

Every connection is a session of its own: a new client object, a new session number, and a will that carries it. So a
late will can be told from the present, and of what was queued for an old connection only the newest values for other
devices are sent on a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.device.complaints import Complaints
from edgefl.device.incoming import Incoming, LinkCallbacks
from edgefl.device.mqtt_session import CONNECT_TIMEOUT_S, LinkIdentity, LinkTls, Session, link_context, new_session
from edgefl.device.peers import Peers
from edgefl.errors import NotJoinedError, StoreError
from edgefl.protocol import (
    Capabilities,
    CommandAnswer,
    Heartbeat,
    PresenceState,
    ProgressReport,
    Status,
    Topic,
)
from edgefl.types import derived_rng

__all__ = ["Link", "LinkCallbacks", "LinkIdentity", "LinkPace", "LinkTls"]

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 10
FIRST_BACKOFF_S = 0.5
# Below the time after which silence means gone: when the broker is back, every device is back in time.
MAX_BACKOFF_S = 8.0
PROGRESS_INTERVAL_S = 0.1
GOODBYE_TIMEOUT_S = 2.0
STABLE_AFTER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPace:
    """The broker sends our will after 1.5 times `keep_alive_s` of silence; attempts are at most the other apart."""

    keep_alive_s: int = KEEP_ALIVE_S
    max_backoff_s: float = MAX_BACKOFF_S


_USUAL_PACE = LinkPace()


class Link:
    """A connection to the broker that is made anew whenever it breaks.

    Args:
        addresses: hosts and ports of the broker, tried in turn; the one that worked last comes first.
        tls: what this device proves itself with and whom it believes.
        identity: see `LinkIdentity`.
        callbacks: see `LinkCallbacks`.
        next_session_no: returns a number that grows with every call, over restarts too.
        pace: how fast it notices and tries again.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        tls: LinkTls,
        identity: LinkIdentity,
        callbacks: LinkCallbacks,
        *,
        next_session_no: Callable[[], int],
        pace: LinkPace = _USUAL_PACE,
    ) -> None:
        if not addresses:
            raise NotJoinedError("the device knows no address of its broker; join again")
        self._addresses = deque(addresses)
        self._context = link_context(tls)
        self._identity = identity
        self._next_session_no = next_session_no
        self._pace = pace
        self._rng = derived_rng("link", identity.device_id, identity.boot_id)
        self._state = PresenceState.ONLINE
        self._capabilities: Capabilities | None = None
        self._peers = Peers()
        self._complaints = Complaints(log)
        self._incoming = Incoming(
            callbacks,
            self._complaints,
            listens_to_peers=lambda: self._peers.is_listening,
            on_offline=self._contradict,
        )
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._unused_session_no: int | None = None
        self._last_progress_s = -1.0
        self._stopping = threading.Event()
        self._is_connected = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread that connects, and connects again, until `stop`; returns at once."""
        self._thread = threading.Thread(target=self._run, name="mqtt-link", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Says goodbye, so that nobody waits for this device, and ends the thread."""
        self._stopping.set()
        self._state = PresenceState.OFFLINE
        session = self._current()
        if session is not None:
            self._say_goodbye(session)
        if self._thread is not None:
            # No longer than a connection attempt: a broker that never answers it ends the thread later.
            self._thread.join(CONNECT_TIMEOUT_S + GOODBYE_TIMEOUT_S)
            self._thread = None

    def renew(self, tls: LinkTls) -> None:
        """Shows another certificate, and connects anew for it; to the fleet the device stays there."""
        self._context = link_context(tls)
        session = self._current()
        if session is not None:
            session.client.disconnect()  # no will, and no goodbye either

    def is_connected(self) -> bool:
        return self._is_connected.is_set()

    def wait_connected(self, timeout_s: float) -> bool:
        """Returns whether the link is up, after waiting for it no longer than that."""
        return self._is_connected.wait(timeout_s)

    @property
    def session_no(self) -> int:
        """The number of the present session, 0 while there is none."""
        session = self._current()
        return session.number if session else 0

    def set_draining(self, *, draining: bool) -> None:
        """Tells the fleet whether this device finishes what it has and takes no more."""
        self._state = PresenceState.DRAINING if draining else PresenceState.ONLINE
        session = self._current()
        if session is not None:
            session.publish_status(self._state)

    def publish_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Sends a heartbeat under the present session's number; returns False, and forgets it, while down."""
        session = self._current()
        if session is None:
            return False
        session.publish(
            Topic.HEARTBEAT, replace(heartbeat, session_no=session.number, boot_id=self._identity.boot_id).dump()
        )
        return True

    def publish_capabilities(self, capabilities: Capabilities) -> None:
        """Sends what the board can do, now and after every connect: a broker may forget what it retained."""
        self._capabilities = capabilities
        session = self._current()
        if session is not None:
            session.publish(Topic.CAPABILITIES, capabilities.dump(), qos=1, retain=True)

    def publish_progress(self, report: ProgressReport) -> bool:
        """Sends a progress report; returns False for those that are dropped: over ten a second, or while down."""
        session, now_s = self._current(), time.monotonic()
        with self._lock:
            if session is None or now_s - self._last_progress_s < PROGRESS_INTERVAL_S:
                return False
            self._last_progress_s = now_s
        session.publish(Topic.PROGRESS, report.dump())
        return True

    def publish_answer(self, answer: CommandAnswer) -> bool:
        """Sends what the coordinator has asked for; returns False, and forgets it, while down."""
        session = self._current()
        if session is None:
            return False
        session.publish(Topic.ANSWER, answer.dump(), qos=1)
        return True

    def publish_peer(self, receiver: str, payload: bytes, *, retain: bool = True) -> bool:
        """Sends the newest value for another device; does not block.

        A value that still waits when a newer one for the same receiver comes is never sent. A retained one is kept
        here too, and sent again after every connect: a broker may forget what it retained.

        Returns:
            False while the link is down: a retained value then leaves at the next connect, another one never.

        Raises:
            NetworkError: the value is empty or has more than `MAX_PEER_BYTES` bytes, or all retained values together
                would have more than `MAX_RETAINED_PEER_BYTES`.
            UsageError: the receiver's name is none.
        """
        return self._peers.publish(receiver, payload, retain=retain)

    def has_sent_to_peers(self) -> bool:
        """Says whether the broker has all that was published for other devices; true while the link is down."""
        return self._peers.is_clear()

    def listen_to_peers(self) -> None:
        """Hands what other devices have for this one to `on_peer`, from now on and after every connect."""
        self._peers.listen()

    def forget_peers(self, receivers: Iterable[str]) -> None:
        """Clears what the broker retains of this device for these receivers, and hears no other device any more.

        While the link is down that waits for the next connect.
        """
        self._peers.forget(receivers)

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            was_accepted = self._connect_to_any()
            # A session that broke at once is no success: two boards with one name would push each other off for ever.
            is_stable = was_accepted and time.monotonic() - started_s > STABLE_AFTER_S
            backoff_s = FIRST_BACKOFF_S if is_stable else min(2 * backoff_s, self._pace.max_backoff_s)
            # A whole fleet loses its broker at once; the jitter keeps it from coming back at once.
            self._stopping.wait(backoff_s * self._rng.uniform(0.5, 1.0))

    def _connect_to_any(self) -> bool:
        """Tries every address once; returns whether one of them held a session."""
        for _ in range(len(self._addresses)):
            if self._connect_once():
                return True
            if self._stopping.is_set():
                break
            self._addresses.rotate(-1)
        return False

    def _connect_once(self) -> bool:
        """Holds one session until it breaks; returns whether there was one."""
        try:
            session = self._next_session()
        except (StoreError, OSError) as error:  # a card that is full now may have room later
            self._complaints.add("session", "cannot count a new session (%s); trying again", error)
            return False
        try:
            self._hold(session)
        finally:
            self._ended(session)
            session.close()
        return session.was_accepted

    def _hold(self, session: Session) -> None:
        """Connects, and returns when the session is over, or there is none."""
        host, port = self._addresses[0]
        try:
            session.client.connect(host, port, keepalive=self._pace.keep_alive_s)
        except (OSError, ValueError) as error:  # ValueError: a host name that cannot be one
            self._unused_session_no = session.number
            self._complaints.add(f"{host}:{port}", "cannot reach the broker at %s:%d (%s)", host, port, error)
            return
        try:
            if not self._stopping.is_set():
                session.run(self._peers.send_due)
        except OSError as error:
            self._complaints.add(f"{host}:{port}", "lost the broker at %s:%d (%s)", host, port, error)

    def _next_session(self) -> Session:
        unused, self._unused_session_no = self._unused_session_no, None
        number = self._next_session_no() if unused is None else unused
        session = new_session(self._identity, number, self._context)
        session.client.on_connect = self._connected
        session.client.on_subscribe = self._subscribed
        session.client.on_disconnect = self._disconnected
        self._incoming.attach(session)
        return session

    def _connected(self, client: mqtt.Client, session: Session, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if reason.is_failure:
            self._complaints.add("refused", "the broker refuses this device: %s", reason)
            client.disconnect()
            return
        session.was_accepted = True
        with self._lock:
            self._session = session
        session.publish_status(self._state)
        if self._capabilities is not None:
            session.publish(Topic.CAPABILITIES, self._capabilities.dump(), qos=1, retain=True)
        # Our own status too: see `_contradict`.
        kinds = ((Topic.BELL, 0), (Topic.COMMAND, 1), (Topic.STATUS, 1))
        client.subscribe([(session.topic(kind), qos) for kind, qos in kinds])
        self._peers.attach(session)
        if self._stopping.is_set():
            self._say_goodbye(session)

    def _subscribed(
        self, _client: Any, session: Session, _mid: int, reasons: Sequence[ReasonCode], _props: Any
    ) -> None:
        """Counts as connected from here: a bell before this would not be heard, one after it is."""
        is_refused = any(reason.is_failure for reason in reasons)
        if self._is_connected.is_set():  # so it was a later subscription
            if is_refused:
                self._complaints.add("lonely", "the broker lets this device hear no other device; check its rules")
            return
        if is_refused:
            self._complaints.add("deaf", "the broker lets this device hear no bell or no command; check its rules")
        self._is_connected.set()
        log.info("connected to the broker, session %d", session.number)
        self._incoming.connection(is_up=True)

    def _disconnected(self, _client: Any, session: Session, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if session.was_accepted and reason.is_failure:
            self._complaints.add("lost", "lost the broker (%s); connecting again", reason)
        self._ended(session)

    def _ended(self, session: Session) -> None:
        self._peers.detach(session)
        with self._lock:
            was_current = self._session is session
            if was_current:
                self._session = None
        if was_current and self._is_connected.is_set():
            self._is_connected.clear()
            self._incoming.connection(is_up=False)

    def _contradict(self, session: Session, status: Status) -> None:
        """Contradicts an `offline` that we did not send: a late will of an earlier session."""
        if not self._stopping.is_set():
            log.info("somebody says that this device is offline (session %d); it is not", status.session_no)
            session.publish_status(self._state)

    def _say_goodbye(self, session: Session) -> None:
        sent = session.publish_status(self._state)
        # From paho's own thread nothing can be waited for; the packet leaves before DISCONNECT all the same.
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError, ValueError):  # the connection broke just now
                sent.wait_for_publish(GOODBYE_TIMEOUT_S)
        session.client.disconnect()

    def _current(self) -> Session | None:
        with self._lock:
            return self._session
