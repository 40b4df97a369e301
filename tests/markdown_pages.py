"""Reads what the documents say: parts under a heading, cells of tables, code in backquotes and in blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {path: path.read_text() for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])}
"""Every text for people, by its path."""
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    """The page of this name, wherever it lies."""
    (found,) = [text for path, text in PAGES.items() if path.stem == name]
    return found


def fences(text: str, *languages: str) -> list[str]:
    """The blocks of code in these languages."""
    return [body for kind, body in _FENCE.findall(text) if kind in languages]


def inline_code(text: str) -> list[str]:
    """Every piece of code in running text; it may be broken over two lines."""
    return [" ".join(piece.split()) for piece in code(_FENCE.sub("", text))]


def part(text: str, title: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert level is not None, f"no heading {title!r}"
    return re.split(rf"^#{{1,{len(level[1])}}} ", text[level.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table in a text, without the heads."""
    found = re.findall(r"^\|.+\|\n\|[-|]+\|\n((?:\|.+\|\n)+)", text, re.MULTILINE)
    return [[[cell.strip() for cell in line[1:-1].split(" | ")] for line in body.splitlines()] for body in found]


def rows(text: str) -> list[list[str]]:
    return [row for table in tables(text) for row in table]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)
