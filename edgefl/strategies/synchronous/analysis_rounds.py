"""Rounds of an analysis: every idle board is asked for its sums, and the next model is solved from all of them.

Selection, lost and slow boards, time-outs and restarts are those of every strategy in rounds. The model is replaced,
not moved: it need not have the tensors of the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from edgefl.core.analyses import BoardSums
from edgefl.core.types import Array, SparseTensor, Tensors, TrainConfig
from edgefl.strategies.aggregation import unload_tensors
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_uniformly

Solve = Callable[[Tensors, Iterable[BoardSums]], Mapping[str, Array]]
"""(model, sums of the boards in the order in which they were asked) -> the next model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisStrategy(SynchronousStrategy[RoundState]):
    """Asks for sums, round by round; one board's are in memory at a time."""

    solve: Solve

    should_keep_updates = True

    def move_model(self, state: RoundState, closing: OpenRound) -> None:
        state.model = dict(self.solve(state.model, _iterate_sums(closing)))


def make_analysis_strategy(rules: RoundRules, solve: Solve) -> AnalysisStrategy:
    """Returns the strategy of an analysis; a board sums over all its examples, as one iteration."""
    return AnalysisStrategy(plan=TrainConfig(iterations=1), compute_weight=weight_uniformly, rules=rules, solve=solve)


def _iterate_sums(closing: OpenRound) -> Iterator[BoardSums]:
    for update in closing.pop_updates():
        sums = {
            name: tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)
            for name, tensor in update.tensors.items()
        }
        yield BoardSums(device_id=update.device_id, sums=sums)
        unload_tensors(update.tensors)
