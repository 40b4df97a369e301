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

from edgefl.errors import ConfigError
from edgefl.strategies.arrivals import Arrival
from edgefl.strategies.asgd import ASGD, StepSettings
from edgefl.strategies.asynchronous import Asynchronous, AsyncState
from edgefl.strategies.gate import may_get_more
from edgefl.strategies.rounds import RoundRules
from edgefl.strategies.ssgd import SSGD
from edgefl.types import Array, Decision, FleetView, Strategy

UNBOUNDED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedStaleness(StepSettings):
    """Settings of a run with `bounded`; `staleness` is s: 0 for `ssgd`, -1 for `asgd`."""

    staleness: int = 1

    def build(self, rules: RoundRules) -> Strategy[Any]:
        if self.staleness < UNBOUNDED:
            raise ConfigError(
                f"strategy.staleness must be 0 or more steps, or -1 for no bound, got {self.staleness!r}"
            )
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.staleness == UNBOUNDED:
            return ASGD(**{item.name: own[item.name] for item in fields(ASGD)}).build(rules)
        if self.staleness == 0:
            return SSGD(**{item.name: own[item.name] for item in fields(SSGD) if item.name in own}).build(rules)
        return Bounded(plan=self.plan(), rate=self.rate(), rules=rules, bound=self.staleness)


@dataclass(slots=True)
class BoundedState(AsyncState):
    """`clocks` counts the steps that each device has finished.

    `at` lists by clock who came to it; those who have left it are crossed off when it is the slowest's turn.
    `slowest` is a lower bound of all clocks at work, `back` who answered since the last question. `had_resting` says
    that somebody rested at the last one, whose rest may be over.
    """

    clocks: dict[str, int] = field(default_factory=dict)
    at: dict[int, list[str]] = field(default_factory=dict)
    slowest: int = 0
    back: list[str] = field(default_factory=list)
    had_resting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded(Asynchronous[BoundedState]):
    """`asgd` whose devices wait when they are more than `bound` steps ahead."""

    bound: int

    def begin(self, model: dict[str, Array]) -> BoundedState:
        return BoundedState(model=model)

    def apply(self, state: BoundedState, arrival: Arrival) -> None:
        self.move(state, arrival, self.trained(state, arrival))

    def assign(self, state: BoundedState, view: FleetView) -> tuple[BoundedState, Decision]:
        state.had_resting = bool(state.seats.resting)
        return Asynchronous.assign(self, state, view)

    def candidates(self, state: BoundedState, view: FleetView) -> Sequence[str]:
        """Returns who may be allowed to start: all who are idle, or those alone who have just answered.

        The others are known to be ahead until the slowest has moved on, or somebody has come or gone.
        """
        before, idle, back = state.slowest, view.idle, state.back
        # Where few may work at a time, who has answered is no more likely to be asked than the others.
        is_capped = self.rules.max_devices is not None or self.rules.fraction is not None
        self._move_on(state, view, frozenset() if is_capped else frozenset(back))
        state.back = []
        nothing_else = state.slowest == before and len(idle) == state.num_left + len(back)
        if is_capped or not nothing_else or state.had_resting or state.seats.resting:
            return idle
        # As many are idle as must be, so these are; to search for each in `idle` would cost more than the rest.
        return [device_id for device_id in back if device_id not in view.busy and may_get_more(device_id, view)]

    def _move_on(self, state: BoundedState, view: FleetView, back: frozenset[str]) -> None:
        """Raises `slowest` to the clock of the slowest that is at work, or is just about to be asked again.

        When there is nobody, it passes all clocks, and whoever comes begins with the others.
        """
        while state.at:
            names = state.at.get(state.slowest, [])
            while names and not self._is_at(state, names[-1], view, back):
                names.pop()
            if names:
                return
            state.at.pop(state.slowest, None)
            state.slowest += 1

    def _is_at(self, state: BoundedState, device_id: str, view: FleetView, back: frozenset[str]) -> bool:
        if state.clocks[device_id] != state.slowest:
            return False
        return state.seats.is_at_work(device_id, view) or (device_id in back and device_id in view.idle)

    def may_start(self, state: BoundedState, device_id: str) -> bool:
        return state.clocks.get(device_id, state.slowest) - state.slowest <= self.bound

    def began(self, state: BoundedState, device_id: str) -> None:
        clock = state.clocks[device_id] = max(state.slowest, state.clocks.get(device_id, 0))
        state.at.setdefault(clock, []).append(device_id)

    def answered(self, state: BoundedState, device_id: str) -> None:
        # One that was lost and answers all the same may be behind: a clock that is passed would never be crossed off.
        clock = state.clocks[device_id] = max(state.slowest, state.clocks[device_id] + 1)
        state.at.setdefault(clock, []).append(device_id)
        state.back.append(device_id)
