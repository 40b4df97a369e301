"""Names in run files to the classes that they may name, checked before an import, and again before a call.

A name that is not built in is an entry point of an installed package, or `module:Class` of a module that the
operator allowed (`--allow-module`, or the variable `EDGEFL_ALLOW_MODULES`). The object must then be a class, defined
there, that declares its kind, mostly by the base it inherits from. Everything else is refused, whoever asks: nothing
of Python's library or of a dependency is ever constructed, and a module that is not allowed is not imported.

The allowed modules belong to the process, as its import path does: processes that it starts inherit them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from edgefl.core.errors import EdgeflError, TaskError, UsageError
from edgefl.core.settings import find_similar

ALLOW_VARIABLE = "EDGEFL_ALLOW_MODULES"
"""Names of modules, with commas between them."""
MAX_NAME_CHARS = 200
_num_blocks: Counter[str] = Counter()
"""Of each module that is allowed beside the variable's own, how many blocks allow it."""
_lock = threading.Lock()
_is_refusing = False


class ExtensionRefusedError(TaskError):
    """A name of what is not built in, in a process that loads nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionKind:
    """Kind of class that a run file names.

    Attributes:
        noun: in messages.
        group: of the entry points.
        is_declared: whether a class says of itself that it is one of this kind.
        declaration: how it says so, in messages.
        error: class of the errors.
    """

    noun: str
    group: str
    is_declared: Callable[[type[Any]], bool]
    declaration: str
    error: type[EdgeflError]


@contextmanager
def refuse_extensions() -> Iterator[None]:
    """Loads nothing into this process, within the block, that is not built in; processes that it starts may."""
    global _is_refusing  # noqa: PLW0603 it belongs to the process, as its modules do
    before, _is_refusing = _is_refusing, True
    try:
        yield
    finally:
        _is_refusing = before


def inherits_from(*bases: type[Any]) -> Callable[[type[Any]], bool]:
    """Returns whether a class has one of the bases in its line, and is none of them; its methods do not count."""
    return lambda found: found not in bases and any(base in found.__mro__ for base in bases)


def list_entry_points(kind: ExtensionKind) -> list[str]:
    """Returns the names that installed packages give to classes of this kind, sorted."""
    return sorted({point.name for point in entry_points(group=kind.group)})


def load_extension(kind: ExtensionKind, name: str) -> type[Any] | None:
    """Returns the class of an entry point or of an allowed `module:Class`; None for a name that is neither.

    Raises:
        EdgeflError: of the kind's class: the module is not allowed or cannot be imported, or the object is not of
            this kind.
    """
    found = load_entry_point(kind, name)
    if found is None and ":" in name:
        module, _, attribute = name.partition(":")
        check_allowed(name, kind.noun, kind.error)
        found = _load_class(kind, name, module, attribute)
    return found


def find_extension(kind: ExtensionKind, name: str, known_names: Sequence[str]) -> type[Any]:
    """Returns what `load_extension` does, which must find something; an error names what was probably meant.

    Raises:
        EdgeflError: of the kind's class, as `load_extension`, or the name is neither.
    """
    found = load_extension(kind, name)
    if found is None:
        similar = find_similar(name, known_names)
        hint = f" (did you mean {similar}?)" if similar else ""
        listing = ", ".join(known_names)
        raise kind.error(f"unknown {kind.noun} {format_name(name)}{hint}; known: {listing}, or module:Class")
    return found


def load_entry_point(kind: ExtensionKind, name: str) -> type[Any] | None:
    """Returns the class of an entry point, None where no package has one of that name; raises as `load_extension`."""
    for point in entry_points(group=kind.group, name=name):
        return load_declared(kind, point)
    return None


def load_declared(kind: ExtensionKind, point: EntryPoint) -> type[Any]:
    """Returns the class of an entry point, which must be of this kind; raises as `load_extension`."""
    module, _, attribute = point.value.partition("[")[0].partition(":")
    return _load_class(kind, point.name, module.strip(), attribute.strip())


def check_allowed(name: str, noun: str, error: type[EdgeflError]) -> None:
    """Checks that the operator allowed the module of a `module:Class`; nothing is imported for it.

    Raises:
        EdgeflError: of class `error`: it is not allowed, or the name is none.
    """
    module, _, attribute = name.partition(":")
    if not is_module_name(module) or not attribute.isidentifier() or len(name) > MAX_NAME_CHARS:
        raise error(f"{noun} {format_name(name)} cannot be loaded: it must be module:Class, such as my_fleet:Mine")
    _reject_standard(module, name, noun, error)
    if module not in list_allowed_modules():
        raise error(
            f"{noun} {name!r} is refused: the module {module} is not allowed here. Where you trust it, add "
            f"--allow-module {module} to the command that starts the coordinator or the simulation, "
            f"or set {ALLOW_VARIABLE}={module}"
        )


def list_allowed_modules() -> tuple[str, ...]:
    """Returns the modules that this process may import for a name in a run file."""
    return tuple(filter(None, map(str.strip, os.environ.get(ALLOW_VARIABLE, "").split(","))))


@contextmanager
def allow_modules(modules: Sequence[str]) -> Iterator[None]:
    """Allows modules too, for this block and for the processes that it starts; threads may have blocks at a time.

    Raises:
        UsageError: one is no module's name, or is of Python's own library.
    """
    added = add_allowed_modules(modules)
    try:
        yield
    finally:
        _remove_allowed_modules(added)


def add_allowed_modules(modules: Sequence[str]) -> Sequence[str]:
    """Allows modules too, until this process ends; returns those that were not allowed by the variable itself.

    Raises:
        UsageError: as `allow_modules`.
    """
    for module in modules:
        check_module_name(module)
    with _lock:
        allowed = list_allowed_modules()
        for module in set(_num_blocks) - set(allowed):  # somebody else took it out of the variable
            del _num_blocks[module]
        added = [one for one in dict.fromkeys(modules) if one not in allowed or one in _num_blocks]
        _num_blocks.update(added)
        if added:
            os.environ[ALLOW_VARIABLE] = ",".join(dict.fromkeys([*allowed, *added]))
    return added


def _remove_allowed_modules(modules: Sequence[str]) -> None:
    """Ends one permission of each module, and takes away those that no other block has."""
    with _lock:
        _num_blocks.subtract(modules)
        ended = {module for module in modules if _num_blocks[module] <= 0}
        for module in ended:
            del _num_blocks[module]
        left = [module for module in list_allowed_modules() if module not in ended]
        if left:
            os.environ[ALLOW_VARIABLE] = ",".join(left)
        elif ended:
            os.environ.pop(ALLOW_VARIABLE, None)


def check_module_name(module: str) -> None:
    """Checks a module to be allowed.

    Raises:
        UsageError: it is no module's name, or is of Python's own library.
    """
    if not is_module_name(module):
        raise UsageError(f"--allow-module must be the name of a module, such as my_fleet, got {format_name(module)}")
    if _is_standard(module):
        raise UsageError(f"--allow-module {module}: it is of Python's own library, which has nothing for a run file")


def is_module_name(text: str) -> bool:
    """Returns whether a text is an absolute name of a module."""
    return len(text) <= MAX_NAME_CHARS and all(part.isidentifier() for part in text.split("."))


def format_name(name: str) -> str:
    """Returns a name for a message, in quotes and cut where it is longer than a name."""
    return repr(name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}…")


def _reject_standard(module: str, name: str, noun: str, error: type[EdgeflError]) -> None:
    if _is_standard(module):
        raise error(
            f"{noun} {format_name(name)} is refused: {module} is of Python's own library, and holds no {noun}"
        )


def _is_standard(module: str) -> bool:
    return _get_package(module) in sys.stdlib_module_names


def _load_class(kind: ExtensionKind, name: str, module: str, attribute: str) -> type[Any]:
    _reject_standard(module, name, kind.noun, kind.error)
    if _is_refusing:
        raise ExtensionRefusedError(
            f"{kind.noun} {format_name(name)} is not built in: it is loaded in a confined process alone"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # importing another author's code may raise anything
        raise kind.error(
            f"{kind.noun} {format_name(name)} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, type):
        raise kind.error(
            f"{kind.noun} {format_name(name)} is a {type(found).__name__}; it must be a class that {kind.declaration}"
        )
    # A class that the module only imported is somebody else's, and nobody decided to offer it.
    is_own = isinstance(found.__module__, str) and _get_package(found.__module__) == _get_package(module)
    if not is_own or not kind.is_declared(found):
        raise kind.error(
            f"{kind.noun} {format_name(name)} is the class {found.__qualname__} of {found.__module__}; it must be a "
            f"class of {_get_package(module)} that {kind.declaration}"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise kind.error(f"{kind.noun} {format_name(name)} is abstract: it has no {missing}")
    return found


def _get_package(module: str) -> str:
    return module.partition(".")[0]
