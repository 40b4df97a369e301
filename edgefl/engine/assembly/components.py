"""Objects of a run: what the round loop and its drivers need of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgefl.core.clusters import make_update_shapes
from edgefl.core.config import (
    RunConfig,
    SplitSection,
)
from edgefl.core.metrics import NO_METRICS, MetricSet, ReplyMetrics
from edgefl.core.protocol import PERSONAL_KEY
from edgefl.core.types import (
    Array,
    Indices,
    Json,
    ModelSpec,
    Strategy,
    Tensors,
    Update,
)
from edgefl.engine.adapted_model import AdaptedModel
from edgefl.engine.divergence import DivergenceRule
from edgefl.engine.progress import RoundCounter, StoppingCriteria
from edgefl.flower.app_bundle import AppBundle
from edgefl.strategies.participation import EvaluationSchedule, RunParticipationPolicy
from edgefl.tasks.analyses.analysis import Analysis
from edgefl.tasks.network_cut import NetworkCut


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A network that is cut: boards train the tensors of `front`, the coordinator beside each board those of `rest`.

    Attributes:
        section: of the run file.
        cut: where.
        front, rest: tensors of both sides.
        encode_front: (model, version) -> the body of the front for the boards.
    """

    section: SplitSection
    cut: NetworkCut
    front: ModelSpec
    rest: ModelSpec
    encode_front: Callable[[Tensors, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """The objects of a run, ready for the round loop.

    Attributes:
        config: source of all of it.
        model: the first global model, shared tensors only.
        strategy, goal, evaluate, rounds, policy: for `run_rounds`.
        header: sent to every device with each instruction: task, options, seed.
        layout: fingerprint of the task's model.
        shapes: of the tensors that are shared.
        encode: (model, version) -> one body for all devices.
        encode_changes: (model, changed entries, version) -> a body for devices that hold an older model, None where
            the whole one is hardly larger; None itself where the run file asks for whole models.
        decode: body of an update -> displacement.
        encode_input: part -> its input, in a job; None in a training.
        read_reply: what a reply of a Flower app says; None for all else.
        make_bundle: () -> a Flower app for stock SuperNodes; None for all else.
        divergence: what follows when the loss diverges, oscillates or stands still.
        metrics: that the task declares beside accuracy.
        needs_torch: devices without torch can neither train nor evaluate the task.
        usual_epochs: of a round of `fedavg` on this task.
        is_built_in: devices train it in the agent itself, not confined.
        adapted: what of the model travels, where that is not all of it; else None.
        split: where the network is cut; None where the boards train all of it.
        analysis: of which updates are the sums; None of a training.
        cluster_shapes: of one cluster's model, where there are several (`ifca`); else empty.
    """

    config: RunConfig
    model: Mapping[str, Array]
    strategy: Strategy[Any]
    goal: StoppingCriteria
    evaluate: EvaluationSchedule
    rounds: RoundCounter
    policy: RunParticipationPolicy
    header: Json
    layout: str
    shapes: ModelSpec
    encode: Callable[[Tensors, int], bytes]
    encode_changes: Callable[[Tensors, Indices, int], bytes | None] | None
    decode: Callable[[bytes], Tensors]
    divergence: DivergenceRule
    encode_input: Callable[[int], bytes] | None = None
    read_reply: Callable[[Update], ReplyMetrics] | None = None
    make_bundle: Callable[[], AppBundle] | None = None
    metrics: MetricSet = NO_METRICS
    needs_torch: bool = False
    usual_epochs: float = 1.0
    is_built_in: bool = True
    split: SplitModel | None = None
    analysis: Analysis | None = None
    adapted: AdaptedModel | None = None
    cluster_shapes: ModelSpec = ()

    @property
    def update_shapes(self) -> ModelSpec:
        """Tensors of one device's update."""
        if self.analysis is not None:
            return self.analysis.sums_spec
        if self.cluster_shapes:
            return make_update_shapes(self.cluster_shapes)
        return self.shapes if self.split is None else self.split.front

    @property
    def has_personal(self) -> bool:
        """Whether each device has a personal copy of the model."""
        return PERSONAL_KEY in self.header

    def make_whole(self, model: Tensors) -> Tensors:
        """Returns a model of the run as it is kept: with its frozen tensors, and adapters added to theirs."""
        return model if self.adapted is None else self.adapted.merge(model)
