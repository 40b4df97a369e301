"""Majority vote: every device sends the signs of its displacement, and the model moves by the sign of their sum.

Each device has one vote, whatever its number of examples and however long its displacement, so fewer than half of the
devices cannot turn an entry that the others agree on, whatever they send. With the codec `sign` a vote takes one bit
an entry; any codec works. An entry where the votes are even, or nobody moved, stays.

Source: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018, algorithm 3, with
momentum (Signum) algorithm 2; Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault
Tolerant, ICLR 2019. Differs from the papers: devices take several local steps before they vote, and the downlink
carries the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from edgefl.core.types import Array, LazyTensors, SparseTensor, Tensor, Tensors, TrainConfig, Update
from edgefl.strategies.aggregation import unload_tensors
from edgefl.strategies.strategy_config import CONSTANT, RoundRules, SingleStepConfig, compute_rate_factor
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGDConfig(SingleStepConfig):
    """Settings of a run with `signsgd`.

    Attributes:
        iterations: local steps before a vote. The sign of one mini-batch's gradient is mostly noise (theorem 1 of the
            paper wants a batch that grows with the run), that of a displacement by a few steps much less, and fewer
            votes travel for the same work. The paper's is 1.
        step: of an entry in the first round; `schedule` scales it, as it does the learning rate. None takes 0.2/√K in
            a run of K rounds, and in a straight line to 0 unless there is another schedule: votes do not get shorter
            near the optimum, so the last model of a constant step swings by it. The paper's theorem 1 has
            1/√(|L|₁ K), whose mean over the run is the same, and leaves L to be found; that a last iterate wants a
            falling step is in Jain, Nagaraj, Netrapalli, COLT 2019. 0.001 where the run file does not say how many.
        momentum: of the devices' gradients (Signum's β, there scaled by 1 - β, which does not change signs); the
            velocity persists from round to round on the device, like that of `keep_optimizer`.
    """

    iterations: int | None = field(default=6, metadata={"at_least": 0})
    step: float | None = field(default=None, metadata={"above": 0})

    def plan(self) -> TrainConfig:
        plan = SingleStepConfig.plan(self)
        return replace(plan, keeps_state=True) if plan.momentum else plan

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        config, step = self, self.step
        if step is None:
            step = compute_default_step(rules.rounds)
            if rules.rounds is not None and self.schedule == CONSTANT:
                config = replace(self, schedule=f"linear:{rules.rounds}")
        return config.make(SignSGD, rules, compute_weight=weight_uniformly, step=step)


def compute_default_step(rounds: int | None) -> float:
    """Returns the step in a run of so many rounds, None for not known."""
    return 0.001 if rounds is None else 0.2 / math.sqrt(rounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGD(SynchronousStrategy[RoundState]):
    """Majority voting in rounds; buffers are averaged and counters taken over, as in any other round."""

    step: float

    def receive(self, state: RoundState, update: Update) -> RoundState:
        return SynchronousStrategy.receive(
            self, state, replace(update, tensors=self._to_sign_tensors(update.tensors))
        )

    def compute_displacement(self, state: RoundState, current_round: OpenRound) -> Mapping[str, Array]:
        mean, step = (
            SynchronousStrategy.compute_displacement(self, state, current_round),
            self.step * compute_rate_factor(self.lr_schedule(state.version), state.halvings, state.version),
        )
        return {name: self._compute_step(name, votes, step) for name, votes in mean.items()}

    def _compute_step(self, name: str, votes: Array, step: float) -> Array:
        if not self._is_voted_on(name, votes):
            return votes
        return np.multiply(np.sign(votes, out=votes), step, out=votes)

    def _to_sign_tensors(self, tensors: Tensors) -> Tensors:
        """Returns an update's votes, decoded at their first access."""

        def load() -> Tensors:
            votes = {name: self._to_signs(name, tensor) for name, tensor in tensors.items()}
            unload_tensors(tensors)
            return votes

        return LazyTensors(load)

    def _to_signs(self, name: str, tensor: Tensor) -> Tensor:
        values = tensor.values if isinstance(tensor, SparseTensor) else tensor
        if not self._is_voted_on(name, values):
            return tensor
        signs = np.sign(values)
        return replace(tensor, values=signs) if isinstance(tensor, SparseTensor) else signs

    def _is_voted_on(self, name: str, values: Array) -> bool:
        return name not in self.rules.server.buffers and bool(np.issubdtype(values.dtype, np.inexact))
