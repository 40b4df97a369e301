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

from edgefl.errors import ConfigError
from edgefl.strategies.arrivals import Arrival, add, checked, is_float, owned
from edgefl.strategies.asynchronous import Asynchronous, AsyncState
from edgefl.strategies.rounds import RoundRules
from edgefl.strategies.settings import TrainingSettings
from edgefl.types import Algorithm, Array, LocalPlan

STALENESS = ("constant", "polynomial", "hinge")


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAsync(TrainingSettings):
    """Settings of a run with `fedasync`.

    Attributes:
        alpha: how much of a fresh model is mixed in, in (0, 1].
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

    def plan(self) -> LocalPlan:
        plan = TrainingSettings.plan(self)
        if self.mu == 0:
            return plan
        if self.optimizer != Algorithm.SGD:
            raise ConfigError(f"strategy.mu needs strategy.optimizer = 'sgd', got {self.optimizer!r}")
        return replace(plan, algorithm=Algorithm.PROX, options={"mu": self.mu})

    def build(self, rules: RoundRules) -> Mixing:
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"strategy.alpha must be in (0, 1], got {self.alpha!r}")
        if self.staleness not in STALENESS:
            raise ConfigError(f"strategy.staleness must be one of {', '.join(STALENESS)}, got {self.staleness!r}")
        a = self.staleness_a
        if a is None:
            a = 10.0 if self.staleness == "hinge" else 0.5
        for name, value in (("staleness_a", a), ("staleness_b", self.staleness_b), ("mu", self.mu)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"strategy.{name} must be a number of 0 or more, got {value!r}")
        return Mixing(
            plan=self.plan(), rate=self.rate(), rules=rules, alpha=self.alpha, staleness=self.staleness, a=a,
            b=self.staleness_b,
        )  # fmt: skip


@dataclass(slots=True)
class MixingState(AsyncState):
    """`models` are the tensors of numbers with a point at the versions that somebody works on."""

    models: dict[int, dict[str, Array]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing(Asynchronous[MixingState]):
    """Moves the model a share of the way to each device's."""

    alpha: float
    staleness: str
    a: float
    b: float

    models_per_device: ClassVar[float] = 1.0

    def begin(self, model: dict[str, Array]) -> MixingState:
        return MixingState(model=model)

    def keep(self, state: MixingState) -> None:
        state.models[state.version] = {
            name: tensor.copy() for name, tensor in state.model.items() if is_float(tensor)
        }

    def release(self, state: MixingState, version: int) -> None:
        state.models.pop(version, None)

    def share(self, delay: int) -> float:
        """Returns alpha s(τ) for an update that is `delay` versions old."""
        match self.staleness:
            case "constant":
                return self.alpha
            case "polynomial":
                return self.alpha * math.pow(1.0 + delay, -self.a)
        return self.alpha if delay <= self.b else self.alpha / (self.a * (delay - self.b) + 1.0)

    def apply(self, state: MixingState, arrival: Arrival) -> None:
        share, base = self.share(state.version - arrival.base_version), state.models[arrival.base_version]
        towards = {}
        for name, weight in state.model.items():
            moved = owned(checked(arrival, name, weight))
            if not is_float(weight):
                add(weight, moved)
                continue
            # Zero, and so exact, while nobody else has moved the model.
            drift = base[name] - weight
            towards[name] = ((moved + drift) * share).astype(weight.dtype, copy=False)
        for name, step in self.rules.server.step(state.moments, towards).items():
            add(state.model[name], step)
