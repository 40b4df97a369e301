"""A run whose boards train without torch: the compiled task in its header, and whether there is to be one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError
from edgefl.core.protocol import COMPILED_KEY, EXAMPLE_UNIT
from edgefl.core.types import Json, Strategy, Task
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.assembly.strategy import get_batch_size
from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue, compute_digest
from edgefl.tasks.adaptation.parts import select_parts
from edgefl.tasks.compiled.board.graph_check import check_constant, check_model, check_origin, load_compiled_task
from edgefl.tasks.compiled.plan import CompiledPlan
from edgefl.tasks.local_algorithms.batch_gradients import check_parts
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.registry import is_torch_task, list_numpy_models

MAX_COMPILED_BATCH = 512
"""Examples of a compiled batch at most; a board cuts a larger one into parts."""


def make_compiled_header(task: Task, config: RunConfig, bases: Path | None) -> Json:
    """Returns what the header of instructions says of the compiled task; empty where there is none.

    Args:
        task: with all tensors.
        config: the run file.
        bases: folder of the coordinator's bases and compiled tasks; None where there is none.

    Raises:
        ConfigError: `run.backend`, `run.compiled` or a setting of gradients does not fit the task or the rest of the
            run file.
        NotFoundError: there is no such compiled task.
        DataError: it is damaged, or asks for something that a board does not run.
        TaskError: it is of another task, or of another model.
    """
    backend, named, micro_batch = config.run.backend, config.run.compiled, _get_micro_batch_size(config)
    if backend == "numpy" and is_torch_task(task):
        models = list_numpy_models(config.run.task)
        hint = f"take another model ({', '.join(models)})" if models else "take another task"
        raise ConfigError(f"run.backend = 'numpy', and the model of task {config.run.task} needs torch: {hint}")
    precision = config.strategy.options.get("precision")
    if precision not in (None, "float32") and (backend in ("onnx", "numpy") or not is_torch_task(task)):
        raise ConfigError(
            f"strategy.precision = {precision!r:.60} is of networks that train with torch, and none here does: "
            "leave it out"
        )
    check_parts(find_loss(task), config.strategy.options.get("micro_batch_size"))
    if named is None:
        return {}
    if backend in ("torch", "numpy") or not is_torch_task(task) or config.split.after is not None:
        raise ConfigError(
            f"run.compiled = {named!r} means nothing with backend = {backend!r}, with a model that needs no torch, "
            "or with split.after; leave it out"
        )
    if bases is None:
        raise ConfigError(f"run.compiled = {named!r}: only a coordinator has compiled tasks; leave it out")
    path = BaseCatalogue(bases).find(named)
    compiled = load_compiled_task(path)
    check_origin(compiled.manifest, config.run.task, config.task)
    if micro_batch < min(compiled.manifest.batch_size, MAX_COMPILED_BATCH):
        raise ConfigError(
            f"strategy.micro_batch_size is {micro_batch}, and the compiled task computes "
            f"{compiled.manifest.batch_size} examples at once; compile it with --batch-size {micro_batch}"
        )
    check_model(compiled.manifest, task.shapes(), task.name)
    parts = select_parts(config.adapt, task.shapes()) if config.adapt.is_used else None
    check_constant(compiled.manifest, parts.constant_names if parts else ())
    plan = CompiledPlan(compute_digest(path), path.stat().st_size, is_for_all=backend == "onnx")
    return {COMPILED_KEY: plan.to_json()}


def can_be_compiled(run: RunComponents) -> bool:
    """Returns whether a run may have a compiled task and has none yet: boards train a whole network of torch."""
    return (
        run.needs_torch
        and COMPILED_KEY not in run.header
        and run.split is None
        and run.analysis is None
        and run.encode_input is None
        and run.config.privacy.unit != EXAMPLE_UNIT
    )


def choose_batch_size(strategy: Strategy[Any], config: RunConfig) -> int:
    """Returns the batch size to compile for: that of the run's plan, or of the equal parts of such a batch."""
    size = max(1, get_batch_size(strategy, config))
    return math.ceil(size / math.ceil(size / _get_micro_batch_size(config)))


def _get_micro_batch_size(config: RunConfig) -> int:
    """Returns how many examples a graph may compute at once."""
    size = config.strategy.options.get("micro_batch_size")
    return min(MAX_COMPILED_BATCH, size) if isinstance(size, int) and size >= 1 else MAX_COMPILED_BATCH
