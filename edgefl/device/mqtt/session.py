"""MQTT session of a device: one client object, one session number, one will that carries it."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from edgefl.core.errors import NotJoinedError
from edgefl.core.protocol import PresenceState, StatusMessage, Topic, peer_topic, topic
from edgefl.system.https_client import create_pinned_context

CONNECT_TIMEOUT_S = 5.0
LOOP_TIMEOUT_S = 1.0
# In Linux's struct tcp_info since 4.6: bytes acknowledged, bytes received, segments out and in, bytes not yet sent.
_TCP_COUNTERS = struct.Struct("=QQIII")
_TCP_COUNTERS_OFFSET = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttTlsFiles:
    """Paths of PEM files: the fleet's CA, this device's certificate and its key.

    `check_hostname` may be False when the coordinator is reached under names that its certificate does not hold: the
    fleet's CA, which signs no other server, vouches for it all the same.
    """

    ca: Path
    cert: Path
    key: Path
    check_hostname: bool = True


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


def create_tls_context(files: MqttTlsFiles) -> ssl.SSLContext:
    """Returns a TLS context with the device's certificate that trusts only the fleet's CA, on any date.

    Raises:
        NotJoinedError: the enrolment files are missing or damaged.
    """
    try:
        context = create_pinned_context(files.ca.read_bytes())
        context.check_hostname = files.check_hostname
        context.load_cert_chain(files.cert, files.key)
        context.sslsocket_class = _ClosingMqttSocket
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: no ASCII
        raise NotJoinedError(
            f"the device's certificates in {files.ca.parent} cannot be used ({error}); join again"
        ) from None
    return context


class _ClosingMqttSocket(ssl.SSLSocket):
    """Closes when the handshake fails; paho leaves that to the garbage collector."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise
