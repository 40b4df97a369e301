"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.

Federated averaging in which every device minimises its loss plus (μ/2)|w - w_t|², which keeps unequal shards from
pulling far apart. Devices that have done less (a budget in `seconds`, a recall) are averaged in all the same.

Differs from the paper: all that are asked take part and weigh by their examples, as in `fedavg`; the paper draws them
with that probability and averages uniformly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, TrainConfig
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.strategies.synchronous.fedavg import weight_by_examples
from edgefl.strategies.synchronous.strategy import RoundRules, RoundState, SynchronousStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProxConfig(StrategyConfig):
    """Settings of a run with `fedprox`; μ = 0 is `fedavg`."""

    mu: float = 0.01
    optimizer: str = Algorithm.PROX

    def plan(self) -> TrainConfig:
        if self.optimizer != Algorithm.PROX:
            raise ConfigError(
                f"strategy.optimizer: fedprox trains with its own, {Algorithm.PROX}, got {self.optimizer!r}"
            )
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ConfigError(f"strategy.mu must be a number of 0 or more, got {self.mu!r}")
        return replace(StrategyConfig.plan(self), options={"mu": float(self.mu)})

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        return SynchronousStrategy(
            plan=self.plan(), compute_weight=weight_by_examples, rules=rules, lr_schedule=self.make_schedule()
        )
