"""PDMM-ISVR and ADMM-ISVR: consensus by edge variables that correct each node's gradients towards the mean.

Source: Niwa et al., Asynchronous Decentralized Optimization With Implicit Stochastic Variance Reduction, ICML 2021.
Its authors hold patents; check whether they apply to you. Differs from the paper: an edge's step size is the same
at both of its ends, 1 / (μ₀ · max(d_i, d_j) · (K - 1)). With the paper's, which is each node's own, nodes of high
degree count for more, and on an irregular graph the result is off. Dual variables start at ±w⁰ and not at zero, which
would shrink the model at first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, PeerLinkConfig
from edgefl.strategies.peer_algorithms.algorithm import Arrays, GossipAlgorithm, GossipMessage, GradientCorrection

MIN_STEP_SIZE_PERIOD, MAX_STEP_SIZE_PERIOD = 2, 16
"""Bounds of the K in a step size: smaller ones are undefined, with larger ones an exchange has almost no effect."""


class Isvr(GossipAlgorithm):
    """w ← (w/μ - g + Σ_j η_ij s_ij z_{i|j}) / (1/μ + Σ_j η_ij); sent is y_{i|j} = z_{i|j} - 2 s_ij w.

    A message is state and no increment: losses, delays and one-sided messages slow it down, and change no fixed
    point. Nodes may differ in speed, in local iterations and in learning rate.

    Attributes:
        retained_fraction: how much of z stays at each message: 0 is PDMM, z ← y; ½ is ADMM, z ← ½z + ½y.

    Args:
        step_size: `edge`, or `node` for the paper's own, only to reproduce its numbers.
    """

    parts: ClassVar[tuple[str, ...]] = ("y",)
    retained_fraction: ClassVar[float] = 0.0

    def __init__(
        self,
        name: str,
        edges: Sequence[PeerLinkConfig],
        *,
        learning_rate: float,
        period: int,
        step_size: str = "edge",
    ) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        if step_size not in {"edge", "node"}:
            raise ConfigError(f"step_size must be edge or node, got {step_size!r}")
        self._is_per_node = step_size == "node"
        self._duals: dict[str, Arrays] = {}
        self._step_sizes: dict[str, float] = {}
        self._dual_term: Arrays | None = None

    def correction(self) -> GradientCorrection:
        if self._dual_term is None:
            self._dual_term = self._compute_dual_term()
        return GradientCorrection(correction=self._dual_term, shrinkage=sum(self._step_sizes.values()))

    def _compute_dual_term(self) -> Arrays:
        dual_term = {name: np.zeros_like(array) for name, array in self.weights.items()}
        for neighbour, dual in self._duals.items():
            factor = self._step_sizes[neighbour] * self.edges[neighbour].sign
            for name, array in dual.items():
                dual_term[name] += array.dtype.type(factor) * array
        return dual_term

    def make_messages(self, neighbours: Sequence[str]) -> list[GossipMessage]:
        return [self._make_message(neighbour) for neighbour in neighbours if neighbour in self._duals]

    def _make_message(self, neighbour: str) -> GossipMessage:
        double_sign = 2 * self.edges[neighbour].sign
        value = {
            name: array - array.dtype.type(double_sign) * self.weights[name]
            for name, array in self._duals[neighbour].items()
        }
        return GossipMessage(
            sender=self.name, receiver=neighbour, step=self.make_step_number(self.iterations), parts={"y": value}
        )

    def receive(self, message: GossipMessage) -> list[GossipMessage]:
        if self.record_if_newer(message):
            for name, dual in self._duals[message.sender].items():
                retained = dual.dtype.type(self.retained_fraction)
                dual[...] = retained * dual + (1 - retained) * message.parts["y"][name]
            self._dual_term = None
        return []

    def add_neighbour(self, link: PeerLinkConfig) -> None:
        super().add_neighbour(link)
        self._duals[link.neighbour] = {
            name: array.dtype.type(link.sign) * array for name, array in self.weights.items()
        }
        self._step_sizes[link.neighbour] = self._compute_step_size(link)
        self._dual_term = None

    def remove_neighbour(self, neighbour: str) -> None:
        super().remove_neighbour(neighbour)
        self._duals.pop(neighbour, None)
        self._step_sizes.pop(neighbour, None)
        self._dual_term = None

    def _compute_step_size(self, link: PeerLinkConfig) -> float:
        if self._is_per_node:
            return 1 / (self.learning_rate * len(self.edges) * (self.period - 1))
        period = min(max(link.period, MIN_STEP_SIZE_PERIOD), MAX_STEP_SIZE_PERIOD)
        return 1 / (self.learning_rate * link.degree * (period - 1))

    def state(self) -> dict[str, Array]:
        duals = {
            f"dual/{neighbour}/{name}": array.copy()
            for neighbour, dual in self._duals.items()
            for name, array in dual.items()
        }
        steps = {f"step_size/{neighbour}": np.array(step) for neighbour, step in self._step_sizes.items()}
        return super().state() | duals | steps

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        for neighbour, dual in self._duals.items():
            # An edge added since then keeps its initial value, which the restored model determines.
            sign = self.edges[neighbour].sign
            self._step_sizes[neighbour] = float(saved.get(f"step_size/{neighbour}", self._step_sizes[neighbour]))
            for name, array in dual.items():
                array[...] = saved.get(f"dual/{neighbour}/{name}", array.dtype.type(sign) * self.weights[name])
        self._dual_term = None


class PdmmIsvr(Isvr):
    """z ← y. Fast, and the wrong choice behind a lossy codec: it amplifies rounding."""

    summary: ClassVar[str] = "Edge variables carry what a node's gradients lack (Niwa et al., 2021)."


class AdmmIsvr(Isvr):
    """z ← ½z + ½y."""

    summary: ClassVar[str] = "As pdmm-isvr, half as fast; for lossy codecs (Niwa et al., 2021)."
    retained_fraction: ClassVar[float] = 0.5
