"""FLTrust: an update counts as far as it points where the coordinator's own update of the round does.

Cao, Fang, Liu, Gong, FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021, algorithm 2.
The coordinator's evaluator holds a few clean examples, the root, and trains on them in each round like a device. With
its update g_0, an update g_i has the trust max(0, cos(g_i, g_0)); the step is the mean of the updates, each scaled to
the length of g_0, weighted by their trust. So no number of rogues moves the model by more than |g_0|, or against g_0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from edgefl.core.errors import StrategyError
from edgefl.core.protocol import EVALUATOR_NAME
from edgefl.core.types import Array, FleetView, Instruction, SparseTensor, Tensors, TrainConfig
from edgefl.strategies.aggregation import add_weighted, unload_tensors
from edgefl.strategies.participation import is_blocked
from edgefl.strategies.strategy_config import MAX_WAIT_S, RoundRules, StrategyConfig
from edgefl.strategies.synchronous.robust import to_kind
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState, SlotRequest
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly

MAX_ROOT_TRIES = 5
"""Times that the coordinator's own update of a round is asked for before the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FLTrustConfig(StrategyConfig):
    """Settings of a run with `fltrust`.

    Attributes:
        root_examples: of the coordinator's data, at most half of it; it evaluates on the others.
    """

    root_examples: int = field(default=100, metadata={"at_least": 1})

    summary: ClassVar[str] = (
        "FLTrust: Cao et al., FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping, NDSS 2021."
    )

    def build(self, rules: RoundRules) -> SynchronousStrategy[RoundState]:
        """Returns the strategy that plays the rounds."""
        return self.make(FLTrustStrategy, rules, compute_weight=weight_uniformly, root_examples=self.root_examples)


@dataclass(frozen=True, slots=True, kw_only=True)
class FLTrustStrategy(SynchronousStrategy[RoundState]):
    """Rounds in which the coordinator's evaluator trains, too; the first slot of a round is its own."""

    root_examples: int

    should_keep_updates = True

    def list_available(self, view: FleetView) -> Sequence[str]:
        """Returns the idle devices, none while the coordinator's evaluator is away."""
        return view.idle if EVALUATOR_NAME in view.devices else ()

    def open_round(self, state: RoundState, selected: Sequence[str], view: FleetView) -> tuple[Instruction, ...]:
        requests = [SlotRequest(device_id=device_id) for device_id in (EVALUATOR_NAME, *selected)]
        return self.assign_slots(state, state.open[-1], requests, view)

    def make_plans(
        self, state: RoundState, plan: TrainConfig, devices: Sequence[str], view: FleetView
    ) -> Mapping[str, TrainConfig]:
        """Returns the plans; where passes are ordered, the evaluator does as many iterations as the median device."""
        plans = dict(SynchronousStrategy.make_plans(self, state, plan, devices, view))
        if EVALUATOR_NAME not in plans or plan.epochs is None:
            return plans
        names = [device_id for device_id, _ in state.open[-1].assigned.values()] or devices
        known = [view.devices[name].examples for name in names if name != EVALUATOR_NAME and name in view.devices]
        trained = [
            round(each[self.rules.task] * (1 - self.rules.test_fraction)) for each in known if self.rules.task in each
        ]
        counts = [plan.count_iterations(number) or 1 for number in trained]
        if counts:
            plans[EVALUATOR_NAME] = replace(plan, epochs=None, iterations=statistics.median_low(counts))
        return plans

    def schedule_during_round(
        self, state: RoundState, current_round: OpenRound, view: FleetView
    ) -> tuple[Instruction, ...]:
        """Asks the coordinator's evaluator again where its update was lost.

        Raises:
            StrategyError: it was lost or refused too often.
        """
        slot, is_away = current_round.order[0], EVALUATOR_NAME not in view.devices
        if _has_root(current_round) or is_away or view.busy.get(EVALUATOR_NAME):
            return ()
        num_tries = 1 + len(current_round.copies.get(slot, ()))
        if num_tries >= MAX_ROOT_TRIES or is_blocked(EVALUATOR_NAME, view):
            raise StrategyError(
                f"the coordinator's own update of round {state.version + 1} was lost or refused {num_tries} times; "
                f"the events of {EVALUATOR_NAME} say why"
            )
        state.attempt += 1
        return self.assign_slots(state, current_round, [SlotRequest(device_id=EVALUATOR_NAME, slot=slot)], view)

    def is_pending(self, current_round: OpenRound, view: FleetView) -> bool:
        return not _has_root(current_round) or current_round.is_pending(view)

    def is_complete(self, current_round: OpenRound, view: FleetView) -> bool:
        num_updates = current_round.num_received - _has_root(current_round)
        if self.rules.min_updates is not None:
            return num_updates >= self.rules.min_updates
        return num_updates > 0 and not self.is_pending(current_round, view)

    def ready(self, state: RoundState, view: FleetView) -> bool:
        has_root = bool(state.open) and _has_root(state.open[0])
        return has_root and SynchronousStrategy.ready(self, state, view)

    def compute_displacement(self, state: RoundState, current_round: OpenRound) -> Mapping[str, Array]:
        root, *updates = (update.tensors for update in current_round.pop_updates())
        step = compute_trusted_mean(root, updates, state.model, self.rules.server.buffers)
        return {name: to_kind(step[name], like) for name, like in state.model.items()}

    def _compute_wake_s(self, state: RoundState, view: FleetView) -> float:
        if state.open and state.open[0].is_abandoned and not _has_root(state.open[0]):
            return MAX_WAIT_S  # it closes with the evaluator's update, which is an event
        return SynchronousStrategy._compute_wake_s(self, state, view)  # noqa: SLF001 of the base


def _has_root(current_round: OpenRound) -> bool:
    return current_round.fold.has_update(current_round.order[0])


def compute_trusted_mean(
    root: Tensors, updates: Sequence[Tensors], model: Mapping[str, Array], buffers: frozenset[str]
) -> dict[str, Array]:
    """Returns the mean of updates by their trust, in single precision at least; zero where none is trusted.

    Args:
        root: the update g_0; at its length each other counts.
        updates: decoded one at a time.
        model: tensors by name.
        buffers: of these; they have a length of their own, and no say in the trust.
    """
    parameters, others = [name for name in model if name not in buffers], [name for name in model if name in buffers]
    total = {name: np.zeros(like.shape, np.promote_types(like.dtype, np.float32)) for name, like in model.items()}
    own: dict[str, Array] = {name: np.zeros_like(tensor) for name, tensor in total.items()}
    for name, tensor in own.items():
        add_weighted(own, name, root[name], 1.0, tensor.dtype)
    unload_tensors(root)
    length, other_length, sum_of_trust = _measure(own, own, parameters)[1], _measure(own, own, others)[1], 0.0
    for update in updates:
        product, norm = _measure(update, own, parameters)
        trust = max(0.0, product / (norm * length)) if norm * length > 0 else 0.0
        if trust:
            sum_of_trust += trust
            other_norm = _measure(update, own, others)[1]
            factors = dict.fromkeys(parameters, trust * length / norm)
            factors |= dict.fromkeys(others, trust * other_length / other_norm if other_norm > 0 else 0.0)
            for name, factor in factors.items():
                add_weighted(total, name, update[name], factor, total[name].dtype)
        unload_tensors(update)
    return {name: tensor / (sum_of_trust or 1.0) for name, tensor in total.items()}


def _measure(update: Tensors, root: Mapping[str, Array], names: Sequence[str]) -> tuple[float, float]:
    """Returns the inner product of an update with the root's, and its norm, over some tensors."""
    product, square = 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # the length of a huge update is infinite: it has no trust
        for name in names:
            tensor, other = update[name], root[name].reshape(-1)
            values = tensor.values if isinstance(tensor, SparseTensor) else np.asarray(tensor).reshape(-1)
            values = values.astype(other.dtype, copy=False)
            product += float(np.dot(values, other[tensor.indices] if isinstance(tensor, SparseTensor) else other))
            square += float(np.dot(values, values))
    return product, math.sqrt(square) if square >= 0 else math.inf
