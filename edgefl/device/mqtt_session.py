"""One MQTT session of a device: one client object, one session number, one will that carries it."""

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

from edgefl.device.trust import pinned_context
from edgefl.errors import NotJoinedError
from edgefl.protocol import PresenceState, Status, Topic, peer_topic, topic

CONNECT_TIMEOUT_S = 5.0
LOOP_TIMEOUT_S = 1.0
# In Linux's struct tcp_info since 4.6: bytes acknowledged, bytes received, segments out and in, bytes not yet sent.
_TCP_COUNTS = struct.Struct("=QQIII")
_TCP_COUNTS_AT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTls:
    """Paths of PEM files: the fleet's CA, this device's certificate and its key.

    `check_hostname` may be False when the coordinator is reached under names that its certificate does not hold: the
    fleet's CA, which signs no other server, vouches for it all the same.
    """

    ca: Path
    cert: Path
    key: Path
    check_hostname: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkIdentity:
    """Who is calling. `boot_id` is new with every start of the agent, `version` is edgefl's, `board` the board's."""

    fleet: str
    device_id: str
    boot_id: str
    version: str = ""
    board: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """A client that connects once; `was_accepted` turns true when the broker lets it in."""

    client: mqtt.Client
    identity: LinkIdentity
    number: int
    was_accepted: bool = False
    acknowledged_bytes: int = 0

    def topic(self, kind: Topic) -> str:
        return topic(self.identity.fleet, self.identity.device_id, kind)

    def publish(self, kind: Topic, payload: bytes, *, qos: int = 0, retain: bool = False) -> mqtt.MQTTMessageInfo:
        return self.client.publish(self.topic(kind), payload, qos=qos, retain=retain)

    @property
    def peer_filter(self) -> str:
        """Matches what every other device has for this one."""
        return peer_topic(self.identity.fleet, "+", self.identity.device_id)

    def publish_to_peer(self, receiver: str, payload: bytes, *, retain: bool) -> mqtt.MQTTMessageInfo:
        name = peer_topic(self.identity.fleet, self.identity.device_id, receiver)
        return self.client.publish(name, payload, qos=1, retain=retain)

    def subscribe_to_peers(self) -> None:
        self.client.subscribe(self.peer_filter, qos=1)

    def unsubscribe_from_peers(self) -> None:
        self.client.unsubscribe(self.peer_filter)

    def run(self, between_turns: Callable[[], None]) -> None:
        """Sends and receives until the session ends; the only thread that ever writes to the socket.

        `between_turns` is called after everything that was received or sent, and once a second.

        paho's `loop_forever` lets every thread that publishes write for itself, and two threads in one TLS socket
        tear the connection. A write callback makes them leave it to this loop, which `loop` alone can be woken from.
        """
        self.client.on_socket_register_write = _leave_to_the_loop
        while self.client.loop(LOOP_TIMEOUT_S) == mqtt.MQTT_ERR_SUCCESS:
            if self._is_moving():
                # paho takes a broker for dead that says nothing while a large packet makes its way to it.
                self.client._last_bytes_received = time.monotonic()  # noqa: SLF001 there is no public way
            between_turns()

    def close(self) -> None:
        """Lets go of the client: they hold each other, and its sockets would stay open until garbage is collected."""
        self.client.user_data_set(None)

    def _is_moving(self) -> bool:
        """Returns whether the broker's machine has taken in more since the last time, and more waits for it."""
        connection = self.client.socket()
        if not isinstance(connection, socket.socket):
            return False
        size = _TCP_COUNTS_AT + _TCP_COUNTS.size
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
        if len(info) < size:
            return False
        acknowledged, *_, waiting = _TCP_COUNTS.unpack_from(info, _TCP_COUNTS_AT)
        before, self.acknowledged_bytes = self.acknowledged_bytes, acknowledged
        return bool(acknowledged > before and waiting)

    def publish_status(self, state: PresenceState) -> mqtt.MQTTMessageInfo:
        return self.publish(Topic.STATUS, self.status(state), qos=1, retain=True)

    def status(self, state: PresenceState, *, will: bool = False) -> bytes:
        return Status(
            state=state,
            boot_id=self.identity.boot_id,
            session_no=self.number,
            version=self.identity.version,
            will=will,
            board=self.identity.board,
        ).dump()


def _leave_to_the_loop(_client: mqtt.Client, _data: object, _socket: object) -> None:
    pass


def new_session(identity: LinkIdentity, number: int, context: ssl.SSLContext) -> Session:
    """Returns a session that is not yet connected; its will says that it broke."""
    client = mqtt.Client(
        CallbackAPIVersion.VERSION2,
        client_id=identity.device_id,
        clean_session=True,
        protocol=mqtt.MQTTv311,
        reconnect_on_failure=False,
    )
    session = Session(client=client, identity=identity, number=number)
    client.connect_timeout = CONNECT_TIMEOUT_S
    client.tls_set_context(context)
    client.user_data_set(session)
    will = session.status(PresenceState.OFFLINE, will=True)
    client.will_set(session.topic(Topic.STATUS), will, qos=1, retain=True)
    return session


def link_context(tls: LinkTls) -> ssl.SSLContext:
    """Returns a TLS context that trusts the fleet's CA alone, on any date, and shows the device's certificate.

    Raises:
        NotJoinedError: the files of the join are missing or damaged.
    """
    try:
        context = pinned_context(tls.ca.read_bytes())
        context.check_hostname = tls.check_hostname
        context.load_cert_chain(tls.cert, tls.key)
        context.sslsocket_class = _TidySocket
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError; ValueError: no ASCII
        raise NotJoinedError(
            f"the device's certificates in {tls.ca.parent} cannot be used ({error}); join again"
        ) from None
    return context


class _TidySocket(ssl.SSLSocket):
    """Closes when the handshake fails; paho leaves that to the garbage collector."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except OSError:
            self.close()
            raise
