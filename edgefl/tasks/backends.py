"""Training backends and accelerators: which a task needs, and which this machine has, found without heavy imports."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Mapping
from typing import Any

from edgefl.core.errors import TaskError, format_install_command
from edgefl.core.types import Task

_ACCELERATOR_PATTERN = re.compile(r"(cpu|cuda(:\d+)?)\Z")


def validate_accelerator(name: str) -> str:
    """Returns `name` if it is `cpu`, `cuda` or `cuda:N`.

    Raises:
        TaskError: it is something else.
    """
    if not _ACCELERATOR_PATTERN.match(name):
        raise TaskError(f"accelerator must be cpu, cuda or cuda:N, got {name!r}")
    return name


def import_extra(package: str, purpose: str, command: str | None = None) -> Any:
    """Returns an optional package, imported when it is used: it may be absent, or take seconds.

    Args:
        package: its name, or that of a module in it.
        purpose: what needs it, the start of the error's sentence.
        command: that installs it; None for that of the extra it belongs to.

    Raises:
        TaskError: it cannot be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise TaskError(
            f"{purpose}, which cannot be imported ({error}); "
            f"install it with: {command or format_install_command(package)}"
        ) from None


def import_torch() -> Any:
    """Returns torch.

    Raises:
        TaskError: it is not installed.
    """
    return import_extra("torch", "this task trains with torch")


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

    A user's task declares this by an attribute `needs_torch`; without it, its `model` does, or it needs none.
    """
    needs_torch = getattr(task, "needs_torch", None)
    return bool(getattr(getattr(task, "model", None), "needs_torch", False) if needs_torch is None else needs_torch)


def list_backends() -> list[str]:
    """Returns the training backends of this machine: `numpy`, and `torch` where installed."""
    return ["numpy", *(["torch"] if _is_installed("torch") else [])]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # an object in its place cannot be imported
        return False
