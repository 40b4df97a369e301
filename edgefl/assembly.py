"""Turns a run file into objects: task, first model, strategy, codecs and goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.adapters.flower_names import is_flower_strategy
from edgefl.compression.auto import AutoCodec, make_auto, parse_auto
from edgefl.compression.codec import make_codec
from edgefl.compression.decoding import decode_body
from edgefl.compression.delta import encode_delta, parse_down
from edgefl.compression.edges import EdgeCodec, edge_shapes
from edgefl.compression.measuring import expected_bytes
from edgefl.compression.specs import with_layers
from edgefl.config import RunConfig
from edgefl.errors import ConfigError
from edgefl.protocol import layout_of
from edgefl.strategies.checked import make_checked
from edgefl.strategies.evaluation import EvaluationSchedule
from edgefl.strategies.gate import Guard, Selection, StrategyGate
from edgefl.strategies.registry import BUILT_IN, make_strategy, settings_of
from edgefl.strategies.rounds import RoundRules
from edgefl.strategies.server_optimizers import ServerOptimizer
from edgefl.tally import Goal, RoundCount
from edgefl.tasks.backends import needs_torch
from edgefl.tasks.registry import make_task
from edgefl.types import Array, Indices, Json, Scalar, Shapes, Strategy, Task, TensorKind, Tensors, derived_rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A run, ready to be driven.

    Attributes:
        config: where all of it comes from.
        model: the first global model, shared tensors only.
        strategy, goal, evaluate, rounds, gate: for `loop.drive`.
        header: what every device is told with each order: task, options, seed.
        layout: tells the task's model from another one.
        shapes: of the tensors that are shared.
        encode: (model, version) -> one body for all devices.
        encode_changes: (model, what changed, version) -> a body for devices that hold an older model, None where the
            whole one is hardly larger; None itself where the run file asks for whole models.
        decode: body of an update -> displacement.
        needs_torch: devices without torch can neither train nor evaluate the task.
    """

    config: RunConfig
    model: Mapping[str, Array]
    strategy: Strategy[Any]
    goal: Goal
    evaluate: EvaluationSchedule
    rounds: RoundCount
    gate: StrategyGate
    header: Json
    layout: str
    shapes: Shapes
    encode: Callable[[Tensors, int], bytes]
    encode_changes: Callable[[Tensors, Indices, int], bytes | None] | None
    decode: Callable[[bytes], Tensors]
    needs_torch: bool = False


def assemble(config: RunConfig, run_id: str) -> Assembled:
    """Returns the objects of one run.

    Raises:
        EdgeflError: the run file names something that does not exist or cannot work; nothing was started.
    """
    task = make_task(config.run.task, config.task)
    shapes = tuple(spec for spec in task.shapes() if spec.shared)
    sends_changes, whole_spec = _down(config)
    down = make_codec(whole_spec, shapes)
    up, codecs = _up(config, shapes)
    seed = config.run.seed

    def encode(model: Tensors, version: int) -> bytes:
        return down.encode(model, derived_rng(seed, version, "downlink"))

    def encode_changes(model: Tensors, changed: Indices, version: int) -> bytes | None:
        return encode_delta(model, changed, shapes, whole_spec, derived_rng(seed, version, "downlink"))

    strategy = _make_strategy(task, config, _rules(config, shapes, up))
    if _has_nodes(strategy):
        _check_nodes(config, task.shapes())
    return Assembled(
        config=config,
        model=_first_model(task, shapes, config),
        strategy=strategy,
        rounds=RoundCount(versions_per_round=_versions_per_round(strategy, config)),
        gate=_gate(config, shapes, codecs, takes_models=_has_nodes(strategy)),
        goal=Goal(
            rounds=config.run.rounds,
            updates=config.run.updates,
            seconds=config.run.seconds,
            bytes=config.run.bytes,
            accuracy=config.run.accuracy,
            accuracy_over=config.run.accuracy_over,
        ),
        evaluate=EvaluationSchedule(every=config.run.evaluate_every, who=config.run.evaluate_on),
        header={
            "v": 1,
            "run": run_id,
            "task": config.run.task,
            "options": dict(config.task),
            "seed": seed,
            "test_fraction": config.run.local_test_fraction,
            "residuals": config.compression.residuals,
        },
        layout=layout_of(task.shapes()),
        shapes=shapes,
        encode=encode,
        encode_changes=encode_changes if sends_changes else None,
        decode=lambda body: decode_body(body, shapes),
        needs_torch=needs_torch(task),
    )


def _make_strategy(task: Task, config: RunConfig, rules: RoundRules) -> Strategy[Any]:
    """Returns the strategy of the run file; one that is not ours is held to its contract."""
    name, options = config.strategy.name, config.strategy.options
    recommended: Mapping[str, Scalar] = getattr(task, "defaults", {})
    if name in BUILT_IN:
        return make_strategy(name, {**_known(recommended, settings_of(name)), **options}, rules)
    from edgefl.storage.state_files import pack_state  # noqa: PLC0415 a device that assembles needs no store

    if is_flower_strategy(name):
        from edgefl.adapters.flower_strategy import flower_settings, make_flower_strategy  # noqa: PLC0415 Flower is slow

        given = {**_known(recommended, flower_settings(name)), **options}
        return make_checked(name, lambda: make_flower_strategy(name, given, rules), pack=pack_state)
    return make_checked(
        name,
        lambda: make_strategy(name, {**_known(recommended, settings_of(name)), **options}, rules),
        pack=pack_state,
    )


def _known(recommended: Mapping[str, Scalar], settings: Mapping[str, Any]) -> dict[str, Scalar]:
    """Returns what a task recommends as far as the strategy knows it."""
    return {name: value for name, value in recommended.items() if name in settings}


def _versions_per_round(strategy: Strategy[Any], config: RunConfig) -> int | None:
    """Returns how many versions are a round; None for the number of devices that are asked first."""
    declared: int | None = getattr(strategy, "versions_per_round", 1)
    return declared if declared is not None else config.run.updates_per_round


def _down(config: RunConfig) -> tuple[bool, str]:
    """Returns whether deltas are sent, and the codec of whole models."""
    down = config.compression.down
    if parse_auto(down) is not None:
        raise ConfigError(f"compression.down = {down!r}: all devices get the same bytes; auto is for compression.up")
    return parse_down(down)


def _up(config: RunConfig, shapes: Shapes) -> tuple[str, AutoCodec | None]:
    """Returns the codec that strategies ask for, and who chooses another one where the run file says `auto`."""
    up, layers = config.compression.up, config.compression.layers
    candidates = parse_auto(up)
    if candidates is None:
        up = with_layers(up, layers)
        make_codec(up, shapes)
        return up, None
    specs = [with_layers(spec, layers) for spec in candidates]
    codecs = make_auto({spec: expected_bytes(spec, shapes) for spec in specs})
    return codecs.specs[0], codecs


def _rules(config: RunConfig, shapes: Shapes, codec: str) -> RoundRules:
    server = config.server
    return RoundRules(
        min_devices=config.devices.min,
        max_devices=config.devices.count,
        fraction=config.devices.fraction,
        min_updates=config.run.min_updates,
        deadline_s=config.run.deadline_s,
        barrier_s=config.run.barrier_s,
        rescue=config.run.rescue,
        updates_per_round=config.run.updates_per_round,
        rounds=config.run.rounds,
        codec=codec,
        task=config.run.task,
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


def _has_nodes(strategy: Strategy[Any]) -> bool:
    """Says whether the strategy makes devices nodes of a graph."""
    return bool(getattr(strategy, "has_nodes", False))


def _check_nodes(config: RunConfig, shapes: Shapes) -> None:
    """Refuses what does not go with nodes of a graph, before any of them is started.

    Raises:
        ConfigError, CodecError: something does not.
    """
    if parse_auto(config.compression.up) is not None:
        raise ConfigError("compression.up = 'auto' is for updates; nodes of a graph need one codec for every edge")
    own = [spec.name for spec in shapes if not spec.shared]
    if own:
        raise ConfigError(f"task {config.run.task}: tensors that stay on the board ({own[0]}) do not go with nodes")
    without = {
        "run.min_updates": config.run.min_updates,
        "run.barrier_s": config.run.barrier_s,
        "run.updates_per_round": config.run.updates_per_round,
        "devices.fraction": config.devices.fraction,
        "guard.max_norm": config.guard.max_norm,
        "guard.max_norm_ratio": config.guard.max_norm_ratio,
    }
    for name, value in without.items():
        if value is not None:
            raise ConfigError(
                f"{name} = {value!r} means nothing where every device has a model of its own; leave it out"
            )
    EdgeCodec(with_layers(config.compression.up, config.compression.layers), edge_shapes(shapes), epoch=1)


def _gate(config: RunConfig, shapes: Shapes, codecs: AutoCodec | None, *, takes_models: bool) -> StrategyGate:
    devices, guard = config.devices, config.guard
    return StrategyGate(
        selection=Selection(
            min_memory_bytes=devices.min_memory_bytes,
            needs_accelerator=devices.accelerator,
            max_temperature_c=devices.max_temperature_c,
            min_battery=devices.min_battery,
            unwell=devices.unwell,
        ),
        guard=Guard(
            takes_models=takes_models,
            shapes=shapes,
            max_norm=guard.max_norm,
            max_norm_ratio=guard.max_norm_ratio,
            flag_after=guard.flag_after,
        ),
        codecs=codecs,
    )


def _first_model(task: Task, shapes: Shapes, config: RunConfig) -> dict[str, Array]:
    if config.run.init is None:
        made: Mapping[str, Array] = task.init(config.run.seed)
    else:
        from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 a device that assembles needs no store

        made = load_model_file(Path(config.run.init))
    for spec in shapes:
        if spec.name not in made or made[spec.name].shape != spec.shape:
            found = made[spec.name].shape if spec.name in made else "none"
            raise ConfigError(f"run.init: tensor {spec.name!r} must have shape {spec.shape}, got {found}")
    return {spec.name: made[spec.name].astype(spec.dtype) for spec in shapes}
