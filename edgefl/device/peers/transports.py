"""Transports of messages between boards, over mutual TLS or MQTT, and the one that a plan requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from edgefl.core.errors import NetworkError, UsageError
from edgefl.core.protocol import MAX_PEER_BYTES, host_and_port
from edgefl.core.types import GossipConfig
from edgefl.device.mqtt.peer_publisher import PeerPublisher
from edgefl.device.peers.listener import PeerListener
from edgefl.device.peers.peer_connection import (
    OnPeerMessage,
    PeerCounters,
    PeerMetrics,
    PeerTimeouts,
    PeerTls,
    PeerTransport,
    get_peer_addresses,
)
from edgefl.device.peers.sender import PeerSender, SocketAddress
from edgefl.device.state_dir import DeviceStateDir
from edgefl.system.atomic_files import TlsFiles

_DEFAULT_TIMEOUTS = PeerTimeouts()


class TlsPeerTransport:
    """`PeerTransport` over a TLS connection in each direction of an edge.

    An unacknowledged message is sent again after the next connect; a receiver that is still the same process
    processes it once.

    Args:
        device_id: of this device; must match its certificate.
        tls: paths of the PEM files of the enrolment.
        listen: host and port to listen at; port 0 is a free one, host "::" both IPv6 and IPv4, or IPv4 alone where
            there is no IPv6.
        addresses: listening address of each device; may contain others than neighbours.
        peers: device ids to exchange messages with.
        on_message: see `OnPeerMessage`.
        timeouts: for dead neighbours and reconnects.

    Raises:
        NotJoinedError: the PEM files are missing, damaged, or of another device.
    """

    def __init__(  # noqa: PLR0913 one keyword per collaborator
        self,
        *,
        device_id: str,
        tls: TlsFiles,
        listen: SocketAddress,
        addresses: Mapping[str, SocketAddress],
        peers: Collection[str],
        on_message: OnPeerMessage,
        timeouts: PeerTimeouts = _DEFAULT_TIMEOUTS,
    ) -> None:
        self._device_id, self._listen_address, self._timeouts = device_id, listen, timeouts
        self._tls = PeerTls.load(tls, device_id)
        self._metrics = PeerMetrics()
        self._listener = PeerListener(tls=self._tls, timeouts=timeouts, metrics=self._metrics, on_message=on_message)
        self._lock = threading.Lock()
        self._addresses = dict(addresses)
        self._senders: dict[str, PeerSender] = {}
        self._stopping_senders: list[PeerSender] = []
        self._is_running = False
        self.set_peers(peers)

    def start(self) -> None:
        """Starts listening and sending.

        Raises:
            PortInUseError: the port is taken.
            NetworkError: this machine has no such address.
        """
        self._listen_address = self._listener.start(*self._listen_address)
        with self._lock:
            self._is_running = True
            for sender in self._senders.values():
                sender.start()

    def stop(self) -> None:
        """Closes every connection and ends every thread; it cannot be started again.

        That is fast, or takes up to `PeerTimeouts.idle_timeout_s` while a connection attempt or `on_message` hangs.
        """
        with self._lock:
            self._is_running = False
            senders, self._senders = [*self._senders.values(), *self._stopping_senders], {}
        self._listener.stop()
        for sender in senders:
            sender.stop()
        until_s = time.monotonic() + self._timeouts.idle_timeout_s + 1.0
        self._listener.join(until_s - time.monotonic())
        for sender in senders:
            sender.join(until_s - time.monotonic())

    @property
    def address(self) -> SocketAddress:
        """Returns the listening address; after `start` with the selected port."""
        return self._listen_address

    @property
    def counters(self) -> PeerCounters:
        return self._metrics.counters

    def list_connected_peers(self) -> frozenset[str]:
        """Returns the connected neighbours; a dead one is detected after some seconds."""
        with self._lock:
            return frozenset(name for name, sender in self._senders.items() if sender.is_connected())

    def get_refusal_times(self) -> Mapping[str, float]:
        with self._lock:
            times = {name: sender.refused_s for name, sender in self._senders.items()}
        return {name: refused_s for name, refused_s in times.items() if refused_s is not None}

    def send(self, receiver: str, payload: bytes, *, is_reply: bool = False) -> bool:
        """Queues a message and returns at once; see `PeerTransport.send`.

        Raises:
            UsageError: the payload is too large.
        """
        if len(payload) > MAX_PEER_BYTES:
            raise UsageError(
                f"a message to a neighbour must have at most {MAX_PEER_BYTES} bytes, got {len(payload)}; "
                "take a smaller model or a codec"
            )
        with self._lock:
            sender = self._senders.get(receiver)
        return sender is not None and sender.queue.put(payload, is_reply=is_reply)

    def is_drained(self) -> bool:
        with self._lock:
            senders = list(self._senders.values())
        return all(sender.queue.is_empty() or not sender.is_connected() for sender in senders)

    def set_peers(self, peers: Collection[str]) -> None:
        """Sets the peers; see `PeerTransport.set_peers`."""
        with self._lock:
            removed = [self._senders.pop(name) for name in self._senders.keys() - set(peers)]
            self._stopping_senders = [sender for sender in (*self._stopping_senders, *removed) if sender.is_alive()]
            for name in peers:
                if name not in self._senders:
                    self._senders[name] = self._make_sender(name)
            self._listener.set_peers(peers)
        for sender in removed:
            sender.stop()

    def set_addresses(self, addresses: Mapping[str, SocketAddress]) -> None:
        """Sets the listening addresses of devices; reconnects to those that moved."""
        with self._lock:
            self._addresses = dict(addresses)
            for name, sender in self._senders.items():
                sender.set_address(self._addresses.get(name))

    def _make_sender(self, receiver: str) -> PeerSender:
        sender = PeerSender(self._device_id, receiver, tls=self._tls, timeouts=self._timeouts, metrics=self._metrics)
        sender.set_address(self._addresses.get(receiver))
        if self._is_running:
            sender.start()
        return sender


class MqttPeerTransport:
    """`PeerTransport` over the device's own MQTT connection.

    Args:
        publisher: of the device's connection.
        on_message: see `OnPeerMessage`.
    """

    def __init__(self, publisher: PeerPublisher, on_message: OnPeerMessage) -> None:
        self._publisher, self._on_message = publisher, on_message
        self._peers: frozenset[str] = frozenset()
        self._is_running = False

    def start(self) -> None:
        self._is_running = True
        self._publisher.subscribe()

    def stop(self) -> None:
        """Drops further messages; retained ones stay, for neighbours that start later."""
        self._is_running = False

    def send(self, receiver: str, payload: bytes, *, is_reply: bool = False) -> bool:
        """Sends a message; replies are not retained.

        Raises:
            NetworkError: the payload, or the total of retained payloads, is too large.
        """
        if not self._is_running or receiver not in self._peers:
            return False
        self._publisher.publish(receiver, payload, retain=not is_reply)
        return True

    def is_drained(self) -> bool:
        return self._publisher.is_queue_empty()

    def list_connected_peers(self) -> frozenset[str]:
        return self._peers

    def get_refusal_times(self) -> Mapping[str, float]:
        return {}

    def set_peers(self, peers: Collection[str]) -> None:
        removed = self._peers - frozenset(peers)
        self._peers = frozenset(peers)
        if removed:
            self._publisher.remove(removed)  # this unsubscribes from all peers
        if self._is_running and self._peers:
            self._publisher.subscribe()

    def set_addresses(self, addresses: Mapping[str, tuple[str, int]]) -> None: ...

    def receive(self, sender: str, payload: bytes) -> None:
        """Passes a message from the connection to `on_message`."""
        if self._is_running and sender in self._peers:
            self._on_message(sender, payload)


class PeerTransportFactory:
    """Factory of peer transports; passes MQTT messages to the newest one.

    Args:
        state: has the device id.
        publisher: of the device's MQTT connection.
    """

    def __init__(self, state: DeviceStateDir, publisher: PeerPublisher) -> None:
        self._state, self._publisher = state, publisher
        self._mqtt_transport: MqttPeerTransport | None = None

    def make(self, plan: GossipConfig, on_message: OnPeerMessage) -> PeerTransport:
        """Returns the transport for a plan.

        Raises:
            NetworkError: the plan's transport is unknown here, or it lacks an address.
        """
        if plan.carrier == "peer":
            self._mqtt_transport = MqttPeerTransport(self._publisher, on_message)
            return self._mqtt_transport
        if plan.carrier != "direct":
            raise NetworkError(
                f"this device cannot carry messages by {plan.carrier!r}, only by relay, peer or direct"
            )
        return TlsPeerTransport(
            device_id=self._state.device_id,
            tls=self._state.tls_files,
            listen=_make_listen_address(plan.listen),
            addresses=get_peer_addresses(plan),
            peers=[edge.neighbour for edge in plan.edges],
            on_message=on_message,
        )

    def receive(self, sender: str, payload: bytes) -> None:
        """Passes a message to the MQTT transport."""
        transport = self._mqtt_transport
        if transport is not None:
            transport.receive(sender, payload)


def _make_listen_address(address: str) -> tuple[str, int]:
    """Returns the listening address: the announced port, on all of this board's addresses."""
    return "::", host_and_port(address)[1]
