"""The synchronous round that `fedavg` and `ssgd` share: ask everyone who is idle, fold, close, ask again.

A round closes when nobody who was asked is still busy, or when `min_updates` have arrived. A device that dies
leaves `view.busy`, so a round never waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgefl.errors import ConfigError
from edgefl.strategies import fold as folding
from edgefl.types import (
    Array,
    Assignment,
    Decision,
    FleetView,
    Indices,
    LocalPlan,
    Tensors,
    Update,
    derived_rng,
)

WAIT_S = 60.0
"""An upper bound on the sleep between two questions; every event wakes the loop anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """What a run file says about every round.

    Attributes:
        min_devices: the first round opens when so many devices are idle; later ones go on with those that are left.
        max_devices: at most so many are asked, None for all; who it is changes from round to round.
        min_updates: k of n: the round closes when k updates are in, or with fewer when nobody is left to ask; None
            waits for all that are alive.
        deadline_s: an assignment that takes longer is given up; None for never.
        codec: spec of the codec for updates.
        seed: decides who is asked where not all are.
    """

    min_devices: int = 1
    max_devices: int | None = None
    min_updates: int | None = None
    deadline_s: float | None = None
    codec: str | None = None
    seed: int = 0


@dataclass(slots=True)
class RoundState:
    """`model` is owned by the state and updated in place; `fold` is the open round, `used` the closed one's."""

    model: dict[str, Array]
    version: int = 0
    attempt: int = 0
    fold: folding.Fold = field(default_factory=folding.Fold)
    asked: dict[str, str] = field(default_factory=dict)
    used: tuple[str, ...] = ()
    used_by: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronous:
    """A strategy in rounds: everyone follows `plan`, and updates are averaged with the weights of `weigh`."""

    plan: LocalPlan
    weigh: Callable[[Update], float]
    rules: RoundRules

    def __post_init__(self) -> None:
        _check_plan(self.plan)

    def init(self, model: Tensors) -> RoundState:
        return RoundState(model={name: np.array(tensor) for name, tensor in model.items()})

    def assign(self, state: RoundState, view: FleetView) -> tuple[RoundState, Decision]:
        """Opens a round when none is open, or asks others when those asked are gone and too few answered."""
        if state.asked and (_num_pending(state, view) or state.fold.num_received >= (self.rules.min_updates or 1)):
            return state, Decision(next_wake_s=WAIT_S)
        willing = _willing(state, view)
        has_begun = bool(state.asked) or state.version > 0
        if len(willing) < (1 if has_begun else self.rules.min_devices):
            return state, Decision(next_wake_s=WAIT_S)
        state.attempt += 1
        chosen = self._choose(willing, state)
        asked = {f"v{state.version}-a{state.attempt}-{device_id}": device_id for device_id in chosen}
        state.asked |= asked
        state.fold.expected += tuple(asked)
        return state, Decision(orders=self._orders(state, asked), next_wake_s=WAIT_S)

    def _choose(self, willing: Sequence[str], state: RoundState) -> list[str]:
        """Returns `max_devices` of the willing in their order; drawn anew each time, or the rest were never heard."""
        limit = self.rules.max_devices
        if limit is None or limit >= len(willing):
            return list(willing)
        rng = derived_rng(self.rules.seed, "chosen", state.version, state.attempt)
        return [willing[place] for place in np.sort(rng.permutation(len(willing))[:limit])]

    def _orders(self, state: RoundState, asked: Mapping[str, str]) -> tuple[Assignment, ...]:
        return tuple(
            Assignment(
                assignment_id=assignment_id,
                device_id=device_id,
                base_version=state.version,
                plan=self.plan,
                codec=self.rules.codec,
                deadline_s=self.rules.deadline_s,
                settled=tuple(used for used, by in state.used_by.items() if by == device_id),
            )
            for assignment_id, device_id in asked.items()
        )

    def receive(self, state: RoundState, update: Update) -> RoundState:
        folding.receive(state.fold, update, self.weigh(update), state.model)
        return state

    def ready(self, state: RoundState, view: FleetView) -> bool:
        if not state.asked or state.fold.num_received == 0:
            return False
        if self.rules.min_updates is not None and state.fold.num_received >= self.rules.min_updates:
            return True
        if _num_pending(state, view):
            return False
        # Too few answered: others may be asked; when there are none, fewer than k close the round, or nobody would.
        return self.rules.min_updates is None or not _willing(state, view)

    def aggregate(self, state: RoundState) -> RoundState:
        folding.close(state.fold, state.model)
        used = tuple(state.fold.used)
        return RoundState(
            model=state.model,
            version=state.version + 1,
            used=used,
            used_by={assignment_id: state.asked[assignment_id] for assignment_id in used},
        )

    def model(self, state: RoundState) -> Tensors:
        return state.model

    def version(self, state: RoundState) -> int:
        return state.version

    def used(self, state: RoundState) -> tuple[str, ...]:
        return state.used

    def changed(self, state: RoundState, since: int) -> Indices | None:  # noqa: ARG002 everything moves
        return None


def _willing(state: RoundState, view: FleetView) -> list[str]:
    """Returns the idle devices that have not brought an update in this round."""
    delivered = {device_id for assignment_id, device_id in state.asked.items() if state.fold.has(assignment_id)}
    return [device_id for device_id in view.idle if device_id not in delivered]


def _num_pending(state: RoundState, view: FleetView) -> int:
    """Returns how many of those asked may still answer."""
    busy = {assignment_id for outstanding in view.busy.values() for assignment_id in outstanding}
    return sum(assignment_id in busy and not state.fold.has(assignment_id) for assignment_id in state.asked)


def _check_plan(plan: LocalPlan) -> None:
    """Refuses what every device would refuse, before the run begins."""
    for name in ("iterations", "epochs", "batch_size"):
        value = getattr(plan, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"strategy.{name} must be a number above 0, got {value!r}")
    for name in ("learning_rate", "momentum", "weight_decay"):
        value = getattr(plan, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"strategy.{name} must be a number of 0 or more, got {value!r}")
