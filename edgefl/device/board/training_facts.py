"""What a board says of training: with what, and if not at all, why not; it may still use finished models."""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.device.board.fits import lacks, other_models, paths, usable_backends
from edgefl.errors import EdgeflError
from edgefl.tasks.backends import needs_torch
from edgefl.tasks.registry import make_task
from edgefl.types import Json, Role


def training_facts(role: str, tasks: Iterable[str], board: Json | None = None) -> Json:
    """Returns what the board's capabilities say of training.

    That is `backends`, `trains`, where that is false `trains_reason`, `backend_reasons` of those that do not fit this
    board, and in `paths` the smallest way to train each task here.

    Args:
        role: that of the join.
        tasks: those that it has shards for, judged with their default options.
        board: what `capabilities.probe` found; its memory and word size are looked at.
    """
    facts, names = board or {}, sorted(tasks)
    found, missing = usable_backends(facts), lacks(facts)
    reason = _why_not(role, names, found, missing)
    told: Json = {"backends": found, "trains": reason is None}
    if reason is not None:
        told["trains_reason"] = reason
    if missing:
        told["backend_reasons"] = missing
    return {**told, "paths": paths(names, facts)} if names else told


def _why_not(role: str, names: list[str], found: list[str], missing: dict[str, str]) -> str | None:
    if role == Role.EVALUATOR:
        return "its role is evaluator"
    if "numpy" in missing:
        return missing["numpy"]
    if not names or "torch" in found or not all(_needs_torch(name) for name in names):
        return None
    why = missing.get("torch", "torch is not installed")
    small = {name: other_models(name) for name in names}
    but = "".join(f"; it trains {name} with {models} in NumPy" for name, models in small.items() if models)
    return f"{why}, and {', '.join(names)} needs it; it evaluates and runs deployed models{but}"


def _needs_torch(task: str) -> bool:
    try:
        return needs_torch(make_task(task))
    except EdgeflError:  # the agent says what is wrong with a shard that it cannot use
        return False
