"""MQTT connection of a device: presence, heartbeats, wake-ups and commands, with endless reconnects.

Every connection is a session of its own: a new client object, a new session number, and a will that carries it. So a
late will can be distinguished from the present session, and of the queue of an old connection only the newest values
for other devices are sent on a new one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.reasoncodes import ReasonCode

from edgefl.core.errors import NotJoinedError, StoreError
from edgefl.core.protocol import (
    HEARTBEAT_JITTER,
    HEARTBEAT_S,
    Capabilities,
    CommandReply,
    Heartbeat,
    PresenceState,
    ProgressReport,
    StatusMessage,
    Topic,
)
from edgefl.core.types import Json, derive_rng
from edgefl.device.mqtt.peer_publisher import PeerPublisher
from edgefl.device.mqtt.session import (
    CONNECT_TIMEOUT_S,
    MessageDispatcher,
    MqttCallbacks,
    MqttIdentity,
    MqttSession,
    create_session,
    create_tls_context,
)
from edgefl.system.atomic_files import TlsFiles
from edgefl.system.retries import Backoff, RateLimitedLog

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 10
INITIAL_BACKOFF_S = 0.5
# Below the presence timeout: after a broker restart, every device reconnects in time.
MAX_BACKOFF_S = 8.0
# Below the time from a session's last will to "gone" (one heartbeat): a clone that takes over one session after the
# other, until it is rejected, does not cost the device its work.
MAX_TAKEOVER_BACKOFF_S = 3.0
PROGRESS_INTERVAL_S = 0.1
OFFLINE_PUBLISH_TIMEOUT_S = 2.0
STABLE_AFTER_S = 5.0

STOP_TIMEOUT_S = 2.0


class MqttConnection:
    """Connection to the broker that reconnects whenever it breaks.

    Args:
        addresses: hosts and ports of the broker, tried in turn; the one that worked last comes first.
        tls_files: this device's certificate and key, and the trusted CA.
        identity: see `MqttIdentity`.
        callbacks: see `MqttCallbacks`.
        next_session_no: returns a number that grows with every call, over restarts too.
        keep_alive_s: the broker sends our will after 1.5 times this much silence.
        max_backoff_s: between two attempts.

    Attributes:
        peers: values for other devices, and the subscription to theirs.
    """

    def __init__(  # noqa: PLR0913 a keyword for each part
        self,
        addresses: Sequence[tuple[str, int]],
        tls_files: TlsFiles,
        identity: MqttIdentity,
        callbacks: MqttCallbacks,
        *,
        next_session_no: Callable[[], int],
        keep_alive_s: int = KEEP_ALIVE_S,
        max_backoff_s: float = MAX_BACKOFF_S,
    ) -> None:
        if not addresses:
            raise NotJoinedError("the device knows no address of its broker; join again")
        self._addresses = self._tried_addresses = deque(addresses)
        self._tls_context = create_tls_context(tls_files)
        self._identity = identity
        self._next_session_no = next_session_no
        self._keep_alive_s, self._max_backoff_s = keep_alive_s, max_backoff_s
        self._rng = derive_rng("link", identity.device_id, identity.boot_id)
        self._state = PresenceState.ONLINE
        self._capabilities: Capabilities | None = None
        self.peers = PeerPublisher()
        self._rate_limited_log = RateLimitedLog(log)
        self._dispatcher = MessageDispatcher(
            callbacks,
            self._rate_limited_log,
            is_subscribed_to_peers=lambda: self.peers.is_subscribed,
            on_offline=self._republish_status,
        )
        self._lock = threading.Lock()
        self._session: MqttSession | None = None
        self._unused_session_no: int | None = None
        self._last_progress_s = -1.0
        self._stopping, self._interrupted = threading.Event(), threading.Event()
        self._is_connected = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread that keeps connected until `stop`; returns at once."""
        self._thread = threading.Thread(target=self._run, name="mqtt-link", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publishes offline, disconnects and ends the thread."""
        self._stopping.set()
        self._interrupted.set()
        self._state = PresenceState.OFFLINE
        session = self._get_session()
        if session is not None:
            self._publish_offline(session)
        if self._thread is not None:
            # No longer than a connection attempt: with a broker that never answers it, the thread ends later.
            self._thread.join(CONNECT_TIMEOUT_S + OFFLINE_PUBLISH_TIMEOUT_S)
            self._thread = None

    def renew(self, tls_files: TlsFiles) -> None:
        """Reconnects with another certificate, without going offline for the fleet."""
        self._tls_context = create_tls_context(tls_files)
        session = self._get_session()
        if session is not None:
            session.client.disconnect()  # neither the will nor `offline` is sent

    def switch_broker(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Reconnects to the broker at other addresses, and goes offline at the former one."""
        self._addresses = deque(addresses)
        session = self._get_session()
        if session is not None:
            self._publish_offline(session)
        self._interrupted.set()

    def is_connected(self) -> bool:
        return self._is_connected.is_set()

    def wait_connected(self, timeout_s: float) -> bool:
        """Returns whether it is connected, after waiting for at most `timeout_s`."""
        return self._is_connected.wait(timeout_s)

    @property
    def session_no(self) -> int:
        """Returns the number of the present session, 0 while there is none."""
        session = self._get_session()
        return session.number if session else 0

    def set_draining(self, *, draining: bool) -> None:
        """Publishes whether this device finishes its work and accepts no more."""
        self._state = PresenceState.DRAINING if draining else PresenceState.ONLINE
        session = self._get_session()
        if session is not None:
            session.publish_status(self._state)

    def publish_heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Sends a heartbeat with the present session's number; dropped (returns False) while down."""
        session = self._get_session()
        if session is None:
            return False
        session.publish(
            Topic.HEARTBEAT, replace(heartbeat, session_no=session.number, boot_id=self._identity.boot_id).dump()
        )
        return True

    def publish_capabilities(self, capabilities: Capabilities) -> None:
        """Publishes capabilities now and after every connect, since a broker may lose retained ones."""
        self._capabilities = capabilities
        self._publish(Topic.CAPABILITIES, capabilities.dump(), qos=1, retain=True)

    def publish_progress(self, report: ProgressReport) -> bool:
        """Sends a progress report; dropped (returns False) above ten a second, or while down."""
        now_s = time.monotonic()
        with self._lock:
            if self._session is None or now_s - self._last_progress_s < PROGRESS_INTERVAL_S:
                return False
            self._last_progress_s = now_s
        return self._publish(Topic.PROGRESS, report.dump())

    def publish_reply(self, reply: CommandReply) -> bool:
        """Sends a reply to a coordinator's request; dropped (returns False) while down."""
        return self._publish(Topic.ANSWER, reply.dump(), qos=1)

    def _publish(self, kind: Topic, payload: bytes, *, qos: int = 0, retain: bool = False) -> bool:
        """Returns whether there is a session, in which it was published."""
        session = self._get_session()
        if session is not None:
            session.publish(kind, payload, qos=qos, retain=retain)
        return session is not None

    def _run(self) -> None:
        backoff = Backoff(initial_s=INITIAL_BACKOFF_S, max_s=self._max_backoff_s, rng=self._rng)
        while not self._stopping.is_set():
            self._interrupted.clear()
            started_s = time.monotonic()
            was_accepted = self._connect_to_any()
            # A session that broke at once is no success: two boards with one name would disconnect each other for
            # ever.
            if was_accepted and time.monotonic() - started_s > STABLE_AFTER_S:
                backoff.reset()
            # A whole fleet loses its broker at once; the jitter keeps it from coming back at once.
            if not self._stopping.is_set():
                pause_s = backoff.next_s()
                self._interrupted.wait(min(pause_s, MAX_TAKEOVER_BACKOFF_S) if was_accepted else pause_s)

    def _connect_to_any(self) -> bool:
        """Tries every address once; returns whether one yielded a session."""
        addresses = self._tried_addresses = self._addresses
        for _ in range(len(addresses)):
            if self._connect_once(*addresses[0]):
                return True
            if self._is_outdated():
                break
            addresses.rotate(-1)
        return False

    def _connect_once(self, host: str, port: int) -> bool:
        """Runs one session until it breaks; returns whether it was accepted."""
        try:
            session = self._make_session()
        except (StoreError, OSError) as error:  # a card that is full now may have room later
            self._rate_limited_log.warning("session", "cannot count a new session (%s); trying again", error)
            return False
        try:
            self._run_session(session, host, port)
        finally:
            self._on_session_end(session)
            session.close()
        return session.is_accepted

    def _run_session(self, session: MqttSession, host: str, port: int) -> None:
        """Connects, and runs the session until it ends."""
        try:
            session.client.connect(host, port, keepalive=self._keep_alive_s)
        except (OSError, ValueError) as error:  # ValueError: a host name that cannot be one
            self._unused_session_no = session.number
            self._rate_limited_log.warning(
                f"{host}:{port}", "cannot reach the broker at %s:%d (%s)", host, port, error
            )
            return
        try:
            if not self._is_outdated():
                session.run(self.peers.send_due)
        except OSError as error:
            self._rate_limited_log.warning(f"{host}:{port}", "lost the broker at %s:%d (%s)", host, port, error)

    def _make_session(self) -> MqttSession:
        unused, self._unused_session_no = self._unused_session_no, None
        number = self._next_session_no() if unused is None else unused
        session = create_session(self._identity, number, self._tls_context)
        session.client.on_connect = self._on_connect
        session.client.on_subscribe = self._on_subscribe
        session.client.on_disconnect = self._on_disconnect
        self._dispatcher.attach(session)
        return session

    def _on_connect(
        self, client: mqtt.Client, session: MqttSession, _flags: Any, reason: ReasonCode, _props: Any
    ) -> None:
        if reason.is_failure:
            self._rate_limited_log.warning("refused", "the broker refuses this device: %s", reason)
            client.disconnect()
            return
        session.is_accepted = True
        with self._lock:
            self._session = session
        session.publish_status(self._state)
        if self._capabilities is not None:
            session.publish(Topic.CAPABILITIES, self._capabilities.dump(), qos=1, retain=True)
        # Our own status too: see `_republish_status`.
        kinds = ((Topic.WAKEUP, 0), (Topic.COMMAND, 1), (Topic.STATUS, 1))
        client.subscribe([(session.topic(kind), qos) for kind, qos in kinds])
        self.peers.attach(session)
        if self._is_outdated():
            self._publish_offline(session)

    def _on_subscribe(
        self, _client: Any, session: MqttSession, _mid: int, reasons: Sequence[ReasonCode], _props: Any
    ) -> None:
        """Marks the session as connected: wake-ups are received from now on."""
        is_refused = any(reason.is_failure for reason in reasons)
        if self._is_connected.is_set():  # so it was a later subscription
            if is_refused:
                self._rate_limited_log.warning(
                    "lonely", "the broker lets this device hear no other device; check its rules"
                )
            return
        if is_refused:
            self._rate_limited_log.warning(
                "deaf", "the broker lets this device hear no wake-up or no command; check its rules"
            )
        self._is_connected.set()
        log.info("connected to the broker, session %d", session.number)
        self._dispatcher.notify_connection(is_connected=True)

    def _on_disconnect(
        self, _client: Any, session: MqttSession, _flags: Any, reason: ReasonCode, _props: Any
    ) -> None:
        if session.is_accepted and reason.is_failure:
            self._rate_limited_log.warning("lost", "lost the broker (%s); connecting again", reason)
        self._on_session_end(session)

    def _on_session_end(self, session: MqttSession) -> None:
        self.peers.detach(session)
        with self._lock:
            is_current_session = self._session is session
            if is_current_session:
                self._session = None
        if is_current_session and self._is_connected.is_set():
            self._is_connected.clear()
            self._dispatcher.notify_connection(is_connected=False)

    def _republish_status(self, session: MqttSession, status: StatusMessage) -> None:
        """Republishes our status after a foreign `offline`, the late will of an earlier session."""
        if not self._is_outdated():
            log.info("somebody says that this device is offline (session %d); it is not", status.session_no)
            session.publish_status(self._state)

    def _publish_offline(self, session: MqttSession) -> None:
        publish_info = session.publish_status(PresenceState.OFFLINE)
        # paho's own thread must not wait; the packet is sent before DISCONNECT all the same.
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError, ValueError):  # the connection broke just now
                publish_info.wait_for_publish(OFFLINE_PUBLISH_TIMEOUT_S)
        session.client.disconnect()

    def _is_outdated(self) -> bool:
        """Returns whether it stops, or the broker has moved since the present attempt began."""
        return self._stopping.is_set() or self._tried_addresses is not self._addresses

    def _get_session(self) -> MqttSession | None:
        with self._lock:
            return self._session


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """Current activity of the device; it still keeps the finished updates of the assignments `holding`."""

    run: str | None = None
    assignment: str | None = None
    iteration: int | None = None
    holding: list[str] = field(default_factory=list)
    clock_skew_s: float | None = None
    model: str | None = None
    deployment: Json | None = None
    installation: Json | None = None
    blocked: Json | None = None
    allowance: Json | None = None
    metered: bool | None = None


class HeartbeatPublisher:
    """Publisher of a heartbeat every `interval_s`, with jitter, from `start` to `stop`.

    Args:
        publish: sends one heartbeat, such as `MqttConnection.publish_heartbeat`, which also fills in the session
            number.
        read_health: reads the board's health, such as `HealthReader.read`.
        get_activity: returns the current activity; must not wait for the trainer.
        seed: of the jitter that spreads a fleet's heartbeats, such as the device id.
    """

    def __init__(
        self,
        publish: Callable[[Heartbeat], bool],
        read_health: Callable[[], Json],
        get_activity: Callable[[], DeviceActivity] = DeviceActivity,
        *,
        interval_s: float = HEARTBEAT_S,
        seed: str = "",
    ) -> None:
        self._publish = publish
        self._read_health = read_health
        self._get_activity = get_activity
        self._interval_s = interval_s
        self._rng = derive_rng("heartbeat", seed)
        self._seq = 0
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            self._thread = None

    def publish_now(self) -> None:
        """Publishes the next heartbeat at once, after a connect for instance."""
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._publish_once()
            jitter = self._rng.uniform(-HEARTBEAT_JITTER, HEARTBEAT_JITTER)
            self._wake.wait(self._interval_s * (1 + jitter))
            self._wake.clear()

    def _publish_once(self) -> None:
        try:
            self._publish(self._make_heartbeat())
        except Exception:  # the boundary of the thread: a failed reading must not make the board look dead
            log.exception("a heartbeat was lost")

    def _make_heartbeat(self) -> Heartbeat:
        self._seq += 1
        return Heartbeat(seq=self._seq, session_no=0, **self._read_health(), **asdict(self._get_activity()))
