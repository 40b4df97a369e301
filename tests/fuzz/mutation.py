"""Changes valid content: trees of JSON, lines of TOML and text, bytes. What is valid but for one thing finds most."""

from __future__ import annotations

import json
import re
import struct
from copy import deepcopy
from random import Random
from typing import Any

from fuzz.reader import MOST_INPUT_BYTES, Form, Seed

_RAW = "\x01raw"
"""Begins a text that stands for JSON as it is written in `_RAW_JSON`."""
_RAW_JSON = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"-0", b"1e-400", b"1" * 30, b"-" + b"9" * 19,
    b"9223372036854775808", b"1" * 400, b"1" * 5000, b"[" * 60 + b"]" * 60, b"[" * 900 + b"]" * 900,
    b"[" * 20_000 + b"]" * 20_000, b'{"a":' * 900 + b"1" + b"}" * 900, b'{"a":' * 9000 + b"1" + b"}" * 9000,
    b'"\\ud800"', b'"\\udfff x"', b'"\\u0000"', b'"a\\u0000b"', b'"\\u202e"', b'"\xff"', b'{"a":1,"a":2}', b"", b"]",
    b'"',
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 65536, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64, 10**30, 0.0, -0.0,
    0.5, 1.5, -1.5, 1e308, -1e308, 5e-324, "", " ", "a", "0", "1", "-1", "nan", "inf", "true", "null", "\n",
    "\t\x1b[2J",
    "ä", "🍓", "../../etc/passwd", "/dev/zero", "%s%n", "x" * 100, "x" * 5000, "a\x00b", [], {}, [[]], [None], [{}],
    {"": 0}, {"v": 1}, [1] * 300, [[1, 2], [3, 4]], {"a": {"b": {"c": []}}}, [0] * 5, ["a"], ["a", 1],
)  # fmt: skip
_TOML_VALUES = (
    b"0", b"1", b"-1", b"1.5", b"inf", b"-inf", b"nan", b"true", b'""', b'"a"', b'"\\u0000"', b'"\\u202e"', b"[]",
    b"{}",
    b"[[]]", b"[1]", b'["a"]', b'["a", 1]', b"{a = 1}", b"9223372036854775808", b"1" * 400, b"0x" + b"f" * 40,
    b"0x" + b"f" * 5000, b"1e999", b"1e-999", b"1979-05-27T07:32:00Z", b"07:32:00", b"1979-05-27", b"'''\n'''",
    b"[" * 3000,
    b"[" * 400 + b"]" * 400, b"{a=" * 400 + b"1" + b"}" * 400, b"{a=" * 20_000, b'"' + b"x" * 3000 + b'"',
)  # fmt: skip
_TOML_LINES = (
    b"[x]", b"[[x]]", b"[run]", b"[run.x]", b"[[run]]", b"x = 1", b"x.y.z = 1", b".".join([b"a"] * 2000) + b" = 1",
    b"[" + b".".join([b"a"] * 2000) + b"]", b"= 1", b'"" = 1', b"\xff", b"\x00", b"# \x7f",
)  # fmt: skip
_BYTES = (
    *(bytes([byte]) for byte in (0, 1, 2, 10, 32, 34, 63, 64, 65, 127, 128, 192, 255)),
    b"\xff" * 9 + b"\x01", b"\x00" * 8, b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f",
    b"\x00\x00\x00\x80", b"\xff" * 7 + b"\x7f", b"\x00\x00\x01\x00", b"\xed\xa0\x80", b"\r\n", b"..", b"/",
    *(struct.pack("<f", value) for value in (float("nan"), float("inf"), 3.4e38, -3.4e38, 1e-45)),
)  # fmt: skip
_MARKED = re.compile(rb'"\\u0001raw(\d+)#"')
_NUMBER = re.compile(rb"-?\d+")


def mutated(seed: Seed, luck: Random, words: tuple[bytes, ...] = ()) -> bytes:
    """Returns the seed's content after a few changes, not closed yet."""
    return changed(seed.content, seed.form, luck, words)


def changed(content: bytes, form: Form, luck: Random, words: tuple[bytes, ...] = ()) -> bytes:
    """Returns content of this form after a few changes; what is not of the form is changed as bytes."""
    made = None
    if form is Form.JSON and luck.random() < 0.85:
        made = _changed_json(content, luck)
    elif form is Form.TOML and luck.random() < 0.85:
        made = _changed_toml(content, luck)
    elif form is Form.TEXT and luck.random() < 0.6:
        made = _changed_text(content, luck, words)
    return (damaged(content, luck, words) if made is None else made)[:MOST_INPUT_BYTES]


def damaged(content: bytes, luck: Random, words: tuple[bytes, ...] = ()) -> bytes:
    """Returns the content after one to four changes: bits, bytes, hostile numbers, cuts, insertions, repeats."""
    made = bytearray(content)
    for _ in range(luck.choice((1, 1, 2, 3, 4))):
        at, kind = luck.randrange(len(made) + 1), luck.randrange(8)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << luck.randrange(8)
        elif kind == 1 and at < len(made):
            made[at] = luck.randrange(256)
        elif kind == 2:
            hostile = luck.choice(_BYTES)
            made[at : at + len(hostile)] = hostile
        elif kind == 3:
            del made[at : at + luck.randrange(1, 9)]
        elif kind == 4:
            made[at:at] = luck.randbytes(luck.randrange(1, 9))
        elif kind == 5:
            start = luck.randrange(len(made) + 1)
            made[at:at] = made[start : start + luck.randrange(1, 65)]
        elif kind == 6 and words:
            word = luck.choice(words)
            made[at : at + luck.choice((0, len(word)))] = word
        elif kind == 7 and luck.random() < 0.3:
            del made[at:]
    return bytes(made)


def _changed_json(content: bytes, luck: Random) -> bytes | None:
    try:
        tree = [json.loads(content)]
    except (ValueError, RecursionError):
        return None
    for _ in range(luck.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            break
        _change_place(*luck.choice(places), places, luck)
    try:
        text = json.dumps(tree[0], separators=(",", ":")) if tree else ""
    except RecursionError:  # it may be read deeper than it may be written
        return None
    return _MARKED.sub(lambda found: _RAW_JSON[int(found[1]) % len(_RAW_JSON)], text.encode())


def _places(tree: Any) -> Any:
    """Yields (container, key) of every node."""
    todo = [tree]
    while todo:
        node = todo.pop()
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in entries:
            yield node, key
            if isinstance(value, dict | list):
                todo.append(value)


def _change_place(node: Any, key: Any, places: list[tuple[Any, Any]], luck: Random) -> None:
    # A change before may have taken the place away.
    if (isinstance(node, dict) and key not in node) or (isinstance(node, list) and key >= len(node)):
        return
    value, kind = node[key], luck.randrange(9)
    if kind <= 2:
        node[key] = deepcopy(luck.choice(_VALUES))
    elif kind <= 4:
        node[key] = f"{_RAW}{luck.randrange(len(_RAW_JSON))}#"
    elif kind == 5:
        del node[key]
    elif kind == 6:
        node[key] = luck.choice(([value], {"a": value}, [value, value], {"v": 1, "x": value}, str(value)[:1000]))
    elif kind == 7 and isinstance(value, int | float) and abs(value) < 1e300 and not isinstance(value, bool):
        node[key] = luck.choice((value + 1, value - 1, -value, value * 2.5, float(value), value * 10**9))
    elif kind == 7 and isinstance(value, str) and value:
        at = luck.randrange(len(value))
        node[key] = (
            value[:at]
            + luck.choice(("", "\x00", "/", "ä", value, " ", "9", "\ud800"))
            + value[at + luck.randrange(2) :]
        )
    elif isinstance(node, dict):
        node[luck.choice((f"{key}x", "", "v", str(luck.choice(places)[1])))] = luck.choice((value, *_VALUES[:8]))
    else:
        node.append(value)


def _changed_toml(content: bytes, luck: Random) -> bytes:
    lines = content.split(b"\n")
    for _ in range(luck.choice((1, 1, 2, 3))):
        at, kind = luck.randrange(len(lines)), luck.randrange(7)
        name, is_pair, value = lines[at].partition(b"=")
        if kind <= 2 and is_pair:
            lines[at] = name + b"= " + luck.choice(_TOML_VALUES)
        elif kind == 3:
            lines.insert(at, luck.choice((*_TOML_LINES, *lines)))
        elif kind == 4 and len(lines) > 1:
            del lines[at]
        elif kind == 5 and is_pair:
            lines[at] = luck.choice((b"x", name.strip() + b"_", b'""', name.strip() + b".y")) + b" =" + value
        elif numbers := list(_NUMBER.finditer(lines[at])):
            found = luck.choice(numbers)
            lines[at] = lines[at][: found.start()] + luck.choice(_TOML_VALUES[:12]) + lines[at][found.end() :]
    return b"\n".join(lines)


def _changed_text(content: bytes, luck: Random, words: tuple[bytes, ...]) -> bytes:
    tokens = re.split(rb"([\s,;:=|/]+)", content)
    for _ in range(luck.choice((1, 1, 2, 3))):
        at, kind = luck.randrange(len(tokens)), luck.randrange(5)
        if kind == 0:
            tokens[at] = luck.choice(
                (*words, b"", b"0", b"-1", b"1e999", b"nan", b"9" * 30, b"x" * 300, b"\xff", b"\x00")
            )
        elif kind == 1:
            count = luck.choice((2, 3, 50))
            tokens[at] = tokens[at][: MOST_INPUT_BYTES // count] * count
        elif kind == 2:
            tokens.insert(at, luck.choice(tokens))
        elif kind == 3 and len(tokens) > 1:
            del tokens[at]
        elif numbers := list(_NUMBER.finditer(tokens[at])):
            found = luck.choice(numbers)
            number = luck.choice((b"0", b"-1", b"1.5", b"2147483648", b"9" * 19, b"9" * 400, b"1e9"))
            tokens[at] = tokens[at][: found.start()] + number + tokens[at][found.end() :]
    return b"".join(tokens)
