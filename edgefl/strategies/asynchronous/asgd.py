"""Asynchronous SGD: as it comes (`asgd`), with delay compensation (`dc-asgd`), or with bounded staleness (`bounded`).

Sources: the baseline `dist_async` of Li et al., ESync, IEEE TSC 2020, section 2; Dean et al., Large Scale Distributed
Deep Networks, NIPS 2012; Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017;
Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Server, NIPS 2013.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Decision, FleetView, Strategy, Tensor
from edgefl.strategies.aggregation import QueuedUpdate, to_writable
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState, SingleUpdateConfig
from edgefl.strategies.participation import can_receive_work
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly

DEFAULT_COMPENSATION = {"constant": 0.04, "adaptive": 2.0, "mxnet": 0.04}
EPSILON = 1e-7

UNBOUNDED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ASGDConfig(SingleUpdateConfig):
    """Settings of a run with `asgd`: w <- w + d/n, where d = -η g holds the device's own learning rate."""

    summary: ClassVar[str] = (
        "Asynchronous SGD: every device's step moves the model as soon as it is there, "
        "however old the model it began with."
    )

    def build(self, rules: RoundRules) -> ASGD:
        return self.make(ASGD, rules, step_scale=self.step_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASGD(AsynchronousStrategy[AsyncState]):
    """Adds every displacement, scaled."""

    def make_state(self, model: dict[str, Array]) -> AsyncState:
        return AsyncState(model=model)

    def apply(self, state: AsyncState, queued_update: QueuedUpdate) -> None:
        self.apply_displacement(state, queued_update, self.select_trained(state, queued_update))


@dataclass(frozen=True, slots=True, kw_only=True)
class DCASGDConfig(SingleUpdateConfig):
    """Settings of a run with `dc-asgd`: w <- w - (η/n) (g + λ g⊙g⊙(w - w_bak)), with n = 1 in the paper.

    w_bak is the model that the device began with: a first-order guess of what its gradient would be at the present
    model. With the displacement d = -η g that is w <- w + (d - (λ/η) d⊙d⊙(w - w_bak))/n.

    *Differs from the paper* where a device takes more than one step for an assignment: then -d/η is their sum.

    Attributes:
        variant: `constant` λ; `adaptive` λ_t = λ / sqrt(MS + 1e-7), where MS <- μ MS + (1 - μ) g⊙g for each device;
            `mxnet` keeps one backup for everybody, the model before the last update. That is what MXNet's optimiser
            does and what ESync was compared with; it is not the paper's.
        compensation: λ; None takes 0.04, and 2 when it is adaptive.
        mean_square_decay: μ of the adaptive variant.
    """

    variant: Literal["constant", "adaptive", "mxnet"] = "constant"
    compensation: float | None = field(default=None, metadata={"at_least": 0})
    mean_square_decay: float = 0.95

    summary: ClassVar[str] = (
        "Delay-compensated ASGD: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, "
        "ICML 2017."
    )

    def build(self, rules: RoundRules) -> DCASGD:
        strength = DEFAULT_COMPENSATION[self.variant] if self.compensation is None else self.compensation
        if not 0 <= self.mean_square_decay < 1:
            raise ConfigError(f"strategy.mean_square_decay must be in [0, 1), got {self.mean_square_decay!r}")
        return self.make(
            DCASGD,
            rules,
            step_scale=self.step_scale,
            variant=self.variant,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SSPConfig(SingleUpdateConfig):
    """Settings of a run with `bounded`; `staleness` is s: 0 for `ssgd`, -1 for `asgd`.

    A device begins its next step only if it is at most s steps ahead of the slowest that is at work. s = 0 is `ssgd`
    and s = -1, no bound, is `asgd`, both to the last bit. In between every update moves the model when it comes, as
    `asgd` does, by the same `step_scale`.

    A device that is lost leaves the bound, and one that joins or comes back enters it at the pace of the slowest.
    """

    staleness: int = 1

    summary: ClassVar[str] = (
        "Bounded staleness: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Server, "
        "NIPS 2013."
    )

    def build(self, rules: RoundRules) -> Strategy[Any]:
        if self.staleness < UNBOUNDED:
            raise ConfigError(
                f"strategy.staleness must be 0 or more steps, or -1 for no bound, got {self.staleness!r}"
            )
        if self.staleness == UNBOUNDED:
            return self.make(ASGD, rules, step_scale=self.step_scale)
        if self.staleness == 0:
            return self.make(SynchronousStrategy, rules, compute_weight=weight_uniformly)
        return self.make(SSP, rules, step_scale=self.step_scale, max_steps_ahead=self.staleness)


@dataclass(slots=True)
class SSPState(AsyncState):
    """State of SSP; `clocks` counts the finished steps of each device.

    `at` lists the devices that reached each clock; those that have passed it are removed when it becomes the slowest.
    `slowest` is a lower bound of all clocks at work, `back` the devices that answered since the last `assign`.
    `had_resting`: a device was in back-off at the last one, which may have expired.
    """

    clocks: dict[str, int] = field(default_factory=dict)
    at: dict[int, list[str]] = field(default_factory=dict)
    slowest: int = 0
    back: list[str] = field(default_factory=list)
    had_resting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SSP(AsynchronousStrategy[SSPState]):
    """`asgd` whose devices wait when they are more than `max_steps_ahead` steps ahead."""

    max_steps_ahead: int

    def make_state(self, model: dict[str, Array]) -> SSPState:
        return SSPState(model=model)

    def apply(self, state: SSPState, queued_update: QueuedUpdate) -> None:
        self.apply_displacement(state, queued_update, self.select_trained(state, queued_update))

    def assign(self, state: SSPState, view: FleetView) -> tuple[SSPState, Decision]:
        state.had_resting = bool(state.slots.resting)
        return AsynchronousStrategy.assign(self, state, view)

    def list_candidates(self, state: SSPState, view: FleetView) -> Sequence[str]:
        """Returns the devices that may start: all idle ones, or only those that have just answered.

        The others are too far ahead until the slowest advances, or a device joins or leaves.
        """
        slowest_before, idle, recent = state.slowest, view.idle, state.back
        # With a cap on busy devices, those that just answered have no priority over the others.
        is_capped = self.rules.max_devices is not None or self.rules.fraction is not None
        self._update_slowest(state, view, frozenset() if is_capped else frozenset(recent))
        state.back = []
        is_unchanged = state.slowest == slowest_before and len(idle) == state.num_left + len(recent)
        if is_capped or not is_unchanged or state.had_resting or state.slots.resting:
            return idle
        # The number of idle devices matches, so these are idle; searching for each in `idle` would dominate the cost.
        return [device_id for device_id in recent if device_id not in view.busy and can_receive_work(device_id, view)]

    def _update_slowest(self, state: SSPState, view: FleetView, recent: frozenset[str]) -> None:
        """Raises `slowest` to the clock of the slowest device at work or about to be asked again.

        Without any, it passes all clocks, and new devices start level with the others.
        """
        while state.at:
            names = state.at.get(state.slowest, [])
            while names and not self._is_at_slowest(state, names[-1], view, recent):
                names.pop()
            if names:
                return
            state.at.pop(state.slowest, None)
            state.slowest += 1

    def _is_at_slowest(self, state: SSPState, device_id: str, view: FleetView, recent: frozenset[str]) -> bool:
        if state.clocks[device_id] != state.slowest:
            return False
        return state.slots.is_in_flight(device_id, view) or (device_id in recent and device_id in view.idle)

    def can_start(self, state: SSPState, device_id: str) -> bool:
        return state.clocks.get(device_id, state.slowest) - state.slowest <= self.max_steps_ahead

    def on_assigned(self, state: SSPState, device_id: str) -> None:
        clock = state.clocks[device_id] = max(state.slowest, state.clocks.get(device_id, 0))
        state.at.setdefault(clock, []).append(device_id)

    def on_update(self, state: SSPState, device_id: str) -> None:
        # A late answer of a lost device may be behind: a passed clock would never be removed.
        clock = state.clocks[device_id] = max(state.slowest, state.clocks[device_id] + 1)
        state.at.setdefault(clock, []).append(device_id)
        state.back.append(device_id)
