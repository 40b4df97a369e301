"""Asynchronous SGD: every device's step moves the model as soon as it is there, however old the model it began with.

w <- w + d, where the displacement d = -η g holds the device's own learning rate: the baseline `dist_async` of Li et
al., ESync, IEEE TSC 2020, section 2; Dean et al., Large Scale Distributed Deep Networks, NIPS 2012.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgefl.strategies.arrivals import Arrival
from edgefl.strategies.asynchronous import Asynchronous, AsyncState
from edgefl.strategies.rounds import RoundRules
from edgefl.strategies.settings import TrainingSettings
from edgefl.types import Array, LocalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings(TrainingSettings):
    """Settings of strategies whose devices send every step: `iterations` = 0 leaves the work to `epochs`."""

    iterations: int | None = 1

    def plan(self) -> LocalPlan:
        longer = self.iterations == 0 or self.seconds is not None
        return TrainingSettings.plan(replace(self, iterations=None) if longer else self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASGD(StepSettings):
    """Settings of a run with `asgd`."""

    def build(self, rules: RoundRules) -> AsynchronousSGD:
        return AsynchronousSGD(plan=self.plan(), rate=self.rate(), rules=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousSGD(Asynchronous[AsyncState]):
    """Adds every displacement as it is."""

    def begin(self, model: dict[str, Array]) -> AsyncState:
        return AsyncState(model=model)

    def apply(self, state: AsyncState, arrival: Arrival) -> None:
        self.move(state, arrival, self.trained(state, arrival))
