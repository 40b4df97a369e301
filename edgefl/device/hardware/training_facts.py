"""Training facts of a board: usable backends, and why it cannot train; inference may still work."""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.core.errors import EdgeflError
from edgefl.core.types import Json, Role
from edgefl.device.hardware.requirements import (
    find_unsupported_backends,
    format_numpy_models,
    list_usable_backends,
    select_training_paths,
)
from edgefl.tasks.backends import is_torch_task
from edgefl.tasks.registry import make_task


def get_training_facts(role: str, tasks: Iterable[str], board_facts: Json | None = None) -> Json:
    """Returns the training part of the board's capabilities.

    That is `backends`, `trains`, where that is false `trains_reason`, `backend_reasons` of those that do not fit this
    board, and in `paths` the smallest backend for each task here.

    Args:
        role: of the enrolment.
        tasks: with shards on the board, evaluated with their default options.
        board_facts: result of `capabilities.probe`; its memory and word size are used.
    """
    facts, names = board_facts or {}, sorted(tasks)
    usable, missing = list_usable_backends(facts), find_unsupported_backends(facts)
    reason = _find_training_blocker(role, names, usable, missing)
    training_facts: Json = {"backends": usable, "trains": reason is None}
    if reason is not None:
        training_facts["trains_reason"] = reason
    if missing:
        training_facts["backend_reasons"] = missing
    return {**training_facts, "paths": select_training_paths(names, facts)} if names else training_facts


def _find_training_blocker(role: str, names: list[str], usable: list[str], missing: dict[str, str]) -> str | None:
    if role == Role.EVALUATOR:
        return "its role is evaluator"
    if "numpy" in missing:
        return missing["numpy"]
    if not names or "torch" in usable or not all(_needs_torch(name) for name in names):
        return None
    torch_reason = missing.get("torch", "torch is not installed")
    numpy_models = {name: format_numpy_models(name) for name in names}
    alternatives = "".join(
        f"; it trains {name} with {models} in NumPy" for name, models in numpy_models.items() if models
    )
    return f"{torch_reason}, and {', '.join(names)} needs it; it evaluates and runs deployed models{alternatives}"


def _needs_torch(task: str) -> bool:
    try:
        return is_torch_task(make_task(task))
    except EdgeflError:  # the agent says what is wrong with a shard that it cannot use
        return False
