"""Registry of tasks: built in, from installed packages, or from a user's own module."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Scalar, Task

ENTRY_POINT_GROUP = "edgefl.tasks"

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
        name: a built-in task, one of an installed package (entry point `edgefl.tasks`), or `module:Class`.
        options: keyword arguments of the task.

    Raises:
        TaskError: there is no such task, its module cannot be imported, or its object is no task's class.
        ConfigError: an option that the task does not have, or a value that it rejects.
    """
    return _create_task(name, _find_factory(name), dict(options or {}))


def list_task_names() -> tuple[str, ...]:
    """Returns the names of the built-in and the installed tasks."""
    return tuple(sorted({*BUILT_IN, *(entry_point.name for entry_point in entry_points(group=ENTRY_POINT_GROUP))}))


def _find_factory(name: str) -> Callable[..., Task]:
    if name in BUILT_IN:
        return _load_target(name, BUILT_IN[name])
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _load_target(name, entry_point.value)
    if ":" in name:
        return _validate_task_class(name, _load_target(name, name))
    raise TaskError(
        f"there is no task {name!r}; choose one of {', '.join(list_task_names())}, or module:Class of your own"
    )


def _load_target(name: str, target: str) -> Callable[..., Task]:
    try:
        target_object = load_object(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskError(
            f"task {name!r} cannot be loaded: {error}; it must be module:Class, importable here"
        ) from None
    if not callable(target_object):
        raise TaskError(
            f"task {name!r} is a {type(target_object).__name__}, it must be a class or a function that makes one"
        )
    factory: Callable[..., Task] = target_object
    return factory


def load_object(target: str) -> Any:
    """Returns the object that `module:attribute` names; raises what its module raises when it is imported."""
    module, _, attribute = target.partition(":")
    return functools.reduce(getattr, attribute.split("."), importlib.import_module(module))


def _validate_task_class(name: str, found: Any) -> Callable[..., Task]:
    """Rejects a non-task before it is called: names may come from elsewhere, and `os:system` is callable too.

    Only `read` is required, since a task may take over shapes, init and learner from its model in `__init__`.
    """
    factory: Callable[..., Task] = found
    if not inspect.isclass(found):
        raise TaskError(f"task {name!r} is a {type(found).__name__}, it must be a class with a method read")
    read = getattr(found, "read", None)
    if not (inspect.isfunction(read) or inspect.ismethod(read)):
        raise TaskError(f"task {name!r} is a class without a method read; it is no task")
    return factory


def _create_task(name: str, factory: Callable[..., Task], options: dict[str, Scalar]) -> Task:
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        option_names = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"options of task {name}: {error}; it has these: {option_names}") from None
    return factory(**options)
