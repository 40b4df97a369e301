"""Tasks by name (built in, of installed packages, or of a module that the operator allowed), and what trains them.

Backends and accelerators are found without heavy imports: which a task needs, and which this machine has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

from edgefl.core.errors import ConfigError, EdgeflError, TaskError, format_install_command
from edgefl.core.extensions import ExtensionKind, find_extension, inherits_from, list_entry_points
from edgefl.core.safe_parsing import parse_duration_s
from edgefl.core.settings import OptionType, check_options, list_options
from edgefl.core.types import ACCELERATOR_PATTERN, Scalar, Task
from edgefl.tasks.augmentation import find_augment
from edgefl.tasks.losses.registry import find_loss

MIN_SPLIT_PERIOD_S, MAX_SPLIT_PERIOD_S = 1.0, 366 * 86_400.0
KIND = ExtensionKind(
    noun="task",
    group="edgefl.tasks",
    is_declared=inherits_from(Task),
    declaration="inherits from edgefl.Task",
    error=TaskError,
)
BUILT_IN: Mapping[str, str] = {
    "cifar-10": "edgefl.tasks.images:cifar10",
    "digits": "edgefl.tasks.images:digits",
    "fashion-mnist": "edgefl.tasks.images:fashion_mnist",
    "mnist": "edgefl.tasks.images:mnist",
    "motionsense": "edgefl.tasks.motionsense:motionsense",
    "noop": "edgefl.tasks.noop:NoopTask",
    "audio": "edgefl.tasks.configured.audio:audio",
    "pictures": "edgefl.tasks.configured.pictures:pictures",
    "series": "edgefl.tasks.configured.series:series",
    "table": "edgefl.tasks.configured.table:table",
    "text": "edgefl.tasks.configured.text:text",
}
CONFIGURED = frozenset({"audio", "pictures", "series", "table", "text"})
"""Built-in tasks that only the options of a run file make."""

NUMPY_MODELS: Mapping[str, tuple[str, ...]] = {
    "mnist": ("2nn", "mlp", "mlp-tanh", "logistic"),
    "fashion-mnist": ("2nn", "mlp", "mlp-tanh", "logistic"),
    "cifar-10": ("2nn", "mlp", "mlp-tanh", "logistic"),
    "motionsense": ("mlp", "logistic"),
    "audio": ("mlp", "linear"),
    "pictures": ("mlp", "linear"),
    "series": ("mlp", "linear"),
}
"""NumPy models (values of `model`) of tasks that need torch by default or with another model."""


def make_task(name: str, options: Mapping[str, Scalar] | None = None, *, table: str = "task") -> Task:
    """Returns the task of that name.

    Args:
        name: a built-in task, one of an installed package (entry point `edgefl.tasks`), or an allowed `module:Class`.
        options: keyword arguments of the task.
        table: of the run file that has the options, for messages.

    Raises:
        TaskError: there is no such task, its module is not allowed or cannot be imported, or its class is no task's.
        ConfigError: an option that the task does not have, a value that it rejects, a loss that there is not, an
            augmentation that is no function, or a `split_period` that is no time.
    """
    factory = find_task_factory(name)
    check_options(name, options or {}, list_options(factory), table=table)
    try:
        task = factory(**(options or {}))
    except EdgeflError:
        raise
    except (Exception, SystemExit) as error:  # another author's code may raise anything
        raise TaskError(f"task {name}: making it raised {type(error).__name__}: {error}") from error
    find_loss(task)
    find_augment(task)
    find_split_period_s(task)
    return task


def find_split_period_s(task: Task) -> float | None:
    """Returns the length of the periods by which a task's data is split; None where it is split by example.

    Raises:
        ConfigError: its `split_period` is no time of a second to a year.
    """
    period = getattr(task, "split_period", None)
    if period is None:
        return None
    try:
        period_s = parse_duration_s(period)
    except (TypeError, ValueError):
        period_s = math.nan
    if not MIN_SPLIT_PERIOD_S <= period_s <= MAX_SPLIT_PERIOD_S:
        raise ConfigError(
            f"split_period of task {task.name} must be a time of 1s to 366d, such as 6h, got {period!r:.40}"
        )
    return period_s


def list_task_names() -> tuple[str, ...]:
    """Returns the names of the built-in and the installed tasks."""
    return tuple(sorted({*BUILT_IN, *list_entry_points(KIND)}))


def list_task_options(name: str) -> Mapping[str, OptionType]:
    """Returns the options of a task; raises as `make_task`."""
    return list_options(find_task_factory(name))


def find_task_factory(name: str) -> Callable[..., Task]:
    """Returns the class or function of a task, which was not called; raises as `make_task`."""
    if name in BUILT_IN:
        built_in: Callable[..., Task] = load_object(BUILT_IN[name])
        return built_in
    return find_extension(KIND, name, list_task_names())


def load_object(target: str) -> Any:
    """Returns the object that `module:attribute` names; raises what its module raises when it is imported."""
    module, _, attribute = target.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def validate_accelerator(name: str) -> str:
    """Returns `name` if it is `cpu`, `cuda` or `cuda:N`.

    Raises:
        TaskError: it is something else.
    """
    if not ACCELERATOR_PATTERN.fullmatch(name):
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
    except (ImportError, OSError, RuntimeError) as error:  # beside another build of torch than its own, the last two
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


def list_numpy_models(task: str) -> tuple[str, ...]:
    """Returns the NumPy models of a task that needs torch for others; none where it never does."""
    return NUMPY_MODELS.get(task, ())


def is_torch_task(task: Task) -> bool:
    """Returns whether the task is trained with torch.

    A user's task declares this by an attribute `needs_torch`; without it, its `model` does, or it needs none.
    """
    needs_torch = getattr(task, "needs_torch", None)
    return bool(getattr(getattr(task, "model", None), "needs_torch", False) if needs_torch is None else needs_torch)


def list_backends() -> list[str]:
    """Returns the training backends of this machine: `numpy`, and `onnx` and `torch` where installed.

    `onnx` trains what was compiled where torch is (`edgefl task compile`).
    """
    packages = {"onnx": "onnxruntime", "torch": "torch"}
    return ["numpy", *(name for name, package in packages.items() if _is_installed(package))]


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # an object in its place cannot be imported
        return False
