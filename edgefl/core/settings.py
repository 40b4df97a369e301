"""Settings from outside, checked against annotations and bounds: dataclasses filled from tables, options of a call.

Understood are texts, numbers, booleans, `Literal`, enums, `tuple[str, ...]`, mappings of scalars, nested dataclasses
and unions of those. A field's metadata bounds its number: `at_least` and `at_most` include the bound, `above` and
`below` do not. The same declarations give the JSON schema.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from edgefl.core.errors import ConfigError

T = TypeVar("T")

REQUIRED = inspect.Parameter.empty
REST = "rest"
"""Metadata of the field that takes all keys that no other field has."""
SECRET = "secret"  # noqa: S105 a name
"""Metadata of a field whose value no message shows."""
MAX_SHOWN_CHARS = 100
MAX_FAULTS = 20
"""Wrong settings that one message names."""
MOVED: Mapping[str, str] = {"run.micro_batch_size": "strategy.micro_batch_size"}
"""Settings of releases before, and what they are now."""
_BOUNDS = {"above": "exclusiveMinimum", "at_least": "minimum", "below": "exclusiveMaximum", "at_most": "maximum"}
"""Bounds in a field's metadata, and their names in a JSON schema."""
_TEXTS, _NUMBERS = tuple[str, ...], tuple[float, ...]
_DESCRIPTIONS: Mapping[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", NoneType: "none",
    _TEXTS: "a list of texts", _NUMBERS: "a list of numbers",
    Any: "a text, a number or true/false", object: "a text, a number or true/false",
}  # fmt: skip
_SCHEMAS: Mapping[Any, Mapping[str, Any]] = {
    bool: {"type": "boolean"}, int: {"type": "integer"}, float: {"type": "number"}, str: {"type": "string"},
    _TEXTS: {"type": "array", "items": {"type": "string"}},
    _NUMBERS: {"type": "array", "items": {"type": "number"}},
}  # fmt: skip
_SCALAR_SCHEMA = {"type": ["string", "number", "boolean"]}
_NAMES: Mapping[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "None": NoneType}


class OptionType(NamedTuple):
    """Annotation, default and bounds of an option; the default is `REQUIRED` where it must be given."""

    annotation: Any
    default: Any
    metadata: Mapping[str, Any] = MappingProxyType({})


def find_similar(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a mistyped one was probably meant to be; None if none is similar."""
    return next(iter(get_close_matches(name, [*known], n=1)), None)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a message about a name that is not known; empty if there is none."""
    similar = find_similar(name, known := [*known])
    return f"did you mean {similar}?" if similar else (f"known are {', '.join(sorted(known))}" if known else "")


class Faults(contextlib.AbstractContextManager[None]):
    """Collects the messages of `ConfigError`s, so that a user gets all of a file's at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self.messages += error.faults
        return True

    def check(self) -> None:
        """Raises one `ConfigError` of all messages, if there are any."""
        if self.messages:
            more = [f"and {len(self.messages) - MAX_FAULTS} more"] if len(self.messages) > MAX_FAULTS else []
            raise ConfigError("; ".join([*self.messages[:MAX_FAULTS], *more]), self.messages)


def list_options(target: Callable[..., Any]) -> Mapping[str, OptionType]:
    """Returns the keyword parameters of a class or a function, in their order; `*args` and `**kwargs` are none.

    Raises:
        ConfigError: another author's class does not say what it takes.
    """
    return _read_options(target)


@cache
def _read_options(target: Callable[..., Any]) -> Mapping[str, OptionType]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{getattr(target, '__qualname__', target)} does not say what it takes: {error}") from None
    hints = _get_hints(target)
    metadata = {item.name: item.metadata for item in fields(target)} if is_dataclass(target) else {}
    return MappingProxyType({
        p.name: OptionType(hints.get(p.name, p.annotation), p.default, metadata.get(p.name, {}))
        for p in parameters
        if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}
    })  # fmt: skip


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: str = "run") -> T:
    """Returns the frozen dataclass `cls` filled from a table of TOML or JSON values.

    Args:
        cls: a dataclass with keyword-only fields; one with `REST` in its metadata takes the keys that no other has.
        mapping: the table.
        path: where the table stands, put before the key in messages; empty for a whole file.

    Raises:
        ConfigError: unknown or missing keys, wrong types, values out of range: all of them, up to `MAX_FAULTS`.
    """
    table, options = _check_table(mapping, path), list_options(cls)
    known = {name: option for name, option in options.items() if REST not in option.metadata}
    extra_values = {key: value for key, value in table.items() if key not in known}
    faults, values = Faults(), dict[str, Any]()
    if len(known) == len(options):
        faults.messages += [_format_unknown(key, list(known), path) for key in extra_values]
    for name, option in known.items():
        with faults:
            if name in table:
                values[name] = _convert(_join(path, name), table[name], option)
            elif option.default is REQUIRED:
                raise _make_missing_error(option.annotation, _join(path, name))
    with faults:
        values |= {name: _check_scalars(extra_values, path) for name in options if name not in known}
    faults.check()
    return cls(**values)


def check_options(name: str, options: Mapping[str, Any], known: Mapping[str, OptionType], *, table: str) -> None:
    """Checks the options for what `name` names.

    Args:
        name: of the strategy or task, for messages.
        options: as they stand in the run file.
        known: what it takes.
        table: of the run file, for messages.

    Raises:
        ConfigError: options are unknown or missing, of another type than their annotation's, or out of range.
    """
    faults = Faults()
    for option, value in options.items():
        with faults:
            if option not in known:
                similar = find_similar(option, known)
                hint = f" (did you mean {similar}?)" if similar else ""
                names = ", ".join(known) or "none"
                raise ConfigError(f"{table}.{_shorten(option)}: {name} has no such setting{hint}; known: {names}")
            check_value(f"{table}.{option}", value, known[option])
    missing = [option for option, kind in known.items() if kind.default is REQUIRED and option not in options]
    faults.messages += [f"{table}.{option} is missing: {name} cannot do without" for option in missing]
    faults.check()


def check_settings(settings: object, table: str) -> None:
    """Checks those fields of a dataclass that have bounds or a closed choice, however it was made.

    Raises:
        ConfigError: a value is out of range, or none of the choices.
    """
    for name, option in list_options(type(settings)).items():
        if option.metadata or any(map(_list_choices, _list_kinds(option))):
            check_value(f"{table}.{name}", getattr(settings, name), option)


def check_value(path: str, value: Any, option: OptionType) -> None:
    """Checks one value; `path` is the setting's name in messages.

    Raises:
        ConfigError: it is of another type than the annotation's, or out of range.
    """
    kinds, bounds = _list_kinds(option), option.metadata
    if any(_is_of_kind(value, kind) and _is_within(value, kind, bounds) for kind in kinds):
        return
    descriptions = [text for kind in kinds if kind is not NoneType and (text := _describe(kind, bounds))]
    if not descriptions:
        raise ConfigError(
            f"{path} cannot be given in a run file: it is annotated {option.annotation!s:.100}, and a run file has "
            "texts, numbers, true and false"
        )
    found = f"a {type(value).__name__}" if bounds.get(SECRET) else format_setting(value)
    raise ConfigError(f"{path} must be {' or '.join(descriptions)}, got {found}")


def format_setting(value: object) -> str:
    """Returns a found value for an error, as TOML spells it, shortened."""
    return str(value).lower() if isinstance(value, bool) else _shorten(repr(value))


def make_schema(options: Mapping[str, OptionType], doc: str | None = None) -> dict[str, Any]:
    """Returns the JSON schema (2020-12) of a table with these options.

    Args:
        options: of the table; None, which TOML does not have, is never among the values.
        doc: docstring whose first paragraph and `Attributes` describe the table and its keys.
    """
    texts = _parse_attributes(doc or "")
    schema: dict[str, Any] = {"type": "object", "additionalProperties": False}
    if "" in texts:
        schema["description"] = texts[""]
    schema["properties"] = {
        name: _make_value_schema(option) | ({"description": texts[name]} if name in texts else {})
        for name, option in options.items()
        if REST not in option.metadata
    }
    if any(REST in option.metadata for option in options.values()):
        schema["additionalProperties"] = _SCALAR_SCHEMA
    if required := [name for name, option in options.items() if option.default is REQUIRED]:
        schema["required"] = required
    return schema


def _make_value_schema(option: OptionType) -> dict[str, Any]:
    kinds = [kind for kind in _list_kinds(option) if kind is not NoneType]
    schemas = [_make_kind_schema(kind, option.metadata) for kind in kinds]
    schema: dict[str, Any] = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if isinstance(option.default, bool | int | float | str):
        schema["default"] = option.default
    return schema


def _make_kind_schema(kind: Any, bounds: Mapping[str, Any]) -> dict[str, Any]:
    if is_dataclass(kind) and isinstance(kind, type):
        return make_schema(list_options(kind), kind.__doc__)
    if get_origin(kind) is Mapping:
        return {"type": "object", "additionalProperties": _SCALAR_SCHEMA}
    if choices := _list_choices(kind):
        return {"enum": list(choices)}
    limits = {key: bounds[name] for name, key in _BOUNDS.items() if name in bounds and kind in (int, float)}
    return {**_SCHEMAS.get(kind, _SCALAR_SCHEMA), **limits}


def _parse_attributes(doc: str) -> dict[str, str]:
    """Returns the texts of a docstring by attribute, and under "" its first paragraph."""
    head, _, attributes = inspect.cleandoc(doc).partition("\nAttributes:\n")
    texts = {"": " ".join(head.partition("\n\n")[0].split())} if head.strip() else {}
    names: list[str] = []
    for line in attributes.splitlines():
        if line.strip() and not line.startswith(" "):  # the next section of the docstring
            break
        if line.startswith("    ") and not line.startswith("     "):
            key, _, line = line.partition(":")  # noqa: PLW2901 the rest of the line is its text
            names = key.strip().split(", ")
        for name in names:
            texts[name] = f"{texts.get(name, '')} {line.strip()}".strip()
    return texts


def _convert(path: str, value: Any, option: OptionType) -> Any:
    """Returns a value of a table as the field has it: tables as dataclasses, lists as tuples, numbers as floats."""
    kinds = [kind for kind in _list_kinds(option) if kind is not NoneType]
    if value is None and NoneType in _list_kinds(option):
        return None
    if len(kinds) == 1 and is_dataclass(kinds[0]) and isinstance(kinds[0], type):
        return from_mapping(kinds[0], _check_table(value, path), path)
    if len(kinds) == 1 and get_origin(kinds[0]) is Mapping:
        return _check_scalars(_check_table(value, path), path)
    check_value(path, value, option)
    if kinds == [float]:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _check_table(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path or 'the file'} must be a table, got {format_setting(value)}")
    return value


def _check_scalars(table: Mapping[str, Any], path: str) -> dict[str, Any]:
    for key, value in table.items():
        check_value(_join(path, key), value, OptionType(Any, REQUIRED))
    return dict(table)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _format_unknown(key: str, known: list[str], path: str) -> str:
    if moved := MOVED.get(_join(path, key)):
        return f"unknown setting {_join(path, key)}: it is {moved} now"
    similar = find_similar(key, known)
    hint = f"did you mean {_join(path, similar)}?" if similar else suggest_name(key, known)
    return f"unknown setting {_join(path, _shorten(key))}: {hint}"


def _make_missing_error(kind: Any, path: str) -> ConfigError:
    if is_dataclass(kind) and isinstance(kind, type):
        required = [name for name, option in list_options(kind).items() if option.default is REQUIRED]
        return ConfigError(f"[{path}] is missing, with at least {', '.join(required)}")
    return ConfigError(f"{path} is missing: {_describe(kind, {})}")


def _list_kinds(option: OptionType) -> tuple[Any, ...]:
    """Returns the types of an annotation, those of a union one by one."""
    annotation = option.annotation
    if isinstance(annotation, str):  # it could not be evaluated
        return tuple(_NAMES.get(part.strip(), Any) for part in annotation.split("|"))
    if annotation is REQUIRED:
        # Without an annotation the default says what it is about.
        return (type(option.default),) if isinstance(option.default, bool | int | float | str) else (Any,)
    return get_args(annotation) if get_origin(annotation) in {Union, UnionType} else (annotation,)


def _list_choices(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(member.value for member in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()


def _is_of_kind(value: Any, kind: Any) -> bool:
    if choices := _list_choices(kind):
        return any(isinstance(value, type(choice)) and value == choice for choice in choices)
    if kind is Any or kind is object:
        return isinstance(value, bool | str) or _is_finite(value)
    if kind in {_TEXTS, _NUMBERS}:
        is_right = _is_finite if kind == _NUMBERS else lambda entry: isinstance(entry, str)
        return isinstance(value, list | tuple) and all(map(is_right, value))
    if kind is float:
        return _is_finite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return kind in (bool, str, NoneType) and isinstance(value, kind)


def _is_finite(value: Any) -> bool:
    # Not math.isfinite: TOML's integers are unbounded, and one beyond a float's range would overflow there.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_within(value: Any, kind: Any, bounds: Mapping[str, Any]) -> bool:
    return kind not in (int, float) or (
        ("above" not in bounds or value > bounds["above"])
        and ("at_least" not in bounds or value >= bounds["at_least"])
        and ("below" not in bounds or value < bounds["below"])
        and ("at_most" not in bounds or value <= bounds["at_most"])
    )


def _describe(kind: Any, bounds: Mapping[str, Any]) -> str:
    if choices := _list_choices(kind):
        return "one of " + ", ".join(repr(choice) for choice in choices)
    limits = [
        f"{name.replace('_', ' ')} {bounds[name]}" for name in _BOUNDS if name in bounds and kind in (int, float)
    ]
    return f"{_DESCRIPTIONS.get(kind, '')} {' and '.join(limits)}".strip()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSection:
    """A broker, which need not be the fleet's.

    Attributes:
        host: of the broker, which speaks MQTT 5.
        port: 1883 at first, with `tls` 8883.
        login_file: a file whose first line is the user and whose second is the password.
        tls: whether the connection is encrypted.
        ca_file: authority of the broker's certificate; none for those of the system.
    """

    host: str
    port: int | None = field(default=None, metadata={"at_least": 1, "at_most": 65_535})
    login_file: str = ""
    tls: bool = False
    ca_file: str = ""

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port or (8883 if self.tls else 1883)
