"""Builds the objects of a run from its configuration: task, first model, strategy, codecs, goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.codec_benchmark import compute_expected_bytes
from edgefl.compression.codec_selection import CodecSelector, make_codec_selector, parse_auto_candidates
from edgefl.compression.delta import encode_delta, parse_downlink_codec
from edgefl.compression.error_feedback import has_error_feedback
from edgefl.compression.peer_codec import PeerCodec, select_peer_tensors
from edgefl.compression.registry import format_with_layers
from edgefl.core.analyses import ANALYSES
from edgefl.core.clusters import CLUSTERS_KEY, is_stack, make_stack_shapes, make_update_shapes, split_stack
from edgefl.core.config import (
    RunConfig,
)
from edgefl.core.errors import CodecError, ConfigError, TaskError
from edgefl.core.protocol import (
    ADAPT_KEY,
    CONDITIONS_KEY,
    EXAMPLE_UNIT,
    INSTRUCTION_VERSION,
    METERED_KEY,
    PERSONAL_KEY,
    PRIVACY_KEY,
    SECURE_KEY,
    SLICES_KEY,
    SPARSE_KEY,
    model_fingerprint,
)
from edgefl.core.settings import REQUIRED, Faults, check_options, list_options
from edgefl.core.sites import PARTIAL_SUMS_KEY, SITE_LIMITS_KEY, SiteLimits
from edgefl.core.types import (
    Algorithm,
    Array,
    Indices,
    Json,
    ModelSpec,
    Strategy,
    Task,
    Tensors,
    derive_rng,
)
from edgefl.engine.adapted_model import (
    AdaptedModel,
    check_clusters,
    check_head_epochs,
    check_local_tensors,
    check_num_models,
    check_personal,
    make_adapted_model,
    make_first_models,
)
from edgefl.engine.assembly.analysis import build_analysis
from edgefl.engine.assembly.compiled import make_compiled_header
from edgefl.engine.assembly.components import RunComponents, SplitModel
from edgefl.engine.assembly.job import build_job
from edgefl.engine.assembly.privacy import check_private, check_secure
from edgefl.engine.assembly.rules import (
    check_consistency,
    check_metered_codec,
    check_selection,
    choose_evaluation,
    make_divergence_rule,
    make_goal,
    make_planner,
    make_policy,
)
from edgefl.engine.assembly.split import check_split_strategy, make_split_model, name_codec_errors
from edgefl.engine.assembly.strategy import (
    check_slices,
    get_inner_strategy,
    get_plan,
    get_versions_per_round,
    make_round_rules,
    make_run_strategy,
    permits_partial_sums,
)
from edgefl.engine.collective_checks import check_collective, check_weighted_mean
from edgefl.engine.progress import RoundCounter
from edgefl.strategies.participation import EvaluationSchedule
from edgefl.strategies.registry import (
    BUILT_IN_STRATEGIES,
    find_strategy,
)
from edgefl.strategies.synchronous.esync import ESync
from edgefl.tasks.adaptation.parts import select_parts
from edgefl.tasks.job import Job
from edgefl.tasks.metrics.evaluation import make_task_metrics
from edgefl.tasks.registry import BUILT_IN, is_torch_task, make_task


def build_run(config: RunConfig, run_id: str, *, bases: Path | None = None) -> RunComponents:
    """Returns the objects of one run; `bases` is the folder of the coordinator's pretrained bases.

    Raises:
        EdgeflError: the run file names something missing or unusable; nothing was started.
    """
    if config.privacy.unit is not None:
        check_private(config)
    if config.secure_aggregation.enabled:
        check_secure(config)
    run, conditions = _build_run(config, run_id, bases), config.conditions.to_json()
    return replace(run, header={**run.header, CONDITIONS_KEY: conditions}) if conditions else run


def _build_run(config: RunConfig, run_id: str, bases: Path | None) -> RunComponents:
    if config.job.name:
        return build_job(config, run_id, bases)
    task = make_run_task(config)
    if isinstance(task, Job):
        raise TaskError(f"run.task: {config.run.task} is a job: give it as name in [job], without run.task")
    if config.strategy.name in ANALYSES:
        return build_analysis(config, run_id, task)
    compiled = make_compiled_header(task, config, bases)
    task, first, adapted = _make_first_model(task, config, bases)
    shapes_on_board = task.shapes()
    shapes = tuple(spec for spec in shapes_on_board if spec.shared)
    split = None if config.split.after is None else make_split_model(config, task)
    trained = shapes if split is None else split.front
    up, codecs = _make_uplink_codec(config, trained)
    if config.aggregation.is_collective:
        check_collective(config)
    strategy = make_run_strategy(task, config, make_round_rules(config, shapes, up))
    check_selection(config, strategy)
    check_metered_codec(config, strategy, up)
    with name_codec_errors("compression.up"):
        check_slices(config, strategy, trained)
    has_residuals = any(has_error_feedback(spec) for spec in ([up] if codecs is None else codecs.specs))
    num_clusters = check_clusters(strategy, config, shapes_on_board, has_residuals=has_residuals)
    cluster_shapes = shapes if num_clusters else ()
    update_shapes = make_update_shapes(shapes) if num_clusters else shapes
    shapes = make_stack_shapes(shapes, num_clusters)
    first = make_first_models(task, config, first, num_clusters)
    with name_codec_errors("compression.down"):
        sends_changes, whole_spec = _parse_downlink(config)
        # Members of a collective have the next model already: what changed since is nothing.
        sends_changes |= config.aggregation.is_collective
        down = make_codec(whole_spec, shapes)
    seed = config.run.seed

    def encode(model: Tensors, version: int) -> bytes:
        return down.encode(model, derive_rng(seed, version, "downlink"))

    def encode_changes(model: Tensors, changed: Indices, version: int) -> bytes | None:
        return encode_delta(model, changed, shapes, whole_spec, derive_rng(seed, version, "downlink"))

    if config.aggregation.is_collective:
        check_weighted_mean(strategy, config)
    if strategy.has_nodes:
        _check_decentralised(config, task.shapes())
    plans_iterations = _plans_iterations(strategy)
    check_local_tensors(config.strategy.name, get_plan(strategy), shapes_on_board)
    check_consistency(config, get_plan(strategy))
    check_head_epochs(get_plan(strategy), shapes_on_board, plans_iterations=plans_iterations)
    has_personal = check_personal(strategy, config, shapes_on_board, plans_iterations=plans_iterations)
    metrics = make_task_metrics(task, has_personal=has_personal)
    if split is not None:
        check_split_strategy(config, strategy, codecs)
    down_shapes, up_shapes = (shapes, update_shapes) if split is None else (split.front, split.front)
    planner = make_planner(config, strategy, down=(whole_spec, down_shapes), up=(up, up_shapes))
    return RunComponents(
        config=config,
        model={spec.name: first[spec.name] for spec in shapes},
        strategy=strategy,
        rounds=RoundCounter(versions_per_round=get_versions_per_round(strategy, config)),
        policy=replace(
            make_policy(config, update_shapes, codecs, strategy, num_clusters=num_clusters), planner=planner
        ),
        goal=make_goal(strategy, config, metrics),
        evaluate=EvaluationSchedule(
            every=config.run.evaluate_every,
            evaluate_on=choose_evaluation(
                config, shapes_on_board, has_personal=has_personal, num_clusters=num_clusters
            ),
            # No board has room for the whole network, or it would not be cut.
            can_use_trainers=split is None,
        ),
        header={
            **_make_header(config, run_id, strategy, split, adapted),
            **({PERSONAL_KEY: True} if has_personal else {}),
            **({METERED_KEY: True} if codecs is not None else {}),
            **({CLUSTERS_KEY: num_clusters} if num_clusters else {}),
            **_make_site_header(config),
            **({SLICES_KEY: True} if getattr(strategy, "sends_slices", False) else {}),
            **compiled,
        },
        layout=model_fingerprint(task.shapes() if split is None else trained),
        shapes=shapes,
        encode=encode,
        encode_changes=encode_changes if sends_changes else None,
        decode=lambda body: decode_body(body, update_shapes),
        divergence=make_divergence_rule(task, config, strategy),
        metrics=metrics,
        needs_torch=is_torch_task(task),
        usual_epochs=float(getattr(task, "defaults", {}).get("epochs", 1.0)),
        split=split,
        adapted=adapted,
        cluster_shapes=cluster_shapes,
        is_built_in=config.run.task in BUILT_IN and getattr(get_plan(strategy), "algorithm", "sgd") in {*Algorithm},
    )


def _make_site_header(config: RunConfig) -> Json:
    """Returns what instructions say to site gateways."""
    if not permits_partial_sums(config):
        return {}
    limits = SiteLimits(
        max_weight_ratio=config.guard.max_weight_ratio,
        deadline_s=config.run.deadline_s,
        has_plain_step=config.server.optimizer == "none" and config.server.learning_rate == 1.0,
    )
    return {PARTIAL_SUMS_KEY: True, SITE_LIMITS_KEY: limits.to_json()}


def _plans_iterations(strategy: Strategy[Any]) -> bool:
    """Returns whether a strategy counts on it that devices train as many iterations as it says, and no more."""
    inner = get_inner_strategy(strategy)
    return isinstance(inner, ESync) or bool(strategy.root_examples)


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
        **({PRIVACY_KEY: EXAMPLE_UNIT} if config.privacy.unit == EXAMPLE_UNIT else {}),
        **({SECURE_KEY: True} if config.secure_aggregation.enabled else {}),
        **({SPARSE_KEY: True} if config.secure_aggregation.graph == "sparse" else {}),
    }


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


def _parse_downlink(config: RunConfig) -> tuple[bool, str]:
    """Returns whether deltas are sent, and the codec of whole models."""
    down = config.compression.down
    if parse_auto_candidates(down) is not None:
        raise ConfigError(f"compression.down = {down!r}: all devices get the same bytes; auto is for compression.up")
    return parse_downlink_codec(down)


def _make_uplink_codec(config: RunConfig, shapes: ModelSpec) -> tuple[str, CodecSelector | None]:
    """Returns the uplink codec, and the codec selector where the run file says `auto`, or `metered`."""
    metered, layers = config.compression.metered, config.compression.layers
    with name_codec_errors("compression.metered"):
        if metered is not None:
            if parse_auto_candidates(metered) is not None:
                raise CodecError(f"it must be one codec, got {metered!r}")
            metered = format_with_layers(metered, layers)
            make_codec(metered, shapes)
    with name_codec_errors("compression.up"):
        candidates = parse_auto_candidates(config.compression.up)
        specs = [format_with_layers(spec, layers) for spec in candidates or (config.compression.up,)]
        if candidates is None:
            make_codec(specs[0], shapes)
            sizes = {specs[0]: 1}
        else:
            sizes = {spec: compute_expected_bytes(spec, shapes) for spec in specs}
    if candidates is None and metered is None:
        return specs[0], None
    with name_codec_errors("compression.up" if metered is None else "compression.metered"):
        codecs = make_codec_selector(sizes, metered)
    return codecs.specs[0], codecs


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
    """Returns the first whole model; tensors that stay on the devices may be the task's own, whatever `run.init`.

    Of cluster models that a run has kept it is the stack.
    """
    shapes = task.shapes()
    local = {spec.name for spec in shapes if not spec.shared}
    if config.run.init is None:
        model: Mapping[str, Array] = task.init(config.run.seed)
    else:
        from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 a device that assembles needs no store

        model = load_model_file(Path(config.run.init))
        if is_stack(model):
            if config.adapt.is_used:
                check_num_models(model, 0)
            shapes = make_stack_shapes(shapes, len(split_stack(model)))
        if config.adapt.is_used:  # its local tensors are in no model that is kept, but in the first one of a run
            local |= {spec.name for spec in select_parts(config.adapt, shapes).trained if not spec.shared}
            own = {name: tensor for name, tensor in task.init(config.run.seed).items() if name in local}
            model = {**own, **model}
    for spec in shapes:
        if spec.name not in local and (spec.name not in model or model[spec.name].shape != spec.shape):
            found = model[spec.name].shape if spec.name in model else "none"
            raise ConfigError(f"run.init: tensor {spec.name!r} must have shape {spec.shape}, got {found}")
    return {spec.name: model[spec.name].astype(spec.dtype) for spec in shapes if spec.name in model}
