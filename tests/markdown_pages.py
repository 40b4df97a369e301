"""Reads what the documents say: parts under a heading, cells of tables, code in backquotes."""

import re


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
