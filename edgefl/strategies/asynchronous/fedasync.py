"""FedAsync: Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019, Algorithm 1.

Each device's model is mixed into the global one as it comes: w <- w + alpha s(τ) (w_i - w), where τ is the number of
versions since the device got its model. s is `constant` (1), `polynomial` ((1 + τ)^-a) or `hinge` (1 up to τ = b,
then 1 / (a (τ - b) + 1)). The proximal term of the paper's local loss is `mu`.

Devices send displacements, so w_i is the model they began with plus the displacement, and the state keeps the models
of all versions that somebody works on: at most one for each device at work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, Array, TrainConfig
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.strategies.synchronous.strategy import RoundRules
from edgefl.strategies.update_tensors import QueuedUpdate, add_in_place, is_float, require_tensor, to_writable

STALENESS_FUNCTIONS = ("constant", "polynomial", "hinge")


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAsyncConfig(StrategyConfig):
    """Settings of a run with `fedasync`.

    Attributes:
        alpha: mixing weight of a fresh model, in (0, 1].
        staleness: the function s.
        staleness_a: a; None takes 0.5 for the polynomial and 10 for the hinge.
        staleness_b: b of the hinge.
        mu: weight of the proximal term on the devices; 0 leaves it out.
    """

    alpha: float = 0.6
    staleness: str = "polynomial"
    staleness_a: float | None = None
    staleness_b: float = 4.0
    mu: float = 0.0

    def plan(self) -> TrainConfig:
        plan = StrategyConfig.plan(self)
        if self.mu == 0:
            return plan
        if self.optimizer != Algorithm.SGD:
            raise ConfigError(f"strategy.mu needs strategy.optimizer = 'sgd', got {self.optimizer!r}")
        return replace(plan, algorithm=Algorithm.PROX, options={"mu": self.mu})

    def build(self, rules: RoundRules) -> FedAsync:
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"strategy.alpha must be in (0, 1], got {self.alpha!r}")
        if self.staleness not in STALENESS_FUNCTIONS:
            raise ConfigError(
                f"strategy.staleness must be one of {', '.join(STALENESS_FUNCTIONS)}, got {self.staleness!r}"
            )
        a = self.staleness_a
        if a is None:
            a = 10.0 if self.staleness == "hinge" else 0.5
        for name, value in (("staleness_a", a), ("staleness_b", self.staleness_b), ("mu", self.mu)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"strategy.{name} must be a number of 0 or more, got {value!r}")
        return FedAsync(
            plan=self.plan(), lr_schedule=self.make_schedule(), rules=rules, alpha=self.alpha,
            staleness=self.staleness, a=a, b=self.staleness_b,
        )  # fmt: skip


@dataclass(slots=True)
class FedAsyncState(AsyncState):
    """State of FedAsync; `models` are the float tensors at the versions in flight."""

    models: dict[int, dict[str, Array]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAsync(AsynchronousStrategy[FedAsyncState]):
    """Moves the model part of the way to each device's."""

    alpha: float
    staleness: str
    a: float
    b: float

    models_per_device: ClassVar[float] = 1.0

    def make_state(self, model: dict[str, Array]) -> FedAsyncState:
        return FedAsyncState(model=model)

    def on_version_dispatched(self, state: FedAsyncState) -> None:
        state.models[state.version] = {
            name: tensor.copy() for name, tensor in state.model.items() if is_float(tensor)
        }

    def on_version_released(self, state: FedAsyncState, version: int) -> None:
        state.models.pop(version, None)

    def compute_mixing_weight(self, delay: int) -> float:
        """Returns alpha s(τ) for an update that is `delay` versions old."""
        match self.staleness:
            case "constant":
                return self.alpha
            case "polynomial":
                return self.alpha * math.pow(1.0 + delay, -self.a)
        return self.alpha if delay <= self.b else self.alpha / (self.a * (delay - self.b) + 1.0)

    def apply(self, state: FedAsyncState, queued_update: QueuedUpdate) -> None:
        share, base = (
            self.compute_mixing_weight(state.version - queued_update.base_version),
            state.models[queued_update.base_version],
        )
        mixed = {}
        for name, weight in state.model.items():
            displacement = to_writable(require_tensor(queued_update, name, weight))
            if not is_float(weight):
                add_in_place(weight, displacement)
                continue
            # Exactly zero while no other update has moved the model.
            drift = base[name] - weight
            mixed[name] = ((displacement + drift) * share).astype(weight.dtype, copy=False)
        for name, step in self.rules.server.step(state.moments, mixed).items():
            add_in_place(state.model[name], step)
