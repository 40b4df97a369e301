"""What a board says of training: with what, and if not at all, why not; it may still use finished models."""

from __future__ import annotations

from collections.abc import Iterable

from edgefl.errors import EdgeflError
from edgefl.tasks.backends import backends, needs_torch
from edgefl.tasks.registry import make_task
from edgefl.types import Json, Role


def training_facts(role: str, tasks: Iterable[str]) -> Json:
    """Returns `backends`, `trains`, and where that is false `trains_reason`, for the board's capabilities.

    Args:
        role: that of the join.
        tasks: those that it has shards for, judged with their default options.
    """
    found, names = backends(), sorted(tasks)
    reason = None
    if role == Role.EVALUATOR:
        reason = "its role is evaluator"
    elif names and "torch" not in found and all(_needs_torch(name) for name in names):
        reason = f"torch is not installed, and {', '.join(names)} needs it; it evaluates and runs deployed models"
    facts: Json = {"backends": found, "trains": reason is None}
    return facts if reason is None else {**facts, "trains_reason": reason}


def _needs_torch(task: str) -> bool:
    try:
        return needs_torch(make_task(task))
    except EdgeflError:  # the agent says what is wrong with a shard that it cannot use
        return False
