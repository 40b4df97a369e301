"""Turns a run file into objects: task, first model, strategy, codecs and goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.compression.registry import decode_body, make_codec
from edgefl.config import RunConfig
from edgefl.errors import ConfigError
from edgefl.loop import Goal
from edgefl.strategies.evaluation import EvaluationSchedule
from edgefl.strategies.registry import make_strategy, settings_of
from edgefl.strategies.rounds import RoundRules
from edgefl.tasks.registry import make_task
from edgefl.types import Array, Json, Scalar, Shapes, Strategy, Task, Tensors, derived_rng


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """A run, ready to be driven.

    Attributes:
        config: where all of it comes from.
        model: the first global model, shared tensors only.
        strategy, goal, evaluate: for `loop.drive`.
        header: what every device is told with each order: task, options, seed.
        encode: (model, version) -> one body for all devices.
        decode: body of an update -> displacement.
    """

    config: RunConfig
    model: Mapping[str, Array]
    strategy: Strategy[Any]
    goal: Goal
    evaluate: EvaluationSchedule
    header: Json
    encode: Callable[[Tensors, int], bytes]
    decode: Callable[[bytes], Tensors]


def assemble(config: RunConfig, run_id: str) -> Assembled:
    """Returns the objects of one run.

    Raises:
        EdgeflError: the run file names something that does not exist or cannot work; nothing was started.
    """
    task = make_task(config.run.task, config.task)
    shapes = tuple(spec for spec in task.shapes() if spec.shared)
    down = make_codec(config.compression.down, shapes)
    make_codec(config.compression.up, shapes)
    seed = config.run.seed

    def encode(model: Tensors, version: int) -> bytes:
        return down.encode(model, derived_rng(seed, version, "downlink"))

    return Assembled(
        config=config,
        model=_first_model(task, shapes, config),
        strategy=make_strategy(config.strategy.name, _strategy_options(task, config), _rules(config)),
        goal=Goal(
            versions=config.run.rounds,
            updates=config.run.updates,
            seconds=config.run.seconds,
            bytes=config.run.bytes,
            accuracy=config.run.accuracy,
        ),
        evaluate=EvaluationSchedule(every=config.run.evaluate_every, who=config.run.evaluate_on),
        header={
            "v": 1,
            "run": run_id,
            "task": config.run.task,
            "options": dict(config.task),
            "seed": seed,
            "test_fraction": config.run.local_test_fraction,
        },
        encode=encode,
        decode=lambda body: decode_body(body, shapes),
    )


def _strategy_options(task: Task, config: RunConfig) -> dict[str, Scalar]:
    """Returns the options of the run file over what the task recommends and the strategy knows."""
    known = settings_of(config.strategy.name)
    recommended: Mapping[str, Scalar] = getattr(task, "defaults", {})
    return {**{name: value for name, value in recommended.items() if name in known}, **config.strategy.options}


def _rules(config: RunConfig) -> RoundRules:
    return RoundRules(
        min_devices=config.devices.min,
        max_devices=config.devices.count,
        min_updates=config.run.min_updates,
        deadline_s=config.run.deadline_s,
        codec=config.compression.up,
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
