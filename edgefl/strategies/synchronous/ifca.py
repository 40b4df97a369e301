"""IFCA: several models, each trained by the devices whose examples it fits best.

Ghosh, Chung, Yin, Ramchandran, An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, algorithm 1,
option II (model averaging). All models travel as one stack. Each device trains the one with the least loss on its own
training examples, and sends the displacement of that one; the coordinator averages those of each cluster.

Differs from the paper: devices weigh by their examples, as in `fedavg`; the paper averages uniformly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from edgefl.core.clusters import MAX_CLUSTERS, get_cluster, name_in_stack, split_stack
from edgefl.core.types import Array, Update
from edgefl.strategies.aggregation import StreamingMean, apply_step, unload_tensors
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState
from edgefl.strategies.synchronous.strategy import SynchronousStrategy, weight_by_examples


@dataclass(frozen=True, slots=True, kw_only=True)
class IfcaConfig(StrategyConfig):
    """Settings of a run with `ifca`.

    A cluster that no device takes in a round keeps its model.

    Attributes:
        clusters: models, which begin from different random weights.
    """

    clusters: int = field(default=2, metadata={"at_least": 2, "at_most": MAX_CLUSTERS})

    summary: ClassVar[str] = (
        "IFCA: Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020, Algorithm 1."
    )

    def build(self, rules: RoundRules) -> SynchronousStrategy[IfcaState]:
        """Returns the strategy that plays the rounds."""
        return self.make(Ifca, rules, compute_weight=weight_by_examples, num_clusters=self.clusters)


@dataclass(slots=True)
class IfcaState(RoundState):
    """State of `ifca`; `members` are the devices whose updates went into the newest version, by cluster."""

    members: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ifca(SynchronousStrategy[IfcaState]):
    """Rounds that average each cluster's updates apart; one update is in memory at a time."""

    num_clusters: int

    should_keep_updates = True

    def make_state(self, model: dict[str, Array]) -> IfcaState:
        return IfcaState(model=model)

    def move_model(self, state: IfcaState, closing: OpenRound) -> None:
        models, updates = split_stack(state.model), closing.pop_updates()
        by_cluster: list[list[Update]] = [[] for _ in models]
        for update in updates:
            by_cluster[get_cluster(update.tensors)].append(update)
            unload_tensors(update.tensors)
        state.members = [len(each) for each in by_cluster]
        for cluster, each in enumerate(by_cluster):
            if each:
                self._move_cluster(state, cluster, models[cluster], each)

    def _move_cluster(
        self, state: IfcaState, cluster: int, model: Mapping[str, Array], updates: Sequence[Update]
    ) -> None:
        """Moves one cluster's model by the mean of its updates."""
        stacked, server = {name: name_in_stack(cluster, name) for name in model}, self.rules.server
        names = {name: found if found in state.model else name for name, found in stacked.items()}
        mean = StreamingMean(expected=[update.assignment_id for update in updates])
        for update in updates:
            mean.add_update(update.assignment_id, update, weight=self.compute_weight(update))
        displacement = {names[name]: tensor for name, tensor in mean.compute_mean(model, server.buffers).items()}
        server = replace(server, buffers=frozenset(names[name] for name in server.buffers & names.keys()))
        apply_step(state.model, server.step(state.moments, displacement))

    def facts(self, state: IfcaState) -> Mapping[str, float]:
        """Returns how many devices took each cluster."""
        return {f"cluster-{cluster}": float(count) for cluster, count in enumerate(state.members)}
