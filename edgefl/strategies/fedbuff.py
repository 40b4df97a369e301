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

from edgefl.errors import ConfigError
from edgefl.strategies.arrivals import Arrival, checked, is_float, owned
from edgefl.strategies.asynchronous import Asynchronous, AsyncState
from edgefl.strategies.rounds import RoundRules
from edgefl.strategies.settings import TrainingSettings
from edgefl.types import Array, FleetView, SparseTensor, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class FedBuff(TrainingSettings):
    """Settings of a run with `fedbuff`.

    Attributes:
        buffer_size: K.
        staleness_exponent: a; 0 weighs all alike.
    """

    buffer_size: int = 10
    staleness_exponent: float = 0.5

    def build(self, rules: RoundRules) -> Buffered:
        if self.buffer_size < 1:
            raise ConfigError(f"strategy.buffer_size must be at least 1, got {self.buffer_size!r}")
        if not (math.isfinite(self.staleness_exponent) and self.staleness_exponent >= 0):
            raise ConfigError(
                f"strategy.staleness_exponent must be a number of 0 or more, got {self.staleness_exponent!r}"
            )
        return Buffered(
            plan=self.plan(),
            rate=self.rate(),
            rules=rules,
            size=self.buffer_size,
            exponent=self.staleness_exponent,
        )


@dataclass(slots=True)
class BufferState(AsyncState):
    """`total` is the weighted sum of what is `held`; `weight` the sum of its weights.

    `counters` are the integer tensors of the update with the most examples so far. `is_over`: no more is assigned.
    """

    total: dict[str, Array] = field(default_factory=dict)
    weight: float = 0.0
    counters: dict[str, Array] = field(default_factory=dict)
    most_examples: int = -1
    held: tuple[str, ...] = ()
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffered(Asynchronous[BufferState]):
    """Folds updates as they come, one model in memory, and moves when `size` of them are in.

    At the end of a run what is in the buffer counts although it is not full: their mean is of as many as there are.
    """

    size: int
    exponent: float

    versions_per_round: ClassVar[int | None] = 1

    def begin(self, model: dict[str, Array]) -> BufferState:
        return BufferState(model=model)

    def receive(self, state: BufferState, update: Update) -> BufferState:
        if len(state.held) >= self.size:  # the loop closes what is ready before it waits; a batch may bring more
            return Asynchronous.receive(self, state, update)
        arrival = self.arrival(state, update)
        if arrival is not None:
            self.apply(state, arrival)
        return state

    def apply(self, state: BufferState, arrival: Arrival) -> None:
        weight = (1.0 + state.version - arrival.base_version) ** -self.exponent
        for name, like in state.model.items():
            tensor = checked(arrival, name, like)
            if not is_float(like):
                if arrival.num_examples > state.most_examples:
                    state.counters[name] = owned(tensor)
                continue
            moved = owned(tensor) if isinstance(tensor, SparseTensor) else tensor
            if self.is_averaged(name, like):
                moved = state.buffers[arrival.base_version][name] + moved
            kind = np.promote_types(like.dtype, np.float32)
            scaled = np.multiply(moved, weight, dtype=kind, out=np.empty(like.shape, kind))
            if name in state.total:
                state.total[name] += scaled
            else:
                state.total[name] = scaled
        state.weight += weight
        state.most_examples = max(state.most_examples, arrival.num_examples)
        state.held = (*state.held, arrival.assignment_id)
        self.done(state, arrival)

    def ready(self, state: BufferState, view: FleetView) -> bool:
        return len(state.held) >= self.size or (state.is_over and bool(state.held) and not view.busy)

    def finish(self, state: BufferState) -> BufferState:
        state.is_over = True
        return state

    def resumed(self, state: BufferState) -> BufferState:
        state = Asynchronous.resumed(self, state)
        state.is_over = False
        return state

    def aggregate(self, state: BufferState) -> BufferState:
        """Moves the model by the buffer; running means become the weighted mean of the devices' own."""
        mean = {
            name: total
            / np.asarray(state.weight if self.is_averaged(name, state.model[name]) else len(state.held), total.dtype)
            for name, total in state.total.items()
        }
        averaged = {name: mean.pop(name) for name in list(mean) if self.is_averaged(name, state.model[name])}
        for name, step in self.rules.server.step(state.moments, mean).items():
            np.add(state.model[name], step, out=state.model[name], casting="same_kind")
        for name, value in averaged.items():
            np.copyto(state.model[name], value, casting="same_kind")
        for name, moved in state.counters.items():
            np.add(state.model[name], moved, out=state.model[name], casting="unsafe")
        state.version, state.used = state.version + 1, state.held
        state.total, state.counters, state.held = {}, {}, ()
        state.weight, state.most_examples = 0.0, -1
        while state.queue and len(state.held) < self.size:
            self.apply(state, state.queue.popleft())
        return state
