"""One node of a graph: its model, what its local steps are corrected by, what it sends, and what it makes of mail.

A method is a subclass. Between two exchanges a device makes local steps w ← (w - μ(g - c)) / (1 + μh), in which g is
the gradient of a batch, and the method chose the correction c and the shrinkage h: training needs to know no more of
it. So a method is pure arithmetic on arrays, the same for NumPy and torch, for live boards and simulated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from edgefl.errors import ConfigError
from edgefl.types import Array, EdgeSide

Arrays = dict[str, Array]

_COUNTS = 1 << 30
"""A message's number is the node's life times this, plus what it counts in that life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What a local step adds to the gradient step: see the module. `correction` empty is plain SGD."""

    correction: Mapping[str, Array] = field(default_factory=dict)
    shrinkage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """What one node sends to a neighbour: `parts` are whole models by name (`y`, `w`), `step` numbers the sender's.

    With `is_reply` it answers the mail of that step, which was the receiver's own. `count` is the step without the
    sender's life: local iterations, or exchanges where all neighbours are averaged with at once.
    """

    sender: str
    receiver: str
    step: int
    parts: Mapping[str, Mapping[str, Array]]
    is_reply: bool = False

    @property
    def count(self) -> int:
        return self.step % _COUNTS


class Node:
    """What all methods have in common; a subclass gives `post` and `take`.

    `weights` are the node's own model; a caller may read them at any time, and after training calls `trained`. `life`
    grows with every start of its device, so that what it sends after a reboot is newer than all before.
    """

    parts: ClassVar[tuple[str, ...]] = ("w",)
    needs_all: ClassVar[bool] = False
    """Whether an exchange is right only with the mail of every neighbour: then carriers wait for it, if they can."""

    def __init__(self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int) -> None:
        if not learning_rate > 0 or period < 1:
            raise ConfigError(
                f"a node needs a learning rate above 0 and a period of 1 or more, got {learning_rate} and {period}"
            )
        self.name = name
        self.learning_rate, self.period = learning_rate, period
        self.weights: Arrays = {}
        self.life = 0
        self.iterations = 0
        self.exchanges = 0
        self.edges: dict[str, EdgeSide] = {side.neighbour: side for side in edges}
        self._seen: dict[str, int] = {}

    def begin(self, weights: Mapping[str, Array]) -> None:
        """Starts from a model, the same for all nodes of a run or not."""
        self.weights = {name: np.array(array, order="C") for name, array in weights.items()}
        for side in list(self.edges.values()):
            self.joined(side)

    @property
    def neighbours(self) -> tuple[str, ...]:
        return tuple(self.edges)

    def correction(self) -> Correction:
        """Returns what the next local steps are corrected by."""
        return Correction()

    def trained(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        """Takes the model that local steps ended at.

        Args:
            weights: by name, as `self.weights`; they are copied.
            iterations: how many steps there were.
            learning_rate: μ of these steps.
        """
        del learning_rate  # the methods that estimate a gradient want it
        self.iterations += iterations
        for name, array in weights.items():
            self.weights[name][...] = array

    def post(self, neighbours: Sequence[str]) -> list[Mail]:
        """Returns the mail to these neighbours, whose edges fire now. Called right after `trained`."""
        raise NotImplementedError

    def take(self, mail: Mail) -> list[Mail]:
        """Takes a neighbour's mail and returns the answers; what is old, repeated or of a stranger is dropped."""
        raise NotImplementedError

    def has_all(self) -> bool:
        """Says whether the mail that the present exchange needs is here."""
        return True

    def mix(self) -> None:
        """Ends an exchange; only methods that average all neighbours at once do something here."""

    @classmethod
    def trains_before(cls, exchange: int) -> bool:
        """Says whether local steps come before an exchange, the first being 1; if not it follows at once."""
        return exchange >= 1

    def numbered(self, count: int) -> int:
        """Returns the step of mail that says what the node did `count` of."""
        return self.life * _COUNTS + count

    def joined(self, side: EdgeSide) -> None:
        """Begins an edge; called at the start for each neighbour, later when one comes."""
        self.edges[side.neighbour] = side

    def left(self, neighbour: str) -> None:
        """Ends an edge with all that was kept for it."""
        self.edges.pop(neighbour, None)
        self._seen.pop(neighbour, None)

    def state(self) -> dict[str, Array]:
        """Returns all that must survive a reboot, flat by name, as copies."""
        kept: dict[str, Array] = {
            "iterations": np.array(self.iterations),
            "exchanges": np.array(self.exchanges),
            **{f"seen/{other}": np.array(step) for other, step in self._seen.items()},
        }
        return kept | {f"weights/{name}": array.copy() for name, array in self.weights.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        """Goes on from a state of the same method and neighbours. Comes after `begin`.

        Raises:
            ConfigError: it is another method's, or of another model.
        """
        self.iterations, self.exchanges = int(saved["iterations"]), int(saved["exchanges"])
        self._seen = {key.removeprefix("seen/"): int(step) for key, step in saved.items() if key.startswith("seen/")}
        for name, array in self.weights.items():
            array[...] = saved[f"weights/{name}"]

    def is_news(self, mail: Mail) -> bool:
        """Says whether mail is of a neighbour and newer than all before it on its edge, and remembers it then."""
        if mail.sender not in self.edges or mail.receiver != self.name:
            return False
        if mail.step <= self._seen.get(mail.sender, -1):
            return False
        self._seen[mail.sender] = mail.step
        return True


def copied(arrays: Mapping[str, Array]) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def blended(terms: Iterable[tuple[float, Mapping[str, Array]]]) -> Arrays:
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
