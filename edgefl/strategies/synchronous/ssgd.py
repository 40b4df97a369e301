"""Synchronous SGD: one mini-batch gradient per device and round, averaged uniformly.

w <- w - η (1/p) Σ_i g_i, as the baseline of Li et al., ESync, IEEE TSC 2020, section 2. Updates are
displacements -η g_i, so one round is `fedavg` with a single local step and equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from edgefl.core.types import TrainConfig, Update
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.strategies.synchronous.strategy import RoundRules, RoundState, SynchronousStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSingleStepConfig(StrategyConfig):
    """Settings of devices that take one step; `iterations` = 0 leaves it to `epochs`, `seconds` replace it."""

    iterations: int | None = 1

    def plan(self) -> TrainConfig:
        takes_more = self.iterations == 0 or self.seconds is not None
        return StrategyConfig.plan(replace(self, iterations=None) if takes_more else self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SSGDConfig(SyncSingleStepConfig):
    """Settings of a run with `ssgd`.

    With `double_buffering` a device computes the next gradient while the last one is sent and averaged: SGD with a
    delay of one step, w_{t+1} = w_t - η g(w_{t-1}), as the DoubleBuffering optimiser of Parallel-SGD.
    """

    double_buffering: bool = False

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        return SynchronousStrategy(
            plan=self.plan(),
            compute_weight=weight_uniformly,
            rules=rules,
            lr_schedule=self.make_schedule(),
            double_buffering=self.double_buffering,
        )


def weight_uniformly(update: Update) -> float:  # noqa: ARG001 every update weighs the same
    return 1.0
