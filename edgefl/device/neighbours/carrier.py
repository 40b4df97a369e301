"""What brings the messages of decentralised training from one board to the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

OnPeerMessage = Callable[[str, bytes], None]
"""Takes the sender's device id and what it sent; called in a thread of the carrier's, one call at a time for each
sender, and should return soon: until it does, its sender's next message waits."""


class Carrier(Protocol):
    """Brings messages to neighbours while the caller trains on.

    A message is state, not an increment: of what has not left yet only the newest to each receiver is kept. A message
    that was delivered may come again, or after a newer one, when a device restarts: receivers number their mail.
    """

    def start(self) -> None:
        """Begins to send and to receive; returns at once.

        Raises:
            NetworkError: this device cannot receive, for instance since its port is taken.
        """

    def stop(self) -> None:
        """Ends both, with all threads; what has not left yet is dropped."""

    def send(self, receiver: str, payload: bytes, *, keep_all: bool = False) -> bool:
        """Hands over a message and returns at once, whether the receiver can be reached or not.

        Args:
            receiver: the device id of a neighbour.
            payload: at most `MAX_PEER_BYTES`.
            keep_all: the message is an answer, which no later one replaces: these leave in order, before the state.

        Returns:
            Whether it was taken over; not if the receiver is no neighbour, or too many answers to it wait.

        Raises:
            UsageError: the payload is too large.
        """

    def is_clear(self) -> bool:
        """Says whether all that was handed over has left, but for what waits for somebody who cannot be reached."""

    def set_neighbours(self, neighbours: Collection[str]) -> None:
        """Changes with whom messages are exchanged; what waited for others is dropped, and they are refused."""

    def set_hosts(self, hosts: Mapping[str, tuple[str, int]]) -> None:
        """Says where devices listen; carriers that need no addresses have no use for it."""
