"""Builds the objects of an analysis: its updates are sums, of which each next model is solved."""

from __future__ import annotations

from edgefl.compression.codec import decode_body, make_codec
from edgefl.core.analyses import ANALYSIS_KEY
from edgefl.core.config import (
    AdaptSection,
    AggregationSection,
    CompressionSection,
    RunConfig,
    SelectionSection,
    ServerSection,
    SplitSection,
)
from edgefl.core.metrics import NO_METRICS
from edgefl.core.protocol import INSTRUCTION_VERSION, model_fingerprint
from edgefl.core.settings import Faults
from edgefl.core.types import (
    Task,
    Tensors,
    derive_rng,
)
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.assembly.rules import make_selection
from edgefl.engine.assembly.strategy import make_round_rules
from edgefl.engine.divergence import DivergenceRule
from edgefl.engine.progress import RoundCounter, StoppingCriteria
from edgefl.strategies.participation import EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.synchronous.analysis_rounds import make_analysis_strategy
from edgefl.strategies.update_guard import (
    UpdateGuard,
)
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.metrics.evaluation import make_task_metrics
from edgefl.tasks.registry import BUILT_IN, is_torch_task

ANALYSIS_CODEC = "dense|zstd"
"""Of sums: exact, and most of their bytes are zeros."""


def build_analysis(config: RunConfig, run_id: str, task: Task) -> RunComponents:
    """Returns the objects of an analysis: its updates are sums, of which each next model is solved."""
    _check_analysis_sections(config)
    name, options = config.strategy.name, dict(config.strategy.options)
    analysis = make_analysis(task, name, options)
    metrics = make_task_metrics(task) if analysis.has_task_model else NO_METRICS
    request_codec, seed = make_codec("dense", analysis.request_spec), config.run.seed
    test_fraction = 0.0 if analysis.is_of_whole_shard else config.run.local_test_fraction

    def encode(model: Tensors, version: int) -> bytes:
        return request_codec.encode(analysis.make_request(model), derive_rng(seed, version, "downlink"))

    return RunComponents(
        config=config,
        model=analysis.make_model(),
        strategy=make_analysis_strategy(make_round_rules(config, (), ANALYSIS_CODEC), analysis.solve),
        rounds=RoundCounter(versions_per_round=1),
        policy=RunParticipationPolicy(
            selection=make_selection(config),
            guard=UpdateGuard(
                shapes=analysis.sums_spec,
                refusals_before_quarantine=config.guard.refusals_before_quarantine,
                find_fault=analysis.find_fault,
            ),
        ),
        goal=StoppingCriteria(rounds=config.run.rounds, seconds=config.run.seconds, bytes=config.run.bytes),
        evaluate=EvaluationSchedule(
            every=config.run.evaluate_every,
            evaluate_on=config.run.evaluate_on if analysis.has_task_model else "none",
        ),
        header={
            "v": INSTRUCTION_VERSION,
            "run": run_id,
            "task": config.run.task,
            "options": dict(config.task),
            "seed": seed,
            "test_fraction": test_fraction,
            ANALYSIS_KEY: {"name": name, "options": options},
        },
        layout=model_fingerprint(analysis.request_spec),
        shapes=analysis.request_spec,
        encode=encode,
        encode_changes=None,
        decode=lambda body: decode_body(body, analysis.sums_spec),
        divergence=DivergenceRule(),
        metrics=metrics,
        needs_torch=analysis.has_task_model and is_torch_task(task),
        is_built_in=config.run.task in BUILT_IN,
        analysis=analysis,
    )


def _check_analysis_sections(config: RunConfig) -> None:
    """Checks that a run file says nothing that only a training can follow.

    Raises:
        ConfigError: it does.
    """
    faults, name = Faults(), config.strategy.name
    usual = {
        "compression": (config.compression, CompressionSection()),
        "server": (config.server, ServerSection()),
        "aggregation": (config.aggregation, AggregationSection()),
        "selection": (config.selection, SelectionSection()),
        "split": (config.split, SplitSection()),
        "adapt": (config.adapt, AdaptSection()),
        "run.init": (config.run.init, None),
    }
    faults.messages += [
        f"{section} means nothing for the analysis {name}, whose updates are exact sums; leave it out"
        for section, (found, default) in usual.items()
        if found != default
    ]
    faults.check()
