"""A run whose boards train without torch: the compiled task in its header, and whether there is to be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgefl.core.config import RunConfig
from edgefl.core.errors import ConfigError
from edgefl.core.protocol import COMPILED_KEY
from edgefl.core.types import Json, Strategy, Task
from edgefl.engine.assembly.components import RunComponents
from edgefl.engine.assembly.strategy import get_batch_size
from edgefl.tasks.adaptation.base_catalogue import BaseCatalogue, compute_digest
from edgefl.tasks.compiled.artefact import MAX_BATCH_SIZE
from edgefl.tasks.compiled.board.graph_check import check_model, check_origin, load_compiled_task
from edgefl.tasks.compiled.plan import CompiledPlan
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
        ConfigError: `run.backend` or `run.compiled` does not fit the task or the rest of the run file.
        NotFoundError: there is no such compiled task.
        DataError: it is damaged, or asks for something that a board does not run.
        TaskError: it is of another task, or of another model.
    """
    backend, named = config.run.backend, config.run.compiled
    if backend == "numpy" and is_torch_task(task):
        models = list_numpy_models(config.run.task)
        hint = f"take another model ({', '.join(models)})" if models else "take another task"
        raise ConfigError(f"run.backend = 'numpy', and the model of task {config.run.task} needs torch: {hint}")
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
    check_model(compiled.manifest, task.shapes(), task.name)
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
    )


def choose_batch_size(strategy: Strategy[Any], config: RunConfig) -> int:
    """Returns the batch size to compile for: that of the run's plan."""
    return max(1, min(get_batch_size(strategy, config), MAX_COMPILED_BATCH, MAX_BATCH_SIZE))
