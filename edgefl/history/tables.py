"""A table of rows as a fleet's history has them: for a notebook, pandas, polars, Arrow and Parquet."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, overload

from edgefl.core.errors import MissingPackageError, format_install_command
from edgefl.core.safe_text import dump_readable_json, escape_text
from edgefl.core.types import Json
from edgefl.storage.queries.columns import JSON_COLUMNS, is_text_column

MAX_DISPLAYED_ROWS = 60
"""Rows of a table that a notebook shows."""


class Table(Sequence[Json]):
    """Rows of one kind, oldest first, each a mapping; a notebook shows them as a table.

    Args:
        rows: the rows.
        columns: their names, in the order of the cells.
        kind: of the history, or `""`; it says which columns are text.
    """

    def __init__(self, rows: Iterable[Json], columns: Sequence[str], kind: str = "") -> None:
        self.rows, self.columns, self.kind = list(rows), tuple(columns), kind

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Json: ...
    @overload
    def __getitem__(self, index: slice) -> Table: ...
    def __getitem__(self, index: int | slice) -> Json | Table:
        if isinstance(index, slice):
            return Table(self.rows[index], self.columns, self.kind)
        return self.rows[index]

    def __repr__(self) -> str:
        return f"Table({len(self)} rows: {', '.join(self.columns)})"

    def _repr_html_(self) -> str:
        newest = self.rows[-MAX_DISPLAYED_ROWS:]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        lines = ("".join(f"<td>{_format_cell(row.get(name))}</td>" for name in self.columns) for row in newest)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        left_out = len(self) - len(newest)
        note = f"<p>the newest {len(newest)} of {len(self)} rows</p>" if left_out else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame`; cells that are objects stay dictionaries.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        return _import("pandas").DataFrame(self.rows, columns=list(self.columns))

    def to_polars(self) -> Any:
        """Returns a `polars.DataFrame`, with the types of `to_arrow`.

        Raises:
            MissingPackageError: polars or pyarrow is not installed.
        """
        return _import("polars").from_arrow(self.to_arrow())

    def to_arrow(self) -> Any:
        """Returns a `pyarrow.Table`: text as strings, objects as JSON text, all else as numbers.

        Raises:
            MissingPackageError: pyarrow is not installed.
        """
        return _make_arrow(self.rows, self.columns, self.kind)


def write_parquet(path: Path, columns: Sequence[str], kind: str, pages: Iterator[list[Json]]) -> None:
    """Writes pages of rows of one kind as a Parquet file, with the types of `Table.to_arrow`.

    Raises:
        MissingPackageError: pyarrow is not installed.
        OSError: the file cannot be written.
    """
    arrow, parquet = _import("pyarrow"), _import("pyarrow.parquet")
    tables = [_make_arrow(page, columns, kind) for page in pages] or [_make_arrow([], columns, kind)]
    # A column without values in one page, or with whole numbers there, is of the type of the others.
    parquet.write_table(arrow.concat_tables(tables, promote_options="permissive"), path)


def _make_arrow(rows: Sequence[Json], columns: Sequence[str], kind: str) -> Any:
    arrow = _import("pyarrow")

    def make_column(name: str) -> Any:
        is_text = name in JSON_COLUMNS or is_text_column(kind, name)
        convert: Callable[[object], object] = _to_text if is_text else _to_scalar
        values = [None if row.get(name) is None else convert(row[name]) for row in rows]
        return arrow.array(values, arrow.string() if is_text else None)

    return arrow.table({name: make_column(name) for name in columns})


def _to_text(value: object) -> str:
    return value if isinstance(value, str) else dump_readable_json(value)


def _to_scalar(value: object) -> object:
    return dump_readable_json(value) if isinstance(value, dict | list) else value


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else _to_text(value)
    return html.escape(escape_text(text))


def _import(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackageError(
            f"this table is made with {package}, which cannot be imported ({error}); "
            f"install it with: {format_install_command(package)}"
        ) from None
