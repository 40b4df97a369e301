"""MQTT session of a device: one client object, one session number, one will that carries it; dispatch of messages."""

from __future__ import annotations

import logging
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.core.errors import NetworkError, NotJoinedError
from edgefl.core.protocol import (
    MAX_PEER_BYTES,
    Command,
    PresenceState,
    StatusMessage,
    Topic,
    parse_peer_topic,
    parse_topic,
    peer_topic,
    topic,
)
from edgefl.system.atomic_files import TlsFiles
from edgefl.system.https_client import ClosingSocket, create_pinned_context
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
LOOP_TIMEOUT_S = 1.0
# In Linux's struct tcp_info since 4.6: bytes acknowledged, bytes received, segments out and in, bytes not yet sent.
_TCP_COUNTERS = struct.Struct("=QQIII")
_TCP_COUNTERS_OFFSET = 120

MAX_RECENT_COMMANDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttIdentity:
    """Client identity: `boot_id` per start of the agent, `version` of edgefl, `board` of the board."""

    fleet: str
    device_id: str
    boot_id: str
    version: str = ""
    board: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class MqttSession:
    """Client that connects once; `is_accepted` is set when the broker accepts it."""

    client: mqtt.Client
    identity: MqttIdentity
    number: int
    is_accepted: bool = False
    acknowledged_bytes: int = 0

    def topic(self, kind: Topic) -> str:
        return topic(self.identity.fleet, self.identity.device_id, kind)

    def publish(self, kind: Topic, payload: bytes, *, qos: int = 0, retain: bool = False) -> mqtt.MQTTMessageInfo:
        return self.client.publish(self.topic(kind), payload, qos=qos, retain=retain)

    @property
    def peer_filter(self) -> str:
        """Returns the topic filter of all peer values for this device."""
        return peer_topic(self.identity.fleet, "+", self.identity.device_id)

    def publish_to_peer(self, receiver: str, payload: bytes, *, retain: bool) -> mqtt.MQTTMessageInfo:
        name = peer_topic(self.identity.fleet, self.identity.device_id, receiver)
        return self.client.publish(name, payload, qos=1, retain=retain)

    def subscribe_to_peers(self) -> None:
        self.client.subscribe(self.peer_filter, qos=1)

    def unsubscribe_from_peers(self) -> None:
        self.client.unsubscribe(self.peer_filter)

    def run(self, on_iteration: Callable[[], None]) -> None:
        """Runs I/O until the session ends; the only thread that ever writes to the socket.

        `on_iteration` is called after every receive or send, and once a second.

        paho's `loop_forever` lets every thread that publishes write for itself, and two threads in one TLS socket
        tear the connection. A write callback makes them leave it to this loop, which `loop` alone can be woken from.
        """
        self.client.on_socket_register_write = _ignore_socket_write
        while self.client.loop(LOOP_TIMEOUT_S) == mqtt.MQTT_ERR_SUCCESS:
            if self._is_transferring():
                # paho regards a broker as dead that is silent while a large packet is being transferred to it.
                self.client._last_bytes_received = time.monotonic()  # noqa: SLF001 there is no public API
            on_iteration()

    def close(self) -> None:
        """Breaks the reference cycle with the client, whose sockets would stay open until garbage collection."""
        self.client.user_data_set(None)

    def _is_transferring(self) -> bool:
        """Returns whether the broker's host has acknowledged bytes since the last call, and more are unsent."""
        connection = self.client.socket()
        if not isinstance(connection, socket.socket):
            return False
        size = _TCP_COUNTERS_OFFSET + _TCP_COUNTERS.size
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) < size:
            return False
        acknowledged_bytes, *_, unsent_bytes = _TCP_COUNTERS.unpack_from(info, _TCP_COUNTERS_OFFSET)
        former_bytes, self.acknowledged_bytes = self.acknowledged_bytes, acknowledged_bytes
        return bool(acknowledged_bytes > former_bytes and unsent_bytes)

    def publish_status(self, state: PresenceState) -> mqtt.MQTTMessageInfo:
        return self.publish(Topic.STATUS, self.encode_status(state), qos=1, retain=True)

    def encode_status(self, state: PresenceState, *, will: bool = False) -> bytes:
        return StatusMessage(
            state=state,
            boot_id=self.identity.boot_id,
            session_no=self.number,
            version=self.identity.version,
            will=will,
            board=self.identity.board,
        ).dump()


def _ignore_socket_write(_client: mqtt.Client, _data: object, _socket: object) -> None:
    pass


def create_session(identity: MqttIdentity, number: int, context: ssl.SSLContext) -> MqttSession:
    """Returns a session that is not yet connected; its will reports a broken connection."""
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2,
        client_id=identity.device_id,
        clean_session=True,
        protocol=mqtt.MQTTv311,
        reconnect_on_failure=False,
    )
    session = MqttSession(client=client, identity=identity, number=number)
    client.connect_timeout = CONNECT_TIMEOUT_S
    client.tls_set_context(context)
    client.user_data_set(session)
    will = session.encode_status(PresenceState.OFFLINE, will=True)
    client.will_set(session.topic(Topic.STATUS), will, qos=1, retain=True)
    return session


def create_tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns a TLS context with the device's certificate that trusts only the fleet's CA, on any date.

    Raises:
        NotJoinedError: the enrolment files are missing or damaged.
    """
    try:
        context = create_pinned_context(files.ca.read_bytes())
        context.check_hostname = files.check_hostname
        context.load_cert_chain(files.cert, files.key)
        context.sslsocket_class = ClosingSocket
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: no ASCII
        raise NotJoinedError(
            f"the device's certificates in {files.ca.parent} cannot be used ({error}); join again"
        ) from None
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttCallbacks:
    """Callbacks of the MQTT connection; run in its thread and should return soon.

    `on_wake_up` is also called after every connect, since a wake-up may have been missed. `on_peer_message` gets the
    name of a device and its value for this one, after `PeerPublisher.subscribe`; the same value may come
    twice.
    """

    on_wake_up: Callable[[], None]
    on_command: Callable[[Command], None]
    on_connection: Callable[[bool], None] = lambda _: None
    on_peer_message: Callable[[str, bytes], None] = lambda _sender, _payload: None


class MessageDispatcher:
    """Dispatcher of messages to the agent, in the MQTT thread; malformed ones do not end the connection.

    Args:
        callbacks: see `MqttCallbacks`.
        rate_limited_log: for malformed messages.
        is_subscribed_to_peers: returns whether peer values are wanted now.
        on_offline: called when this device's status is `offline`.
    """

    def __init__(
        self,
        callbacks: MqttCallbacks,
        rate_limited_log: RateLimitedLog,
        *,
        is_subscribed_to_peers: Callable[[], bool],
        on_offline: Callable[[MqttSession, StatusMessage], None],
    ) -> None:
        self._callbacks, self._rate_limited_log = callbacks, rate_limited_log
        self._is_subscribed_to_peers, self._on_offline = is_subscribed_to_peers, on_offline
        self._recent_command_ids: deque[str] = deque(maxlen=MAX_RECENT_COMMANDS)

    def attach(self, session: MqttSession) -> None:
        """Dispatches the messages of a session from now on."""
        session.client.on_message = self._on_message
        session.client.message_callback_add(session.peer_filter, self._on_peer_message)

    def notify_connection(self, *, is_connected: bool) -> None:
        """Notifies the agent of a connect, with a wake-up for missed ones, or of a disconnect."""
        self._guard(lambda: self._callbacks.on_connection(is_connected))
        if is_connected:
            self._guard(self._callbacks.on_wake_up)

    def _on_message(self, _client: Any, session: MqttSession, message: mqtt.MQTTMessage) -> None:
        try:
            _, _, kind = parse_topic(message.topic)
            if kind is Topic.WAKEUP:
                self._guard(self._callbacks.on_wake_up)
            elif kind is Topic.COMMAND:
                self._dispatch_command(Command.load(bytes(message.payload)))
            elif kind is Topic.STATUS and message.payload:
                status = StatusMessage.load(bytes(message.payload))
                if status.state == PresenceState.OFFLINE:
                    self._on_offline(session, status)
        except NetworkError as error:
            self._rate_limited_log.warning("malformed", "dropped a message: %s", error)

    def _on_peer_message(self, _client: Any, _session: MqttSession, message: mqtt.MQTTMessage) -> None:
        payload = bytes(message.payload)
        try:
            _, sender, _ = parse_peer_topic(message.topic)
        except NetworkError as error:
            self._rate_limited_log.warning("malformed", "dropped a message: %s", error)
            return
        if len(payload) > MAX_PEER_BYTES:
            text = "dropped %d bytes from %s, at most %d are taken"
            self._rate_limited_log.warning("malformed", text, len(payload), sender, MAX_PEER_BYTES)
        elif payload and self._is_subscribed_to_peers():  # an empty one only clears the retained value
            self._guard(lambda: self._callbacks.on_peer_message(sender, payload))

    def _dispatch_command(self, command: Command) -> None:
        if command.id in self._recent_command_ids:
            return
        self._recent_command_ids.append(command.id)
        self._guard(lambda: self._callbacks.on_command(command))

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # the boundary of paho's thread: presence must survive failures of the agent
            log.exception("the agent failed to act on a message")
