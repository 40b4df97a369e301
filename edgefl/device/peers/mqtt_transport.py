"""Peer transport through the broker, which retains the newest value of each edge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from edgefl.device.mqtt.connection import MqttConnection
from edgefl.device.peers.transport import OnPeerMessage


class MqttPeerTransport:
    """`PeerTransport` over the device's own MQTT connection.

    Args:
        link: returns the present connection, which changes when the broker moves.
        on_message: see `OnPeerMessage`.
    """

    def __init__(self, link: Callable[[], MqttConnection], on_message: OnPeerMessage) -> None:
        self._link, self._on_message = link, on_message
        self._peers: frozenset[str] = frozenset()
        self._is_running = False

    def start(self) -> None:
        self._is_running = True
        self._link().subscribe_to_peers()

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
        self._link().publish_to_peer(receiver, payload, retain=not is_reply)
        return True

    def is_drained(self) -> bool:
        return self._link().is_peer_queue_empty()

    def set_peers(self, peers: Collection[str]) -> None:
        removed = self._peers - frozenset(peers)
        self._peers = frozenset(peers)
        if removed:
            self._link().remove_peers(removed)  # this unsubscribes from all peers
        if self._is_running and self._peers:
            self._link().subscribe_to_peers()

    def set_addresses(self, addresses: Mapping[str, tuple[str, int]]) -> None: ...

    def receive(self, sender: str, payload: bytes) -> None:
        """Passes a message from the connection to `on_message`."""
        if self._is_running and sender in self._peers:
            self._on_message(sender, payload)

    def on_link_changed(self) -> None:
        """Subscribes again on a replaced connection."""
        if self._is_running:
            self._link().subscribe_to_peers()
