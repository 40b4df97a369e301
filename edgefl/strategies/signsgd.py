"""Majority vote: every device sends the signs of its displacement, and the model moves by the sign of their sum.

Each device has one vote, whatever its number of examples and however long its displacement, so fewer than half of the
devices cannot turn an entry that the others agree on, whatever they send. With the codec `sign` a vote takes one bit
an entry; any codec works. An entry where the votes are even, or nobody moved, stays.

Source: Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018, algorithm 3, with
momentum (Signum) algorithm 2; Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault
Tolerant, ICLR 2019. Differs from the papers: devices may take several local steps before they vote, and the downlink
carries the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edgefl.errors import ConfigError
from edgefl.strategies.open_round import OpenRound, RoundState
from edgefl.strategies.rounds import RoundRules, Synchronous
from edgefl.strategies.ssgd import OneStep, equally
from edgefl.types import Array, LazyTensors, LocalPlan, SparseTensor, Tensor, Tensors, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGD(OneStep):
    """Settings of a run with `signsgd`.

    Attributes:
        step: what an entry moves by in the first round; `schedule` scales it, as it does the learning rate.
        momentum: of the devices' gradients (Signum's β, there scaled by 1 - β, which no sign tells); the velocity
            lives on from round to round, so it is kept on the board like that of `keep_optimizer`.
    """

    step: float = 0.001

    def plan(self) -> LocalPlan:
        if not (math.isfinite(self.step) and self.step > 0):
            raise ConfigError(f"strategy.step must be a number above 0, got {self.step!r}")
        plan = OneStep.plan(self)
        return replace(plan, keeps_state=True) if plan.momentum else plan

    def build(self, rules: RoundRules) -> Synchronous[RoundState]:
        return MajorityVote(plan=self.plan(), weigh=equally, rules=rules, rate=self.rate(), step=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityVote(Synchronous[RoundState]):
    """Rounds that count votes; buffers are averaged and counters taken over, as in any other round."""

    step: float

    def receive(self, state: RoundState, update: Update) -> RoundState:
        return Synchronous.receive(self, state, replace(update, tensors=self._ballot(update.tensors)))

    def displacement(self, state: RoundState, opened: OpenRound) -> Mapping[str, Array]:
        mean, step = Synchronous.displacement(self, state, opened), self.step * self.rate(state.version)
        return {name: self._decision(name, votes, step) for name, votes in mean.items()}

    def _decision(self, name: str, votes: Array, step: float) -> Array:
        if not self._is_voted_on(name, votes):
            return votes
        return np.multiply(np.sign(votes, out=votes), step, out=votes)

    def _ballot(self, tensors: Tensors) -> Tensors:
        """Returns what counts of an update; it is decoded when it is counted, as any other."""

        def load() -> Tensors:
            ballot = {name: self._vote(name, tensor) for name, tensor in tensors.items()}
            if isinstance(tensors, LazyTensors):
                tensors.release()
            return ballot

        return LazyTensors(load)

    def _vote(self, name: str, tensor: Tensor) -> Tensor:
        values = tensor.values if isinstance(tensor, SparseTensor) else tensor
        if not self._is_voted_on(name, values):
            return tensor
        signs = np.sign(values)
        return replace(tensor, values=signs) if isinstance(tensor, SparseTensor) else signs

    def _is_voted_on(self, name: str, values: Array) -> bool:
        return name not in self.rules.server.buffers and bool(np.issubdtype(values.dtype, np.inexact))
