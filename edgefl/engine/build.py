"""Builds the objects of a run from its configuration: task, first model, strategy, codecs, goal."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.compression.codec_selection import CodecSelector, make_codec_selector, parse_auto_candidates
from edgefl.compression.delta import encode_delta, parse_downlink_codec
from edgefl.compression.peer_codec import PeerCodec, select_peer_tensors
from edgefl.compression.registry import format_with_layers
from edgefl.compression.split_bodies import BatchCodec
from edgefl.core.analyses import ANALYSES, ANALYSIS_KEY
from edgefl.core.config import (
    AdaptSection,
    AggregationSection,
    CompressionSection,
    EvaluateOn,
    RunConfig,
    ServerSection,
    SplitSection,
    StrategySection,
)
from edgefl.core.errors import CodecError, ConfigError, EdgeflError, TaskError
from edgefl.core.extensions import format_name
from edgefl.core.metrics import NO_METRICS, Metric, MetricSet
from edgefl.core.protocol import ADAPT_KEY, INSTRUCTION_VERSION, JOB_LIMITS, model_fingerprint
from edgefl.core.settings import REQUIRED, Faults, check_options, list_options, make_schema
from edgefl.core.types import (
    Algorithm,
    Array,
    Indices,
    Json,
    ModelSpec,
    Scalar,
    Strategy,
    Task,
    TensorKind,
    Tensors,
    TrainConfig,
    derive_rng,
)
from edgefl.engine.adapted_model import AdaptedModel, check_head_epochs, make_adapted_model
from edgefl.engine.collective_checks import check_collective, check_weighted_mean
from edgefl.engine.divergence import DivergenceRule, make_advice
from edgefl.engine.progress import EpochSize, MetricGoal, RoundCounter, StoppingCriteria
from edgefl.flower.strategy_options import is_flower_strategy
from edgefl.strategies.aggregation import ServerOptimizer
from edgefl.strategies.job_strategy import RESULT, JobStrategy
from edgefl.strategies.participation import DeviceSelection, EvaluationSchedule, RunParticipationPolicy
from edgefl.strategies.registry import (
    BUILT_IN_STRATEGIES,
    find_strategy,
    get_settings,
    list_strategy_names,
    make_strategy,
)
from edgefl.strategies.strategy_config import RoundRules, StrategyConfig
from edgefl.strategies.synchronous.analysis_rounds import make_analysis_strategy
from edgefl.strategies.synchronous.collective_rounds import make_rules
from edgefl.strategies.synchronous.esync import ESync
from edgefl.strategies.synchronous.scaffold import Scaffold
from edgefl.strategies.synchronous.signsgd import SignSGD, compute_default_step
from edgefl.strategies.synchronous.strategy import SynchronousStrategy
from edgefl.strategies.update_guard import (
    MIN_DIRECTION_PEERS,
    UpdateGuard,
)
from edgefl.strategies.validated_strategy import ValidatedStrategy, make_validated_strategy
from edgefl.tasks.adaptation.parts import select_parts
from edgefl.tasks.analyses.analysis import Analysis
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.job import CheckedJob, Job, make_job
from edgefl.tasks.local_algorithms.rest_training import check_split_algorithm
from edgefl.tasks.metrics.evaluation import make_task_metrics
from edgefl.tasks.network_cut import NetworkCut, describe_cut
from edgefl.tasks.registry import BUILT_IN, is_torch_task, list_task_names, list_task_options, make_task

ANALYSIS_CODEC = "dense|zstd"
"""Of sums: exact, and most of their bytes are zeros."""


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
        divergence: what follows when the loss diverges, oscillates or stands still.
        metrics: that the task declares beside accuracy.
        needs_torch: devices without torch can neither train nor evaluate the task.
        usual_epochs: of a round of `fedavg` on this task.
        is_built_in: devices train it in the agent itself, not confined.
        adapted: what of the model travels, where that is not all of it; else None.
        split: where the network is cut; None where the boards train all of it.
        analysis: of which updates are the sums; None of a training.
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
    metrics: MetricSet = NO_METRICS
    needs_torch: bool = False
    usual_epochs: float = 1.0
    is_built_in: bool = True
    split: SplitModel | None = None
    analysis: Analysis | None = None
    adapted: AdaptedModel | None = None

    @property
    def update_shapes(self) -> ModelSpec:
        """Tensors of one device's update."""
        if self.analysis is not None:
            return self.analysis.sums_spec
        return self.shapes if self.split is None else self.split.front

    def make_whole(self, model: Tensors) -> Tensors:
        """Returns a model of the run as it is kept: with its frozen tensors, and adapters added to theirs."""
        return model if self.adapted is None else self.adapted.merge(model)


def build_run(config: RunConfig, run_id: str, *, bases: Path | None = None) -> RunComponents:
    """Returns the objects of one run; `bases` is the folder of the coordinator's pretrained bases.

    Raises:
        EdgeflError: the run file names something missing or unusable; nothing was started.
    """
    if config.job.name:
        return _build_job(config, run_id)
    task = make_run_task(config)
    if isinstance(task, Job):
        raise TaskError(f"run.task: {config.run.task} is a job: give it as name in [job], without run.task")
    if config.strategy.name in ANALYSES:
        return _build_analysis(config, run_id, task)
    task, first, adapted = _make_first_model(task, config, bases)
    shapes_on_board, metrics = task.shapes(), make_task_metrics(task)
    shapes = tuple(spec for spec in shapes_on_board if spec.shared)
    with _naming("compression.down"):
        sends_changes, whole_spec = _parse_downlink(config)
        # Members of a collective have the next model already: what changed since is nothing.
        sends_changes |= config.aggregation.is_collective
        down = make_codec(whole_spec, shapes)
    split = None if config.split.after is None else _make_split_model(config, task)
    trained = shapes if split is None else split.front
    with _naming("compression.up"):
        up, codecs = _make_uplink_codec(config, trained)
    seed = config.run.seed

    def encode(model: Tensors, version: int) -> bytes:
        return down.encode(model, derive_rng(seed, version, "downlink"))

    def encode_changes(model: Tensors, changed: Indices, version: int) -> bytes | None:
        return encode_delta(model, changed, shapes, whole_spec, derive_rng(seed, version, "downlink"))

    if config.aggregation.is_collective:
        check_collective(config)
    strategy = _make_strategy(task, config, _make_round_rules(config, shapes, up))
    if config.aggregation.is_collective:
        check_weighted_mean(strategy, config)
    if strategy.has_nodes:
        _check_decentralised(config, task.shapes())
    check_head_epochs(_get_plan(strategy), shapes_on_board, plans_iterations=_plans_iterations(strategy))
    if split is not None:
        _check_split_strategy(config, strategy, codecs)
    return RunComponents(
        config=config,
        model={spec.name: first[spec.name] for spec in shapes},
        strategy=strategy,
        rounds=RoundCounter(versions_per_round=_get_versions_per_round(strategy, config)),
        policy=_make_policy(config, shapes, codecs, strategy),
        goal=_make_goal(strategy, config, metrics),
        evaluate=EvaluationSchedule(
            every=config.run.evaluate_every,
            evaluate_on=_choose_evaluation(config, shapes_on_board),
            # No board has room for the whole network, or it would not be cut.
            can_use_trainers=split is None,
        ),
        header=_make_header(config, run_id, strategy, split, adapted),
        layout=model_fingerprint(task.shapes() if split is None else trained),
        shapes=shapes,
        encode=encode,
        encode_changes=encode_changes if sends_changes else None,
        decode=lambda body: decode_body(body, shapes),
        divergence=_make_divergence_rule(task, config, strategy),
        metrics=metrics,
        needs_torch=is_torch_task(task),
        usual_epochs=float(getattr(task, "defaults", {}).get("epochs", 1.0)),
        split=split,
        adapted=adapted,
        is_built_in=config.run.task in BUILT_IN and getattr(_get_plan(strategy), "algorithm", "sgd") in {*Algorithm},
    )


def _plans_iterations(strategy: Strategy[Any]) -> bool:
    """Returns whether a strategy counts on it that devices train as many iterations as it says, and no more."""
    inner = strategy.strategy if isinstance(strategy, ValidatedStrategy) else strategy
    return isinstance(inner, ESync) or bool(strategy.root_examples)


def _choose_evaluation(config: RunConfig, shapes: ModelSpec) -> EvaluateOn:
    """Returns where models are evaluated: on the devices where a part of the model is only there.

    Raises:
        ConfigError: the run file asks for an evaluator, whose part of the model would be untrained.
    """
    evaluate_on = config.run.evaluate_on
    local = next((spec.name for spec in shapes if not spec.shared), None)
    if local is None or evaluate_on in {"devices", "none"}:
        return evaluate_on
    if evaluate_on != "auto":
        raise ConfigError(
            f"run.evaluate_on must be auto, devices or none where tensors stay on the devices ({local}), which "
            f"nobody else has trained, got {evaluate_on!r}"
        )
    return "devices"


def _make_goal(strategy: Strategy[Any], config: RunConfig, metrics: MetricSet) -> StoppingCriteria:
    until = None if config.run.until is None else parse_metric_goal(config.run.until, metrics.metrics)
    accuracy = config.run.accuracy
    if until is not None and until.name == "accuracy" and "accuracy" not in metrics.metrics:
        if accuracy is not None:
            raise ConfigError(
                f"run.until = {config.run.until!r} and run.accuracy = {accuracy:g} are one rule; give one"
            )
        accuracy, until = until.limit, None
    return StoppingCriteria(
        rounds=config.run.rounds,
        epochs=config.run.epochs,
        epoch=EpochSize(
            task=config.run.task,
            batch_size=_get_batch_size(strategy, config),
            test_fraction=config.run.local_test_fraction,
        ),
        updates=config.run.updates,
        seconds=config.run.seconds,
        bytes=config.run.bytes,
        accuracy=accuracy,
        until=until,
        accuracy_window=config.run.accuracy_window,
        trust_single_evaluation=config.run.trust_single_evaluation,
    )


def parse_metric_goal(text: str, metrics: Mapping[str, Metric]) -> MetricGoal:
    """Returns the goal that `run.until` states, of a metric that the task declares or of the accuracy.

    Raises:
        ConfigError: it is no comparison, of an unknown metric, or against the metric's direction.
    """
    found = re.fullmatch(r"\s*([^\s<>=]{1,200})\s*(<=|>=)\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]{1,3})?)\s*", text)
    try:
        name, sign, limit = ("", "", math.nan) if found is None else (found[1], found[2], float(found[3]))
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ConfigError(
            f"run.until must be a metric, <= or >=, and a number, such as 'rmse <= 14.5', got {text!r:.100}"
        )
    if name != "accuracy" and name not in metrics:
        known = ", ".join(dict.fromkeys([*metrics, "accuracy"]))
        raise ConfigError(f"run.until: the task declares no metric {format_name(name)}, only {known}")
    is_max = name not in metrics or metrics[name].direction == "max"
    if (sign == ">=") != is_max:
        raise ConfigError(f"run.until: {name} gets better as it {'rises' if is_max else 'falls'}, got {sign}")
    if name == "accuracy" and not 0 < limit <= 1:
        raise ConfigError(f"run.until: an accuracy must lie above 0 and at most at 1, got {limit:g}")
    return MetricGoal(name=name, limit=limit, is_max=is_max)


def _make_header(
    config: RunConfig,
    run_id: str,
    strategy: Strategy[Any],
    split: SplitModel | None,
    adapted: AdaptedModel | None,
) -> Json:
    return {
        "v": INSTRUCTION_VERSION,
        "run": run_id,
        "task": config.run.task,
        "options": dict(config.task),
        "seed": config.run.seed,
        "test_fraction": config.run.local_test_fraction,
        "residuals": config.compression.residuals,
        **({"root_examples": strategy.root_examples} if strategy.root_examples else {}),
        **({"split": {**asdict(split.section), "num_outputs": split.cut.num_outputs}} if split is not None else {}),
        **({ADAPT_KEY: adapted.plan.to_json()} if adapted is not None else {}),
    }


def _build_job(config: RunConfig, run_id: str) -> RunComponents:
    """Returns the objects of a job's run: it has no model, and its updates are the results of parts."""
    section, devices = config.job, config.devices
    job = make_job(section.name, section.options)
    num_parts = None if section.parts == "boards" else section.parts
    if (num_parts or 0) * section.max_part_bytes > config.run.max_state_bytes:
        raise ConfigError(
            f"job.parts: {num_parts} parts of job.max_part_bytes = {section.max_part_bytes} are more than "
            f"run.max_state_bytes = {config.run.max_state_bytes}; lower the first or raise the second"
        )
    checked_job = CheckedJob(
        section.name,
        job,
        num_parts=num_parts or 0,
        max_part_bytes=section.max_part_bytes,
        max_result_bytes=section.max_result_bytes,
    )

    def decode(body: bytes) -> Tensors:
        if len(body) > section.max_part_bytes:
            raise CodecError(f"a result of {len(body)} bytes, at most {section.max_part_bytes} are taken")
        return {RESULT: np.frombuffer(body, np.uint8)}

    return RunComponents(
        config=config,
        model={},
        strategy=JobStrategy(
            combine=checked_job.combine,
            num_parts=num_parts,
            names=devices.names,
            min_devices=devices.min,
            deadline_s=section.deadline_s,
            max_tries=section.max_tries,
            skip_missing_s=section.skip_missing_s,
            max_part_bytes=section.max_part_bytes,
        ),
        rounds=RoundCounter(versions_per_round=1),
        policy=RunParticipationPolicy(
            selection=_make_selection(config),
            guard=UpdateGuard(refusals_before_quarantine=section.max_failures),
            counts_failures=True,
        ),
        goal=StoppingCriteria(rounds=1, seconds=config.run.seconds, bytes=config.run.bytes),
        evaluate=EvaluationSchedule(evaluate_on="none"),
        header={
            "v": INSTRUCTION_VERSION,
            "run": run_id,
            "task": section.name,
            "options": dict(section.options),
            "seed": config.run.seed,
            "test_fraction": 0.0,
            JOB_LIMITS: {
                "num_parts": num_parts or 0,
                "max_part_bytes": section.max_part_bytes,
                "deadline_s": section.deadline_s,
            },
        },
        layout=model_fingerprint(job.shapes()),
        shapes=(),
        encode=lambda _model, _version: b"",
        encode_changes=None,
        decode=decode,
        divergence=DivergenceRule(),
        needs_torch=is_torch_task(job),
        encode_input=checked_job.make_input,
    )


def _build_analysis(config: RunConfig, run_id: str, task: Task) -> RunComponents:
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
        strategy=make_analysis_strategy(_make_round_rules(config, (), ANALYSIS_CODEC), analysis.solve),
        rounds=RoundCounter(versions_per_round=1),
        policy=RunParticipationPolicy(
            selection=_make_selection(config),
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


def make_run_task(config: RunConfig) -> Task:
    """Returns the task; its wrong settings are named together with those of a built-in strategy."""
    try:
        return make_task(config.run.task, config.task)
    except ConfigError as error:
        faults, name, options = Faults(), config.strategy.name, config.strategy.options
        faults.messages += error.faults
        if name in BUILT_IN_STRATEGIES:
            known = list_options(find_strategy(name))
            optional = {key: kind for key, kind in known.items() if key in options or kind.default is not REQUIRED}
            with faults:
                check_options(name, options, optional, table="strategy")
        faults.check()
        raise


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Puts the setting before the message of a codec's error in the block."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"{setting}: {error}") from None


def _make_strategy(task: Task, config: RunConfig, rules: RoundRules) -> Strategy[Any]:
    """Returns the strategy of the run file; a user's or Flower's is validated against the contract."""
    name, options = config.strategy.name, config.strategy.options
    defaults = _list_recommended(task, name)
    if name in BUILT_IN_STRATEGIES:
        return make_strategy(name, {**_select_known(defaults, get_settings(name)), **options}, rules)
    from edgefl.storage.state_serialisation import encode_state  # noqa: PLC0415 a device that assembles needs no store

    if is_flower_strategy(name):
        from edgefl.flower.strategy import get_flower_settings, make_flower_strategy  # noqa: PLC0415 Flower is slow

        settings = {**_select_known(defaults, get_flower_settings(name)), **options}
        return make_validated_strategy(name, lambda: make_flower_strategy(name, settings, rules), pack=encode_state)
    return make_validated_strategy(
        name,
        lambda: make_strategy(name, {**_select_known(defaults, get_settings(name)), **options}, rules),
        pack=encode_state,
    )


def _make_divergence_rule(task: Task, config: RunConfig, strategy: Strategy[Any]) -> DivergenceRule:
    """Returns the rule of the run file, with advice that fits its strategy and task."""
    inner = strategy.strategy if isinstance(strategy, ValidatedStrategy) else strategy
    plan, name = _get_plan(strategy), "learning_rate"
    rate = plan.learning_rate if isinstance(plan, TrainConfig) else None
    usual = _list_recommended(task, config.strategy.name).get("learning_rate", TrainConfig().learning_rate)
    if isinstance(inner, SignSGD):
        name, rate, usual = "step", inner.step, compute_default_step(config.run.rounds)
    # A task's own loss has another scale than log C.
    labels: Sequence[str] = getattr(task, "labels", ()) if getattr(task, "loss", None) is None else ()
    return DivergenceRule(
        action=config.run.on_divergence,
        untrained_loss=math.log(len(labels)) if len(labels) > 1 else None,
        **make_advice(name, rate, float(usual), getattr(inner, "step_scale", None)),
    )


def _get_plan(strategy: Strategy[Any]) -> Any:
    """Returns the plan of a strategy, None where it has none."""
    return getattr(strategy.strategy if isinstance(strategy, ValidatedStrategy) else strategy, "plan", None)


def _list_recommended(task: Task, name: str) -> dict[str, Any]:
    """Returns the settings that a task recommends, with the learning rate that suits the strategy."""
    recommended = dict(getattr(task, "defaults", {}))
    if "learning_rate" in recommended and name in BUILT_IN_STRATEGIES:
        recommended["learning_rate"] *= find_strategy(name).rate_share
    return recommended


def _select_known(recommended: Mapping[str, Scalar], settings: Mapping[str, Any]) -> dict[str, Scalar]:
    """Returns those of a task's recommended settings that the strategy has."""
    return {name: value for name, value in recommended.items() if name in settings}


def _get_batch_size(strategy: Strategy[Any], config: RunConfig) -> int:
    """Returns the examples of a local iteration, of which run.epochs is counted."""
    inner = strategy.strategy if isinstance(strategy, ValidatedStrategy) else strategy
    plan = getattr(inner, "plan", None)
    if isinstance(plan, TrainConfig):
        return plan.batch_size
    batch_size = config.strategy.options.get("batch_size")
    return batch_size if isinstance(batch_size, int) and batch_size >= 1 else TrainConfig().batch_size


def _get_versions_per_round(strategy: Strategy[Any], config: RunConfig) -> int | None:
    """Returns the versions per round; None for the number of devices in the first dispatch."""
    count = strategy.versions_per_round
    return count if count is not None else config.run.updates_per_round


def _parse_downlink(config: RunConfig) -> tuple[bool, str]:
    """Returns whether deltas are sent, and the codec of whole models."""
    down = config.compression.down
    if parse_auto_candidates(down) is not None:
        raise ConfigError(f"compression.down = {down!r}: all devices get the same bytes; auto is for compression.up")
    return parse_downlink_codec(down)


def _make_uplink_codec(config: RunConfig, shapes: ModelSpec) -> tuple[str, CodecSelector | None]:
    """Returns the uplink codec, and the codec selector where the run file says `auto`."""
    up, layers = config.compression.up, config.compression.layers
    candidates = parse_auto_candidates(up)
    if candidates is None:
        up = format_with_layers(up, layers)
        make_codec(up, shapes)
        return up, None
    specs = [format_with_layers(spec, layers) for spec in candidates]
    codecs = make_codec_selector({spec: compute_expected_bytes(spec, shapes) for spec in specs})
    return codecs.specs[0], codecs


def _make_round_rules(config: RunConfig, shapes: ModelSpec, codec: str) -> RoundRules:
    server = config.server
    return RoundRules(
        min_devices=config.devices.min,
        max_devices=config.devices.count,
        fraction=config.devices.fraction,
        min_updates=config.run.min_updates,
        deadline_s=config.run.deadline_s,
        round_timeout_s=config.run.round_timeout_s,
        on_timeout=config.run.on_timeout,
        updates_per_round=config.run.updates_per_round,
        rounds=config.run.rounds,
        codec=codec,
        task=config.run.task,
        test_fraction=config.run.local_test_fraction,
        collective=make_rules(config.aggregation),
        server=ServerOptimizer(
            kind=server.optimizer,
            learning_rate=server.learning_rate,
            beta1=server.beta1,
            beta2=server.beta2,
            epsilon=server.epsilon,
            buffers=frozenset(spec.name for spec in shapes if spec.kind == TensorKind.BUFFER),
        ),
        seed=config.run.seed,
    )


def _check_decentralised(config: RunConfig, shapes: ModelSpec) -> None:
    """Checks that the configuration suits nodes of a graph, before any of them is started.

    Raises:
        ConfigError, CodecError: a setting does not.
    """
    if parse_auto_candidates(config.compression.up) is not None:
        raise ConfigError("compression.up = 'auto' is for updates; nodes of a graph need one codec for every edge")
    local_tensors = [spec.name for spec in shapes if not spec.shared]
    if local_tensors:
        raise ConfigError(
            f"task {config.run.task}: tensors that stay on the board ({local_tensors[0]}) do not go with nodes"
        )
    unsupported = {
        "run.min_updates": config.run.min_updates,
        "run.round_timeout_s": config.run.round_timeout_s,
        "run.updates_per_round": config.run.updates_per_round,
        "devices.fraction": config.devices.fraction,
        "guard.max_norm": config.guard.max_norm,
    }
    for name, value in unsupported.items():
        if value is not None:
            raise ConfigError(
                f"{name} = {value!r} means nothing where every device has a model of its own; leave it out"
            )
    PeerCodec(
        format_with_layers(config.compression.up, config.compression.layers), select_peer_tensors(shapes), epoch=1
    )


def _make_split_model(config: RunConfig, task: Task) -> SplitModel:
    """Returns both sides of the cut.

    Raises:
        EdgeflError: the network cannot be cut there, or a setting does not go with it.
    """
    section, shapes, seed = config.split, task.shapes(), config.run.seed
    assert section.after is not None
    if local_tensors := [spec.name for spec in shapes if not spec.shared]:
        raise ConfigError(
            f"split.after: task {config.run.task} has tensors that stay on the board ({local_tensors[0]}), which a "
            "split network cannot have"
        )
    if config.compression.down != "dense":
        raise ConfigError(
            f"compression.down must be 'dense' with split.after, which sends the first layers alone, "
            f"got {config.compression.down!r}"
        )
    cut = describe_cut(config.run.task, config.task, section.after)
    for name, spec in (("split.up", section.up), ("split.down", section.down)):
        with _naming(name):
            BatchCodec(spec, cut.activation_shape)
    front = cut.select_front(shapes)
    codec = make_codec("dense", front)

    def encode_front(model: Tensors, version: int) -> bytes:
        return codec.encode({spec.name: model[spec.name] for spec in front}, derive_rng(seed, version, "downlink"))

    return SplitModel(section=section, cut=cut, front=front, rest=cut.select_rest(shapes), encode_front=encode_front)


def _check_split_strategy(config: RunConfig, strategy: Strategy[Any], codecs: CodecSelector | None) -> None:
    """Checks that a strategy suits a network that is cut.

    Raises:
        ConfigError: a setting does not.
    """
    inner = strategy.strategy if isinstance(strategy, ValidatedStrategy) else strategy
    if not isinstance(inner, SynchronousStrategy) or isinstance(inner, Scaffold) or strategy.root_examples:
        raise ConfigError(
            "split.after needs a strategy in rounds that averages models alone, such as fedavg, got strategy.name = "
            f"{config.strategy.name!r}"
        )
    check_split_algorithm(inner.plan)
    if inner.double_buffering:
        raise ConfigError("strategy.double_buffering must be false with split.after: a round has one model, got true")
    if config.aggregation.is_collective:
        raise ConfigError(
            "aggregation.collective must be 'coordinator' with split.after: it has a part of each update, "
            f"got {config.aggregation.collective!r}"
        )
    if codecs is not None:
        raise ConfigError("compression.up = 'auto' is for whole networks; with split.after give one codec")
    if config.run.evaluate_on == "devices":
        raise ConfigError(
            "run.evaluate_on must be auto, coordinator, evaluator or none with split.after: a board has the first "
            "layers alone, got 'devices'"
        )


def _make_policy(
    config: RunConfig, shapes: ModelSpec, codec_policy: CodecSelector | None, strategy: Strategy[Any]
) -> RunParticipationPolicy:
    guard = config.guard
    inner = strategy.strategy if isinstance(strategy, ValidatedStrategy) else strategy
    has_rounds = isinstance(inner, SynchronousStrategy)
    # In rounds the first one is judged when it is complete, otherwise as soon as there are enough to judge by.
    hold_updates = config.run.min_updates if has_rounds else MIN_DIRECTION_PEERS + 1
    return RunParticipationPolicy(
        selection=_make_selection(config),
        guard=UpdateGuard(
            has_full_models=strategy.has_nodes,
            has_collective=config.aggregation.is_collective,
            shapes=shapes,
            max_norm=guard.max_norm,
            norm_ratio=guard.norm_ratio if guard.enabled else None,
            min_cosine=guard.min_cosine if guard.enabled else None,
            compares_responses=not isinstance(inner, Scaffold),  # its updates follow from the variates as well
            refusals_before_quarantine=guard.refusals_before_quarantine,
            hold_updates=hold_updates,
        ),
        codec_policy=codec_policy,
    )


def _make_selection(config: RunConfig) -> DeviceSelection:
    devices = config.devices
    return DeviceSelection(
        min_memory_bytes=devices.min_memory_bytes,
        needs_accelerator=devices.accelerator,
        max_temperature_c=devices.max_temperature_c,
        min_battery=devices.min_battery,
        unhealthy_policy=devices.unhealthy_policy,
    )


def _make_first_model(
    task: Task, config: RunConfig, bases: Path | None
) -> tuple[Task, dict[str, Array], AdaptedModel | None]:
    """Returns the task that devices train, its first model, and what of the whole model travels if not all of it."""
    whole = _load_initial_model(task, config)
    if not config.adapt.is_used:
        return task, whole, None
    adapted = make_adapted_model(task, config, whole, bases)
    return adapted.task, adapted.first, adapted


def _load_initial_model(task: Task, config: RunConfig) -> dict[str, Array]:
    """Returns the first whole model; tensors that stay on the devices may be the task's own, whatever `run.init`."""
    shapes = task.shapes()
    local = {spec.name for spec in shapes if not spec.shared}
    if config.run.init is None:
        model: Mapping[str, Array] = task.init(config.run.seed)
    else:
        from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 a device that assembles needs no store

        model = load_model_file(Path(config.run.init))
        if config.adapt.is_used:  # its local tensors are in no model that is kept, but in the first one of a run
            local |= {spec.name for spec in select_parts(config.adapt, shapes).trained if not spec.shared}
            own = {name: tensor for name, tensor in task.init(config.run.seed).items() if name in local}
            model = {**own, **model}
    for spec in shapes:
        if spec.name not in local and (spec.name not in model or model[spec.name].shape != spec.shape):
            found = model[spec.name].shape if spec.name in model else "none"
            raise ConfigError(f"run.init: tensor {spec.name!r} must have shape {spec.shape}, got {found}")
    return {spec.name: model[spec.name].astype(spec.dtype) for spec in shapes if spec.name in model}


def make_run_schema() -> Json:
    """Returns the JSON schema (2020-12) of run files, with the options of every strategy and task that is here.

    A name that is not built in, such as `module:Class`, may have any options: its class is not there for an editor.
    """
    schema = make_schema(list_options(RunConfig), RunConfig.__doc__)
    strategy, name_schema = schema["properties"]["strategy"], {"type": "string", "default": StrategySection().name}
    strategy["properties"]["name"] = {**name_schema, "examples": list_strategy_names()}
    strategy["allOf"] = []
    shared = make_schema(list_options(StrategyConfig), StrategyConfig.__doc__)["properties"]
    for name in list_strategy_names():
        try:
            found = find_strategy(name)
            options = make_schema(list_options(found), found.__doc__)
        except EdgeflError:  # a broken package must not hide the others
            continue
        for key, option in options["properties"].items():
            if "description" in shared.get(key, {}):
                option.setdefault("description", shared[key]["description"])
        options["properties"]["name"] = {"const": name}
        is_default = name == name_schema["default"]
        condition = {"properties": {"name": {"const": name}}, "required": [] if is_default else ["name"]}
        strategy["allOf"].append({"if": condition, "then": options})
    task_options = schema["properties"]["task"]["additionalProperties"]
    schema["properties"]["task"]["additionalProperties"] = {"type": [*task_options["type"], "array"]}
    schema["properties"]["run"]["properties"]["task"]["examples"] = list(list_task_names())
    schema["allOf"] = [
        {
            "if": {"properties": {"run": {"properties": {"task": {"const": name}}}}},
            "then": {"properties": {"task": make_schema(list_task_options(name))}},
        }
        for name in list_task_names()
    ]
    schema["anyOf"] = [{"required": schema.pop("required")}, {"required": ["job"]}]
    schema["properties"]["run"].pop("required")
    schema["anyOf"][0]["properties"] = {"run": {"required": ["task"]}}
    schema["properties"]["job"]["required"] = ["name"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "edgefl run file", **schema}
