"""PDMM-ISVR and ADMM-ISVR: consensus by edge variables that correct each node's gradients towards the mean.

Source: Niwa et al., Asynchronous Decentralized Optimization With Implicit Stochastic Variance Reduction, ICML 2021.
Its authors hold patents; check whether they apply to you. Differs from the paper: an edge's step size η is the same
at both of its ends, 1 / (μ₀ · max(d_i, d_j) · (K_η - 1)), where K_η is K, of ADMM 2K, or what `k_eta` says. With
the paper's, which is each node's own, nodes of high degree count for more, and on an irregular graph the result is
off. Dual variables start at ±w⁰ and not at zero, which would shrink the model at first.
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
)

MIN_STEP_SIZE_PERIOD, MAX_STEP_SIZE_PERIOD = 2, 16
"""Bounds of the K in a step size: smaller ones are undefined, with larger ones an exchange has almost no effect."""


class Isvr(GossipAlgorithm):
    """w ← (w/μ - g + Σ_j η_ij s_ij z_{i|j}) / (1/μ + Σ_j η_ij); sent is y_{i|j} = z_{i|j} - 2 s_ij w.

    A message is state and no increment: losses, delays and one-sided messages slow it down, and change no fixed
    point. Nodes may differ in speed, in local iterations and in learning rate.

    Attributes:
        retained_fraction: how much of z stays at each message: 0 is PDMM, z ← y; ½ is ADMM, z ← ½z + ½y.
        periods_of_pull: K_η over K of a step size of `edge`, where `k_eta` is None.

    Args:
        step_size: `edge`, or `node` for the paper's own, 1 / (μ₀ · d_i · (K_η - 1)), to reproduce its numbers.
        k_eta: K_η above 1, the smaller the stronger neighbours pull; None for K where `node`, and for
            `periods_of_pull` times K, K within bounds, where `edge`.
    """

    parts: ClassVar[tuple[str, ...]] = ("y",)
    settings: ClassVar[tuple[str, ...]] = ("step_size", "k_eta")
    has_pairs: ClassVar[bool] = True
    retained_fraction: ClassVar[float] = 0.0
    periods_of_pull: ClassVar[float] = 1.0

    def __init__(
        self,
        name: str,
        edges: Sequence[PeerLinkConfig],
        *,
        learning_rate: float,
        period: int,
        step_size: str = "edge",
        k_eta: float | None = None,
    ) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        if step_size not in {"edge", "node"}:
            raise ConfigError(f"step_size must be edge or node, got {step_size!r}")
        if k_eta is not None and not (isinstance(k_eta, int | float) and 1 < k_eta < math.inf):
            raise ConfigError(f"k_eta must be a finite number above 1, got {k_eta!r:.40}")
        self._is_per_node, self._k_eta = step_size == "node", k_eta
        self._duals: dict[str, Arrays] = {}
        self._step_sizes: dict[str, float] = {}
        self._dual_term: Arrays | None = None
        self._sent_parts: dict[str, Parts] = {}

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

    def apply_local_steps(self, weights: Mapping[str, Array], iterations: int, learning_rate: float) -> None:
        super().apply_local_steps(weights, iterations, learning_rate)
        self._sent_parts = {}

    def make_messages(self, neighbours: Sequence[str]) -> list[GossipMessage]:
        if self.is_pairwise:
            return super().make_messages(neighbours)
        step = self.make_step_number(self.iterations)
        return [
            GossipMessage(sender=self.name, receiver=neighbour, step=step, parts=self.make_pair_parts(neighbour))
            for neighbour in neighbours
            if neighbour in self._duals
        ]

    def make_pair_parts(self, neighbour: str) -> Parts:
        if neighbour in self._sent_parts:
            return self._sent_parts[neighbour]
        double_sign = 2 * self.edges[neighbour].sign
        value = {
            name: array - array.dtype.type(double_sign) * self.weights[name]
            for name, array in self._duals[neighbour].items()
        }
        return {"y": value}

    def receive(self, message: GossipMessage) -> list[GossipMessage]:
        if self.is_pairwise:
            return super().receive(message)
        if self.record_if_newer(message):
            self._update_dual(message.sender, message.parts["y"])
        return []

    def apply_pair(self, neighbour: str, own: Parts, other: Parts) -> None:  # noqa: ARG002 as the base class has it
        # Given until the next local step is the y of the last one: from newer z, consensus would be elsewhere.
        self._sent_parts[neighbour] = self.make_pair_parts(neighbour)
        self._update_dual(neighbour, other["y"])

    def _update_dual(self, neighbour: str, value: Mapping[str, Array]) -> None:
        for name, dual in self._duals[neighbour].items():
            retained = dual.dtype.type(self.retained_fraction)
            dual[...] = retained * dual + (1 - retained) * value[name]
        self._dual_term = None

    def add_neighbour(self, link: PeerLinkConfig) -> None:
        super().add_neighbour(link)
        self._duals[link.neighbour] = {
            name: array.dtype.type(link.sign) * array for name, array in self.weights.items()
        }
        self._step_sizes[link.neighbour] = self._compute_step_size(link)
        self._sent_parts.pop(link.neighbour, None)
        self._dual_term = None

    def remove_neighbour(self, neighbour: str) -> None:
        super().remove_neighbour(neighbour)
        self._duals.pop(neighbour, None)
        self._step_sizes.pop(neighbour, None)
        self._sent_parts.pop(neighbour, None)
        self._dual_term = None

    def _compute_step_size(self, link: PeerLinkConfig) -> float:
        if self._is_per_node:
            degree, default = len(self.edges), float(max(self.period, MIN_STEP_SIZE_PERIOD))
        else:
            period = min(max(link.period, MIN_STEP_SIZE_PERIOD), MAX_STEP_SIZE_PERIOD)
            degree, default = link.degree, period * self.periods_of_pull
        return 1 / (self.learning_rate * degree * ((self._k_eta or default) - 1))

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
    """z ← ½z + ½y.

    Nodes that move alike are pulled to where they all were at the exchange, by PDMM to half a period's way past it.
    So the same η holds ADMM's local steps back, and half of it does better where data differ little.
    """

    summary: ClassVar[str] = "As pdmm-isvr, half as fast; for lossy codecs (Niwa et al., 2021)."
    retained_fraction: ClassVar[float] = 0.5
    periods_of_pull: ClassVar[float] = 2.0
