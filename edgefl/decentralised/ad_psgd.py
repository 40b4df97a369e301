"""AD-PSGD: when an edge fires, both of its nodes adopt the mean of their two models.

Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgefl.core.types import Array, PeerLinkConfig
from edgefl.decentralised.algorithm import Arrays, GossipAlgorithm, GossipMessage, copy_arrays

MAX_UNANSWERED_FIRINGS = 8
"""Number of firings of an edge without a reply after which the request counts as lost."""


@dataclass(slots=True)
class _PendingExchange:
    """Model sent to a neighbour, and how often its edge has fired since."""

    step: int
    weights: Arrays
    num_skipped: int = 0


class AdPsgd(GossipAlgorithm):
    """AD-PSGD node: the receiver averages and replies with its former model; the sender moves by half the difference.

    Both move by opposite amounts, whatever they trained meanwhile, so the mean of all models is kept. When both send
    at the same time each takes the other's request for its reply. A node sends no further request before the reply; a
    lost
    one breaks the balance: the sender asks again after a while, and the mean of the models has moved a little.
    Biased where the nodes' data differ.
    """

    def __init__(self, name: str, edges: Sequence[PeerLinkConfig], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self._pending: dict[str, _PendingExchange] = {}

    def make_messages(self, neighbours: Sequence[str]) -> list[GossipMessage]:
        messages = []
        for neighbour in neighbours:
            pending = self._pending.get(neighbour)
            if pending is not None and pending.num_skipped < MAX_UNANSWERED_FIRINGS:
                pending.num_skipped += 1
            elif neighbour in self.edges:
                exchange = _PendingExchange(
                    step=self.make_step_number(self.iterations), weights=copy_arrays(self.weights)
                )
                self._pending[neighbour] = exchange
                messages.append(self._make_message(neighbour, exchange.step, exchange.weights))
        return messages

    def _make_message(
        self, neighbour: str, step: int, weights: Mapping[str, Array], *, is_reply: bool = False
    ) -> GossipMessage:
        return GossipMessage(sender=self.name, receiver=neighbour, step=step, parts={"w": weights}, is_reply=is_reply)

    def receive(self, message: GossipMessage) -> list[GossipMessage]:
        if message.is_reply:
            exchange = self._pending.get(message.sender)
            if exchange is not None and exchange.step == message.step and message.receiver == self.name:
                self._average_with(self._pending.pop(message.sender).weights, message.parts["w"])
            return []
        if not self.record_if_newer(message):
            return []
        if message.sender in self._pending:
            self._average_with(self._pending.pop(message.sender).weights, message.parts["w"])
            return []
        former = copy_arrays(self.weights)
        self._average_with(former, message.parts["w"])
        return [self._make_message(message.sender, message.step, former, is_reply=True)]

    def _average_with(self, own: Mapping[str, Array], other: Mapping[str, Array]) -> None:
        for name, array in self.weights.items():
            array[...] += (other[name] - own[name]) / array.dtype.type(2)

    def remove_neighbour(self, neighbour: str) -> None:
        super().remove_neighbour(neighbour)
        self._pending.pop(neighbour, None)
