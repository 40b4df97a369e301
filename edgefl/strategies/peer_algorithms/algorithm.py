"""Gossip algorithm of one node: model, gradient correction, messages sent, and processing of messages received.

A method is a subclass. Between two exchanges a device makes local steps w ← (w - μ(g - c)) / (1 + μh), in which g is
the gradient of a batch, and the method chooses the correction c and the shrinkage h, which is all that training
depends on. A method is pure arithmetic on arrays, the same for NumPy and torch, for live boards and simulated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, PeerLinkConfig

Arrays = dict[str, Array]
Parts = Mapping[str, Mapping[str, Array]]

_STEPS_PER_INCARNATION = 1 << 30
"""A message's number is the node's incarnation times this, plus its count in that incarnation."""
MAX_UNANSWERED_FIRINGS = 8
"""Number of firings of an edge without a reply after which the request counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCorrection:
    """Correction of a local gradient step, see the module; empty `correction` is plain SGD."""

    correction: Mapping[str, Array] = field(default_factory=dict)
    shrinkage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GossipMessage:
    """Message of one node to a neighbour: `parts` are whole models by name (`y`, `w`), `step` numbers the sender's.

    With `is_reply` it answers the receiver's own message of that step. `local_step` is the step without the sender's
    incarnation: local iterations, or exchanges where all neighbours are averaged with at once.
    """

    sender: str
    receiver: str
    step: int
    parts: Mapping[str, Mapping[str, Array]]
    is_reply: bool = False

    @property
    def local_step(self) -> int:
        return self.step % _STEPS_PER_INCARNATION


@dataclass(slots=True)
class _PendingExchange:
    """Parts sent to a neighbour, and how often its edge has fired since; nobody waits for a late reply."""

    step: int
    parts: Parts
    num_skipped: int = 0
    is_late: bool = False


class GossipAlgorithm:
    """Base class of all methods; a subclass implements `make_messages` and `receive`, or exchanges in pairs.

    In pairs (`is_pairwise`) the end of an edge that fires sends what it has, and the other end, as soon as the
    message comes, takes it and replies with what it had itself: `make_pair_parts` and `apply_pair`. Where both fire
    at a time, each takes the other's request for its reply. A node asks again after the reply, or after
    `MAX_UNANSWERED_FIRINGS`.

    `weights` are the node's own model; a caller may read them at any time, and after training calls
    `apply_local_steps`. `incarnation` grows with every start of its device, so that messages after a reboot are newer
    than all before.
    """

    summary: ClassVar[str] = ""
    """One line for `edgefl strategies`."""
    parts: ClassVar[tuple[str, ...]] = ("w",)
    is_synchronous: ClassVar[bool] = False
    """Whether an exchange is exact only with every neighbour's message: then runners wait for them, if they can."""
    is_lockstep: ClassVar[bool] = False
    """Whether all edges of a node have to fire together, in the schedule `sync`."""
    has_single_iteration: ClassVar[bool] = False
    """Whether the period is 1: an exchange follows every local iteration."""
    has_pairs: ClassVar[bool] = False
    """Whether it can exchange in pairs."""
    settings: ClassVar[tuple[str, ...]] = ()
    """Fields of `GossipConfig`, and keyword arguments, that only this method has."""

    def __init__(self, name: str, edges: Sequence[PeerLinkConfig], *, learning_rate: float, period: int) -> None:
        if not learning_rate > 0 or period < 1:
            raise ConfigError(
                f"a node needs a learning rate above 0 and a period of 1 or more, got {learning_rate} and {period}"
            )
        self.name = name
        self.learning_rate, self.period = learning_rate, period
        self.weights: Arrays = {}
        self.incarnation = 0
        self.iterations = 0
        self.exchanges = 0
        self.edges: dict[str, PeerLinkConfig] = {edge.neighbour: edge for edge in edges}
        self.is_pairwise = False
        self._last_received: dict[str, int] = {}
        self._pending: dict[str, _PendingExchange] = {}

    def start(self, weights: Mapping[str, Array]) -> None:
        """Starts from a model, the same for all nodes of a run or not."""
        self.weights = {name: np.array(array, order="C") for name, array in weights.items()}
        self._pending = {}
        for edge in list(self.edges.values()):
            self.add_neighbour(edge)

    @property
    def neighbours(self) -> tuple[str, ...]:
        return tuple(self.edges)

    def correction(self) -> GradientCorrection:
        """Returns the correction of the next local steps."""
        return GradientCorrection()

    def apply_local_steps(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        """Adopts the model that local steps ended at.

        Args:
            weights: by name, as `self.weights`; they are copied.
            iterations: how many steps there were.
            learning_rate: μ of these steps.
        """
        del learning_rate  # the methods that estimate a gradient need it
        self.iterations += iterations
        for name, array in weights.items():
            self.weights[name][...] = array

    def make_messages(self, neighbours: Sequence[str]) -> list[GossipMessage]:
        """Returns messages to these neighbours, whose edges fire now; called right after `apply_local_steps`."""
        messages = []
        for neighbour in neighbours:
            pending = self._pending.get(neighbour)
            if pending is not None and pending.num_skipped < MAX_UNANSWERED_FIRINGS:
                pending.num_skipped += 1
            elif neighbour in self.edges:
                step, parts = self.make_step_number(self.iterations), self.make_pair_parts(neighbour)
                self._pending[neighbour] = _PendingExchange(step=step, parts=parts)
                messages.append(GossipMessage(sender=self.name, receiver=neighbour, step=step, parts=parts))
        return messages

    def receive(self, message: GossipMessage) -> list[GossipMessage]:
        """Processes a neighbour's message and returns replies; drops old, repeated and unknown senders' ones."""
        sender, pending = message.sender, self._pending.get(message.sender)
        is_answer = message.is_reply and pending is not None and pending.step == message.step
        if is_answer and message.receiver == self.name:
            self.apply_pair(sender, self._pending.pop(sender).parts, message.parts)
        if message.is_reply or not self.record_if_newer(message):
            return []
        if pending is not None:
            self.apply_pair(sender, self._pending.pop(sender).parts, message.parts)
            return []
        own = self.make_pair_parts(sender)
        self.apply_pair(sender, own, message.parts)
        return [GossipMessage(sender=self.name, receiver=sender, step=message.step, parts=own, is_reply=True)]

    def make_pair_parts(self, neighbour: str) -> Parts:  # noqa: ARG002 for subclasses
        """Returns a copy of what this end of an edge gives in an exchange of a pair."""
        return {"w": copy_arrays(self.weights)}

    def apply_pair(self, neighbour: str, own: Parts, other: Parts) -> None:
        """Applies an exchange of a pair: `own` was given, `other` taken."""
        raise NotImplementedError

    def has_all_messages(self) -> bool:
        """Returns whether all messages that the present exchange needs have arrived."""
        return all(pending.is_late for pending in self._pending.values())

    def mix(self) -> None:
        """Ends an exchange: what has not come by now is late."""
        for pending in self._pending.values():
            pending.is_late = True

    @classmethod
    def should_train_before(cls, exchange: int) -> bool:
        """Returns whether local steps precede an exchange (the first is 1); else it follows at once."""
        return exchange >= 1

    def make_step_number(self, count: int) -> int:
        """Returns the message step number for a local count, made unique by the incarnation."""
        return self.incarnation * _STEPS_PER_INCARNATION + count

    def add_neighbour(self, link: PeerLinkConfig) -> None:
        """Starts an edge; called at the start for each neighbour, later when one is added."""
        self.edges[link.neighbour] = link

    def remove_neighbour(self, neighbour: str) -> None:
        """Ends an edge and deletes its state."""
        self.edges.pop(neighbour, None)
        self._last_received.pop(neighbour, None)
        self._pending.pop(neighbour, None)

    def state(self) -> dict[str, Array]:
        """Returns the state that must survive a reboot, flat by name, as copies."""
        values: dict[str, Array] = {
            "iterations": np.array(self.iterations),
            "exchanges": np.array(self.exchanges),
            **{f"seen/{neighbour}": np.array(step) for neighbour, step in self._last_received.items()},
        }
        return values | {f"weights/{name}": array.copy() for name, array in self.weights.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Restores a state of the same method and neighbours; called after `start`.

        Raises:
            ConfigError: the state belongs to another method or model.
        """
        self.iterations, self.exchanges = int(saved["iterations"]), int(saved["exchanges"])
        self._last_received = {
            key.removeprefix("seen/"): int(step) for key, step in saved.items() if key.startswith("seen/")
        }
        for name, array in self.weights.items():
            array[...] = saved[f"weights/{name}"]

    def record_if_newer(self, message: GossipMessage) -> bool:
        """Returns whether a message is a neighbour's and newer than all before on its edge; records it then."""
        if message.sender not in self.edges or message.receiver != self.name:
            return False
        if message.step <= self._last_received.get(message.sender, -1):
            return False
        self._last_received[message.sender] = message.step
        return True


def copy_arrays(arrays: Mapping[str, Array]) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def compute_weighted_sum(terms: Iterable[tuple[float, Mapping[str, Array]]]) -> Arrays:
    """Returns the weighted sum of models."""
    total: Arrays = {}
    for weight, arrays in terms:
        for name, array in arrays.items():
            scaled = array * array.dtype.type(weight)
            if name in total:
                total[name] += scaled
            else:
                total[name] = scaled
    return total
