"""FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.

Federated averaging in which every device minimises its loss plus (μ/2)|w - w_t|², which keeps unequal shards from
pulling far apart. Devices that have done less (a budget in `seconds`, a recall) are averaged in all the same.

Differs from the paper: all that are asked take part and weigh by their examples, as in `fedavg`; the paper draws them
with that probability and averages uniformly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from edgefl.errors import ConfigError
from edgefl.strategies.fedavg import by_examples
from edgefl.strategies.rounds import RoundRules, RoundState, Synchronous
from edgefl.strategies.settings import TrainingSettings
from edgefl.types import Algorithm, LocalPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProx(TrainingSettings):
    """Settings of a run with `fedprox`; μ = 0 is `fedavg`."""

    mu: float = 0.01
    optimizer: str = Algorithm.PROX

    def plan(self) -> LocalPlan:
        if self.optimizer != Algorithm.PROX:
            raise ConfigError(
                f"strategy.optimizer: fedprox trains with its own, {Algorithm.PROX}, got {self.optimizer!r}"
            )
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ConfigError(f"strategy.mu must be a number of 0 or more, got {self.mu!r}")
        return replace(TrainingSettings.plan(self), options={"mu": float(self.mu)})

    def build(self, rules: RoundRules) -> Synchronous[RoundState]:
        return Synchronous(plan=self.plan(), weigh=by_examples, rules=rules, rate=self.rate())
