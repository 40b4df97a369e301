"""Tasks by name: built in, from installed packages, or from a user's own module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from edgefl.errors import ConfigError, TaskError
from edgefl.types import Scalar, Task

ENTRY_POINT_GROUP = "edgefl.tasks"

BUILT_IN: Mapping[str, str] = {
    "digits": "edgefl.tasks.digits:digits",
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
        TaskError: there is no such task, its module cannot be imported, or what it names is no task's class.
        ConfigError: an option that the task does not have, or a value that it refuses.
    """
    return _make(name, _factory(name), dict(options or {}))


def task_names() -> tuple[str, ...]:
    """Returns the names of the built-in and the installed tasks."""
    return tuple(sorted({*BUILT_IN, *(found.name for found in entry_points(group=ENTRY_POINT_GROUP))}))


def _factory(name: str) -> Callable[..., Task]:
    if name in BUILT_IN:
        return _loaded(name, BUILT_IN[name])
    for found in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _loaded(name, found.value)
    if ":" in name:
        return _checked_class(name, _loaded(name, name))
    raise TaskError(
        f"there is no task {name!r}; choose one of {', '.join(task_names())}, or module:Class of your own"
    )


def _loaded(name: str, target: str) -> Callable[..., Task]:
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskError(
            f"task {name!r} cannot be loaded: {error}; it must be module:Class, importable here"
        ) from None
    if not callable(found):
        raise TaskError(f"task {name!r} is a {type(found).__name__}, it must be a class or a function that makes one")
    factory: Callable[..., Task] = found
    return factory


def _checked_class(name: str, found: Any) -> Callable[..., Task]:
    """Refuses what is no task before it is called: the name may come from elsewhere, and `os:system` is callable too.

    Only `read` is asked for, since a task may take over shapes, init and learner from its model in `__init__`.
    """
    factory: Callable[..., Task] = found
    if not inspect.isclass(found):
        raise TaskError(f"task {name!r} is a {type(found).__name__}, it must be a class with a method read")
    read = getattr(found, "read", None)
    if not (inspect.isfunction(read) or inspect.ismethod(read)):
        raise TaskError(f"task {name!r} is a class without a method read; it is no task")
    return factory


def _make(name: str, factory: Callable[..., Task], options: dict[str, Scalar]) -> Task:
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        allowed = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"options of task {name}: {error}; it has these: {allowed}") from None
    return factory(**options)
