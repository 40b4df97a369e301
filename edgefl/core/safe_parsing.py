"""Safe parsing of untrusted JSON and TOML: any defect of a text is a `ValueError`.

The parsers of the standard library alone raise more than that: a text of brackets ends in a `RecursionError`, or,
with a larger stack, in a value that breaks every later traversal; and a number of a hundred thousand digits
cannot even be printed in a message.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

_DURATION = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
SHA256 = re.compile(r"[0-9a-f]{64}\Z")
MAX_NESTING = 100
"""Nesting limit of dicts and lists."""
MAX_TOML_CHARS = 1024 * 1024
_INT64_LIMIT, _MAX_INT64_CHARS = 2**63, 20
_TOML_KEY = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_BARE_TOML_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NESTED_TOML_KEY = re.compile(rf"(?:{_TOML_KEY}[ \t]*+\.[ \t]*+){{{MAX_NESTING}}}")
_OPENING_BRACKETS = {"[", "{"}

T = TypeVar("T")


def parse_json(
    content: str | bytes,
    *,
    parse_constant: Callable[[str], Any] | None = None,
    parse_int: Callable[[str], int] | None = None,
    parse_float: Callable[[str], float] | None = None,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """Returns the value in a JSON text; the hooks are those of `json.loads`.

    Raises:
        ValueError: not JSON, not UTF-8, or nested deeper than `MAX_NESTING`.
    """
    text = content if isinstance(content, str) else content.decode("utf-8-sig")
    try:
        value = json.loads(
            text,
            parse_constant=parse_constant,
            parse_int=parse_int,
            parse_float=parse_float,
            object_pairs_hook=object_pairs_hook,
        )
    except RecursionError:
        raise _make_nesting_error() from None
    # Most texts have fewer brackets than the nesting limit and need no further check.
    if sum(map(text.count, _OPENING_BRACKETS)) > MAX_NESTING:
        check_nesting(value)
    return value


def parse_record(cls: type[T], value: Mapping[str, Any] | None) -> T | None:
    """Returns the dataclass in a JSON object, of which it takes its own fields; None for none.

    Raises:
        TypeError: a field is missing, or not a plain value.
    """
    if value is None:
        return None
    field_names = {item.name for item in fields(cls)}  # type: ignore[arg-type]  # it is a dataclass
    if nested := [name for name in field_names if isinstance(value.get(name), dict | list)]:
        raise TypeError(f"{nested[0]} must be a plain value")
    return cls(**{name: item for name, item in value.items() if name in field_names})


def parse_message(content: bytes, *, should_keep_nul: bool = False) -> Any:
    """Returns the value in a JSON text from the network, safe to store and to serialise again.

    Lone surrogates, which only an escape can produce, become question marks; NULs go, unless `should_keep_nul`.

    Raises:
        ValueError: as `parse_json`; or a number is NaN or infinite, or an integer has more than 64 bits.
    """
    value = parse_json(content, parse_constant=_reject_number, parse_int=_parse_int, parse_float=_parse_float)
    return _sanitise(value, "" if not should_keep_nul else "\0") if b"\\u" in content else value


def parse_toml(content: str | bytes, *, max_chars: int = MAX_TOML_CHARS) -> dict[str, Any]:
    """Returns the table in a TOML text.

    Raises:
        ValueError: not TOML, not UTF-8, larger than `max_chars`, nested deeper than `MAX_NESTING`, or with an
            integer beyond 64 bits, which TOML does not have.
    """
    text = content if isinstance(content, str) else content.decode()
    if len(text) > max_chars:
        raise ValueError(f"it has {len(text)} characters, at most {max_chars} are read")
    # The parser is quadratic in a key's length. Most texts have too few dots for such a key.
    if text.count(".") >= MAX_NESTING and _NESTED_TOML_KEY.search(text):
        raise _make_nesting_error()
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _make_nesting_error() from None
    check_nesting(table, should_check_int64=True)
    return table


def format_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Returns a table of texts, numbers, booleans, lists of them and tables as TOML.

    Args:
        table: by key; None has no place in TOML.
        path: of the table itself, as it stands in its header.
    """
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_format_toml_key(key)} = {_format_toml_value(value)}\n" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            inner_path = f"{path}.{_format_toml_key(key)}" if path else _format_toml_key(key)
            has_header = not value or any(not isinstance(inner, Mapping) for inner in value.values())
            header = f"\n[{inner_path}]\n" if has_header else ""
            lines.append(header + format_toml(value, inner_path))
    return "".join(lines)


def _format_toml_key(key: str) -> str:
    return key if _BARE_TOML_KEY.fullmatch(key) else _format_toml_value(key)


def _format_toml_value(value: Any) -> str:
    # JSON's texts, booleans and lists are TOML too, but for a bare delete; a float must keep its point.
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def check_nesting(value: Any, *, max_depth: int = MAX_NESTING, should_check_int64: bool = False) -> None:
    """Checks that dicts and lists are nested at most `max_depth` levels deep.

    Breadth first, as a value may be deep; each container once, as a value may be shared or contain itself.

    Raises:
        ValueError: too deep; or, with `should_check_int64`, an integer has more than 64 bits.
    """
    layer, depth = {id(value): value} if isinstance(value, dict | list) else {}, 0
    while layer:
        if depth >= max_depth:
            raise _make_nesting_error(max_depth)
        entries = [inner for entry in layer.values() for inner in _list_entries(entry)]
        if should_check_int64 and any(isinstance(entry, int) and not is_int64(entry) for entry in entries):
            raise ValueError("a whole number has at most 64 bits")
        layer = {id(entry): entry for entry in entries if isinstance(entry, dict | list)}
        depth += 1


def is_int64(number: int) -> bool:
    """Returns whether an integer fits in 64 bits."""
    return -_INT64_LIMIT <= number < _INT64_LIMIT


def _list_entries(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _reject_number(text: str) -> float:
    raise ValueError(f"{text[:20]} is no number")


def _parse_int(text: str) -> int:
    # The length first: parsing a number of many digits is slow.
    if len(text) > _MAX_INT64_CHARS or not is_int64(int(text)):
        raise ValueError("a whole number has at most 64 bits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _reject_number(text)


def _sanitise(value: Any, nul: str) -> Any:
    if isinstance(value, str):
        return sanitise_text(value).replace("\0", nul)
    if isinstance(value, dict):
        return {sanitise_text(name).replace("\0", nul): _sanitise(entry, nul) for name, entry in value.items()}
    return [_sanitise(entry, nul) for entry in value] if isinstance(value, list) else value


def sanitise_text(text: str) -> str:
    """Returns the text with question marks for lone surrogates, which cannot be encoded."""
    return text.encode(errors="replace").decode()


def _make_nesting_error(max_depth: int = MAX_NESTING) -> ValueError:
    return ValueError(f"it is nested deeper than {max_depth} levels")


def parse_duration_s(text: str) -> float:
    """Returns the seconds of a text such as 30m, 2h or 1d; raises a `ValueError` where it is none."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"a duration is such as 30m, 2h or 1d, got {text!r:.40}")
    return int(match[1]) * _SECONDS[match[2]]
