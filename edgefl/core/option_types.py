"""Options of a run file's table against the parameters of the class that gets them, before it is called."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from edgefl.core.errors import ConfigError

REQUIRED = inspect.Parameter.empty
MAX_SHOWN_CHARS = 100
_DESCRIPTIONS: Mapping[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none",
}  # fmt: skip
_NAMES: Mapping[str, Any] = {"bool": bool, "int": int, "float": float, "str": str}


class OptionType(NamedTuple):
    """Annotation and default of an option; the default is `REQUIRED` where it must be given."""

    annotation: Any
    default: Any


def list_options(target: Callable[..., Any]) -> dict[str, OptionType]:
    """Returns the keyword parameters of a class or a function, in their order; `*args` and `**kwargs` are none.

    Raises:
        ConfigError: another author's class does not say what it takes.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{getattr(target, '__qualname__', target)} does not say what it takes: {error}") from None
    hints = _get_hints(target)
    return {
        p.name: OptionType(hints.get(p.name, p.annotation), p.default)
        for p in parameters
        if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}
    }


def check_options(name: str, options: Mapping[str, Any], known: Mapping[str, OptionType], *, table: str) -> None:
    """Checks the options for what `name` names.

    Args:
        name: of the strategy or task, for messages.
        options: as they stand in the run file.
        known: what it takes.
        table: of the run file, for messages.

    Raises:
        ConfigError: an option is unknown or missing, of another type than its annotation's, or not finite.
    """
    for option, value in options.items():
        if option not in known:
            raise ConfigError(
                f"{table}.{_shorten(option)}: {name} has no such setting; known: {', '.join(known) or 'none'}"
            )
        _check_value(f"{table}.{option}", value, known[option])
    missing = [option for option, kind in known.items() if kind.default is REQUIRED and option not in options]
    if missing:
        raise ConfigError(f"{table}.{missing[0]} is missing: {name} cannot do without")


def _check_value(path: str, value: Any, option: OptionType) -> None:
    kinds = _list_kinds(option)
    if any(_is_of_kind(value, kind) for kind in kinds):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} must be a finite number, got {value!r}")
    descriptions = [text for kind in kinds if kind is not NoneType and (text := _describe(kind))]
    if not descriptions:
        raise ConfigError(
            f"{path} cannot be given in a run file: it is annotated {option.annotation!s:.100}, and a run file has "
            "texts, numbers, true and false"
        )
    raise ConfigError(f"{path} must be {' or '.join(descriptions)}, got {_shorten(repr(value))}")


def _list_kinds(option: OptionType) -> tuple[Any, ...]:
    """Returns the types of an annotation, those of a union one by one."""
    annotation = option.annotation
    if isinstance(annotation, str):  # it could not be evaluated
        kinds = [
            _NAMES.get(part.strip(), NoneType if part.strip() == "None" else Any) for part in annotation.split("|")
        ]
        return tuple(kinds)
    if annotation is REQUIRED:
        # Without an annotation the default says what it is about.
        return (type(option.default),) if isinstance(option.default, bool | int | float | str) else (Any,)
    return get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)


def _is_of_kind(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(kind))
    if kind is Any or kind is object:
        return isinstance(value, bool | str) or _is_finite(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return isinstance(value, str) and any(value == member.value for member in kind)
    if kind is float:
        return _is_finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind in (bool, str, NoneType) and isinstance(value, kind)


def _is_finite(value: Any) -> bool:
    # Not math.isfinite: an integer beyond a float's range would overflow there.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    if kind is Any or kind is object:
        return "a text, a number or true/false"
    return _DESCRIPTIONS.get(kind, "")


def _get_hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the evaluated annotations; none where one cannot be evaluated, such as a type checker's name."""
    owner: Any = target if not isinstance(target, type) or is_dataclass(target) else target.__init__  # type: ignore[misc]
    try:
        # Unwrapped first: a function that wraps itself would be followed for ever.
        return get_type_hints(inspect.unwrap(owner))
    except Exception:  # noqa: BLE001 annotations of another author may raise anything; their text is looked at then
        return {}


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
