"""Gossip node: encoded messages in and out, local steps in between; message framing; the algorithms by name.

A trainer reads the algorithm's `correction`, trains from its `weights`, and calls its `apply_local_steps`. A
transport passes messages to `receive` and sends those that `receive` and `start_exchange` return. Both do not depend
on the method. Several messages travel together as an index in a JSON header and their bodies, concatenated before a
tail.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from edgefl.core.errors import CodecError, ConfigError, NetworkError
from edgefl.core.protocol import INSTRUCTION_VERSION
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Array, GossipConfig, PeerLinkConfig, PeerMessage
from edgefl.strategies.peer_algorithms.algorithm import GossipAlgorithm, GossipMessage
from edgefl.strategies.peer_algorithms.gossip_averaging import D2, AdPsgd, Dsgd, GradientTracking, KGradientTracking
from edgefl.strategies.peer_algorithms.isvr import AdmmIsvr, PdmmIsvr
from edgefl.strategies.peer_algorithms.topology import EdgeScheduleKind

log = logging.getLogger(__name__)

MAX_MESSAGES = 4096

ALGORITHMS: Mapping[str, type[GossipAlgorithm]] = MappingProxyType(
    {
        "pdmm-isvr": PdmmIsvr,
        "admm-isvr": AdmmIsvr,
        "dsgd": Dsgd,
        "ad-psgd": AdPsgd,
        "gradient-tracking": GradientTracking,
        "k-gt": KGradientTracking,
        "d2": D2,
    }
)


class PeerMessageCodec(Protocol):
    """Codec between message parts and body; implemented by `compression.peer_codec.PeerCodec`."""

    def encode(self, receiver: str, parts: Mapping[str, Mapping[str, Array]], rng: Generator) -> bytes: ...
    def decode(self, sender: str, body: bytes) -> Mapping[str, Mapping[str, Array]]: ...
    def remove_peer(self, peer: str) -> None: ...


class GossipNode:
    """Gossip algorithm with its message codec.

    `buffers` are the non-parameter tensors of the node's model, which are never sent. `num_dropped` counts unreadable
    messages.

    Args:
        algorithm: a started algorithm.
        codec: of messages in both directions.
        rng: for randomised codecs.
    """

    def __init__(self, algorithm: GossipAlgorithm, codec: PeerMessageCodec, rng: Generator) -> None:
        self.algorithm = algorithm
        self.buffers: dict[str, Array] = {}
        self.num_dropped = 0
        self._codec, self._rng = codec, rng
        self._is_exchanging = False

    def start(self, weights: Mapping[str, Array]) -> None:
        """Starts or restarts the node from a model: step numbers go on, edge states are reset."""
        for neighbour in self.algorithm.edges:
            self._codec.remove_peer(neighbour)
        self._is_exchanging = False
        self.algorithm.start(weights)

    def receive(self, messages: Iterable[PeerMessage]) -> tuple[PeerMessage, ...]:
        """Processes neighbours' messages and returns replies; unreadable messages are dropped."""
        replies: list[GossipMessage] = []
        for message in messages:
            sender, receiver = message.edge
            if receiver != self.algorithm.name or sender not in self.algorithm.edges:
                continue
            try:
                parts = self._codec.decode(sender, message.body)
            except CodecError as error:
                self.num_dropped += 1
                log.info("dropped a message of %s: %s", sender, error)
                continue
            if reason := self._rejection_reason(parts):
                self.num_dropped += 1
                log.info("dropped a message of %s: %s", sender, reason)
                continue
            gossip_message = GossipMessage(
                sender=sender, receiver=receiver, step=message.step, parts=parts, is_reply=message.is_reply
            )
            replies += self.algorithm.receive(gossip_message)
        return self._encode_messages(replies)

    def _rejection_reason(self, parts: Mapping[str, Mapping[str, Array]]) -> str | None:
        """Returns why a message is invalid, or None: a diverged node must not spoil the others."""
        if not parts or not set(parts) <= set(self.algorithm.parts):
            return f"it holds {', '.join(sorted(parts)) or 'nothing'}"
        is_finite = all(np.isfinite(array).all() for arrays in parts.values() for array in arrays.values())
        return None if is_finite else "it holds a NaN or an infinity"

    def finish_exchange(self) -> None:
        """Ends the exchange under way, if any, with the messages received so far."""
        if self._is_exchanging:
            self.algorithm.mix()
            self._is_exchanging = False

    def can_finish_exchange(self) -> bool:
        """Returns whether no exchange is under way, or all its messages have arrived."""
        return not self._is_exchanging or self.algorithm.has_all_messages()

    def should_train_next(self) -> bool:
        """Returns whether local steps precede the next exchange."""
        return self.algorithm.should_train_before(self.algorithm.exchanges + 1)

    def start_exchange(self, neighbours: Sequence[str]) -> tuple[PeerMessage, ...]:
        """Starts an exchange and returns the messages to these neighbours."""
        messages = self.algorithm.make_messages(neighbours)
        self._is_exchanging = True
        return self._encode_messages(messages)

    def update_links(self, edges: Sequence[PeerLinkConfig]) -> None:
        """Updates the node's edges: ends removed ones, starts new ones."""
        current_links = {link.neighbour: link for link in edges}
        for neighbour, former_link in list(self.algorithm.edges.items()):
            if neighbour not in current_links or current_links[neighbour].epoch != former_link.epoch:
                self.algorithm.remove_neighbour(neighbour)
                self._codec.remove_peer(neighbour)
        for neighbour, link in current_links.items():
            if neighbour not in self.algorithm.edges:
                self.algorithm.add_neighbour(link)
            else:
                self.algorithm.edges[neighbour] = link

    def model(self) -> dict[str, Array]:
        """Returns the node's model, parameters and buffers; read-only."""
        return {**self.algorithm.weights, **self.buffers}

    def state(self) -> dict[str, Array]:
        """Returns the state that must survive a reboot, flat by name."""
        epochs = {f"epoch/{neighbour}": np.array(link.epoch) for neighbour, link in self.algorithm.edges.items()}
        return (
            self.algorithm.state() | epochs | {f"buffer/{name}": array.copy() for name, array in self.buffers.items()}
        )

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restores a state of the same method; edges restarted since then are restarted.

        Raises:
            ConfigError: the state belongs to another method or model.
        """
        self.algorithm.restore(saved)
        links = tuple(self.algorithm.edges.values())
        for link in links:
            epoch = int(saved.get(f"epoch/{link.neighbour}", link.epoch))
            self.algorithm.edges[link.neighbour] = replace(link, epoch=epoch)
        self.update_links(links)
        self.buffers = {
            name.removeprefix("buffer/"): array.copy() for name, array in saved.items() if name.startswith("buffer/")
        }

    def _encode_messages(self, messages: Sequence[GossipMessage]) -> tuple[PeerMessage, ...]:
        return tuple(
            PeerMessage(
                edge=(message.sender, message.receiver),
                step=message.step,
                body=self._codec.encode(message.receiver, message.parts, self._rng),
                is_reply=message.is_reply,
            )
            for message in messages
        )


def encode_messages(messages: Sequence[PeerMessage], tail: bytes = b"") -> tuple[list[list[Any]], bytes]:
    """Returns the JSON index of the messages, and their bodies followed by `tail`."""
    index = [[*message.edge, message.step, int(message.is_reply), len(message.body)] for message in messages]
    return index, b"".join([*(message.body for message in messages), tail])


def decode_messages(index: Any, body: bytes) -> tuple[tuple[PeerMessage, ...], bytes]:
    """Returns the messages and the bytes after them.

    Raises:
        NetworkError: the index does not fit the body.
    """
    if not isinstance(index, list) or len(index) > MAX_MESSAGES:
        raise NetworkError(f"messages of edges must be a list of at most {MAX_MESSAGES}, got {index!r:.40}")
    messages, start = [], 0
    for entry in index:
        sender, receiver, step, is_reply, length = _parse_entry(entry)
        if start + length > len(body):
            raise NetworkError(f"a message of {length} bytes begins at {start} of a body of {len(body)}")
        messages.append(
            PeerMessage(
                edge=(sender, receiver), step=step, body=body[start : start + length], is_reply=bool(is_reply)
            )
        )
        start += length
    return tuple(messages), body[start:]


def encode_peer_message(run: str, message: PeerMessage) -> bytes:
    """Returns one message in the peer format: a line of JSON, then its body."""
    index, body = encode_messages([message])
    return json.dumps({"v": INSTRUCTION_VERSION, "run": run, "messages": index}).encode() + b"\n" + body


def decode_peer_message(payload: bytes) -> tuple[str, PeerMessage]:
    """Returns the run and the message.

    Raises:
        NetworkError: the payload is malformed.
    """
    line, _, body = payload.partition(b"\n")
    try:
        header = parse_json(line)
        run, index = header["run"], header["messages"]
    except (ValueError, KeyError, TypeError) as error:
        raise NetworkError(f"a neighbour's message begins with no JSON of ours: {error}") from None
    messages, tail = decode_messages(index, body)
    if header.get("v") != INSTRUCTION_VERSION or not isinstance(run, str) or len(messages) != 1 or tail:
        raise NetworkError(f"a neighbour's message must be one, of version {INSTRUCTION_VERSION}, and nothing else")
    return run, messages[0]


def _parse_entry(entry: Any) -> tuple[str, str, int, int, int]:
    if isinstance(entry, list) and len(entry) == 5:
        sender, receiver, step, is_reply, length = entry
        numbers = [step, is_reply, length]
        is_whole = all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
        if isinstance(sender, str) and isinstance(receiver, str) and is_whole:
            return sender, receiver, step, is_reply, length
    raise NetworkError(f"a message of an edge must be [sender, receiver, step, reply, bytes], got {entry!r:.80}")


def make_algorithm(
    method: str,
    name: str,
    edges: Sequence[PeerLinkConfig],
    *,
    learning_rate: float,
    period: int,
    incarnation: int = 0,
    **settings: Any,
) -> GossipAlgorithm:
    """Returns an algorithm, not yet started (`start`).

    Args:
        method: one of `ALGORITHMS`.
        name: of the node.
        edges: the node's own, from `Topology.make_link_configs`.
        learning_rate: μ₀, above 0.
        period: K, local iterations between two exchanges of an edge, 1 or more.
        incarnation: grows with every start of its device.
        settings: of this method alone (`GossipAlgorithm.settings`).

    Raises:
        ConfigError: the method is unknown, or does not support these numbers.
    """
    if method not in ALGORITHMS:
        raise ConfigError(f"decentralised method {method!r} is unknown; known: {', '.join(ALGORITHMS)}")
    node = ALGORITHMS[method](name, edges, learning_rate=learning_rate, period=period, **settings)
    node.incarnation = incarnation
    return node


def make_configured_algorithm(plan: GossipConfig, name: str, *, incarnation: int = 0) -> GossipAlgorithm:
    """Returns the algorithm of device `name` under a plan; see `make_algorithm`."""
    settings = ALGORITHMS[plan.method].settings if plan.method in ALGORITHMS else ()
    node = make_algorithm(
        plan.method,
        name,
        plan.edges,
        learning_rate=plan.learning_rate,
        period=plan.period,
        incarnation=incarnation,
        **{setting: getattr(plan, setting) for setting in settings},
    )
    node.is_pairwise = node.has_pairs and plan.schedule == EdgeScheduleKind.PAIR
    return node
