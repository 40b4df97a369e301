"""Connections of one member of a collective to those that it exchanges chunks with, and an all-reduce over them.

A message is a header and the bytes of a chunk. A member that gives up says so, and everybody passes that on; one that
is not reached for `LOST_S` is gone, and so is one whose machine refuses connections after it has begun. A member that
restarts has lost its part: its new messages have another session. So that this is noticed whatever it had sent
before, each member first greets those that it exchanges chunks with, and sends one of them chunks only when it has
been greeted: no chunk is taken by a process that nobody knows of.
"""

from __future__ import annotations

import hashlib
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from edgefl.core.errors import NetworkError
from edgefl.core.types import CollectiveConfig, GossipConfig, PeerLinkConfig
from edgefl.device.peers.collective_messages import HEADER, ChunkMessage, decode_message, encode_message
from edgefl.device.peers.peer_connection import MakePeerTransport, PeerTransport, get_peer_addresses
from edgefl.strategies.peer_algorithms.collectives import AllReduce, Chunk, Schedule

log = logging.getLogger(__name__)

LOST_S, FIRST_S = 10.0, 120.0
"""How long a member may be out of reach, and how long until it is first reached: it may still load its model."""
SLOWEST_BYTES_PER_S = 125_000
"""The coordinator may send its model to all members, one after another, at this rate (1 Mbit/s): then all begin."""
FINISH_S = 120.0
"""How long a member that is to finish early waits for the others."""
STALL_S = 3600.0
"""How long it waits for members that are there and send nothing: they train."""
MAX_QUEUED_VECTORS, MIN_QUEUE_BYTES = 3, 1024 * 1024
"""Most chunks that others send before this member is that far: all of an all-reduce, and the first of the next."""
MAX_ABORTS = 64
IDLE_WAIT_S, SEND_WAIT_S = 0.1, 0.002


class CollectiveBrokenError(NetworkError):
    """A member is gone, or has given up."""


class CollectiveLink:
    """Connections from one round of a run to the next; used by one thread, `receive` by transports.

    Args:
        device_id: of this member.
        make_transport: makes direct connections.
        clock: seconds, monotone, the one of the transport's refusals.
    """

    def __init__(
        self, device_id: str, make_transport: MakePeerTransport, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._device_id, self._make_transport, self._clock = device_id, make_transport, clock
        self._session = secrets.token_bytes(8)
        self._transport: PeerTransport | None = None
        self._listen = ""
        self._members: tuple[str, ...] = ()
        self._peers: frozenset[str] = frozenset()
        self._group = b""
        self._changed = threading.Condition()
        self._received: deque[tuple[str, ChunkMessage]] = deque()
        self._queued_bytes, self._max_queued_bytes = 0, MIN_QUEUE_BYTES
        self._sessions: dict[str, bytes] = {}
        self._started_s: dict[str, float] = {}
        self._greetings: dict[str, ChunkMessage] = {}
        self._ungreeted: set[str] = set()
        self._reached_s: dict[str, float] = {}
        self._begin_until_s = 0.0
        self._broken_by = ""
        self._aborts: deque[tuple[str, bytes]] = deque(maxlen=MAX_ABORTS)

    def open(self, run: str, config: CollectiveConfig, schedule: Schedule, *, vector_bytes: int) -> None:
        """Connects to those that this member exchanges chunks with in a group; what came for another is dropped.

        Raises:
            NetworkError: this device cannot listen, or does not know where one of them does.
        """
        addresses = dict(zip(config.members, config.addresses, strict=True))
        peers = _list_peers(schedule, config.members, self._device_id)
        unknown = sorted(name for name in (*peers, self._device_id) if not addresses[name])
        if unknown and peers:
            raise NetworkError(f"nobody says where {unknown[0]} listens")
        plan = _make_plan(peers, addresses, addresses[self._device_id])
        with self._changed:
            self._group = hashlib.sha256(f"{run}\n{config.group}".encode()).digest()[:16]
            self._members, self._peers, self._broken_by = config.members, frozenset(peers), ""
            self._sessions, self._started_s = {}, {}
            self._max_queued_bytes = MAX_QUEUED_VECTORS * vector_bytes + MIN_QUEUE_BYTES
            # Those of the last group had to be reached a moment ago.
            now_s = self._clock()
            models_bytes = len(config.members) * vector_bytes // 2  # the bound of a vector is that of doubles
            self._begin_until_s = now_s + FIRST_S + models_bytes / SLOWEST_BYTES_PER_S
            self._reached_s = {name: now_s if name in self._reached_s else now_s + FIRST_S - LOST_S for name in peers}
            early = [item for item in self._received if item[1].group == self._group]
            aborts = [sender for sender, group in self._aborts if group == self._group]
            self._received, self._queued_bytes = deque(), 0
            self._ungreeted = set(peers)
            greetings = [item for item in self._greetings.items() if item[1].group == self._group]
        if peers and (self._transport is None or self._listen != plan.listen):
            self.close()
            transport = self._make_transport(plan, self.receive)
            transport.set_peers(peers)
            transport.start()
            self._transport, self._listen = transport, plan.listen
        elif self._transport is not None:
            self._transport.set_addresses(get_peer_addresses(plan))
            self._transport.set_peers(peers)
        self._greet()
        for sender, message in (*greetings, *early):
            self._add(sender, message)
        if aborts:
            self._break(f"{aborts[0]} has given up")

    def close(self) -> None:
        """Ends all connections."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.stop()

    def abort(self) -> None:
        """Tells the others that this member leaves the group."""
        message = encode_message(ChunkMessage(group=self._group, session=self._session, is_abort=True))
        transport = self._transport
        if transport is not None:
            for peer in self._peers:
                transport.send(peer, message)

    def receive(self, sender: str, payload: bytes) -> None:
        """Queues a message of another member; a malformed one is dropped, and one too many breaks the group."""
        try:
            self._add(sender, decode_message(payload))
        except NetworkError as error:
            log.warning("dropped a message of %s: %s", sender, error)

    def run(self, member: AllReduce, reduction: int, should_finish: Callable[[], bool], dtype: np.dtype) -> int:
        """Runs an all-reduce to its end; returns the bytes sent.

        Args:
            member: this member's state.
            reduction: number of the all-reduce in the round.
            should_finish: called all the time; returns whether to wait no longer than `FINISH_S`.
            dtype: of the vector.

        Raises:
            CollectiveBrokenError: a member is gone or has given up.
        """
        unsent: dict[int, bytes] = {}
        sent_bytes, progress_s, finish_s = 0, self._clock(), float("inf")
        while True:
            if should_finish():
                finish_s = min(finish_s, self._clock() + FINISH_S)
            has_moved = self._take(member, reduction, dtype)
            for peer, payload in list(unsent.items()):
                if self._send(peer, payload):
                    del unsent[peer]
                    has_moved = True
            self._greet()
            for chunk in member.pop_due(lambda peer: peer not in unsent and self._members[peer] in self._sessions):
                payload = self._encode(chunk, reduction)
                sent_bytes += len(payload)
                has_moved = True
                if not self._send(chunk.peer, payload):
                    unsent[chunk.peer] = payload
            if member.is_complete and not unsent:
                return sent_bytes
            now_s = self._clock()
            progress_s = now_s if has_moved else progress_s
            self._check(member.list_partners(), now_s, until_s=min(finish_s, progress_s + STALL_S))
            if not has_moved:
                with self._changed:
                    if not self._has_message(reduction):
                        self._changed.wait(SEND_WAIT_S if unsent else IDLE_WAIT_S)

    def _add(self, sender: str, message: ChunkMessage) -> None:
        with self._changed:
            if message.is_abort:
                self._aborts.append((sender, message.group))
            if sender in self._members and message.group == self._group:
                if message.is_abort:
                    self._break(f"{sender} has given up")
                else:
                    self._record_session(sender, message)
            if message.is_greeting:
                self._greetings[sender] = message
                self._changed.notify_all()
            if message.is_abort or message.is_greeting:
                return
            num_bytes = HEADER.size + len(message.values)
            if self._queued_bytes + num_bytes > self._max_queued_bytes:
                self._break(f"{sender} sends more than {self._max_queued_bytes} bytes ahead")
                return
            self._queued_bytes += num_bytes
            self._received.append((sender, message))
            self._changed.notify_all()

    def _record_session(self, sender: str, message: ChunkMessage) -> None:
        if sender not in self._sessions:
            self._started_s[sender] = self._clock()
            if message.is_greeting:
                self._ungreeted.add(sender)  # what greeted it before may have been taken by the process before
        if self._sessions.setdefault(sender, message.session) != message.session:
            self._break(f"{sender} has restarted")

    def _greet(self) -> None:
        """Greets those that were not, as far as there is room in the queues to them."""
        message = encode_message(ChunkMessage(group=self._group, session=self._session, is_greeting=True))
        transport = self._transport
        with self._changed:
            waiting = sorted(self._ungreeted)
        for peer in waiting:
            with self._changed:
                self._ungreeted.discard(peer)
            if transport is None or not transport.send(peer, message, is_reply=True):
                with self._changed:
                    self._ungreeted.add(peer)

    def _break(self, reason: str) -> None:
        with self._changed:
            self._broken_by = self._broken_by or reason
            self._changed.notify_all()

    def _has_message(self, reduction: int) -> bool:
        return any(item.group == self._group and item.reduction == reduction for _, item in self._received)

    def _take(self, member: AllReduce, reduction: int, dtype: np.dtype) -> bool:
        """Passes the messages of an all-reduce to its state; returns whether there were any."""
        with self._changed:
            due = [
                (sender, item)
                for sender, item in self._received
                if item.group == self._group and item.reduction == reduction
            ]
            later = [
                (sender, item)
                for sender, item in self._received
                if item.group != self._group or item.reduction > reduction
            ]
            self._received = deque(later)
            self._queued_bytes = sum(HEADER.size + len(item.values) for _, item in later)
        for sender, item in due:
            if sender not in self._members or len(item.values) % dtype.itemsize:
                raise CollectiveBrokenError(f"{sender} sends what is no chunk of this group")
            values = np.frombuffer(item.values, dtype)
            try:
                member.receive(
                    Chunk(peer=self._members.index(sender), step=item.step, start=item.start, values=values)
                )
            except NetworkError as error:
                raise CollectiveBrokenError(f"{sender}: {error}") from None
        return bool(due)

    def _encode(self, chunk: Chunk, reduction: int) -> bytes:
        return encode_message(
            ChunkMessage(
                group=self._group,
                session=self._session,
                reduction=reduction,
                step=chunk.step,
                start=chunk.start,
                values=chunk.values.tobytes(),
            )
        )

    def _send(self, peer: int, payload: bytes) -> bool:
        transport = self._transport
        if transport is None:
            raise CollectiveBrokenError("the connections were closed")
        return transport.send(self._members[peer], payload, is_reply=True)

    def _check(self, partners: Iterable[int], now_s: float, *, until_s: float) -> None:
        if self._broken_by:
            raise CollectiveBrokenError(self._broken_by)
        if now_s >= until_s:
            raise CollectiveBrokenError("the others were waited for too long")
        connected = frozenset[str]() if self._transport is None else self._transport.list_connected_peers()
        for name in connected & self._peers:
            self._reached_s[name] = max(now_s, self._reached_s.get(name, now_s))
        refused_s = {} if self._transport is None else self._transport.get_refusal_times()
        names = [self._members[partner] for partner in partners]
        for name in names:
            # It listened when it greeted this member, so its process has ended, and its part with it. Before, it may
            # not have begun yet, and the sender may be slow to try again.
            if refused_s.get(name, -math.inf) > self._started_s.get(name, math.inf):
                raise CollectiveBrokenError(f"{name} has ended")
            if now_s - self._reached_s.get(name, now_s) > LOST_S:
                raise CollectiveBrokenError(f"{name} is not reached")
        if now_s > self._begin_until_s and (late := [name for name in names if name not in self._sessions]):
            raise CollectiveBrokenError(f"{late[0]} has not begun")


def _list_peers(schedule: Schedule, members: tuple[str, ...], device_id: str) -> list[str]:
    place = members.index(device_id)
    pairs = {(item.sender, item.receiver) for step in schedule for item in step.transfers}
    partners = {receiver for sender, receiver in pairs if sender == place}
    partners |= {sender for sender, receiver in pairs if receiver == place}
    return [members[partner] for partner in sorted(partners)]


def _make_plan(peers: Iterable[str], addresses: dict[str, str], listen: str) -> GossipConfig:
    """Returns what a transport needs of a plan; the rest is for nodes of a graph."""
    links = (
        PeerLinkConfig(neighbour=name, sign=1.0, degree=1, weight=0.5, period=1, address=addresses[name])
        for name in peers
    )
    return GossipConfig(method="", edges=tuple(links), learning_rate=0.0, period=1, carrier="direct", listen=listen)
