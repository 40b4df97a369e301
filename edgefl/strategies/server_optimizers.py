"""Server optimisers: they treat the mean displacement of a round as a gradient.

`momentum` is FedAvgM (Hsu, Qi, Brown, Measuring the Effects of Non-Identical Data Distribution, 2019); `adagrad`,
`adam` and `yogi` are Algorithm 2 of Reddi et al., Adaptive Federated Optimization, ICLR 2021, without bias correction
as there. They wrap any strategy that moves the model by a displacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array

KINDS = ("none", "momentum", "adagrad", "adam", "yogi")

ServerMoments = dict[str, Array]
"""Moments of an optimiser, part of a strategy's state: `m/NAME` and, except for momentum, `v/NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptimizer:
    """Computes the model's step from a displacement.

    Attributes:
        kind: one of `KINDS`.
        learning_rate: η of the server.
        beta1: share of the old direction that is kept.
        beta2: share of the old second moment that is kept, by adam and yogi.
        epsilon: τ of the paper, the degree of adaptivity.
        buffers: tensors that are averaged and never optimised, such as running means.
    """

    kind: str = "none"
    learning_rate: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3
    buffers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"server.optimizer must be one of {', '.join(KINDS)}, got {self.kind!r}")

    def step(self, moments: ServerMoments, displacement: Mapping[str, Array]) -> Mapping[str, Array]:
        """Returns the step to add to the model.

        Args:
            moments: of the strategy's state, changed in place; empty before the first step.
            displacement: mean displacement by tensor; it may be changed. Integers and buffers pass as they are.
        """
        if self.kind == "none" and self.learning_rate == 1.0:
            return displacement
        return {name: self._compute_step(moments, name, tensor) for name, tensor in displacement.items()}

    def _compute_step(self, moments: ServerMoments, name: str, moved: Array) -> Array:
        if name in self.buffers or not np.issubdtype(moved.dtype, np.inexact):
            return moved
        if self.kind == "none":
            return np.multiply(moved, self.learning_rate, dtype=moved.dtype)
        # In single precision at least: the square of a half float underflows.
        kind, moved = moved.dtype, moved.astype(np.promote_types(moved.dtype, np.float32), copy=False)
        first = _get_moment(moments, f"m/{name}", moved)
        first *= self.beta1
        if self.kind == "momentum":
            first += moved
            return np.multiply(first, self.learning_rate).astype(kind, copy=False)
        first += (1.0 - self.beta1) * moved
        second, square = _get_moment(moments, f"v/{name}", moved), np.square(moved)
        match self.kind:
            case "adagrad":
                second += square
            case "adam":
                second *= self.beta2
                second += (1.0 - self.beta2) * square
            case _:
                second -= (1.0 - self.beta2) * square * np.sign(second - square)
        step: Array = self.learning_rate * first / (np.sqrt(second) + self.epsilon)
        return step.astype(kind, copy=False)


def _get_moment(moments: ServerMoments, key: str, like: Array) -> Array:
    if key not in moments:
        moments[key] = np.zeros_like(like)
    return moments[key]
