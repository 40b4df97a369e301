"""SCAFFOLD: local steps corrected by control variates, so that devices with different data do not drift apart.

y <- y - μ(g - c_i + c) on the device, then c_i <- c_i - c + (x - y)/(Kμ), which it keeps; here x moves by the mean
displacement, and c by the mean of what the c_i moved by, over all devices ever asked. That follows from the
displacements, so only c travels beside the model, and only downwards. Unequal K are normalised as in FedNova.

A device's part in c is its mean gradient: its displacement by its steps. One that claims few steps for a long way
would have a large part, so it counts for `MAX_GRADIENT_RATIO` times the largest median of earlier rounds at most. Not
of the last round: near the optimum the gradients of honest devices differ by any factor.

c must be the mean of the c_i, or the optimum is another one for good. So a device moves its c_i only by updates that
were used, and neither moves by one that the guard has clipped: what is clipped to nothing would take away a part of c
in every round, until the model stands still. So would a device that answers with the model as it came: an update of
less than `MIN_GRADIENT_RATIO` moves neither. When a device shows that it has lost its c_i, which nobody else knows,
or is blocked, all variates begin at zero again.
Source: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, option II.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import ZERO_CONTROL_VARIATE, Algorithm, Array, FleetView, PeerMessage, TrainConfig, Update
from edgefl.strategies.aggregation import add_weighted, is_float, require_tensor, unload_tensors
from edgefl.strategies.participation import is_blocked
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig, compute_rate_factor
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly
from edgefl.strategies.update_guard import compute_norm

COORDINATOR = "coordinator"
"""Sender of the messages beside the model."""
MAX_GRADIENT_RATIO = 8.0
"""Of the length of a device's mean gradient to the largest median of a round."""
MIN_GRADIENT_RATIO = 0.05
"""Of the length of a device's mean gradient to the median of the last version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldConfig(StrategyConfig):
    """Settings of a run with `scaffold`.

    The learning rate is half of what the task recommends, unless the run file has one. c - c_i is a round old, and
    feedback that is one step old halves the stable step: x <- x - a x is stable for a < 2, with the x before for
    a < 1.
    """

    rate_share: ClassVar[float] = 0.5

    def build(self, rules: RoundRules) -> SynchronousStrategy[ScaffoldState]:
        plan = self.plan()
        if plan.algorithm != Algorithm.SGD or plan.momentum:
            raise ConfigError(
                f"strategy.optimizer of scaffold must be sgd without momentum, got {plan.algorithm!r} with "
                f"{plan.momentum:g}: its control variates are mean gradients"
            )
        plan = replace(plan, algorithm=Algorithm.SCAFFOLD, keeps_state=True)
        rate = self.make_schedule()

        def steps(update: Update) -> float:
            return plan.learning_rate * rate(update.base_version) * max(1, update.metrics.iterations)

        return Scaffold(plan=plan, compute_weight=weight_uniformly, rules=rules, compute_norm=steps, lr_schedule=rate)


@dataclass(slots=True)
class ScaffoldState(RoundState):
    """State of SCAFFOLD: `control` is c, by tensor; `members` are all devices ever asked.

    Attributes:
        size: their number when the last round closed, 0 for unknown: c is the mean over these.
        began: the version at which all variates were zero.
        counted: devices whose variates have moved since then.
        has_lost: one of these reported that it lost its variate.
        lengths: of the mean gradients that arrived since the last version.
        last_length, usual_length: the newest and the largest median of these in a round, 0 before the first.
        uncounted: updates of open rounds that move no variate, and their divisors, by assignment.
    """

    control: dict[str, Array] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    size: int = 0
    began: int = 0
    counted: set[str] = field(default_factory=set)
    has_lost: bool = False
    lengths: list[float] = field(default_factory=list)
    last_length: float = 0.0
    usual_length: float = 0.0
    uncounted: dict[str, tuple[Update, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold(SynchronousStrategy[ScaffoldState]):
    """Rounds in which c is sent beside the model."""

    def make_state(self, model: dict[str, Array]) -> ScaffoldState:
        trained_names = [name for name, tensor in model.items() if self._is_trained(name, tensor)]
        return ScaffoldState(model=model, control={name: np.zeros_like(model[name]) for name in trained_names})

    def make_plans(
        self,
        state: ScaffoldState,
        plan: TrainConfig,
        devices: Sequence[str],
        view: FleetView,
    ) -> Mapping[str, TrainConfig]:
        blocked = {name for name in state.members if is_blocked(name, view)}
        state.members.difference_update(blocked)
        state.has_lost = state.has_lost or not blocked.isdisjoint(state.counted)
        state.members.update(devices)
        body = encode_control_variate(state.control)
        return {
            name: replace(plan, messages=(PeerMessage(edge=(COORDINATOR, name), step=state.began, body=body),))
            for name in devices
        }

    def on_update(self, state: ScaffoldState, current_round: OpenRound, update: Update) -> None:  # noqa: ARG002 of any round
        is_blank = bool(update.metrics.extra.get(ZERO_CONTROL_VARIATE))
        state.has_lost = state.has_lost or (is_blank and update.device_id in state.counted)

    def compute_divisor(self, state: ScaffoldState, update: Update) -> float:
        steps = compute_rate_factor(self.compute_norm(update), state.halvings, update.base_version)
        moved = self._compute_length(state, update)
        state.lengths.append(moved / steps)
        is_idle = moved < MIN_GRADIENT_RATIO * state.last_length * steps
        if state.usual_length > 0:
            steps = max(steps, moved / (MAX_GRADIENT_RATIO * state.usual_length))
        if update.is_clipped or is_idle:
            state.uncounted[update.assignment_id] = update, steps
        return steps

    def _compute_length(self, state: ScaffoldState, update: Update) -> float:
        return compute_norm({name: update.tensors[name] for name in state.control if name in update.tensors})

    def compute_displacement(self, state: ScaffoldState, current_round: OpenRound) -> Mapping[str, Array]:
        displacement = SynchronousStrategy.compute_displacement(self, state, current_round)
        if state.lengths:
            state.last_length, state.lengths = float(np.median(state.lengths)), []
            state.usual_length = max(state.usual_length, state.last_length)
        if state.has_lost:
            self._reset_variates(state, state.version + 1)
            return displacement
        counted_ids = [name for name in current_round.fold.used.values() if name not in state.uncounted]
        state.counted.update(current_round.assigned[assignment_id][0] for assignment_id in counted_ids)
        uncounted = self._sum_uncounted(state, current_round)
        steps = current_round.fold.weighted_norm / current_round.fold.weight
        size_before, state.size = state.size or len(state.members), len(state.members)
        retained_share = size_before / state.size - len(counted_ids) / state.size
        share = current_round.fold.weight / state.size
        for name, control in state.control.items():
            kind = control.dtype.type
            control[...] = kind(retained_share) * control - kind(share) * (displacement[name] / kind(steps))
            if name in uncounted:
                np.add(control, uncounted[name] / kind(state.size), out=control)
        return displacement

    def aggregate(self, state: ScaffoldState) -> ScaffoldState:
        state = SynchronousStrategy.aggregate(self, state)
        for assignment_id in state.used:
            if assignment_id in state.uncounted:
                update, _ = state.uncounted.pop(assignment_id)
                del state.used_assignments[update.device_id][assignment_id]
        return state

    def restore_model(self, state: ScaffoldState, model: Mapping[str, Array]) -> ScaffoldState:
        state = SynchronousStrategy.restore_model(self, state, model)
        self._reset_variates(state, state.version)
        state.uncounted.clear()
        state.lengths, state.last_length, state.usual_length = [], 0.0, 0.0
        return state

    def _reset_variates(self, state: ScaffoldState, version: int) -> None:
        state.control = {name: np.zeros_like(control) for name, control in state.control.items()}
        state.began, state.counted, state.has_lost = version, set(), False

    def resumed(self, state: ScaffoldState) -> ScaffoldState:
        state.uncounted.clear()
        return SynchronousStrategy.resumed(self, state)

    def _sum_uncounted(self, state: ScaffoldState, closing: OpenRound) -> dict[str, Array]:
        """Returns the sum of the uncounted mean gradients of a round, as they are in its mean, in its order."""
        total: dict[str, Array] = {}
        for assignment_id in closing.fold.used.values():
            if assignment_id not in state.uncounted:
                continue
            update, steps = state.uncounted[assignment_id]
            for name, control in state.control.items():
                add_weighted(total, name, require_tensor(update, name, control), 1.0 / steps, control.dtype)
            unload_tensors(update.tensors)
        return total

    def _is_trained(self, name: str, tensor: Array) -> bool:
        return is_float(tensor) and name not in self.rules.server.buffers


def encode_control_variate(control: Mapping[str, Array]) -> bytes:
    """Returns c, tensor by tensor in the model's order, each in its own type, little-endian."""
    return b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in control.values())
