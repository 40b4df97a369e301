"""Rows on stdout: a table for people, JSON and CSV for programs."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click

JSON_VERSION = 1
FORMATS = ("table", "json", "csv")

Function = TypeVar("Function", bound=Callable[..., Any])
Rows = Sequence[Mapping[str, Any]]

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


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
        click.echo(json.dumps({"v": JSON_VERSION, "kind": kind, "rows": selected}, indent=2, ensure_ascii=False))
    elif fmt == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_format_csv_cell(row.get(name)) for name in columns] for row in rows)
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
            writer.writerows([_format_csv_cell(row.get(name)) for name in columns] for row in page)
        return
    head = json.dumps({"v": JSON_VERSION, "kind": kind, "rows": []}, indent=2)
    click.echo(head.removesuffix("]\n}"), nl=False)
    separator = ""
    for row in (row for page in pages for row in page):
        text = json.dumps({name: row.get(name) for name in columns}, indent=2, ensure_ascii=False)
        click.echo(f"{separator}\n{textwrap.indent(text, '    ')}", nl=False)
        separator = ","
    click.echo("\n  ]\n}" if separator else "]\n}")


def select_known_columns(rows: Rows, columns: Sequence[str], optional: Collection[str]) -> list[str]:
    """Returns the columns without optional ones that are empty in all rows."""
    return [name for name in columns if name not in optional or any(row.get(name) not in (None, "") for row in rows)]


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
    # A device's name or reason may contain line breaks and terminal escapes.
    return "".join(character if character.isprintable() else "\ufffd" for character in str(value))


def _format_number(name: str, value: float) -> str:
    if name == "at" or name.endswith("_at"):
        return datetime.fromtimestamp(value, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
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
    from edgefl.cli.table_layout import render_table  # noqa: PLC0415 fast start

    if title:
        click.secho(title, bold=True)
    cells = [[format_value(name, row.get(name)) for name in columns] for row in rows]
    width = shutil.get_terminal_size().columns
    for line in render_table(
        [_format_heading(name) for name in columns], cells, _find_numeric_columns(rows, columns), width
    ):
        click.echo(line)


def _print_plain_table(rows: Rows, columns: Sequence[str], title: str | None) -> None:
    if title:
        click.echo(title)
    numeric = _find_numeric_columns(rows, columns)
    lines = [
        [_format_heading(name) for name in columns],
        *([format_value(name, row.get(name)) for name in columns] for row in rows),
    ]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        click.echo(_align_cells(line, widths, numeric))


def _align_cells(cells: Iterable[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, numeric, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _find_numeric_columns(rows: Rows, columns: Sequence[str]) -> list[bool]:
    def is_numeric(name: str) -> bool:
        values = [row.get(name) for row in rows if row.get(name) is not None]
        return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)

    return [is_numeric(name) for name in columns]


def _format_heading(name: str) -> str:
    return name.replace("_", " ")


def _format_csv_cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list | tuple) else value
