r"""Escapes of text that boards, users and networks choose, for logs, terminals, CSV files and JSON.

Unsafe is what changes how other text is shown: control characters (C0, C1, delete), marks that reorder text or have
no width, separators of lines and paragraphs, unassigned and private characters, and lone surrogates. They become
their Python escapes, such as `\x1b` and `\u202e`. Letters of every script stay as they are.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

# Without width, although Python counts them as printable: joiners, fillers and variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\uffa0\ufe00-\ufe0f\U000e0100-\U000e01ef]"
)
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# OWASP, CSV injection; a spreadsheet reads the wide forms as the narrow ones.
_FORMULA_STARTS = tuple("=+-@\uff1d\uff0b\uff0d\uff20")
_TRACEBACK_INDENT = "  "


def is_safe_text(text: str) -> bool:
    """Returns whether the text has no unsafe character; a line break is one."""
    return text.isprintable() and _INVISIBLE.search(text) is None


def escape_text(text: str) -> str:
    r"""Returns the text as one line of visible characters; a line break becomes `\n`."""
    if is_safe_text(text):
        return text
    return "".join(char if is_safe_text(char) else _escape(char) for char in text)


def escape_start(text: str, max_chars: int) -> str:
    """Returns the first characters of the text as `escape_text`, with its white space joined."""
    return escape_text(" ".join(text.split()))[:max_chars]


def escape_lines(text: str) -> str:
    """Returns the text with its line breaks, and everything else as `escape_text`."""
    return "\n".join(map(escape_text, text.split("\n")))


def escape_values(value: Any) -> Any:
    """Returns a JSON value with all of its texts and keys as `escape_text`."""
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, Mapping):
        return {escape_text(str(key)): escape_values(entry) for key, entry in value.items()}
    return [escape_values(entry) for entry in value] if isinstance(value, list | tuple) else value


def dump_readable_json(value: Any, *, indent: int | None = None) -> str:
    r"""Returns JSON with the letters of every script, and `\uXXXX` for unsafe characters; the value is unchanged."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return "\n".join(
        line if is_safe_text(line) else "".join(c if is_safe_text(c) else json.dumps(c)[1:-1] for c in line)
        for line in text.split("\n")
    )


def format_csv_cell(value: Any) -> Any:
    """Returns a value for a CSV file: numbers unchanged, text that no spreadsheet takes for a formula.

    A text that begins like a formula and is no number gets an apostrophe in front, as OWASP recommends.
    """
    if isinstance(value, Mapping | list | tuple):
        return dump_readable_json(value)
    if not isinstance(value, str):
        return value
    text = escape_text(value)
    is_formula = text.lstrip().startswith(_FORMULA_STARTS) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula else text


LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class SafeFormatter(logging.Formatter):
    """Formatter whose messages are one safe line each; lines of a traceback follow, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 logging's name
        record.message = escape_text(record.message.rstrip("\n"))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 logging's name
        return _indent_lines(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 logging's name
        return _indent_lines(super().formatStack(stack_info))


def _indent_lines(text: str) -> str:
    # Indented, so that a line break in an error's message makes no line that looks like one of the log.
    return "\n".join(f"{_TRACEBACK_INDENT}{escape_text(line)}" for line in text.split("\n"))


def _escape(char: str) -> str:
    # The escapes of `repr`; a character that Python would print is written by its number.
    escaped = repr(char)[1:-1]
    if escaped != char:
        return escaped
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
