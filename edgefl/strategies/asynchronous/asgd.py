"""Asynchronous SGD: every device's step moves the model as soon as it is there, however old the model it began with.

w <- w + d, where the displacement d = -η g holds the device's own learning rate: the baseline `dist_async` of Li et
al., ESync, IEEE TSC 2020, section 2; Dean et al., Large Scale Distributed Deep Networks, NIPS 2012.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgefl.core.types import Array, TrainConfig
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.strategies.synchronous.strategy import RoundRules
from edgefl.strategies.update_tensors import QueuedUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSingleStepConfig(StrategyConfig):
    """Settings of strategies whose devices send every step: `iterations` = 0 leaves the work to `epochs`."""

    iterations: int | None = 1

    def plan(self) -> TrainConfig:
        longer = self.iterations == 0 or self.seconds is not None
        return StrategyConfig.plan(replace(self, iterations=None) if longer else self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASGDConfig(AsyncSingleStepConfig):
    """Settings of a run with `asgd`."""

    def build(self, rules: RoundRules) -> ASGD:
        return ASGD(plan=self.plan(), lr_schedule=self.make_schedule(), rules=rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class ASGD(AsynchronousStrategy[AsyncState]):
    """Adds every displacement as it is."""

    def make_state(self, model: dict[str, Array]) -> AsyncState:
        return AsyncState(model=model)

    def apply(self, state: AsyncState, queued_update: QueuedUpdate) -> None:
        self.apply_displacement(state, queued_update, self.select_trained(state, queued_update))
