"""Interface of message transports for decentralised training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

OnPeerMessage = Callable[[str, bytes], None]
"""Callback with the sender's device id and payload; called in a thread of the transport, one call at a time for each
sender, and should return soon: until it does, its sender's next message waits."""


class PeerTransport(Protocol):
    """Asynchronous message transport to neighbours.

    A message is state, not an increment: of unsent messages only the newest to each receiver is kept. A delivered
    message
    may come again, or after a newer one, when a device restarts: receivers check step numbers.
    """

    def start(self) -> None:
        """Starts sending and receiving; returns at once.

        Raises:
            NetworkError: this device cannot receive, for instance because its port is taken.
        """

    def stop(self) -> None:
        """Stops sending, receiving and all threads; unsent messages are dropped."""

    def send(self, receiver: str, payload: bytes, *, is_reply: bool = False) -> bool:
        """Queues a message and returns at once, whether the receiver is reachable or not.

        Args:
            receiver: the device id of a neighbour.
            payload: at most `MAX_PEER_BYTES`.
            is_reply: the message is a reply, which no later one replaces: these are sent in order, before the state.

        Returns:
            Whether it was queued; False if the receiver is no neighbour, or too many replies to it are queued.

        Raises:
            UsageError: the payload is too large.
        """

    def is_drained(self) -> bool:
        """Returns whether all messages have been sent, except those to unreachable peers."""

    def set_peers(self, peers: Collection[str]) -> None:
        """Sets the peers; drops messages queued for others and rejects their connections."""

    def set_addresses(self, addresses: Mapping[str, tuple[str, int]]) -> None:
        """Sets the listening addresses of devices; ignored by transports without addresses."""
