"""Gossip averaging: with all neighbours at once (DSGD, D2, gradient tracking, K-GT), and pairwise (AD-PSGD).

Sources: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017 (D-PSGD, here with
local steps); Tang et al., D2: Decentralized Training over Decentralized Data, ICML 2018; Di Lorenzo, Scutari, NEXT,
2016, and Nedić et al., 2017 (gradient tracking); Liu et al., Decentralized Gradient Tracking with Local Steps, 2023;
Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018 (AD-PSGD).
All but DSGD lose their exactness when messages are lost: a missing neighbour's last message is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, PeerLinkConfig
from edgefl.strategies.peer_algorithms.algorithm import (
    Arrays,
    GossipAlgorithm,
    GossipMessage,
    GradientCorrection,
    Parts,
    compute_weighted_sum,
    copy_arrays,
)

_MAX_BUFFERED = 3
"""Number of a neighbour's newest messages that are kept: of this exchange, of the one before, and of the next."""


class GossipAveraging(GossipAlgorithm):
    """Base of methods that replace each of `parts` by its weighted mean over node and neighbours."""

    is_synchronous: ClassVar[bool] = True
    cycle_length: ClassVar[int] = 1
    """Number of exchanges after which the same parts are sent again."""

    def __init__(self, name: str, edges: Sequence[PeerLinkConfig], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self._received: dict[str, dict[int, Parts]] = {}

    def select_parts(self) -> dict[str, Arrays]:
        """Returns the parts to send and to mix."""
        return {"w": self.weights}

    def apply_means(self, parts: Mapping[str, Arrays]) -> None:
        """Adopts the weighted means of the parts."""
        self.weights = parts["w"]

    def make_messages(self, neighbours: Sequence[str]) -> list[GossipMessage]:
        if self.is_pairwise:
            return super().make_messages(neighbours)
        parts = {part: copy_arrays(arrays) for part, arrays in self.select_parts().items()}
        self.exchanges = max(self.exchanges, self._find_later_exchange()) + 1
        step = self.make_step_number(self.exchanges)
        return [
            GossipMessage(sender=self.name, receiver=neighbour, step=step, parts=parts)
            for neighbour in neighbours
            if neighbour in self.edges
        ]

    def receive(self, message: GossipMessage) -> list[GossipMessage]:
        if self.is_pairwise:
            return super().receive(message)
        if self.record_if_newer(message):
            parts_by_exchange = self._received.setdefault(message.sender, {})
            parts_by_exchange[message.local_step] = message.parts
            for exchange in sorted(parts_by_exchange)[:-_MAX_BUFFERED]:
                del parts_by_exchange[exchange]
        return []

    def has_all_messages(self) -> bool:
        if self.is_pairwise:
            return super().has_all_messages()
        return all(max(self._received.get(neighbour, {0: {}})) >= self.exchanges for neighbour in self.edges)

    def mix(self) -> None:
        """Averages; the weight of a neighbour without any message goes to the node itself."""
        if self.is_pairwise:
            super().mix()
            return
        parts = self.select_parts()
        self.apply_means({part: self._average_part(part, parts[part]) for part in parts})

    def _average_part(self, part: str, own: Mapping[str, Array]) -> Arrays:
        """Returns the weighted mean of a part over this node and the neighbours that sent it."""
        terms = []
        for neighbour, parts_by_exchange in self._received.items():
            # Of this exchange, or the last before it; parts of the next one stay queued.
            exchanges = [
                exchange
                for exchange, parts in parts_by_exchange.items()
                if exchange <= self.exchanges and part in parts
            ]
            if neighbour in self.edges and exchanges:
                terms.append((self.edges[neighbour].weight, parts_by_exchange[max(exchanges)][part]))
        terms = self.bound_terms(own, terms)
        return compute_weighted_sum([(1 - sum(weight for weight, _ in terms), own), *terms])

    def bound_terms(
        self,
        own: Mapping[str, Array],  # noqa: ARG002 for subclasses
        terms: list[tuple[float, Mapping[str, Array]]],
    ) -> list[tuple[float, Mapping[str, Array]]]:
        """Returns weights and models of the neighbours as they are averaged."""
        return terms

    def _find_later_exchange(self) -> int:
        """Returns the exchange of neighbours that are ahead, as after a reboot of this node; else 0.

        A neighbour cannot be two exchanges ahead while it waits for ours.
        """
        newest = max(
            (max(parts_by_exchange) for parts_by_exchange in self._received.values() if parts_by_exchange), default=0
        )
        lead = newest - self.exchanges
        return self.exchanges + lead - lead % self.cycle_length if lead > 1 else 0

    def remove_neighbour(self, neighbour: str) -> None:
        super().remove_neighbour(neighbour)
        self._received.pop(neighbour, None)


class Dsgd(GossipAveraging):
    """K local SGD steps, then w ← Ww. With K = 1 it is D-PSGD. Biased where the nodes' data differ.

    In pairs the two ends of edge (i, j) move towards each other by W_ij of their difference, when it fires.

    With `num_rogues` f, what a neighbour differs by is clipped to the distance of the (f + 1)-th farthest one:
    self-centred clipping, He, Karimireddy, Jaggi, Byzantine-Robust Decentralized Learning via ClippedGossip,
    arXiv 2202.01545, whose radius rests on the honest neighbours' distances, which are not known.
    """

    summary: ClassVar[str] = "Local SGD steps, then the mean with the neighbours (Lian et al., NeurIPS 2017)."
    settings: ClassVar[tuple[str, ...]] = ("num_rogues",)
    has_pairs: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        edges: Sequence[PeerLinkConfig],
        *,
        learning_rate: float,
        period: int,
        num_rogues: int = 0,
    ) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self.num_rogues = max(0, num_rogues)

    def apply_pair(self, neighbour: str, own: Parts, other: Parts) -> None:
        move_towards(self.weights, own["w"], other["w"], self.edges[neighbour].weight)

    def bound_terms(
        self, own: Mapping[str, Array], terms: list[tuple[float, Mapping[str, Array]]]
    ) -> list[tuple[float, Mapping[str, Array]]]:
        if not self.num_rogues or len(terms) <= self.num_rogues:
            return terms
        distances = [_measure_distance(own, arrays) for _, arrays in terms]
        radius = sorted(distances)[-1 - self.num_rogues]
        return [
            (weight * (radius / distance if distance > radius else 1.0), arrays)
            for (weight, arrays), distance in zip(terms, distances, strict=True)
        ]


def _measure_distance(own: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    with np.errstate(over="ignore"):  # an infinite distance has no weight
        return math.sqrt(sum(float(np.vdot(step, step)) for step in (other[name] - own[name] for name in own)))


class D2(GossipAveraging):
    """w ← W(2w - w⁻ - μg + μg⁻), at first W(w - μg); one local step an exchange.

    The mixing matrix has to be (I + W)/2 where `Topology.should_damp`.
    """

    summary: ClassVar[str] = "DSGD with one step, corrected by the step before (Tang et al., ICML 2018)."
    is_lockstep: ClassVar[bool] = True
    has_single_iteration: ClassVar[bool] = True

    def __init__(self, name: str, edges: Sequence[PeerLinkConfig], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        _require_period_one("d2", period)
        self._last_learning_rate = learning_rate
        self._previous_step: Arrays = {}
        self._correction: Arrays = {}

    def start(self, weights: Mapping[str, Array]) -> None:
        super().start(weights)
        self._previous_step = copy_arrays(self.weights)
        self._correction = {name: np.zeros_like(array) for name, array in self.weights.items()}

    def correction(self) -> GradientCorrection:
        return GradientCorrection(correction=self._correction)

    def apply_local_steps(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        # The step was w - μ(g - c), so that μg = w + μc - w_end; the next one has to add w' - w + μg, w' being mixed.
        rate = self._last_learning_rate = learning_rate
        self._previous_step = {
            name: weights[name] - array.dtype.type(rate) * self._correction[name]
            for name, array in self.weights.items()
        }
        super().apply_local_steps(weights, iterations, learning_rate)

    def apply_means(self, parts: Mapping[str, Arrays]) -> None:
        super().apply_means(parts)
        # _before is w - μg of the step before; c = (w' - (w - μg)) / μ, by the μ of that step, which may decay.
        rate = self._last_learning_rate
        self._correction = {
            name: (array - self._previous_step[name]) / array.dtype.type(rate) for name, array in self.weights.items()
        }

    def state(self) -> dict[str, Array]:
        return super().state() | {f"correction/{name}": array.copy() for name, array in self._correction.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        self._correction = {name: saved[f"correction/{name}"].copy() for name in self.weights}


class GradientTracking(GossipAveraging):
    """y ← W(y + g - g⁻), w ← W(w - μy), at first y = g: two consecutive exchanges for every gradient.

    The local step leaves the model unchanged: it yields the gradient.
    """

    summary: ClassVar[str] = "Every node follows an estimate of the mean gradient (Di Lorenzo and Scutari, 2016)."
    parts: ClassVar[tuple[str, ...]] = ("w", "y")
    is_lockstep: ClassVar[bool] = True
    has_single_iteration: ClassVar[bool] = True
    cycle_length: ClassVar[int] = 2

    def __init__(self, name: str, edges: Sequence[PeerLinkConfig], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        _require_period_one("gradient-tracking", period)
        self._tracker: Arrays = {}
        self._gradient: Arrays = {}
        self._last_learning_rate = learning_rate
        self._is_mixing_weights = True

    def start(self, weights: Mapping[str, Array]) -> None:
        super().start(weights)
        self._tracker, self._gradient = {}, {}

    def apply_local_steps(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        self.iterations += iterations
        self._last_learning_rate = learning_rate
        gradient = {
            name: (array - weights[name]) / array.dtype.type(learning_rate) for name, array in self.weights.items()
        }
        self._is_mixing_weights = not self._tracker
        for name, array in gradient.items():
            self._tracker[name] = (
                array.copy() if self._is_mixing_weights else self._tracker[name] + array - self._gradient[name]
            )
        self._gradient = gradient

    def select_parts(self) -> dict[str, Arrays]:
        if not self._is_mixing_weights:
            return {"y": self._tracker}
        return {
            "w": {
                name: array - array.dtype.type(self._last_learning_rate) * self._tracker[name]
                for name, array in self.weights.items()
            }
        }

    def apply_means(self, parts: Mapping[str, Arrays]) -> None:
        if self._is_mixing_weights:
            self.weights = parts["w"]
        else:
            self._tracker = parts["y"]

    def mix(self) -> None:
        super().mix()
        self._is_mixing_weights = not self._is_mixing_weights

    @classmethod
    def should_train_before(cls, exchange: int) -> bool:
        """Returns False for odd exchanges after the first, which mix weights with the known tracker."""
        return exchange == 1 or exchange % 2 == 0

    def state(self) -> dict[str, Array]:
        values = {f"tracker/{name}": array.copy() for name, array in self._tracker.items()}
        values |= {"mixes_weights": np.array(self._is_mixing_weights), "rate": np.array(self._last_learning_rate)}
        return super().state() | values | {f"gradient/{name}": array.copy() for name, array in self._gradient.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        self._tracker = {name: saved[f"tracker/{name}"].copy() for name in self.weights if f"tracker/{name}" in saved}
        self._gradient = {name: saved[f"gradient/{name}"].copy() for name in self._tracker}
        self._is_mixing_weights, self._last_learning_rate = bool(saved["mixes_weights"]), float(saved["rate"])


class KGradientTracking(GossipAveraging):
    """K steps w ← w - μ(g + c); d = (w_start - w_end) / (Kμ); c ← c - d + Wd; w ← W w_end. All c sum to 0."""

    summary: ClassVar[str] = "Gradient tracking with local steps (Liu et al., 2023)."
    parts: ClassVar[tuple[str, ...]] = ("w", "d")
    is_lockstep: ClassVar[bool] = True

    def __init__(self, name: str, edges: Sequence[PeerLinkConfig], *, learning_rate: float, period: int) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        self._correction: Arrays = {}
        self._direction: Arrays = {}

    def start(self, weights: Mapping[str, Array]) -> None:
        super().start(weights)
        self._correction = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self._direction = copy_arrays(self._correction)

    def correction(self) -> GradientCorrection:
        return GradientCorrection(correction=self._correction)

    def apply_local_steps(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        self._direction = {
            name: (array - weights[name]) / array.dtype.type(iterations * learning_rate)
            for name, array in self.weights.items()
        }
        super().apply_local_steps(weights, iterations, learning_rate)

    def select_parts(self) -> dict[str, Arrays]:
        return {"w": self.weights, "d": self._direction}

    def apply_means(self, parts: Mapping[str, Arrays]) -> None:
        super().apply_means(parts)
        # Here the correction is subtracted from the gradient, so that it is -c.
        for name, array in self._correction.items():
            array[...] += self._direction[name] - parts["d"][name]

    def state(self) -> dict[str, Array]:
        return super().state() | {f"correction/{name}": array.copy() for name, array in self._correction.items()}

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        self._correction = {name: saved[f"correction/{name}"].copy() for name in self.weights}


def _require_period_one(name: str, period: int) -> None:
    if period != 1:
        raise ConfigError(f"{name} exchanges after every local iteration: iterations must be 1, got {period}")


class AdPsgd(GossipAlgorithm):
    """AD-PSGD node: both ends of an edge move to the middle of their models; see `GossipAlgorithm` on pairs.

    Both move by opposite amounts, whatever they trained meanwhile, so the mean of all models is kept. A lost message
    breaks the balance: the sender asks again after a while, and the mean of the models has moved a little. Biased
    where the nodes' data differ.
    """

    summary: ClassVar[str] = "Two neighbours at a time take the mean of their models (Lian et al., ICML 2018)."
    has_pairs: ClassVar[bool] = True

    def apply_pair(self, neighbour: str, own: Parts, other: Parts) -> None:  # noqa: ARG002 as the base class has it
        move_towards(self.weights, own["w"], other["w"], 0.5)


def move_towards(weights: Arrays, own: Mapping[str, Array], other: Mapping[str, Array], share: float) -> None:
    """Moves a model in place by `share` of the way from `own`, which it was, to `other`."""
    for name, array in weights.items():
        array[...] += array.dtype.type(share) * (other[name] - own[name])
