"""FedNova: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, 2020.

Devices that take more local steps pull the mean towards their own optimum. Normalised averaging divides every
displacement by the weight a_i that its local optimiser gave to its gradients, and moves by the mean times τ_eff:
Δ = τ_eff Σ p_i Δ_i / |a_i|_1 with τ_eff = Σ p_i |a_i|_1 (section 4), so that equal steps give `fedavg`.

Source: NeurIPS 2020. Differs from the authors' code: with a proximal term it takes Σ p_i τ_i for τ_eff, which is
larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, TrainConfig, Update
from edgefl.strategies.strategy_config import LearningRateSchedule, RoundRules, StrategyConfig
from edgefl.strategies.synchronous.round_state import RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_by_examples

NORMALISABLE_ALGORITHMS = (Algorithm.SGD, Algorithm.PROX, Algorithm.DECAY, Algorithm.GRADIENT)
"""Local algorithms whose displacement is a sum of gradients with weights that do not depend on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNovaConfig(StrategyConfig):
    """Settings of a run with `fednova`; `mu` above 0 trains with a proximal term, as `fedprox`."""

    mu: float = field(default=0.0, metadata={"at_least": 0})

    def plan(self) -> TrainConfig:
        plan = StrategyConfig.plan(self)
        if self.mu and plan.algorithm == Algorithm.SGD:
            plan = replace(plan, algorithm=Algorithm.PROX)
        if plan.algorithm == Algorithm.PROX:
            plan = replace(plan, options={"mu": float(self.mu)})
        check_normalisable(plan, "fednova")
        return plan

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        norm = make_normaliser(self.plan(), self.make_schedule())
        return self.make(SynchronousStrategy, rules, compute_weight=weight_by_examples, compute_norm=norm)


def make_normaliser(plan: TrainConfig, schedule: LearningRateSchedule) -> Callable[[Update], float]:
    """Returns |a|_1 of an update that followed `plan`, as a function of the steps actually taken.

    Args:
        plan: of the first round.
        schedule: closed rounds -> factor of its learning rate.
    """

    def norm(update: Update) -> float:
        learning_rate = plan.learning_rate * schedule(update.base_version)
        return compute_step_weight(replace(plan, learning_rate=learning_rate), update.metrics.iterations)

    return norm


def compute_step_weight(plan: TrainConfig, iterations: int) -> float:
    """Returns |a|_1: the displacement by τ local steps on a constant gradient 1, in learning rates.

    With momentum m: (τ - m(1 - m^τ)/(1 - m)) / (1 - m). With a proximal term μ and the learning rate η:
    (1 - (1 - ημ)^τ) / (ημ). Other combinations: by the recursion.

    Args:
        plan: algorithm, learning rate, momentum and options.
        iterations: τ; 0 counts as one.
    """
    steps, momentum = max(1, iterations), plan.momentum
    mu = float(plan.options.get("mu", 0.0)) if plan.algorithm == Algorithm.PROX else 0.0
    pull, decays = plan.learning_rate * mu, plan.algorithm == Algorithm.DECAY
    if plan.algorithm == Algorithm.GRADIENT:
        return 1.0
    if pull and not momentum:
        return (1.0 - (1.0 - pull) ** steps) / pull
    if not pull and not decays:
        return (steps - momentum * (1.0 - momentum**steps) / (1.0 - momentum)) / (1.0 - momentum)
    distance = velocity = 0.0
    for step in range(1, steps + 1):
        velocity = momentum * velocity + 1.0 - pull * distance
        distance += velocity / math.sqrt(step) if decays else velocity
    return distance


def check_normalisable(plan: TrainConfig, strategy_name: str) -> None:
    """Checks that a plan's displacements can be normalised.

    Raises:
        ConfigError: its local optimiser weighs gradients by their values, or keeps state over rounds.
    """
    if plan.algorithm not in NORMALISABLE_ALGORITHMS:
        raise ConfigError(
            f"strategy.optimizer: {strategy_name} can normalise {', '.join(NORMALISABLE_ALGORITHMS)}, "
            f"got {plan.algorithm!r}"
        )
    if plan.keeps_state and (plan.momentum or plan.algorithm == Algorithm.DECAY):
        raise ConfigError(
            f"strategy.keep_optimizer: {strategy_name} cannot normalise what lives on from round to round"
        )
    pull = plan.learning_rate * float(plan.options.get("mu", 0.0))
    if plan.algorithm == Algorithm.PROX and pull >= 2:
        raise ConfigError(
            f"strategy.mu times strategy.learning_rate must be below 2 for {strategy_name}, got {pull!r}"
        )
    if plan.momentum >= 1:
        raise ConfigError(f"strategy.momentum must be below 1 for {strategy_name}, got {plan.momentum!r}")
