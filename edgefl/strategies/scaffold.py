"""SCAFFOLD: local steps corrected by control variates, so that devices with different data do not drift apart.

y <- y - μ(g - c_i + c) on the device, then c_i <- c_i - c + (x - y)/(Kμ), which it keeps; here x moves by the mean
displacement, and c by the mean of what the c_i moved by, over all devices ever asked. That follows from the
displacements, so only c travels beside the model, and only downwards. Unequal K are normalised as in FedNova.

c must be the mean of the c_i, or the optimum is another one for good. So a device moves its c_i only by updates that
were used; and when one shows that it has lost its c_i, which nobody else knows, all variates begin at zero again.
Source: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, option II.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgefl.errors import ConfigError
from edgefl.strategies.arrivals import is_float
from edgefl.strategies.open_round import OpenRound, RoundState
from edgefl.strategies.rounds import RoundRules, Synchronous
from edgefl.strategies.settings import TrainingSettings
from edgefl.strategies.ssgd import equally
from edgefl.types import BLANK_VARIATE, Algorithm, Array, EdgeMessage, FleetView, LocalPlan, Update

COORDINATOR = "coordinator"
"""The sender of what travels beside the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold(TrainingSettings):
    """Settings of a run with `scaffold`."""

    def build(self, rules: RoundRules) -> Synchronous[ScaffoldState]:
        plan = self.plan()
        if plan.algorithm != Algorithm.SGD or plan.momentum:
            raise ConfigError(
                f"strategy.optimizer of scaffold must be sgd without momentum, got {plan.algorithm!r} with "
                f"{plan.momentum:g}: its control variates are mean gradients"
            )
        plan = replace(plan, algorithm=Algorithm.SCAFFOLD, keeps_state=True)
        rate = self.rate()

        def steps(update: Update) -> float:
            return plan.learning_rate * rate(update.base_version) * max(1, update.metrics.iterations)

        return ScaffoldRounds(plan=plan, weigh=equally, rules=rules, norm=steps, rate=rate)


@dataclass(slots=True)
class ScaffoldState(RoundState):
    """`control` is c, by tensor; `members` are all who were ever asked.

    Attributes:
        size: how many they were when the last round was closed, 0 for not known: c is the mean over so many.
        began: the version at which all variates were zero.
        counted: whose variates have moved since then.
        has_lost: one of these has shown that it lost its own.
    """

    control: dict[str, Array] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    size: int = 0
    began: int = 0
    counted: set[str] = field(default_factory=set)
    has_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldRounds(Synchronous[ScaffoldState]):
    """Rounds in which c travels with the model."""

    def begin(self, model: dict[str, Array]) -> ScaffoldState:
        trained = [name for name, tensor in model.items() if self._is_trained(name, tensor)]
        return ScaffoldState(model=model, control={name: np.zeros_like(model[name]) for name in trained})

    def plans(
        self,
        state: ScaffoldState,
        plan: LocalPlan,
        devices: Sequence[str],
        view: FleetView,  # noqa: ARG002 all get the same c
    ) -> Mapping[str, LocalPlan]:
        state.members.update(devices)
        body = packed(state.control)
        return {
            name: replace(plan, inbox=(EdgeMessage(edge=(COORDINATOR, name), step=state.began, body=body),))
            for name in devices
        }

    def note(self, state: ScaffoldState, opened: OpenRound, update: Update) -> None:  # noqa: ARG002 of any round
        is_blank = bool(update.metrics.extra.get(BLANK_VARIATE))
        state.has_lost = state.has_lost or (is_blank and update.device_id in state.counted)

    def displacement(self, state: ScaffoldState, opened: OpenRound) -> Mapping[str, Array]:
        moved = Synchronous.displacement(self, state, opened)
        if state.has_lost:
            state.control = {name: np.zeros_like(control) for name, control in state.control.items()}
            state.began, state.counted, state.has_lost = state.version + 1, set(), False
            return moved
        state.counted.update(opened.asked[used][0] for used in opened.fold.used.values())
        steps = opened.fold.weighted_norm / opened.fold.weight
        before, state.size = state.size or len(state.members), len(state.members)
        kept, share = before / state.size, opened.num_received / state.size
        for name, control in state.control.items():
            kind = control.dtype.type
            control[...] = kind(kept - share) * control - kind(share) * (moved[name] / kind(steps))
        return moved

    def _is_trained(self, name: str, tensor: Array) -> bool:
        return is_float(tensor) and name not in self.rules.server.buffers


def packed(control: Mapping[str, Array]) -> bytes:
    """Returns c, tensor after tensor in the model's order, each in its own type, little-endian."""
    return b"".join(array.astype(array.dtype.newbyteorder("<")).tobytes() for array in control.values())
