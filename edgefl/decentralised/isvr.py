"""PDMM-ISVR and ADMM-ISVR: consensus by edge variables, which carry what each node's gradients lack to the mean.

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

from edgefl.decentralised.node import Arrays, Correction, Mail, Node
from edgefl.errors import ConfigError
from edgefl.types import Array, EdgeSide

LEAST_PERIOD, MOST_PERIOD = 2, 16
"""The K of a step size is held to these: below it means nothing, above it the exchange does next to nothing."""


class Isvr(Node):
    """w ← (w/μ - g + Σ_j η_ij s_ij z_{i|j}) / (1/μ + Σ_j η_ij); sent is y_{i|j} = z_{i|j} - 2 s_ij w.

    Mail is state and no increment: lost, late and one-sided mail delays, and changes no fixed point. Nodes may differ
    in speed, in local iterations and in learning rate.

    Args:
        keeps: how much of z stays when mail comes: 0 is PDMM, z ← y; ½ is ADMM, z ← ½z + ½y.
        step_size: `edge`, or `node` for the paper's own, which only its numbers are for.
    """

    parts: ClassVar[tuple[str, ...]] = ("y",)
    keeps: ClassVar[float] = 0.0

    def __init__(
        self, name: str, edges: Sequence[EdgeSide], *, learning_rate: float, period: int, step_size: str = "edge"
    ) -> None:
        super().__init__(name, edges, learning_rate=learning_rate, period=period)
        if step_size not in {"edge", "node"}:
            raise ConfigError(f"step_size must be edge or node, got {step_size!r}")
        self._per_node = step_size == "node"
        self._duals: dict[str, Arrays] = {}
        self._steps: dict[str, float] = {}
        self._pull: Arrays | None = None

    def correction(self) -> Correction:
        if self._pull is None:
            self._pull = self._pulled()
        return Correction(correction=self._pull, shrinkage=sum(self._steps.values()))

    def _pulled(self) -> Arrays:
        pull = {name: np.zeros_like(array) for name, array in self.weights.items()}
        for neighbour, dual in self._duals.items():
            factor = self._steps[neighbour] * self.edges[neighbour].sign
            for name, array in dual.items():
                pull[name] += array.dtype.type(factor) * array
        return pull

    def post(self, neighbours: Sequence[str]) -> list[Mail]:
        return [self._mail(neighbour) for neighbour in neighbours if neighbour in self._duals]

    def _mail(self, neighbour: str) -> Mail:
        twice = 2 * self.edges[neighbour].sign
        value = {
            name: array - array.dtype.type(twice) * self.weights[name]
            for name, array in self._duals[neighbour].items()
        }
        return Mail(sender=self.name, receiver=neighbour, step=self.numbered(self.iterations), parts={"y": value})

    def take(self, mail: Mail) -> list[Mail]:
        if self.is_news(mail):
            for name, dual in self._duals[mail.sender].items():
                kept = dual.dtype.type(self.keeps)
                dual[...] = kept * dual + (1 - kept) * mail.parts["y"][name]
            self._pull = None
        return []

    def joined(self, side: EdgeSide) -> None:
        super().joined(side)
        self._duals[side.neighbour] = {
            name: array.dtype.type(side.sign) * array for name, array in self.weights.items()
        }
        self._steps[side.neighbour] = self._step_size(side)
        self._pull = None

    def left(self, neighbour: str) -> None:
        super().left(neighbour)
        self._duals.pop(neighbour, None)
        self._steps.pop(neighbour, None)
        self._pull = None

    def _step_size(self, side: EdgeSide) -> float:
        if self._per_node:
            return 1 / (self.learning_rate * len(self.edges) * (self.period - 1))
        period = min(max(side.period, LEAST_PERIOD), MOST_PERIOD)
        return 1 / (self.learning_rate * side.degree * (period - 1))

    def rescale(self, learning_rate: float) -> None:
        """Changes the μ₀ of the step sizes at a fixed point's expense of nothing; both ends of an edge have to.

        z ← s w + (η_old / η_new)(z - s w). A learning rate that decays needs none of this: step sizes stay.
        """
        ratio = learning_rate / self.learning_rate
        self.learning_rate = learning_rate
        for neighbour, dual in self._duals.items():
            sign = self.edges[neighbour].sign
            for name, array in dual.items():
                own = array.dtype.type(sign) * self.weights[name]
                array[...] = own + array.dtype.type(ratio) * (array - own)
            self._steps[neighbour] /= ratio
        self._pull = None

    def state(self) -> dict[str, Array]:
        duals = {
            f"dual/{neighbour}/{name}": array.copy()
            for neighbour, dual in self._duals.items()
            for name, array in dual.items()
        }
        steps = {f"step_size/{neighbour}": np.array(step) for neighbour, step in self._steps.items()}
        return super().state() | duals | steps

    def restore(self, saved: Mapping[str, Array]) -> None:
        super().restore(saved)
        for neighbour, dual in self._duals.items():
            # An edge that is new since then keeps its start, which the model that was restored decides.
            sign = self.edges[neighbour].sign
            self._steps[neighbour] = float(saved.get(f"step_size/{neighbour}", self._steps[neighbour]))
            for name, array in dual.items():
                array[...] = saved.get(f"dual/{neighbour}/{name}", array.dtype.type(sign) * self.weights[name])
        self._pull = None


class PdmmIsvr(Isvr):
    """z ← y. Fast, and the wrong choice behind a lossy codec: it amplifies rounding."""


class AdmmIsvr(Isvr):
    """z ← ½z + ½y."""

    keeps: ClassVar[float] = 0.5
