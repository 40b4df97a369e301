"""A table laid out for a terminal of a given width, so that no column is torn apart."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

_GAP = "  "
_WHOLE = 12
_BLANK = frozenset({"", "-"})


def fitted(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], width: int) -> list[str]:
    """Returns the lines of a table that is at most so wide.

    A table that is too wide loses the columns that hold nothing, then a first column that is the same in all rows
    goes above it, then words go to lines of their own. One that is too wide even so becomes a block of lines a row.

    Args:
        headings: of the columns; their words may stand below each other.
        rows: cells by column.
        numeric: columns that are aligned to the right.
        width: characters in a line.
    """
    kept = list(range(len(headings)))
    if _needed(headings, rows, kept) > width:
        kept = [index for index in kept if any(row[index] not in _BLANK for row in rows)] or kept
    lines = []
    if _needed(headings, rows, kept) > width and len(rows) > 1 and len({row[kept[0]] for row in rows}) == 1:
        lines.append(f"{headings[kept[0]]} {rows[0][kept.pop(0)]}")
    widths = _widths(headings, rows, kept, width)
    if widths is None:
        return lines + _blocks(headings, rows, kept, width)
    right = [numeric[index] for index in kept]
    lines += _stacked([headings[index] for index in kept], widths, right, bottom=True)
    lines.append(_GAP.join("─" * wide for wide in widths))
    for row in rows:
        lines += _stacked([row[index] for index in kept], widths, right)
    return lines


def _longest(text: str) -> int:
    return max((len(piece) for piece, _ in _pieces(text)), default=1)


def _pieces(text: str) -> list[tuple[str, str]]:
    """Returns what a line break may not cut, each with what stands before it on the same line."""
    pieces: list[tuple[str, str]] = []
    for word in text.split():
        # Ids break after a hyphen; dates, numbers and short words do not.
        parts = re.findall("-?[^-]+-?|-", word) if len(word) > _WHOLE else [word]
        pieces += [(part, "" if index else " ") for index, part in enumerate(parts)]
    return pieces


def _needed(headings: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int]) -> int:
    return sum(_natural(headings, rows, index) for index in kept) + len(_GAP) * (len(kept) - 1)


def _natural(headings: Sequence[str], rows: Sequence[Sequence[str]], index: int) -> int:
    return max(_longest(headings[index]), *(len(row[index]) for row in rows), 1)


def _widths(
    headings: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], width: int
) -> list[int] | None:
    """Returns how wide each kept column is; None when no widths fit."""
    widths = [_natural(headings, rows, index) for index in kept]
    least = [max(_longest(headings[index]), *(_longest(row[index]) for row in rows), 1) for index in kept]
    over = sum(widths) + len(_GAP) * (len(kept) - 1) - width
    while over > 0:
        spare = [wide - low for wide, low in zip(widths, least, strict=True)]
        if max(spare) == 0:
            return None
        widths[spare.index(max(spare))] -= 1
        over -= 1
    return widths


def _stacked(
    cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], *, bottom: bool = False
) -> list[str]:
    """Returns one row as lines, each cell wrapped to its column; headings stand on the rule (`bottom`)."""
    wrapped = [_wrapped(cell, wide) for cell, wide in zip(cells, widths, strict=True)]
    if bottom:
        high = max(map(len, wrapped))
        wrapped = [[""] * (high - len(lines)) + lines for lines in wrapped]
    return [_line(parts, widths, right) for parts in zip_longest(*wrapped, fillvalue="")]


def _wrapped(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines: list[str] = []
    for piece, before in _pieces(cell):
        if lines and len(lines[-1]) + len(before) + len(piece) <= width:
            lines[-1] += before + piece
        else:
            lines.append(piece)
    return lines


def _line(parts: Iterable[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        part.rjust(wide) if flush else part.ljust(wide)
        for part, wide, flush in zip(parts, widths, right, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def _blocks(headings: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[int], width: int) -> list[str]:
    margin = max(len(headings[index]) for index in kept) + len(_GAP)
    lines: list[str] = []
    for row in rows:
        for index in kept:
            first, *more = textwrap.wrap(row[index], max(width - margin, 20)) or [""]
            lines.append(f"{headings[index]:<{margin}}{first}".rstrip())
            lines += [" " * margin + rest for rest in more]
        lines.append("")
    return lines[:-1]
