"""Interface of message transports for decentralised training, and their counters."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from edgefl.core.protocol import host_and_port
from edgefl.core.types import GossipConfig
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

OnPeerMessage = Callable[[str, bytes], None]
"""Callback with the sender's device id and payload; called in a thread of the transport, one call at a time for each
sender, and should return soon: until it does, its sender's next message waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCounters:
    """Counters since the start: messages `delivered` to and `received` from neighbours.

    `superseded` messages were replaced by a newer one before delivery; `repeated` ones came again after a lost ACK,
    and were dropped. `refused` connections were of a peer with a wrong identity, in either direction; `malformed`
    ones broke off because of an invalid frame.
    """

    delivered: int = 0
    superseded: int = 0
    received: int = 0
    repeated: int = 0
    refused: int = 0
    malformed: int = 0


class PeerMetrics:
    """Thread-safe counters and rate-limited log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = PeerCounters()
        self._log = RateLimitedLog(log)

    @property
    def counters(self) -> PeerCounters:
        return self._counters

    def increment(self, name: str) -> None:
        """Increments a field of `PeerCounters`."""
        with self._lock:
            self._counters = replace(self._counters, **{name: getattr(self._counters, name) + 1})

    def log_warning(self, peer: str, text: str, *values: object) -> None:
        """Logs a warning, one a minute for each peer and text; `peer` has to come from a small set of names."""
        self._log.warning(f"{peer} {text}", text, *values)


class PeerTransport(Protocol):
    """Asynchronous message transport to neighbours.

    A message is state, not an increment: of unsent messages only the newest to each receiver is kept. A delivered
    message may come again, or after a newer one, when a device restarts: receivers check step numbers.
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


MakePeerTransport = Callable[[GossipConfig, OnPeerMessage], PeerTransport]
"""(plan, callback of messages) -> transport, not yet started."""


def get_peer_addresses(plan: GossipConfig) -> dict[str, tuple[str, int]]:
    """Returns the known listening addresses of a node's neighbours."""
    return {edge.neighbour: host_and_port(edge.address) for edge in plan.edges if edge.address}
