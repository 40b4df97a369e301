"""Messages straight from board to board, under mutual TLS with the fleet's own certificates: no broker in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping

from edgefl.device.neighbours.carrier import OnPeerMessage
from edgefl.device.neighbours.peer_frames import PeerPace
from edgefl.device.neighbours.peer_listener import PeerListener
from edgefl.device.neighbours.peer_sender import Address, PeerSender
from edgefl.device.neighbours.peer_tls import PeerTls, TlsFiles
from edgefl.device.neighbours.peer_watch import PeerCounts, PeerWatch
from edgefl.errors import UsageError
from edgefl.protocol import MAX_PEER_BYTES

__all__ = ["DirectCarrier", "PeerCounts", "PeerPace"]

_USUAL_PACE = PeerPace()


class DirectCarrier:
    """A `Carrier` over a TLS connection in each direction of an edge.

    A message whose receipt was not confirmed is sent again after the next connect, and the receiver, if it is still
    the same process, takes it once.

    Args:
        device_id: who this is; its certificate has to say so too.
        tls: paths of the PEM files that a join left.
        listen: host and port to take connections at; port 0 is a free one, host "::" both IPv6 and IPv4, or IPv4
            alone where there is no IPv6.
        hosts: where each device listens; others than neighbours may stand there too.
        neighbours: with whom messages are exchanged, by device id.
        on_message: see `OnPeerMessage`.
        pace: how soon a dead neighbour is noticed and tried again.

    Raises:
        NotJoinedError: the PEM files are missing, damaged, or of another device.
    """

    def __init__(  # noqa: PLR0913 one keyword per neighbour
        self,
        *,
        device_id: str,
        tls: TlsFiles,
        listen: Address,
        hosts: Mapping[str, Address],
        neighbours: Collection[str],
        on_message: OnPeerMessage,
        pace: PeerPace = _USUAL_PACE,
    ) -> None:
        self._device_id, self._listen, self._pace = device_id, listen, pace
        self._tls = PeerTls.load(tls, device_id)
        self._watch = PeerWatch()
        self._listener = PeerListener(tls=self._tls, pace=pace, watch=self._watch, on_message=on_message)
        self._lock = threading.Lock()
        self._hosts = dict(hosts)
        self._senders: dict[str, PeerSender] = {}
        self._leaving: list[PeerSender] = []
        self._is_running = False
        self.set_neighbours(neighbours)

    def start(self) -> None:
        """Begins to listen and to send.

        Raises:
            PortInUseError: somebody else listens at that port.
            NetworkError: this machine has no such address.
        """
        self._listen = self._listener.start(*self._listen)
        with self._lock:
            self._is_running = True
            for sender in self._senders.values():
                sender.start()

    def stop(self) -> None:
        """Closes every connection and ends every thread; it cannot be started again.

        That takes an instant, or up to `PeerPace.silence_s` while an attempt to connect or `on_message` hangs.
        """
        with self._lock:
            self._is_running = False
            senders, self._senders = [*self._senders.values(), *self._leaving], {}
        self._listener.stop()
        for sender in senders:
            sender.stop()
        until_s = time.monotonic() + self._pace.silence_s + 1.0
        self._listener.join(until_s - time.monotonic())
        for sender in senders:
            sender.join(until_s - time.monotonic())

    @property
    def address(self) -> Address:
        """Where it listens; after `start` with the port that was free."""
        return self._listen

    @property
    def counts(self) -> PeerCounts:
        return self._watch.counts

    def reachable(self) -> frozenset[str]:
        """Returns the neighbours to which there is a connection; one that died is missed after some seconds."""
        with self._lock:
            return frozenset(name for name, sender in self._senders.items() if sender.is_connected())

    def send(self, receiver: str, payload: bytes, *, keep_all: bool = False) -> bool:
        """Hands over a message and returns at once; see `Carrier.send`.

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
        return sender is not None and sender.queue.put(payload, keep_all=keep_all)

    def is_clear(self) -> bool:
        with self._lock:
            senders = list(self._senders.values())
        return all(sender.queue.is_empty() or not sender.is_connected() for sender in senders)

    def set_neighbours(self, neighbours: Collection[str]) -> None:
        """Changes with whom messages are exchanged; see `Carrier.set_neighbours`."""
        with self._lock:
            gone = [self._senders.pop(name) for name in self._senders.keys() - set(neighbours)]
            self._leaving = [sender for sender in (*self._leaving, *gone) if sender.is_alive()]
            for name in neighbours:
                if name not in self._senders:
                    self._senders[name] = self._sender(name)
            self._listener.set_neighbours(neighbours)
        for sender in gone:
            sender.stop()

    def set_hosts(self, hosts: Mapping[str, Address]) -> None:
        """Changes where devices listen; connections to those that moved are made anew."""
        with self._lock:
            self._hosts = dict(hosts)
            for name, sender in self._senders.items():
                sender.set_address(self._hosts.get(name))

    def _sender(self, receiver: str) -> PeerSender:
        sender = PeerSender(self._device_id, receiver, tls=self._tls, pace=self._pace, watch=self._watch)
        sender.set_address(self._hosts.get(receiver))
        if self._is_running:
            sender.start()
        return sender
