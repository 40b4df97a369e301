"""Asynchronous federated averaging: model by model (FedAsync), or in buffers of K updates (FedBuff).

Sources: Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019, Algorithm 1; Nguyen et al., Federated Learning
with Buffered Asynchronous Aggregation, AISTATS 2022, Algorithm 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Algorithm, Array, FleetView, SparseTensor, TrainConfig, Update
from edgefl.strategies.aggregation import (
    QueuedUpdate,
    add_in_place,
    apply_step,
    is_float,
    require_tensor,
    to_writable,
)
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig

MAX_CLAIMS = 1000
"""Devices whose newest update says how many examples are usual."""
MOST_EXAMPLES = 4.0
"""What an update's examples count as at most, in medians over the devices: a board states them itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAsyncConfig(StrategyConfig):
    """Settings of a run with `fedasync`: w <- w + alpha s(τ) (w_i - w) for every model that comes.

    τ is the number of versions since the device got its model. Devices send displacements, so w_i is the model they
    began with plus the displacement, and the state keeps the models of all versions that somebody works on: at most
    one for each device at work.

    The paper mixes every model alike, whatever n, the number of devices at work. What follows from n is the default:

    - alpha is 1/(n s(n - 1)), so that a model of the usual age, n - 1 versions, weighs 1/n: the running mean holds n
      models, as the mean of a round does. It is at most 1/√n, as for s = (1 + τ)^-½: where s falls faster, fresh
      models of few fast devices would be most of the mean, and what they add for their age would not end.
    - a model weighs in proportion to its examples, as in `fedavg`.
    - a model that weighs a pulls back by a τ of the steps that others took meanwhile, as it is τ versions old. Its
      own displacement d counts 1 + a τ times for that. With steady steps v of a version, v = a ((1 + a τ) d - τ v) is
      solved by v = a d: n updates move the model as far as a round of `fedavg`, where v = a d / (1 + a τ) is half.

    Attributes:
        alpha: mixing weight of a fresh model, in (0, 1]; it makes the algorithm the paper's, whose value is 0.6. None
            takes the default above.
        staleness: the function s: `constant` (1), `polynomial` ((1 + τ)^-a) or `hinge` (1 up to τ = b, then
            1 / (a (τ - b) + 1)).
        staleness_a: a; None takes 0.5 for the polynomial and 10 for the hinge.
        staleness_b: b of the hinge.
        mu: weight of the proximal term of the devices' loss, as in the paper; 0 leaves it out.
    """

    alpha: float | None = field(default=None, metadata={"above": 0, "at_most": 1})
    staleness: Literal["constant", "polynomial", "hinge"] = "polynomial"
    staleness_a: float | None = field(default=None, metadata={"at_least": 0})
    staleness_b: float = field(default=4.0, metadata={"at_least": 0})
    mu: float = field(default=0.0, metadata={"at_least": 0})

    summary: ClassVar[str] = "FedAsync: Xie, Koyejo, Gupta, Asynchronous Federated Optimization, 2019, Algorithm 1."

    def plan(self) -> TrainConfig:
        plan = StrategyConfig.plan(self)
        if self.mu == 0:
            return plan
        if self.optimizer != Algorithm.SGD:
            raise ConfigError(f"strategy.mu needs strategy.optimizer = 'sgd', got {self.optimizer!r}")
        return replace(plan, algorithm=Algorithm.PROX, options={"mu": self.mu})

    def build(self, rules: RoundRules) -> FedAsync:
        a = self.staleness_a
        if a is None:
            a = 10.0 if self.staleness == "hinge" else 0.5
        return self.make(FedAsync, rules, alpha=self.alpha, staleness=self.staleness, a=a, b=self.staleness_b)


@dataclass(slots=True)
class FedAsyncState(AsyncState):
    """State of FedAsync.

    `models` are the float tensors at the versions in flight, `claims` the examples of each device's newest update.
    """

    models: dict[int, dict[str, Array]] = field(default_factory=dict)
    claims: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAsync(AsynchronousStrategy[FedAsyncState]):
    """Moves the model part of the way to each device's."""

    alpha: float | None
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

    def compute_mixing_weight(self, delay: int, num_workers: int = 1) -> float:
        """Returns alpha s(τ), at most 1, for an update that is `delay` versions old, of one of `num_workers`."""
        weight = self._compute_staleness(delay)
        if self.alpha is None:
            usual = num_workers * self._compute_staleness(num_workers - 1)
            return weight * min(1.0 / usual, 1.0 / math.sqrt(num_workers))
        return self.alpha * weight

    def _compute_staleness(self, delay: int) -> float:
        match self.staleness:
            case "constant":
                return 1.0
            case "polynomial":
                return math.pow(1.0 + delay, -self.a)
        return 1.0 if delay <= self.b else 1.0 / (self.a * (delay - self.b) + 1.0)

    def apply(self, state: FedAsyncState, queued_update: QueuedUpdate) -> None:
        delay, base = state.version - queued_update.base_version, state.models[queued_update.base_version]
        share, extension = self.compute_mixing_weight(delay, state.num_workers), 1.0
        if self.alpha is None:
            extension += share * delay
            share = min(1.0, share * count_examples(state.claims, queued_update))
        mixed = {}
        for name, weight in state.model.items():
            displacement = to_writable(require_tensor(queued_update, name, weight))
            if not is_float(weight):
                add_in_place(weight, displacement)
                continue
            if delay and not self.is_averaged(name, weight):
                displacement = displacement * extension
            # Exactly zero while no other update has moved the model.
            drift = base[name] - weight
            mixed[name] = ((displacement + drift) * share).astype(weight.dtype, copy=False)
        for name, step in self.rules.server.step(state.moments, mixed).items():
            add_in_place(state.model[name], step)


def count_examples(claims: dict[str, int], update: QueuedUpdate) -> float:
    """Puts an update's examples into the devices' `claims`, and returns them relative to the mean of those.

    All of them count as `MOST_EXAMPLES` medians at most, so a minority's claims do not make the others weigh nothing,
    however often it sends.
    """
    claims.pop(update.device_id, None)
    claims[update.device_id] = max(1, update.num_examples)
    if len(claims) > MAX_CLAIMS:
        del claims[next(iter(claims))]
    most = MOST_EXAMPLES * statistics.median(claims.values())
    return min(claims[update.device_id], most) / statistics.fmean(min(count, most) for count in claims.values())


PAPER_BUFFER_SIZE = 10
MOST_BUFFERS_IN_FLIGHT = 2
"""Buffers that the updates of all devices at work fill: about the delay of an update, in versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBuffConfig(StrategyConfig):
    """Settings of a run with `fedbuff`: every K updates are one version, w <- w + η_g (1/K) Σ_i d_i / (1 + τ_i)^a.

    Devices train without a pause. τ_i is the number of versions since device i got its model and a = 0.5 as in the
    paper. η_g is the run file's `[server] learning_rate`, and `[server] optimizer` may stand in for the plain step.

    Attributes:
        buffer_size: K; None takes 10 as in the paper, half of the n devices at work where that is more, and n where
            that is fewer. A buffer that waits for several updates of each device moves the model more rarely than
            rounds would. One of far fewer makes updates n/K versions old, of which n/K move the model as far as a
            round does: that times the delay bounds the stable rate, and (1 + τ)^-½ takes only a root of it back.
        staleness_exponent: a; 0 weighs all alike.
    """

    buffer_size: int | None = field(default=None, metadata={"at_least": 1})
    staleness_exponent: float = field(default=0.5, metadata={"at_least": 0})

    summary: ClassVar[str] = (
        "FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, "
        "Algorithm 1."
    )

    def build(self, rules: RoundRules) -> FedBuff:
        return self.make(FedBuff, rules, size=self.buffer_size, exponent=self.staleness_exponent)


@dataclass(slots=True)
class FedBuffState(AsyncState):
    """State of FedBuff: `total` is the weighted sum of `buffered`; `weight` and `share` are sums, too.

    `counters` are the integer tensors of the update with the most examples so far. With `is_over` nothing more is
    assigned.
    """

    total: dict[str, Array] = field(default_factory=dict)
    weight: float = 0.0
    share: float = 0.0
    counters: dict[str, Array] = field(default_factory=dict)
    most_examples: int = -1
    buffered: tuple[str, ...] = ()
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBuff(AsynchronousStrategy[FedBuffState]):
    """Adds updates to a buffer as they arrive, one model in memory, and moves at `size` of them.

    At the end of a run a partial buffer counts too, with the mean of its updates.
    """

    size: int | None
    exponent: float

    versions_per_round: ClassVar[int | None] = 1

    def make_state(self, model: dict[str, Array]) -> FedBuffState:
        return FedBuffState(model=model)

    def compute_size(self, state: FedBuffState) -> int:
        """Returns K, for the devices that are at work now."""
        if self.size is not None:
            return self.size
        num_workers = state.num_workers
        return min(num_workers, max(PAPER_BUFFER_SIZE, math.ceil(num_workers / MOST_BUFFERS_IN_FLIGHT)))

    def receive(self, state: FedBuffState, update: Update) -> FedBuffState:
        if len(state.buffered) >= self.compute_size(
            state
        ):  # the loop aggregates before it waits; a batch may hold more updates
            return AsynchronousStrategy.receive(self, state, update)
        queued_update = self.complete_assignment(state, update)
        if queued_update is not None:
            self.apply(state, queued_update)
        return state

    def apply(self, state: FedBuffState, queued_update: QueuedUpdate) -> None:
        weight = (1.0 + state.version - queued_update.base_version) ** -self.exponent
        for name, like in state.model.items():
            tensor = require_tensor(queued_update, name, like)
            if not is_float(like):
                if queued_update.num_examples > state.most_examples:
                    state.counters[name] = to_writable(tensor)
                continue
            dense, factor = to_writable(tensor) if isinstance(tensor, SparseTensor) else tensor, weight
            if self.is_averaged(name, like):
                dense = state.buffers[queued_update.base_version][name] + dense
                factor = weight * queued_update.share
            kind = np.promote_types(like.dtype, np.float32)
            weighted = np.multiply(dense, factor, dtype=kind, out=np.empty(like.shape, kind))
            if name in state.total:
                state.total[name] += weighted
            else:
                state.total[name] = weighted
        state.weight += weight * queued_update.share
        state.share += queued_update.share
        state.most_examples = max(state.most_examples, queued_update.num_examples)
        state.buffered = (*state.buffered, queued_update.assignment_id)
        self.release_update(state, queued_update)

    def ready(self, state: FedBuffState, view: FleetView) -> bool:
        return len(state.buffered) >= self.compute_size(state) or (
            state.is_over and bool(state.buffered) and not view.busy
        )

    def finish(self, state: FedBuffState) -> FedBuffState:
        state.is_over = True
        return state

    def restore_model(self, state: FedBuffState, model: Mapping[str, Array]) -> FedBuffState:
        self._clear_buffer(state)
        return AsynchronousStrategy.restore_model(self, state, model)

    def _clear_buffer(self, state: FedBuffState) -> None:
        state.total, state.counters, state.buffered = {}, {}, ()
        state.weight, state.share, state.most_examples = 0.0, 0.0, -1

    def resumed(self, state: FedBuffState) -> FedBuffState:
        state = AsynchronousStrategy.resumed(self, state)
        state.is_over = False
        return state

    def aggregate(self, state: FedBuffState) -> FedBuffState:
        """Moves the model by the buffer; running means become the weighted mean of the devices' own."""
        mean = {
            name: total
            / np.asarray(state.weight if self.is_averaged(name, state.model[name]) else state.share, total.dtype)
            for name, total in state.total.items()
        }
        buffer_means = {name: mean.pop(name) for name in list(mean) if self.is_averaged(name, state.model[name])}
        apply_step(state.model, self.rules.server.step(state.moments, mean))
        for name, value in buffer_means.items():
            np.copyto(state.model[name], value, casting="same_kind")
        for name, displacement in state.counters.items():
            np.add(state.model[name], displacement, out=state.model[name], casting="unsafe")
        state.version, state.used = state.version + 1, state.buffered
        self._clear_buffer(state)
        while state.queue and len(state.buffered) < self.compute_size(state):
            self.apply(state, state.queue.popleft())
        return state
