"""Copies of a SQLite store while somebody writes it, and what can be said of one without changing it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.errors import StoreError, StoreTooNewError
from edgefl.storage.database import BUSY_TIMEOUT_S, SCHEMA_REVISION
from edgefl.storage.failures import full_disk_explained

_PROBLEMS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseReport:
    """What was found in a store: its schema's revision, and what `PRAGMA quick_check` complains about."""

    revision: str
    problems: tuple[str, ...]


def copy_database(source: Path, target: Path) -> None:
    """Writes a new file with one state of a database that others may be writing meanwhile; nobody has to wait.

    Raises:
        StoreError: there is no such database, or it cannot be copied.
        StoreFullError: no room.
    """
    if not source.is_file():
        raise StoreError(f"no store at {source}")
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        with (
            full_disk_explained(str(target)),
            closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_S)) as old,
            closing(sqlite3.connect(target)) as new,
        ):
            # All pages in one step: a step later than a writer's commit would begin from the start again.
            old.backup(new)
            # Without a WAL beside it the copy is one file.
            new.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise StoreError(f"store {source} cannot be copied: {error}") from None


def check_database(path: Path) -> DatabaseReport:
    """Returns how a store is, without writing a byte.

    Raises:
        StoreTooNewError: a newer edgefl wrote it.
        StoreError: it is no store of ours, or cannot be read.
    """
    if not path.is_file():
        raise StoreError(f"no store at {path}")
    try:
        with closing(sqlite3.connect(_read_only(path), uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
            revision = _revision(connection, path)
            found = _quick_check(connection)
    except sqlite3.Error as error:
        raise StoreError(f"store {path} cannot be read: {error}") from None
    problems = () if found == ["ok"] else tuple(found[:_PROBLEMS_SHOWN])
    return DatabaseReport(revision=revision, problems=problems)


def _quick_check(connection: sqlite3.Connection) -> list[str]:
    try:
        return [str(row[0]) for row in connection.execute("PRAGMA quick_check(10)")]
    except sqlite3.DatabaseError as error:
        # Some damage stops the check itself.
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CORRUPT:
            return [str(error)]
        raise


def named_models(path: Path) -> frozenset[str]:
    """Returns the SHA-256 of every model that the store names; raises as `check_database`."""
    return frozenset(row[0] for row in _rows(path, "SELECT sha256 FROM checkpoints"))


def device_versions(path: Path) -> dict[str, str]:
    """Returns which edgefl each device of the fleet has, as far as it said; raises as `check_database`."""
    query = "SELECT device_id, version FROM devices WHERE removed_at IS NULL AND version IS NOT NULL"
    return dict(_rows(path, query))


def _rows(path: Path, query: str) -> list[Any]:
    try:
        with closing(sqlite3.connect(_read_only(path), uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
            return connection.execute(query).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"store {path} cannot be read: {error}") from None


def _revision(connection: sqlite3.Connection, path: Path) -> str:
    try:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.OperationalError:
        row = None
    if row is None or not str(row[0]).isdigit():
        raise StoreError(f"{path} is a database, but not of edgefl")
    if int(row[0]) > int(SCHEMA_REVISION):
        raise StoreTooNewError(
            f"store {path} was written by a newer edgefl (revision {row[0]}, this program knows {SCHEMA_REVISION}); "
            "update edgefl"
        )
    return str(row[0])


def _read_only(path: Path) -> str:
    # Where nobody has it open, SQLite would make the WAL's two files to read a database in WAL mode.
    is_alone = not Path(f"{path}-wal").exists()
    return f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if is_alone else "")
