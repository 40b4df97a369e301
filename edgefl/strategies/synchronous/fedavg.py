"""Plain averaging in rounds: federated averaging, FedProx, synchronous SGD, and one device alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, Array, FleetView, TrainConfig
from edgefl.strategies.strategy_config import RoundRules, SingleStepConfig, StrategyConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState, SlotRequest
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_by_examples, weight_uniformly


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgConfig(StrategyConfig):
    """Settings of a run with `fedavg`; with `double_buffering` devices compute while the last round is closed.

    Every device takes `epochs` passes (or `iterations` steps) of SGD over its shard; the next model is the old one
    plus the mean displacement, weighted by the number of local examples.
    """

    double_buffering: bool = False

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
