"""Online copies of a SQLite store, and read-only queries of one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from edgefl.core.errors import StoreError
from edgefl.storage.database import BUSY_TIMEOUT_S, check_revision, translate_disk_full

_MAX_PROBLEMS = 3


def copy_database(source: Path, target: Path) -> None:
    """Writes a consistent copy of a database to a new file; concurrent writers do not have to wait.

    Raises:
        StoreError: there is no such database, or it cannot be copied.
        StoreFullError: no room.
    """
    if not source.is_file():
        raise StoreError(f"no store at {source}")
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    try:
        with (
            translate_disk_full(str(target)),
            closing(sqlite3.connect(source, timeout=BUSY_TIMEOUT_S)) as source_connection,
            closing(sqlite3.connect(target)) as target_connection,
        ):
            # All pages in one step: after a writer's commit the next step would start over.
            source_connection.backup(target_connection)
            # Without a WAL beside it the copy is one file.
            target_connection.execute("PRAGMA journal_mode = DELETE")
    except sqlite3.Error as error:
        raise StoreError(f"store {source} cannot be copied: {error}") from None


def check_database(path: Path) -> tuple[str, tuple[str, ...]]:
    """Returns a store's revision, and what `PRAGMA quick_check` complains of; writes no byte.

    Raises:
        StoreTooNewError: a newer edgefl wrote it.
        StoreError: not an edgefl store, or unreadable.
    """
    if not path.is_file():
        raise StoreError(f"no store at {path}")
    with _open_read_only(path) as connection:
        revision = _read_revision(connection, path)
        messages = _run_quick_check(connection)
    return revision, () if messages == ["ok"] else tuple(messages[:_MAX_PROBLEMS])


def _run_quick_check(connection: sqlite3.Connection) -> list[str]:
    try:
        return [str(row[0]) for row in connection.execute("PRAGMA quick_check(10)")]
    except sqlite3.DatabaseError as error:
        # Some damage stops the check itself.
        if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_CORRUPT:
            return [str(error)]
        raise


def list_model_hashes(path: Path) -> frozenset[str]:
    """Returns the SHA-256 of every model named in the store; raises as `check_database`."""
    return frozenset(row[0] for row in _read_rows(path, "SELECT sha256 FROM checkpoints"))


def get_device_versions(path: Path) -> dict[str, str]:
    """Returns the edgefl version of each device that reported one; raises as `check_database`."""
    query = "SELECT device_id, version FROM devices WHERE removed_at IS NULL AND version IS NOT NULL"
    return dict(_read_rows(path, query))


def _read_rows(path: Path, query: str) -> list[Any]:
    with _open_read_only(path) as connection:
        return connection.execute(query).fetchall()


@contextmanager
def _open_read_only(path: Path) -> Iterator[sqlite3.Connection]:
    # With no other connection open, SQLite would create the WAL's two files to read a database in WAL mode.
    options = "mode=ro" if Path(f"{path}-wal").exists() else "mode=ro&immutable=1"
    try:
        uri = f"{path.absolute().as_uri()}?{options}"
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT_S)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"store {path} cannot be read: {error}") from None


def _read_revision(connection: sqlite3.Connection, path: Path) -> str:
    try:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    except sqlite3.OperationalError:
        row = None
    if row is None or not str(row[0]).isdigit():
        raise StoreError(f"{path} is a database, but not of edgefl")
    return check_revision(str(row[0]), path)
