"""JSON and TOML that somebody else wrote: whatever is wrong with a text is a `ValueError`, and nothing else.

The parsers of the standard library alone give more than that: a text of brackets ends in a `RecursionError`, or,
where the stack is larger, in a value that every later walk falls over; and a number of a hundred thousand digits
cannot even be shown in a message.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

MOST_NESTED = 100
"""How deep tables and lists may lie in each other."""
MOST_TOML_CHARS = 1024 * 1024
_INT64, _INT64_CHARS = 2**63, 20
_KEY = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:{_KEY}[ \t]*+\.[ \t]*+){{{MOST_NESTED}}}")
_OPENING = {"[", "{"}


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
        ValueError: it is none, no UTF-8, or nested deeper than `MOST_NESTED`.
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
        raise _too_deep() from None
    # Most texts have fewer brackets than may be nested, and are looked at no further.
    if sum(map(text.count, _OPENING)) > MOST_NESTED:
        check_nesting(value)
    return value


def parse_message(content: bytes, *, keeps_nul: bool = False) -> Any:
    """Returns the value in a JSON text from the network, of which everything can be stored and said again.

    Half characters, which only an escape can bring in, become question marks; NULs go, unless `keeps_nul`.

    Raises:
        ValueError: as `parse_json`; or a number is none, is infinite, or a whole one has more than 64 bits.
    """
    value = parse_json(content, parse_constant=_no_number, parse_int=_whole, parse_float=_real)
    return _cleaned(value, "" if not keeps_nul else "\0") if b"\\u" in content else value


def parse_toml(content: str | bytes) -> dict[str, Any]:
    """Returns the table in a TOML text.

    Raises:
        ValueError: it is none, no UTF-8, larger than `MOST_TOML_CHARS`, nested deeper than `MOST_NESTED`, or holds a
            whole number beyond 64 bits, which TOML does not have.
    """
    text = content if isinstance(content, str) else content.decode()
    if len(text) > MOST_TOML_CHARS:
        raise ValueError(f"it has {len(text)} characters, at most {MOST_TOML_CHARS} are read")
    # The parser takes time and memory by the square of a key's length. Most texts have too few dots for such a key.
    if text.count(".") >= MOST_NESTED and _LONG_KEY.search(text):
        raise _too_deep()
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    check_nesting(table, has_int64=True)
    return table


def check_nesting(value: Any, *, most: int = MOST_NESTED, has_int64: bool = False) -> None:
    """Checks that tables and lists lie no deeper in each other than `most` levels.

    Layer by layer, as a value may be deep, and each once, as one may stand in many places of it, or in itself.

    Raises:
        ValueError: they do; or, with `has_int64`, a whole number has more than 64 bits.
    """
    layer, depth = {id(value): value} if isinstance(value, dict | list) else {}, 0
    while layer:
        if depth >= most:
            raise _too_deep(most)
        entries = [inner for entry in layer.values() for inner in _entries(entry)]
        if has_int64 and any(isinstance(entry, int) and not is_int64(entry) for entry in entries):
            raise ValueError("a whole number has at most 64 bits")
        layer = {id(entry): entry for entry in entries if isinstance(entry, dict | list)}
        depth += 1


def is_int64(number: int) -> bool:
    """Returns whether a whole number has at most 64 bits."""
    return -_INT64 <= number < _INT64


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _no_number(text: str) -> float:
    raise ValueError(f"{text[:20]} is no number")


def _whole(text: str) -> int:
    # The length first: making a number of many digits takes long.
    if len(text) > _INT64_CHARS or not is_int64(int(text)):
        raise ValueError("a whole number has at most 64 bits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _cleaned(value: Any, nul: str) -> Any:
    if isinstance(value, str):
        return sound_text(value).replace("\0", nul)
    if isinstance(value, dict):
        return {sound_text(name).replace("\0", nul): _cleaned(entry, nul) for name, entry in value.items()}
    return [_cleaned(entry, nul) for entry in value] if isinstance(value, list) else value


def sound_text(text: str) -> str:
    """Returns the text with question marks for half characters, which cannot be sent or stored."""
    return text.encode(errors="replace").decode()


def _too_deep(most: int = MOST_NESTED) -> ValueError:
    return ValueError(f"it is nested deeper than {most} levels")
