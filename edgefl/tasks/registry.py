"""Registry of tasks: built in, from installed packages, or from a module that the operator allowed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from edgefl.core.errors import EdgeflError, TaskError
from edgefl.core.extensions import ExtensionKind, format_name, inherits_from, list_entry_points, load_extension
from edgefl.core.option_types import check_options, list_options
from edgefl.core.types import Scalar, Task

KIND = ExtensionKind(
    noun="task",
    group="edgefl.tasks",
    is_declared=inherits_from(Task),
    declaration="inherits from edgefl.Task",
    error=TaskError,
)
BUILT_IN: Mapping[str, str] = {
    "digits": "edgefl.tasks.images:digits",
    "fashion-mnist": "edgefl.tasks.images:fashion_mnist",
    "mnist": "edgefl.tasks.images:mnist",
    "motionsense": "edgefl.tasks.motionsense:motionsense",
    "noop": "edgefl.tasks.noop:NoopTask",
}


def make_task(name: str, options: Mapping[str, Scalar] | None = None) -> Task:
    """Returns the task of that name.

    Args:
        name: a built-in task, one of an installed package (entry point `edgefl.tasks`), or an allowed `module:Class`.
        options: keyword arguments of the task.

    Raises:
        TaskError: there is no such task, its module is not allowed or cannot be imported, or its class is no task's.
        ConfigError: an option that the task does not have, or a value that it rejects.
    """
    factory = _find_factory(name)
    check_options(name, options or {}, list_options(factory), table="task")
    try:
        return factory(**(options or {}))
    except EdgeflError:
        raise
    except (Exception, SystemExit) as error:  # another author's code may raise anything
        raise TaskError(f"task {name}: making it raised {type(error).__name__}: {error}") from error


def list_task_names() -> tuple[str, ...]:
    """Returns the names of the built-in and the installed tasks."""
    return tuple(sorted({*BUILT_IN, *list_entry_points(KIND)}))


def _find_factory(name: str) -> Callable[..., Task]:
    if name in BUILT_IN:
        built_in: Callable[..., Task] = load_object(BUILT_IN[name])
        return built_in
    task_class = load_extension(KIND, name)
    if task_class is None:
        raise TaskError(
            f"there is no task {format_name(name)}; choose one of {', '.join(list_task_names())}, or module:Class of "
            "your own"
        )
    return task_class


def load_object(target: str) -> Any:
    """Returns the object that `module:attribute` names; raises what its module raises when it is imported."""
    module, _, attribute = target.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
