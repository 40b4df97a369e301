"""FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, Algorithm 1.

Devices train without a pause; every K updates are one version: w <- w + η_g (1/K) Σ_i d_i / (1 + τ_i)^a, where τ_i is
the number of versions since device i got its model and a = 0.5 as there. η_g is the run file's `[server]
learning_rate`, and `[server] optimizer` may stand in for the plain step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, FleetView, SparseTensor, Update
from edgefl.strategies.asynchronous.strategy import AsynchronousStrategy, AsyncState
from edgefl.strategies.strategy_config import StrategyConfig
from edgefl.strategies.synchronous.strategy import RoundRules
from edgefl.strategies.update_tensors import QueuedUpdate, is_float, require_tensor, to_writable


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBuffConfig(StrategyConfig):
    """Settings of a run with `fedbuff`.

    Attributes:
        buffer_size: K.
        staleness_exponent: a; 0 weighs all alike.
    """

    buffer_size: int = 10
    staleness_exponent: float = 0.5

    def build(self, rules: RoundRules) -> FedBuff:
        if self.buffer_size < 1:
            raise ConfigError(f"strategy.buffer_size must be at least 1, got {self.buffer_size!r}")
        if not (math.isfinite(self.staleness_exponent) and self.staleness_exponent >= 0):
            raise ConfigError(
                f"strategy.staleness_exponent must be a number of 0 or more, got {self.staleness_exponent!r}"
            )
        return FedBuff(
            plan=self.plan(),
            lr_schedule=self.make_schedule(),
            rules=rules,
            size=self.buffer_size,
            exponent=self.staleness_exponent,
        )


@dataclass(slots=True)
class FedBuffState(AsyncState):
    """State of FedBuff: `total` is the weighted sum of `held`, `weight` the sum of its weights.

    `counters` are the integer tensors of the update with the most examples so far. With `is_over` nothing more is
    assigned.
    """

    total: dict[str, Array] = field(default_factory=dict)
    weight: float = 0.0
    counters: dict[str, Array] = field(default_factory=dict)
    most_examples: int = -1
    held: tuple[str, ...] = ()
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBuff(AsynchronousStrategy[FedBuffState]):
    """Adds updates to a buffer as they arrive, one model in memory, and moves at `size` of them.

    At the end of a run a partial buffer counts too, with the mean of its updates.
    """

    size: int
    exponent: float

    versions_per_round: ClassVar[int | None] = 1

    def make_state(self, model: dict[str, Array]) -> FedBuffState:
        return FedBuffState(model=model)

    def receive(self, state: FedBuffState, update: Update) -> FedBuffState:
        if len(state.held) >= self.size:  # the loop aggregates before it waits; a batch may hold more updates
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
            dense = to_writable(tensor) if isinstance(tensor, SparseTensor) else tensor
            if self.is_averaged(name, like):
                dense = state.buffers[queued_update.base_version][name] + dense
            kind = np.promote_types(like.dtype, np.float32)
            weighted = np.multiply(dense, weight, dtype=kind, out=np.empty(like.shape, kind))
            if name in state.total:
                state.total[name] += weighted
            else:
                state.total[name] = weighted
        state.weight += weight
        state.most_examples = max(state.most_examples, queued_update.num_examples)
        state.held = (*state.held, queued_update.assignment_id)
        self.release_update(state, queued_update)

    def ready(self, state: FedBuffState, view: FleetView) -> bool:
        return len(state.held) >= self.size or (state.is_over and bool(state.held) and not view.busy)

    def finish(self, state: FedBuffState) -> FedBuffState:
        state.is_over = True
        return state

    def resumed(self, state: FedBuffState) -> FedBuffState:
        state = AsynchronousStrategy.resumed(self, state)
        state.is_over = False
        return state

    def aggregate(self, state: FedBuffState) -> FedBuffState:
        """Moves the model by the buffer; running means become the weighted mean of the devices' own."""
        mean = {
            name: total
            / np.asarray(state.weight if self.is_averaged(name, state.model[name]) else len(state.held), total.dtype)
            for name, total in state.total.items()
        }
        buffer_means = {name: mean.pop(name) for name in list(mean) if self.is_averaged(name, state.model[name])}
        for name, step in self.rules.server.step(state.moments, mean).items():
            np.add(state.model[name], step, out=state.model[name], casting="same_kind")
        for name, value in buffer_means.items():
            np.copyto(state.model[name], value, casting="same_kind")
        for name, displacement in state.counters.items():
            np.add(state.model[name], displacement, out=state.model[name], casting="unsafe")
        state.version, state.used = state.version + 1, state.held
        state.total, state.counters, state.held = {}, {}, ()
        state.weight, state.most_examples = 0.0, -1
        while state.queue and len(state.held) < self.size:
            self.apply(state, state.queue.popleft())
        return state
