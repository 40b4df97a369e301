"""Delay-compensated ASGD: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017.

w <- w - η (g + λ g⊙g⊙(w - w_bak)), where w_bak is the model that the device began with: a first-order guess of what
its gradient would be at the present model. With the displacement d = -η g that is w <- w + d - (λ/η) d⊙d⊙(w - w_bak).

Variants: `constant` λ; `adaptive` λ_t = λ / sqrt(MS + 1e-7), where MS <- μ MS + (1 - μ) g⊙g for each device; `mxnet`
keeps one backup for everybody, the model before the last update. That is what MXNet's optimiser does and what ESync
was compared with; it is not the paper's.

*Differs from the paper* where a device takes more than one step for an assignment: then -d/η is their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from edgefl.errors import ConfigError
from edgefl.strategies.arrivals import Arrival, owned
from edgefl.strategies.asgd import StepSettings
from edgefl.strategies.asynchronous import Asynchronous, AsyncState
from edgefl.strategies.rounds import RoundRules
from edgefl.types import Array, Tensor

VARIANTS = ("constant", "adaptive", "mxnet")
COMPENSATION = {"constant": 0.04, "adaptive": 2.0, "mxnet": 0.04}
EPSILON = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class DCASGD(StepSettings):
    """Settings of a run with `dc-asgd`.

    Attributes:
        variant: `constant`, `adaptive` or `mxnet`.
        compensation: λ; None takes 0.04, and 2 when it is adaptive.
        mean_square_decay: μ of the adaptive variant.
    """

    variant: str = "constant"
    compensation: float | None = None
    mean_square_decay: float = 0.95

    def build(self, rules: RoundRules) -> DelayCompensated:
        if self.variant not in VARIANTS:
            raise ConfigError(f"strategy.variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        strength = COMPENSATION[self.variant] if self.compensation is None else self.compensation
        if not (math.isfinite(strength) and strength >= 0):
            raise ConfigError(f"strategy.compensation must be a number of 0 or more, got {strength!r}")
        if not 0 <= self.mean_square_decay < 1:
            raise ConfigError(f"strategy.mean_square_decay must be in [0, 1), got {self.mean_square_decay!r}")
        return DelayCompensated(
            plan=self.plan(),
            rate=self.rate(),
            rules=rules,
            variant=self.variant,  # type: ignore[arg-type]  # it is one of VARIANTS
            strength=strength,
            decay=self.mean_square_decay,
        )


@dataclass(slots=True)
class CompensatedState(AsyncState):
    """`backups` are the models at the versions that somebody works on; `mean_squares` is kept by device.

    `before_last` is the model before the last update, of the mxnet variant.
    """

    backups: dict[int, dict[str, Array]] = field(default_factory=dict)
    mean_squares: dict[str, dict[str, Array]] = field(default_factory=dict)
    before_last: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCompensated(Asynchronous[CompensatedState]):
    """Adds every displacement with its compensation; `strength` is λ, `decay` is μ."""

    variant: Literal["constant", "adaptive", "mxnet"]
    strength: float
    decay: float

    def bytes_per_device(self, model_bytes: int) -> int:
        return {"constant": 1, "adaptive": 2, "mxnet": 0}[self.variant] * model_bytes if self.strength else 0

    def begin(self, model: dict[str, Array]) -> CompensatedState:
        return CompensatedState(model=model)

    def keep(self, state: CompensatedState) -> None:
        if self.strength and self.variant != "mxnet":
            state.backups[state.version] = {name: tensor.copy() for name, tensor in state.model.items()}

    def release(self, state: CompensatedState, version: int) -> None:
        state.backups.pop(version, None)

    def forget(self, state: CompensatedState, device_id: str) -> None:
        state.mean_squares.pop(device_id, None)

    def apply(self, state: CompensatedState, arrival: Arrival) -> None:
        displacement = self.trained(state, arrival)
        # Skipped, not multiplied by 0: with λ = 0 this is asgd to the last bit.
        if self.strength and arrival.learning_rate:
            displacement = {name: self._compensated(state, arrival, name, d) for name, d in displacement.items()}
        if self.strength and self.variant == "mxnet":
            state.before_last = {name: state.model[name].copy() for name in displacement}
        self.move(state, arrival, displacement)

    def _compensated(self, state: CompensatedState, arrival: Arrival, name: str, tensor: Tensor) -> Array:
        moved, rate, weight = owned(tensor), arrival.learning_rate, state.model[name]
        if self.variant == "mxnet":
            return compensated(moved, weight, state.before_last.get(name, weight), self.strength, rate)
        strength: float | Array = self.strength
        if self.variant == "adaptive":
            own = state.mean_squares.setdefault(arrival.device_id, {})
            own[name] = mean_square(own.get(name), moved, rate, self.decay)
            strength = adaptive_strength(own[name], self.strength)
        return compensated(moved, weight, state.backups[arrival.base_version][name], strength, rate)


def compensated(displacement: Array, weight: Array, backup: Array, strength: float | Array, rate: float) -> Array:
    """Returns d - (λ/η) d⊙d⊙(w - w_bak).

    Args:
        displacement: d = -η g.
        weight: the model now.
        backup: the model that d began with.
        strength: λ, one number or one for each entry.
        rate: η, above 0.
    """
    # In single precision at least: the square of a half float's displacement is soon 0.
    kind = np.promote_types(displacement.dtype, np.float32)
    moved = displacement.astype(kind, copy=False)
    drift = weight.astype(kind, copy=False) - backup.astype(kind, copy=False)
    corrected: Array = moved - (strength / rate) * np.square(moved) * drift
    return corrected.astype(displacement.dtype, copy=False)


def mean_square(before: Array | None, displacement: Array, rate: float, decay: float) -> Array:
    """Returns μ MS + (1 - μ) g⊙g with g = -d/η, in single precision at least; None stands for MS = 0."""
    gradient = displacement.astype(np.promote_types(displacement.dtype, np.float32), copy=False) / -rate
    squared: Array = (1.0 - decay) * np.square(gradient)
    return squared if before is None else decay * before + squared


def adaptive_strength(mean_squares: Array, strength: float) -> Array:
    """Returns λ_t = λ / sqrt(MS + 1e-7)."""
    taken: Array = strength / np.sqrt(mean_squares + EPSILON)
    return taken
