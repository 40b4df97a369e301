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

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Tensor
from edgefl.strategies.asynchronous.asgd import AsyncSingleStepConfig
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState
from edgefl.strategies.synchronous.strategy import RoundRules
from edgefl.strategies.update_tensors import QueuedUpdate, to_writable

VARIANTS = ("constant", "adaptive", "mxnet")
DEFAULT_COMPENSATION = {"constant": 0.04, "adaptive": 2.0, "mxnet": 0.04}
EPSILON = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class DCASGDConfig(AsyncSingleStepConfig):
    """Settings of a run with `dc-asgd`.

    Attributes:
        variant: `constant`, `adaptive` or `mxnet`.
        compensation: λ; None takes 0.04, and 2 when it is adaptive.
        mean_square_decay: μ of the adaptive variant.
    """

    variant: str = "constant"
    compensation: float | None = None
    mean_square_decay: float = 0.95

    def build(self, rules: RoundRules) -> DCASGD:
        if self.variant not in VARIANTS:
            raise ConfigError(f"strategy.variant must be one of {', '.join(VARIANTS)}, got {self.variant!r}")
        strength = DEFAULT_COMPENSATION[self.variant] if self.compensation is None else self.compensation
        if not (math.isfinite(strength) and strength >= 0):
            raise ConfigError(f"strategy.compensation must be a number of 0 or more, got {strength!r}")
        if not 0 <= self.mean_square_decay < 1:
            raise ConfigError(f"strategy.mean_square_decay must be in [0, 1), got {self.mean_square_decay!r}")
        return DCASGD(
            plan=self.plan(),
            lr_schedule=self.make_schedule(),
            rules=rules,
            variant=self.variant,  # type: ignore[arg-type]  # it is one of VARIANTS
            strength=strength,
            decay=self.mean_square_decay,
        )


@dataclass(slots=True)
class DCASGDState(AsyncState):
    """State of DC-ASGD: `backups` by version in flight, `mean_squares` by device.

    `before_last` is the model before the last update, of the mxnet variant.
    """

    backups: dict[int, dict[str, Array]] = field(default_factory=dict)
    mean_squares: dict[str, dict[str, Array]] = field(default_factory=dict)
    before_last: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DCASGD(AsynchronousStrategy[DCASGDState]):
    """Applies every displacement with its compensation; `strength` is λ, `decay` is μ."""

    variant: Literal["constant", "adaptive", "mxnet"]
    strength: float
    decay: float

    def bytes_per_device(self, model_bytes: int) -> int:
        return {"constant": 1, "adaptive": 2, "mxnet": 0}[self.variant] * model_bytes if self.strength else 0

    def make_state(self, model: dict[str, Array]) -> DCASGDState:
        return DCASGDState(model=model)

    def on_version_dispatched(self, state: DCASGDState) -> None:
        if self.strength and self.variant != "mxnet":
            state.backups[state.version] = {name: tensor.copy() for name, tensor in state.model.items()}

    def on_version_released(self, state: DCASGDState, version: int) -> None:
        state.backups.pop(version, None)

    def on_device_gone(self, state: DCASGDState, device_id: str) -> None:
        state.mean_squares.pop(device_id, None)

    def apply(self, state: DCASGDState, queued_update: QueuedUpdate) -> None:
        displacement = self.select_trained(state, queued_update)
        # Skipped, not multiplied by 0: with λ = 0 this is asgd to the last bit.
        if self.strength and queued_update.learning_rate:
            displacement = {
                name: self._apply_compensation(state, queued_update, name, d) for name, d in displacement.items()
            }
        if self.strength and self.variant == "mxnet":
            state.before_last = {name: state.model[name].copy() for name in displacement}
        self.apply_displacement(state, queued_update, displacement)

    def _apply_compensation(
        self, state: DCASGDState, queued_update: QueuedUpdate, name: str, tensor: Tensor
    ) -> Array:
        dense, rate, weight = to_writable(tensor), queued_update.learning_rate, state.model[name]
        if self.variant == "mxnet":
            return apply_delay_compensation(dense, weight, state.before_last.get(name, weight), self.strength, rate)
        strength: float | Array = self.strength
        if self.variant == "adaptive":
            mean_squares = state.mean_squares.setdefault(queued_update.device_id, {})
            mean_squares[name] = update_mean_square(mean_squares.get(name), dense, rate, self.decay)
            strength = compute_adaptive_strength(mean_squares[name], self.strength)
        return apply_delay_compensation(
            dense, weight, state.backups[queued_update.base_version][name], strength, rate
        )


def apply_delay_compensation(
    displacement: Array, weight: Array, backup: Array, strength: float | Array, learning_rate: float
) -> Array:
    """Returns d - (λ/η) d⊙d⊙(w - w_bak).

    Args:
        displacement: d = -η g.
        weight: the current model.
        backup: the model that d started from.
        strength: λ, one number or one for each entry.
        learning_rate: η, above 0.
    """
    # In single precision at least: the square of a half float's displacement underflows.
    kind = np.promote_types(displacement.dtype, np.float32)
    gradient_step = displacement.astype(kind, copy=False)
    drift = weight.astype(kind, copy=False) - backup.astype(kind, copy=False)
    compensated: Array = gradient_step - (strength / learning_rate) * np.square(gradient_step) * drift
    return compensated.astype(displacement.dtype, copy=False)


def update_mean_square(previous: Array | None, displacement: Array, learning_rate: float, decay: float) -> Array:
    """Returns μ MS + (1 - μ) g⊙g with g = -d/η, in single precision at least; None stands for MS = 0."""
    gradient = displacement.astype(np.promote_types(displacement.dtype, np.float32), copy=False) / -learning_rate
    square: Array = (1.0 - decay) * np.square(gradient)
    return square if previous is None else decay * previous + square


def compute_adaptive_strength(mean_squares: Array, strength: float) -> Array:
    """Returns λ_t = λ / sqrt(MS + 1e-7)."""
    adaptive: Array = strength / np.sqrt(mean_squares + EPSILON)
    return adaptive
