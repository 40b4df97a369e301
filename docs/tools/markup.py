"""Small pieces of Markdown that the generated pages share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table; cells are Markdown, and bars in them are escaped."""
    lines = [_row(heads), "|" + "---|" * len(heads), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def code(text: object) -> str:
    return f"`{text}`"


def prose(text: str) -> str:
    """Returns plain text as Markdown: outside of code, brackets are no links or tags and stars no emphasis."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([\[\]<>*_])", r"\\\1", piece) for piece in pieces)


def sections(parts: Iterable[str]) -> str:
    """Returns the parts with a blank line between them."""
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def names_joined(docstring: str) -> str:
    """Returns a docstring in which `a, b: meaning` is `a,b: meaning`, which griffe reads as one name."""
    names = re.compile(r"^(\s+)(\w+(?:, \w+)+):", re.MULTILINE)
    return names.sub(lambda found: found[1] + found[2].replace(", ", ",") + ":", docstring)


def named(name: str) -> str:
    """Returns one or more joined names as code."""
    return ", ".join(code(item) for item in name.split(","))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
