"""Messages from device to device through the broker: the newest value of each edge is retained there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from edgefl.device.link import Link
from edgefl.device.neighbours.carrier import OnPeerMessage


class BrokerCarrier:
    """A `Carrier` over the device's own MQTT connection.

    Args:
        link: returns the link as it is now; it changes when the broker moves.
        on_message: see `OnPeerMessage`.
    """

    def __init__(self, link: Callable[[], Link], on_message: OnPeerMessage) -> None:
        self._link, self._on_message = link, on_message
        self._neighbours: frozenset[str] = frozenset()
        self._is_running = False

    def start(self) -> None:
        self._is_running = True
        self._link().listen_to_peers()

    def stop(self) -> None:
        """Takes no more messages; what is retained stays, for neighbours that start later."""
        self._is_running = False

    def send(self, receiver: str, payload: bytes, *, keep_all: bool = False) -> bool:
        """Sends a message; an answer is not retained, since it is for the one who asked.

        Raises:
            NetworkError: the payload is too large, or all that is retained together would be.
        """
        if not self._is_running or receiver not in self._neighbours:
            return False
        self._link().publish_peer(receiver, payload, retain=not keep_all)
        return True

    def is_clear(self) -> bool:
        return self._link().has_sent_to_peers()

    def set_neighbours(self, neighbours: Collection[str]) -> None:
        gone = self._neighbours - frozenset(neighbours)
        self._neighbours = frozenset(neighbours)
        if gone:
            self._link().forget_peers(gone)  # it hears nobody then
        if self._is_running and self._neighbours:
            self._link().listen_to_peers()

    def set_hosts(self, hosts: Mapping[str, tuple[str, int]]) -> None: ...

    def deliver(self, sender: str, payload: bytes) -> None:
        """Hands on what came over the link."""
        if self._is_running and sender in self._neighbours:
            self._on_message(sender, payload)

    def moved(self) -> None:
        """Says that the link is another one now."""
        if self._is_running:
            self._link().listen_to_peers()
