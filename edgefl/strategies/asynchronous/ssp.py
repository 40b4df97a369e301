"""Bounded staleness: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Server, NIPS 2013.

A device begins its next step only if it is at most s steps ahead of the slowest that is at work. s = 0 is `ssgd` and
s = -1, no bound, is `asgd`, both to the last bit. In between every update moves the model when it comes, as `asgd`
does: the step of one update is then that of a whole round of `ssgd`, whose updates are averaged.

A device that is lost leaves the bound, and one that joins or comes back enters it at the pace of the slowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Decision, FleetView, Strategy
from edgefl.strategies.asynchronous.asgd import ASGDConfig, AsyncSingleStepConfig
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState
from edgefl.strategies.participation import can_receive_work
from edgefl.strategies.synchronous.ssgd import SSGDConfig
from edgefl.strategies.synchronous.strategy import RoundRules
from edgefl.strategies.update_tensors import QueuedUpdate

UNBOUNDED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SSPConfig(AsyncSingleStepConfig):
    """Settings of a run with `bounded`; `staleness` is s: 0 for `ssgd`, -1 for `asgd`."""

    staleness: int = 1

    def build(self, rules: RoundRules) -> Strategy[Any]:
        if self.staleness < UNBOUNDED:
            raise ConfigError(
                f"strategy.staleness must be 0 or more steps, or -1 for no bound, got {self.staleness!r}"
            )
        settings = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.staleness == UNBOUNDED:
            return ASGDConfig(**{item.name: settings[item.name] for item in fields(ASGDConfig)}).build(rules)
        if self.staleness == 0:
            return SSGDConfig(
                **{item.name: settings[item.name] for item in fields(SSGDConfig) if item.name in settings}
            ).build(rules)
        return SSP(plan=self.plan(), lr_schedule=self.make_schedule(), rules=rules, max_steps_ahead=self.staleness)


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
        state.had_resting = bool(state.seats.resting)
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
        if is_capped or not is_unchanged or state.had_resting or state.seats.resting:
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
        return state.seats.is_in_flight(device_id, view) or (device_id in recent and device_id in view.idle)

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
