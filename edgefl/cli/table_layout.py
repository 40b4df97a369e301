"""Table layout for a terminal of a given width, without wrapping across columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest

_GAP = "  "
_MAX_UNBROKEN_CHARS = 12
_BLANK_CELLS = frozenset({"", "-"})


def render_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[bool], max_width: int
) -> list[str]:
    """Returns the lines of a table of at most `max_width`.

    A table that is too wide loses its empty columns, then a first column that is the same in all rows goes above it,
    then words are wrapped. If it is still too wide, it becomes a block of lines per row.

    Args:
        headings: of the columns; their words may stand below each other.
        rows: cells by column.
        numeric: columns that are aligned to the right.
        max_width: characters in a line.
    """
    columns = list(range(len(headings)))
    if _compute_total_width(headings, rows, columns) > max_width:
        columns = [index for index in columns if any(row[index] not in _BLANK_CELLS for row in rows)] or columns
    lines = []
    if (
        _compute_total_width(headings, rows, columns) > max_width
        and len(rows) > 1
        and len({row[columns[0]] for row in rows}) == 1
    ):
        lines.append(f"{headings[columns[0]]} {rows[0][columns.pop(0)]}")
    widths = _compute_widths(headings, rows, columns, max_width)
    if widths is None:
        return lines + _render_blocks(headings, rows, columns, max_width)
    right = [numeric[index] for index in columns]
    lines += _render_row([headings[index] for index in columns], widths, right, is_heading=True)
    lines.append(_GAP.join("─" * wide for wide in widths))
    for row in rows:
        lines += _render_row([row[index] for index in columns], widths, right)
    return lines


def _compute_min_width(text: str) -> int:
    return max((len(piece) for piece, _ in _split_pieces(text)), default=1)


def _split_pieces(text: str) -> list[tuple[str, str]]:
    """Returns the unbreakable pieces of a cell, each with its separator from the one before."""
    pieces: list[tuple[str, str]] = []
    for word in text.split():
        # Ids break after a hyphen; dates, numbers and short words do not.
        parts = re.findall("-?[^-]+-?|-", word) if len(word) > _MAX_UNBROKEN_CHARS else [word]
        pieces += [(part, "" if index else " ") for index, part in enumerate(parts)]
    return pieces


def _compute_total_width(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int]) -> int:
    return sum(_compute_natural_width(headings, rows, index) for index in columns) + len(_GAP) * (len(columns) - 1)


def _compute_natural_width(headings: Sequence[str], rows: Sequence[Sequence[str]], column: int) -> int:
    return max(_compute_min_width(headings[column]), *(len(row[column]) for row in rows), 1)


def _compute_widths(
    headings: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int], max_width: int
) -> list[int] | None:
    """Returns the width of each kept column; None when no widths fit."""
    widths = [_compute_natural_width(headings, rows, index) for index in columns]
    minimums = [
        max(_compute_min_width(headings[index]), *(_compute_min_width(row[index]) for row in rows), 1)
        for index in columns
    ]
    excess = sum(widths) + len(_GAP) * (len(columns) - 1) - max_width
    while excess > 0:
        slack = [wide - low for wide, low in zip(widths, minimums, strict=True)]
        if max(slack) == 0:
            return None
        widths[slack.index(max(slack))] -= 1
        excess -= 1
    return widths


def _render_row(
    cells: Sequence[str], widths: Sequence[int], right: Sequence[bool], *, is_heading: bool = False
) -> list[str]:
    """Returns the lines of one row, each cell wrapped to its column; headings are bottom-aligned (`is_heading`)."""
    cell_lines = [_wrap_cell(cell, wide) for cell, wide in zip(cells, widths, strict=True)]
    if is_heading:
        high = max(map(len, cell_lines))
        cell_lines = [[""] * (high - len(lines)) + lines for lines in cell_lines]
    return [_join_cells(parts, widths, right) for parts in zip_longest(*cell_lines, fillvalue="")]


def _wrap_cell(cell: str, width: int) -> list[str]:
    if len(cell) <= width:
        return [cell]
    lines: list[str] = []
    for piece, separator in _split_pieces(cell):
        if lines and len(lines[-1]) + len(separator) + len(piece) <= width:
            lines[-1] += separator + piece
        else:
            lines.append(piece)
    return lines


def _join_cells(parts: Iterable[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = [
        part.rjust(wide) if flush else part.ljust(wide)
        for part, wide, flush in zip(parts, widths, right, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def _render_blocks(
    headings: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int], max_width: int
) -> list[str]:
    indent = max(len(headings[index]) for index in columns) + len(_GAP)
    lines: list[str] = []
    for row in rows:
        for index in columns:
            first, *more = textwrap.wrap(row[index], max(max_width - indent, 20)) or [""]
            lines.append(f"{headings[index]:<{indent}}{first}".rstrip())
            lines += [" " * indent + continuation for continuation in more]
        lines.append("")
    return lines[:-1]
