"""What a task needs to train, and what a board has; nothing heavy is imported to find out."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from edgefl.tasks.module_models import ModuleModel
from edgefl.tasks.torch_learner import TorchModel
from edgefl.types import Task

NUMPY_MODELS: Mapping[str, tuple[str, ...]] = {
    "mnist": ("2nn", "mlp", "logistic"),
    "fashion-mnist": ("2nn", "mlp", "logistic"),
    "motionsense": ("mlp", "logistic"),
}
"""Of tasks that are usually learned with torch, the values of `model` that are learned in NumPy."""


def numpy_models(task: str) -> tuple[str, ...]:
    """Returns what a task that needs torch by default can be trained with in NumPy."""
    return NUMPY_MODELS.get(task, ())


def needs_torch(task: Task) -> bool:
    """Returns whether the task is learned with torch.

    A task of the user's own says so with an attribute `needs_torch`; without it, it is taken to need none.
    """
    declared = getattr(task, "needs_torch", None)
    return (
        bool(declared) if declared is not None else isinstance(getattr(task, "model", None), TorchModel | ModuleModel)
    )


def backends() -> list[str]:
    """Returns what this machine can train with: `numpy`, and `torch` where that is installed."""
    return ["numpy", *(["torch"] if _is_installed("torch") else [])]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # what stands in its place cannot be imported
        return False
