"""One node at work: messages in, messages out, and between them its local steps; for live boards and virtual ones.

Whoever trains asks for `correction`, trains from `node.weights`, and tells the result. Whoever carries messages hands
them to `take` and sends what `take` and `post` give. Neither knows the method, and the method knows neither.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.random import Generator

from edgefl.decentralised.node import Correction, Mail, Node
from edgefl.errors import CodecError
from edgefl.types import Array, EdgeMessage, EdgeSide

log = logging.getLogger(__name__)


class EdgeCoder(Protocol):
    """Turns the parts of a message into a body and back; `compression.edges.EdgeCodec` is one."""

    def encode(self, receiver: str, parts: Mapping[str, Mapping[str, Array]], rng: Generator) -> bytes: ...
    def decode(self, sender: str, body: bytes) -> Mapping[str, Mapping[str, Array]]: ...
    def forget(self, neighbour: str) -> None: ...


class Engine:
    """A node with its codec.

    `buffers` are the tensors of the node's model that are no parameters: they stay with the node. `num_dropped`
    counts messages that could not be read.

    Args:
        node: which has begun.
        coder: for what it sends and gets.
        rng: for codecs that draw.
    """

    def __init__(self, node: Node, coder: EdgeCoder, rng: Generator) -> None:
        self.node = node
        self.buffers: dict[str, Array] = {}
        self.num_dropped = 0
        self._coder, self._rng = coder, rng
        self._is_exchanging = False

    def begin(self, weights: Mapping[str, Array]) -> None:
        """Starts the node from a model, or starts it anew: it numbers on, and no edge has a past."""
        for neighbour in self.node.edges:
            self._coder.forget(neighbour)
        self._is_exchanging = False
        self.node.begin(weights)

    def correction(self) -> Correction:
        return self.node.correction()

    def take(self, messages: Iterable[EdgeMessage]) -> tuple[EdgeMessage, ...]:
        """Takes neighbours' messages and returns the answers; one that cannot be read is dropped."""
        answers: list[Mail] = []
        for message in messages:
            sender, receiver = message.edge
            if receiver != self.node.name or sender not in self.node.edges:
                continue
            try:
                parts = self._coder.decode(sender, message.body)
            except CodecError as error:
                self.num_dropped += 1
                log.info("dropped a message of %s: %s", sender, error)
                continue
            if reason := self._misfit(parts):
                self.num_dropped += 1
                log.info("dropped a message of %s: %s", sender, reason)
                continue
            mail = Mail(sender=sender, receiver=receiver, step=message.step, parts=parts, is_reply=message.is_reply)
            answers += self.node.take(mail)
        return self._encoded(answers)

    def _misfit(self, parts: Mapping[str, Mapping[str, Array]]) -> str | None:
        """Returns what is wrong with a message: one node that has diverged must not take all others along."""
        if not parts or not set(parts) <= set(self.node.parts):
            return f"it holds {', '.join(sorted(parts)) or 'nothing'}"
        is_finite = all(np.isfinite(array).all() for arrays in parts.values() for array in arrays.values())
        return None if is_finite else "it holds a NaN or an infinity"

    def settle(self) -> None:
        """Ends the exchange that is under way, if one is, with what has come."""
        if self._is_exchanging:
            self.node.mix()
            self._is_exchanging = False

    def is_settled(self) -> bool:
        """Says whether no exchange is under way, or all that it needs is here."""
        return not self._is_exchanging or self.node.has_all()

    def trains_next(self) -> bool:
        """Says whether local steps come before the next exchange."""
        return self.node.trains_before(self.node.exchanges + 1)

    def trained(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        self.node.trained(weights, iterations, learning_rate)

    def post(self, neighbours: Sequence[str]) -> tuple[EdgeMessage, ...]:
        """Begins an exchange: returns the messages to these neighbours."""
        mail = self.node.post(neighbours)
        self._is_exchanging = True
        return self._encoded(mail)

    def follow(self, edges: Sequence[EdgeSide]) -> None:
        """Takes over the node's edges as they are now: ends those that are gone, begins those that are new."""
        now = {side.neighbour: side for side in edges}
        for neighbour, known in list(self.node.edges.items()):
            if neighbour not in now or now[neighbour].epoch != known.epoch:
                self.node.left(neighbour)
                self._coder.forget(neighbour)
        for neighbour, side in now.items():
            if neighbour not in self.node.edges:
                self.node.joined(side)
            else:
                self.node.edges[neighbour] = side

    def model(self) -> dict[str, Array]:
        """Returns the node's own model: parameters and buffers, not to be written to."""
        return {**self.node.weights, **self.buffers}

    def state(self) -> dict[str, Array]:
        """Returns all that must survive a reboot, flat by name."""
        epochs = {f"epoch/{neighbour}": np.array(side.epoch) for neighbour, side in self.node.edges.items()}
        return self.node.state() | epochs | {f"buffer/{name}": array.copy() for name, array in self.buffers.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Goes on from a state of the same method; edges that began anew since then begin anew here, too.

        Raises:
            ConfigError: it is another method's, or of another model.
        """
        self.node.restore(saved)
        now = tuple(self.node.edges.values())
        for side in now:
            epoch = int(saved.get(f"epoch/{side.neighbour}", side.epoch))
            self.node.edges[side.neighbour] = replace(side, epoch=epoch)
        self.follow(now)
        self.buffers = {
            name.removeprefix("buffer/"): array.copy() for name, array in saved.items() if name.startswith("buffer/")
        }

    def _encoded(self, mail: Sequence[Mail]) -> tuple[EdgeMessage, ...]:
        return tuple(
            EdgeMessage(
                edge=(each.sender, each.receiver),
                step=each.step,
                body=self._coder.encode(each.receiver, each.parts, self._rng),
                is_reply=each.is_reply,
            )
            for each in mail
        )
