"""Translation of database driver errors into edgefl errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from edgefl.core.errors import StoreBusyError, StoreError, StoreFullError
from edgefl.system.atomic_files import DISK_FULL_ERRNOS

_MIN_FREE_BYTES = 64 * 1024
_POSTGRES_DISK_FULL = "53100"
_POSTGRES_LOCKED = ("55P03", "40P01")
_SQLITE_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")
_ADVICE = {
    "SQLITE_NOTADB": "is not a database; move the file away or name another place",
    "SQLITE_CORRUPT": "is damaged; restore a backup",
    "SQLITE_READONLY": "cannot be written; check the file's owner and mode",
    "SQLITE_CANTOPEN": "cannot be opened; check that the directory exists and is yours",
}


@contextmanager
def translate_errors(location: str) -> Iterator[None]:
    """Raises the driver's errors about the database at `location` as `StoreError` or one of its kinds."""
    try:
        yield
    except DBAPIError as error:
        raise _translate(error, location) from error
    except SQLAlchemyError as error:
        raise StoreError(f"store {location}: {_first_line(error)}") from error


@contextmanager
def translate_disk_full(location: str) -> Iterator[None]:
    """Raises an `OSError` that means "no room" as `StoreFullError`; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise StoreFullError(
            f"no room to write {location} ({error.strerror}); free some space and try again"
        ) from error


def _translate(error: DBAPIError, location: str) -> StoreError:
    cause = error.orig
    name = getattr(cause, "sqlite_errorname", "")
    state = getattr(cause, "sqlstate", None)
    # SQLite says no more than "I/O error" when its -shm file finds no room.
    is_full = name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and not _has_free_space(location))
    if is_full or state == _POSTGRES_DISK_FULL:
        return StoreFullError(f"no room to write the store {location}: disk is full; free some space and try again")
    if name.startswith(_SQLITE_LOCKED) or state in _POSTGRES_LOCKED:
        return StoreBusyError(
            f"store {location} is in use by another program; stop that and try again ({_first_line(cause)})"
        )
    for prefix, advice in _ADVICE.items():
        if name.startswith(prefix):
            return StoreError(f"store {location} {advice} ({_first_line(cause)})")
    return StoreError(f"store {location}: {_first_line(cause)}")


def _has_free_space(path: str) -> bool:
    try:
        disk = os.statvfs(Path(path).parent)
    except OSError:
        return True
    return disk.f_bavail * disk.f_frsize >= _MIN_FREE_BYTES


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
