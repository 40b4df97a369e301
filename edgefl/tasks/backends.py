"""Training backends required by tasks and available on a device, found without heavy imports."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from edgefl.core.types import Task
from edgefl.tasks.learners.torch_factory import TorchFactoryModel
from edgefl.tasks.learners.torch_learner import TorchModel

NUMPY_MODELS: Mapping[str, tuple[str, ...]] = {
    "mnist": ("2nn", "mlp", "logistic"),
    "fashion-mnist": ("2nn", "mlp", "logistic"),
    "motionsense": ("mlp", "logistic"),
}
"""NumPy models (values of `model`) of tasks that usually need torch."""


def list_numpy_models(task: str) -> tuple[str, ...]:
    """Returns the NumPy models of a task that needs torch by default."""
    return NUMPY_MODELS.get(task, ())


def is_torch_task(task: Task) -> bool:
    """Returns whether the task is trained with torch.

    A user's task declares this by an attribute `needs_torch`; without it, it is taken to need none.
    """
    needs_torch = getattr(task, "needs_torch", None)
    return (
        bool(needs_torch)
        if needs_torch is not None
        else isinstance(getattr(task, "model", None), TorchModel | TorchFactoryModel)
    )


def list_backends() -> list[str]:
    """Returns the training backends of this machine: `numpy`, and `torch` where installed."""
    return ["numpy", *(["torch"] if _is_installed("torch") else [])]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # an object in its place cannot be imported
        return False
