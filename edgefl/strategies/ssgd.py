"""Synchronous SGD: one mini-batch gradient per device and round, averaged uniformly.

w <- w - η (1/p) Σ_i g_i, as the baseline of Li et al., ESync, IEEE TSC 2020, section 2. Updates are
displacements -η g_i, so one round is `fedavg` with a single local step and equal weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgefl.strategies.rounds import RoundRules, Synchronous
from edgefl.types import Algorithm, LocalPlan, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class SSGD:
    """Settings of a run with `ssgd`."""

    learning_rate: float = 0.05
    batch_size: int = 32

    def build(self, rules: RoundRules) -> Synchronous:
        plan = LocalPlan(
            algorithm=Algorithm.SGD, iterations=1, batch_size=self.batch_size, learning_rate=self.learning_rate
        )
        return Synchronous(plan=plan, weigh=equally, rules=rules)


def equally(update: Update) -> float:  # noqa: ARG001 every update weighs the same
    return 1.0
