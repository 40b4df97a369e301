"""Federated averaging: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, Alg. 1.

Every device takes `epochs` passes (or `iterations` steps) of SGD over its shard; the next model is the old one
plus the mean displacement, weighted by the number of local examples.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.core.types import Update
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.strategies.synchronous.strategy import RoundRules, RoundState, SynchronousStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgConfig(StrategyConfig):
    """Settings of a run with `fedavg`; with `double_buffering` devices compute while the last round is closed."""

    double_buffering: bool = False

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        return SynchronousStrategy(
            plan=self.plan(),
            compute_weight=weight_by_examples,
            rules=rules,
            lr_schedule=self.make_schedule(),
            double_buffering=self.double_buffering,
        )


def weight_by_examples(update: Update) -> float:
    """Returns the weight n_k of the paper; a device without examples (a no-op task) counts as one."""
    return float(max(1, update.metrics.num_examples))
