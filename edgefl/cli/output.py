"""Output of the commands: help of a group, and rows as a table for people or as JSON and CSV for programs."""

from __future__ import annotations

import contextlib
import csv
import inspect
import json
import logging
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any, TypeVar

import click

from edgefl.core.safe_text import dump_readable_json, escape_lines, escape_text, format_csv_cell

JSON_VERSION = 1
SHORT_HASH_DIGITS = 12
"""Digits of a SHA-256 in a table."""
FORMATS = ("table", "json", "csv")
_SHARES = frozenset({"seconds_error", "bytes_error", "joules_error"})
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_GAP = "  "
_MAX_UNBROKEN_CHARS = 12
_BLANK_CELLS = frozenset({"", "-"})

Function = TypeVar("Function", bound=Callable[..., Any])
Rows = Sequence[Mapping[str, Any]]

text_format_option = click.option(
    "--format", "style", type=click.Choice(["text", "json"]), default="text", show_default=True
)


class FullHelpGroup(click.Group):
    """Command group with full summaries: Click itself cuts a command's first sentence after 45 letters."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that the arguments name; a mistyped name gets a hint."""
        from edgefl.core.settings import find_similar  # noqa: PLC0415 fast start

        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            similar = find_similar(name, self.list_commands(ctx))
            hint = f"did you mean {ctx.command_path} {similar}?" if similar else f"see {ctx.command_path} --help"
            ctx.fail(f"there is no command {name!r}: {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    (name, _format_summary(command))
                    for name in self.list_commands(ctx)
                    if (command := self.get_command(ctx, name)) is not None and not command.hidden
                ]
            )


def _format_summary(command: click.Command) -> str:
    paragraph = inspect.cleandoc(command.help or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


def format_option(function: Function) -> Function:
    """Adds `--format table|json|csv`; the command gets it as `fmt`."""
    option = click.option(
        "--format",
        "fmt",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="How to print: for people (UTC), or exact values for programs (unix seconds).",
    )
    return option(function)


def make_broker_option(name: str) -> Callable[[Function], Function]:
    """Returns the option, of that name, of the commands that start a broker."""
    return click.option(
        name,
        type=click.Choice(["auto", "mosquitto", "embedded"]),
        default="auto",
        show_default=True,
        help="auto is mosquitto when it is installed, else embedded.",
    )


def echo(text: str, *, err: bool = False) -> None:
    """Prints lines that may hold names, reasons or errors of boards and users."""
    click.echo(escape_lines(text), err=err)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Prints a JSON value with its letters readable, and nothing that a terminal would obey."""
    click.echo(dump_readable_json(value, indent=indent))


def print_rows(
    rows: Rows, columns: Sequence[str], fmt: str = "table", title: str | None = None, *, kind: str = "rows"
) -> None:
    """Prints rows to stdout.

    Args:
        rows: by column name; a missing value is empty.
        columns: in this order; JSON has only these, too.
        fmt: table, json (`{"v": 1, "kind": ..., "rows": [...]}`) or csv.
        title: above a table.
        kind: of the rows, in JSON.
    """
    if fmt == "json":
        selected = [{name: row.get(name) for name in columns} for row in rows]
        print_json({"v": JSON_VERSION, "kind": kind, "rows": selected})
    elif fmt == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([format_csv_cell(row.get(name)) for name in columns] for row in rows)
    elif sys.stdout.isatty():
        _print_terminal_table(rows, columns, title)
    else:
        _print_plain_table(rows, columns, title)


def print_pages(pages: Iterable[Rows], columns: Sequence[str], fmt: str, *, kind: str) -> None:
    """Prints rows to stdout as they come, as json or csv, with the same text as `print_rows`."""
    if fmt == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        for page in pages:
            writer.writerows([format_csv_cell(row.get(name)) for name in columns] for row in page)
        return
    head = json.dumps({"v": JSON_VERSION, "kind": kind, "rows": []}, indent=2)
    click.echo(head.removesuffix("]\n}"), nl=False)
    separator = ""
    for row in (row for page in pages for row in page):
        text = dump_readable_json({name: row.get(name) for name in columns}, indent=2)
        click.echo(f"{separator}\n{textwrap.indent(text, '    ')}", nl=False)
        separator = ","
    click.echo("\n  ]\n}" if separator else "]\n}")


def select_known_columns(rows: Rows, columns: Sequence[str], optional: Collection[str]) -> list[str]:
    """Returns the columns without optional ones that are empty in all rows."""
    return [
        name for name in columns if name not in optional or any(row.get(name) not in (None, "", {}) for row in rows)
    ]


def format_value(name: str, value: Any) -> str:
    """Returns a value for people to read; the column's name determines the format."""
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    if isinstance(value, int | float):
        return _format_number(name, value)
    if isinstance(value, Mapping):
        return " ".join(f"{format_value('', key)}={format_value('', entry)}" for key, entry in value.items()) or "-"
    if isinstance(value, list | tuple | set):
        return ", ".join(format_value("", entry) for entry in value) or "-"
    return escape_text(str(value))


def _format_number(name: str, value: float) -> str:
    if name == "at" or name.endswith("_at"):
        return datetime.fromtimestamp(value, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
    if name in _SHARES:
        return f"{value:+.1%}"
    if name.startswith("bytes_") or name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def format_bytes(count: float) -> str:
    """Returns a size with a decimal unit."""
    size = float(count)
    for unit in _BYTE_UNITS[:-1]:
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} {_BYTE_UNITS[-1]}"


def _print_terminal_table(rows: Rows, columns: Sequence[str], title: str | None) -> None:
    if title:
        click.secho(escape_text(title), bold=True)
    cells = [[format_value(name, row.get(name)) for name in columns] for row in rows]
    width = shutil.get_terminal_size().columns
    for line in render_table(
        [format_heading(name) for name in columns], cells, _find_numeric_columns(rows, columns), width
    ):
        click.echo(line)


def _print_plain_table(rows: Rows, columns: Sequence[str], title: str | None) -> None:
    if title:
        click.echo(escape_text(title))
    numeric = _find_numeric_columns(rows, columns)
    lines = [
        [format_heading(name) for name in columns],
        *([format_value(name, row.get(name)) for name in columns] for row in rows),
    ]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        click.echo(_join_cells(line, widths, numeric))


def _find_numeric_columns(rows: Rows, columns: Sequence[str]) -> list[bool]:
    def is_numeric(name: str) -> bool:
        values = [row.get(name) for row in rows if row.get(name) is not None]
        return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)

    return [is_numeric(name) for name in columns]


def format_heading(name: str) -> str:
    return name.replace("_", " ")


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


@contextlib.contextmanager
def silence_recorder() -> Iterator[None]:
    """Keeps lost instructions and evaluations off stderr: they are rows, thousands in simulated fleets."""
    log = logging.getLogger("edgefl.coordinator.runs.history_recorder")
    original_level = log.level
    if logging.getLogger().level > logging.DEBUG:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(original_level)
