"""Methods that average with all neighbours at once, by Metropolis weights: DSGD, D2, gradient tracking, K-GT.

Sources: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017 (D-PSGD, here with
local steps); Tang et al., D2: Decentralized Training over Decentralized Data, ICML 2018; Di Lorenzo, Scutari, NEXT,
2016, and Nedić et al., 2017 (gradient tracking); Liu et al., Decentralized Gradient Tracking with Local Steps, 2023.
All but DSGD lose what keeps them right when mail is lost: where a neighbour's is missing, its last one stands in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from edgefl.decentralised.node import Arrays, Correction, Mail, Node, blended, copied
from edgefl.errors import ConfigError
from edgefl.types import Array, EdgeSide

Parts = Mapping[str, Mapping[str, Array]]

_KEPT = 3
"""So many of a neighbour's newest messages are kept: of this exchange, of the one before, and of the next."""


class MixingNode(Node):
    """Sends `parts` to all neighbours and replaces each by the weighted mean of its own and theirs."""

    needs_all: ClassVar[bool] = True
    cycle: ClassVar[int] = 1
    """After so many exchanges the same parts are sent again."""

    def __init__(self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self._inbox: dict[str, dict[int, Parts]] = {}

    def sent(self) -> dict[str, Arrays]:
        """Returns the parts to send and to mix."""
        return {"w": self.weights}

    def mixed(self, parts: Mapping[str, Arrays]) -> None:
        """Takes the means of the parts."""
        self.weights = parts["w"]

    def post(self, neighbours: Sequence[str]) -> list[Mail]:
        parts = {part: copied(arrays) for part, arrays in self.sent().items()}
        self.exchanges = max(self.exchanges, self._left_behind()) + 1
        step = self.numbered(self.exchanges)
        return [
            Mail(sender=self.name, receiver=neighbour, step=step, parts=parts)
            for neighbour in neighbours
            if neighbour in self.edges
        ]

    def take(self, mail: Mail) -> list[Mail]:
        if self.is_news(mail):
            waiting = self._inbox.setdefault(mail.sender, {})
            waiting[mail.count] = mail.parts
            for old in sorted(waiting)[:-_KEPT]:
                del waiting[old]
        return []

    def has_all(self) -> bool:
        return all(max(self._inbox.get(other, {0: {}})) >= self.exchanges for other in self.edges)

    def mix(self) -> None:
        """Averages; a neighbour that nothing is known of gives its weight to the node itself."""
        own = self.sent()
        self.mixed({part: self._blend(part, own[part]) for part in own})

    def _blend(self, part: str, own: Mapping[str, Array]) -> Arrays:
        """Returns the weighted mean of a part over this node and the neighbours that it is known of."""
        theirs = []
        for other, waiting in self._inbox.items():
            # Of this exchange, or the last before it; what is of the next one waits.
            found = [count for count, parts in waiting.items() if count <= self.exchanges and part in parts]
            if other in self.edges and found:
                theirs.append((self.edges[other].weight, waiting[max(found)][part]))
        return blended([(1 - sum(weight for weight, _ in theirs), own), *theirs])

    def _left_behind(self) -> int:
        """Returns the exchange that neighbours are at who went on without this node, as after a reboot; else 0.

        A neighbour cannot be two exchanges ahead while it waits for ours.
        """
        newest = max((max(waiting) for waiting in self._inbox.values() if waiting), default=0)
        ahead = newest - self.exchanges
        return self.exchanges + ahead - ahead % self.cycle if ahead > 1 else 0

    def left(self, neighbour: str) -> None:
        super().left(neighbour)
        self._inbox.pop(neighbour, None)


class Dsgd(MixingNode):
    """K local SGD steps, then w ← Ww. With K = 1 it is D-PSGD. Biased where the nodes' data differ."""


class D2(MixingNode):
    """w ← W(2w - w⁻ - μg + μg⁻), at first W(w - μg); one local step an exchange.

    The mixing matrix has to be (I + W)/2 where `Graph.needs_damping`.
    """

    def __init__(self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        _needs_period_one("d2", period)
        self._rate = learning_rate
        self._before: Arrays = {}
        self._correction: Arrays = {}

    def begin(self, weights: Mapping[str, Array]) -> None:
        super().begin(weights)
        self._before = copied(self.weights)
        self._correction = {name: np.zeros_like(array) for name, array in self.weights.items()}

    def correction(self) -> Correction:
        return Correction(correction=self._correction)

    def trained(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        # The step was w - μ(g - c), so that μg = w + μc - w_end; the next one has to add w' - w + μg, w' being mixed.
        rate = self._rate = learning_rate
        self._before = {
            name: weights[name] - array.dtype.type(rate) * self._correction[name]
            for name, array in self.weights.items()
        }
        super().trained(weights, iterations, learning_rate)

    def mixed(self, parts: Mapping[str, Arrays]) -> None:
        super().mixed(parts)
        # _before is w - μg of the step before; c = (w' - (w - μg)) / μ, by the μ of that step, which may decay.
        rate = self._rate
        self._correction = {
            name: (array - self._before[name]) / array.dtype.type(rate) for name, array in self.weights.items()
        }

    def state(self) -> dict[str, Array]:
        return super().state() | {f"correction/{name}": array.copy() for name, array in self._correction.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        self._correction = {name: saved[f"correction/{name}"].copy() for name in self.weights}


class GradientTracking(MixingNode):
    """y ← W(y + g - g⁻), w ← W(w - μy), at first y = g: two exchanges, one behind the other, for every gradient.

    The local step moves nothing: it tells the gradient.
    """

    parts: ClassVar[tuple[str, ...]] = ("w", "y")
    cycle: ClassVar[int] = 2

    def __init__(self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        _needs_period_one("gradient-tracking", period)
        self._tracker: Arrays = {}
        self._gradient: Arrays = {}
        self._rate = learning_rate
        self._mixes_weights = True

    def begin(self, weights: Mapping[str, Array]) -> None:
        super().begin(weights)
        self._tracker, self._gradient = {}, {}

    def trained(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        self.iterations += iterations
        self._rate = learning_rate
        gradient = {
            name: (array - weights[name]) / array.dtype.type(learning_rate) for name, array in self.weights.items()
        }
        self._mixes_weights = not self._tracker
        for name, array in gradient.items():
            self._tracker[name] = (
                array.copy() if self._mixes_weights else self._tracker[name] + array - self._gradient[name]
            )
        self._gradient = gradient

    def sent(self) -> dict[str, Arrays]:
        if not self._mixes_weights:
            return {"y": self._tracker}
        return {
            "w": {
                name: array - array.dtype.type(self._rate) * self._tracker[name]
                for name, array in self.weights.items()
            }
        }

    def mixed(self, parts: Mapping[str, Arrays]) -> None:
        if self._mixes_weights:
            self.weights = parts["w"]
        else:
            self._tracker = parts["y"]

    def mix(self) -> None:
        super().mix()
        self._mixes_weights = not self._mixes_weights

    @classmethod
    def trains_before(cls, exchange: int) -> bool:
        """Only weights are mixed in exchanges of odd number, by the tracker that is known already but at first."""
        return exchange == 1 or exchange % 2 == 0

    def state(self) -> dict[str, Array]:
        kept = {f"tracker/{name}": array.copy() for name, array in self._tracker.items()}
        kept |= {"mixes_weights": np.array(self._mixes_weights), "rate": np.array(self._rate)}
        return super().state() | kept | {f"gradient/{name}": array.copy() for name, array in self._gradient.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        self._tracker = {name: saved[f"tracker/{name}"].copy() for name in self.weights if f"tracker/{name}" in saved}
        self._gradient = {name: saved[f"gradient/{name}"].copy() for name in self._tracker}
        self._mixes_weights, self._rate = bool(saved["mixes_weights"]), float(saved["rate"])


class KGradientTracking(MixingNode):
    """K steps w ← w - μ(g + c); d = (w_start - w_end) / (Kμ); c ← c - d + Wd; w ← W w_end. All c sum to 0."""

    parts: ClassVar[tuple[str, ...]] = ("w", "d")

    def __init__(self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self._correction: Arrays = {}
        self._direction: Arrays = {}

    def begin(self, weights: Mapping[str, Array]) -> None:
        super().begin(weights)
        self._correction = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self._direction = copied(self._correction)

    def correction(self) -> Correction:
        return Correction(correction=self._correction)

    def trained(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        self._direction = {
            name: (array - weights[name]) / array.dtype.type(iterations * learning_rate)
            for name, array in self.weights.items()
        }
        super().trained(weights, iterations, learning_rate)

    def sent(self) -> dict[str, Arrays]:
        return {"w": self.weights, "d": self._direction}

    def mixed(self, parts: Mapping[str, Arrays]) -> None:
        super().mixed(parts)
        # Here the correction is subtracted from the gradient, so that it is -c.
        for name, array in self._correction.items():
            array[...] += self._direction[name] - parts["d"][name]

    def state(self) -> dict[str, Array]:
        return super().state() | {f"correction/{name}": array.copy() for name, array in self._correction.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        self._correction = {name: saved[f"correction/{name}"].copy() for name in self.weights}


def _needs_period_one(name: str, period: int) -> None:
    if period != 1:
        raise ConfigError(f"{name} exchanges after every local iteration: iterations must be 1, got {period}")
