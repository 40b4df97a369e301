"""Averaging in rounds: federated averaging, FedProx, FedNova, synchronous SGD, and one device alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, Array, FleetView, TrainConfig, Update
from edgefl.strategies.strategy_config import LearningRateSchedule, RoundRules, SingleStepConfig, StrategyConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState, SlotRequest
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_by_examples, weight_uniformly

NORMALISABLE_ALGORITHMS = (Algorithm.SGD, Algorithm.PROX, Algorithm.DECAY, Algorithm.GRADIENT)
"""Local algorithms whose displacement is a sum of gradients with weights that do not depend on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgConfig(StrategyConfig):
    """Settings of a run with `fedavg`; with `double_buffering` devices compute while the last round is closed.

    Every device takes `epochs` passes (or `iterations` steps) of SGD over its shard; the next model is the old one
    plus the mean displacement, weighted by the number of local examples.
    """

    double_buffering: bool = False

    permits_partial_sums: ClassVar[bool] = True
    summary: ClassVar[str] = (
        "Federated averaging: McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017, "
        "Alg. 1."
    )

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        buffering = self.double_buffering
        return self.make(SynchronousStrategy, rules, compute_weight=weight_by_examples, double_buffering=buffering)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProxConfig(StrategyConfig):
    """Settings of a run with `fedprox`; μ = 0 is `fedavg`.

    Every device minimises its loss plus (μ/2)|w - w_t|², which keeps unequal shards from pulling far apart. Devices
    that have done less (a budget in `seconds`, an early finish) are averaged in all the same.

    Differs from the paper: all that are asked take part and weigh by their examples, as in `fedavg`; the paper draws
    them with that probability and averages uniformly.
    """

    mu: float = field(default=0.01, metadata={"at_least": 0})
    optimizer: str = Algorithm.PROX

    permits_partial_sums: ClassVar[bool] = True
    summary: ClassVar[str] = (
        "FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2."
    )

    def plan(self) -> TrainConfig:
        if self.optimizer != Algorithm.PROX:
            raise ConfigError(
                f"strategy.optimizer: fedprox trains with its own, {Algorithm.PROX}, got {self.optimizer!r}"
            )
        return replace(StrategyConfig.plan(self), options={"mu": float(self.mu)})

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        return self.make(SynchronousStrategy, rules, compute_weight=weight_by_examples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SSGDConfig(SingleStepConfig):
    """Settings of a run with `ssgd`: w <- w - η (1/p) Σ_i g_i, the baseline of Li et al., ESync, section 2.

    Updates are displacements -η g_i, so one round is `fedavg` with a single local step and equal weights.
    With `double_buffering` a device computes the next gradient while the last one is sent and averaged: SGD with a
    delay of one step, w_{t+1} = w_t - η g(w_{t-1}), as the DoubleBuffering optimiser of Parallel-SGD.
    """

    double_buffering: bool = False

    summary: ClassVar[str] = "Synchronous SGD: one mini-batch gradient per device and round, averaged uniformly."

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        buffering = self.double_buffering
        return self.make(SynchronousStrategy, rules, compute_weight=weight_uniformly, double_buffering=buffering)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDeviceConfig(StrategyConfig):
    """Settings of a run with `local`: the `device` that trains, by default the first idle one by name.

    It trains as in a round of one, and the others rest. With the whole data set as its shard (cut it for one device)
    this is training on pooled data; with its own shard it is what the device could do without the others. Another
    device replaces it only when it may not be asked any more and the run file does not name it.
    """

    device: str | None = None

    summary: ClassVar[str] = "One device alone: the reference line that every federated run is compared with."

    def build(self, rules: RoundRules) -> SynchronousStrategy[SingleDeviceState]:
        return self.make(SingleDevice, rules, compute_weight=weight_uniformly, device=self.device)


@dataclass(slots=True)
class SingleDeviceState(RoundState):
    """State of `local`; `alone` is the device that trains, None before the first round."""

    alone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleDevice(SynchronousStrategy[SingleDeviceState]):
    """Rounds in which one device takes part."""

    device: str | None = None

    def make_state(self, model: dict[str, Array]) -> SingleDeviceState:
        return SingleDeviceState(model=model, alone=self.device)

    def list_candidates(self, state: SingleDeviceState, view: FleetView) -> Sequence[str]:
        if self.device is None and state.alone not in view.idle:
            state.alone = min(view.idle, default=None)
        return [state.alone] if state.alone is not None and state.alone in view.idle else []

    def select_replacements(
        self, state: SingleDeviceState, current_round: OpenRound, view: FleetView
    ) -> Sequence[SlotRequest]:
        delivered = current_round.find_delivered()
        candidates = [name for name in self.list_candidates(state, view) if name not in delivered]
        return [SlotRequest(device_id=name) for name in self._select_devices(candidates, state)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNovaConfig(StrategyConfig):
    """Settings of a run with `fednova`; `mu` above 0 trains with a proximal term, as `fedprox`.

    Devices that take more local steps pull the mean towards their own optimum. Normalised averaging divides every
    displacement by the weight a_i that its local optimiser gave to its gradients, and moves by the mean times τ_eff:
    Δ = τ_eff Σ p_i Δ_i / |a_i|_1 with τ_eff = Σ p_i |a_i|_1 (section 4), so that equal steps give `fedavg`.

    Source: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS
    2020. Differs from the authors' code: with a proximal term it takes Σ p_i τ_i for τ_eff, which is larger.
    """

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
