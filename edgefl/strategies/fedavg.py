"""Federated averaging: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, Alg. 1.

Every device takes `epochs` passes (or `iterations` steps) of SGD over its shard; the next model is the old one
plus the mean displacement, weighted by the number of local examples.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.strategies.rounds import RoundRules, Synchronous
from edgefl.types import Algorithm, LocalPlan, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvg:
    """Settings of a run with `fedavg`. `iterations`, when set, replaces `epochs`."""

    learning_rate: float = 0.05
    epochs: float = 1.0
    iterations: int | None = None
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 0.0

    def build(self, rules: RoundRules) -> Synchronous:
        plan = LocalPlan(
            algorithm=Algorithm.SGD,
            iterations=self.iterations,
            epochs=self.epochs if self.iterations is None else None,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        return Synchronous(plan=plan, weigh=by_examples, rules=rules)


def by_examples(update: Update) -> float:
    """Returns the weight n_k of the paper; a device without examples (a no-op task) counts as one."""
    return float(max(1, update.metrics.num_examples))
