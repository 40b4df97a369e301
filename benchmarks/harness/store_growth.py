"""How large a store ought to be: the bytes of its rows as SQLite writes them, and how full its pages are.

Source: https://www.sqlite.org/fileformat2.html, sections 1.6 (cells of b-trees) and 2.1 (records).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE_FILL, INDEX_FILL = 0.93, 0.86
"""How full pages are: rows are added at the end, entries of an index where their device or run is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """What a store held at a moment, by table, indexes included: rows, bytes of their pages, and bytes as computed.

    `used_bytes` is all pages but the free ones, `file_bytes` all of them.
    """

    rows: Mapping[str, int]
    bytes_of: Mapping[str, int]
    computed: Mapping[str, float]
    used_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """What a table gained between two moments."""

    table: str
    num_rows: int
    num_bytes: int
    computed_bytes: float


def stock(path: Path) -> Stock:
    """Returns what is in a store now; its coordinator may be running."""
    with _reading(path) as store:
        tables = [row[0] for row in store.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY 1")]
        rows = {name: _one(store, f'SELECT count(*) FROM "{name}"') for name in tables}
        sizes = store.execute(
            "SELECT coalesce(m.tbl_name, s.name), sum(s.pgsize) FROM dbstat s LEFT JOIN sqlite_master m "
            "ON m.name = s.name GROUP BY 1"
        ).fetchall()
        page_bytes, num_pages, num_free = (
            _one(store, f"PRAGMA {what}") for what in ("page_size", "page_count", "freelist_count")
        )
        return Stock(
            rows=rows,
            bytes_of=dict(sizes),
            computed={name: computed_bytes(store, name) for name in tables},
            used_bytes=page_bytes * (num_pages - num_free),
            file_bytes=page_bytes * num_pages,
        )


def computed_bytes(store: sqlite3.Connection, table: str) -> float:
    """Returns what a table and its indexes ought to take, from the values that stand in them."""
    columns = [row[1] for row in store.execute(f'PRAGMA table_info("{table}")')]
    # A row's number stands beside its record, in a variable length; a primary key of type INTEGER is that number.
    key = [row[1] for row in store.execute(f'PRAGMA table_info("{table}")') if row[5] and row[2].upper() == "INTEGER"]
    beside = "(CASE WHEN rowid < 128 THEN 1 WHEN rowid < 16384 THEN 2 WHEN rowid < 2097152 THEN 3 ELSE 4 END)"
    total = _sum(store, table, columns, beside, nulls=key) / TABLE_FILL
    for index in [row[1] for row in store.execute(f'PRAGMA index_list("{table}")')]:
        names = [row[2] or "rowid" for row in store.execute(f'PRAGMA index_xinfo("{index}")')]
        total += _sum(store, table, names, "0") / INDEX_FILL
    return total


def grown(before: Stock, after: Stock) -> list[Grown]:
    """Returns what each table gained, the largest gain first; tables that gained nothing are left out."""
    found = [
        Grown(
            table=table,
            num_rows=num_rows - before.rows.get(table, 0),
            num_bytes=after.bytes_of.get(table, 0) - before.bytes_of.get(table, 0),
            computed_bytes=after.computed[table] - before.computed.get(table, 0),
        )
        for table, num_rows in after.rows.items()
    ]
    return sorted((one for one in found if one.num_rows or one.num_bytes), key=lambda one: -one.num_bytes)


def ratio(before: Stock, after: Stock) -> float:
    """Returns by how much the store grew, over what is computed from the rows that it gained."""
    computed = sum(one.computed_bytes for one in grown(before, after))
    if computed <= 0:
        raise ValueError("no rows were written: nothing is computed that the store could have grown by")
    return (after.used_bytes - before.used_bytes) / computed


def table(before: Stock, after: Stock) -> str:
    """Returns the same for reading."""
    lines = [f"{'table':18}{'rows':>10}{'kB':>10}{'B a row':>9}{'computed kB':>13}"]
    for one in grown(before, after):
        each = f"{one.num_bytes / one.num_rows:9.0f}" if one.num_rows > 0 else f"{'':9}"
        computed = one.computed_bytes / 1e3
        lines.append(f"{one.table:18}{one.num_rows:10}{one.num_bytes / 1e3:10.1f}{each}{computed:13.1f}")
    return "\n".join(lines)


def _sum(
    store: sqlite3.Connection, table: str, columns: list[str], beside: str, *, nulls: list[str] | None = None
) -> int:
    """Returns the bytes of all cells that hold these columns: type and value of each, length, header, pointer."""
    bodies = " + ".join(_body(f'"{name}"') for name in columns if name not in (nulls or [])) or "0"
    types = " + ".join(_type(f'"{name}"') for name in columns)
    content = f"(1 + {types} + {bodies})"
    cell = f"2 + {beside} + (CASE WHEN {content} < 128 THEN 1 ELSE 2 END) + {content}"
    return _one(store, f'SELECT coalesce(sum({cell}), 0) FROM "{table}"')


def _body(column: str) -> str:
    size = f"length(CAST({column} AS BLOB))"
    # A number without a fraction is stored as an integer, whatever the column is.
    whole = f"({column} = CAST({column} AS INTEGER) AND abs({column}) < 140737488355328)"
    return (
        f"(CASE typeof({column}) WHEN 'null' THEN 0 WHEN 'text' THEN {size} WHEN 'blob' THEN {size} "
        f"WHEN 'integer' THEN {_integer(column)} ELSE CASE WHEN {whole} THEN {_integer(column)} ELSE 8 END END)"
    )


def _integer(column: str) -> str:
    limits = ((127, 1), (32767, 2), (8388607, 3), (2147483647, 4), (140737488355327, 6))
    magnitude = f"(CASE WHEN {column} < 0 THEN -1 - {column} ELSE {column} END)"
    cases = " ".join(f"WHEN {magnitude} <= {limit} THEN {size}" for limit, size in limits)
    return f"(CASE WHEN {column} IN (0, 1) THEN 0 {cases} ELSE 8 END)"


def _type(column: str) -> str:
    """Returns the bytes that say of which type and length a value is."""
    return (
        f"(CASE WHEN typeof({column}) IN ('text', 'blob') AND length(CAST({column} AS BLOB)) > 57 THEN 2 ELSE 1 END)"
    )


def _one(store: sqlite3.Connection, query: str) -> int:
    return int(store.execute(query).fetchone()[0])


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as store:
        store.execute("BEGIN")  # all of it at one moment
        yield store
