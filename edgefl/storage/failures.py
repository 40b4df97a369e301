"""What a database driver says, in one line of ours."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from edgefl.errors import StoreBusyError, StoreError, StoreFullError
from edgefl.files import FULL_ERRNOS

_MIN_ROOM_BYTES = 64 * 1024
_POSTGRES_DISK_FULL = "53100"
_POSTGRES_LOCKED = ("55P03", "40P01")
_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")
_ADVICE = {
    "SQLITE_NOTADB": "is not a database; move the file away or name another place",
    "SQLITE_CORRUPT": "is damaged; restore a backup",
    "SQLITE_READONLY": "cannot be written; check the file's owner and mode",
    "SQLITE_CANTOPEN": "cannot be opened; check that the directory exists and is yours",
}


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Raises the driver's errors about the database at `where` as `StoreError` or one of its kinds."""
    try:
        yield
    except DBAPIError as error:
        raise _translate(error, where) from error
    except SQLAlchemyError as error:
        raise StoreError(f"store {where}: {_first_line(error)}") from error


@contextmanager
def full_disk_explained(where: str) -> Iterator[None]:
    """Raises an `OSError` that means "no room" as `StoreFullError`; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            raise
        raise StoreFullError(f"no room to write {where} ({error.strerror}); free some space and try again") from error


def _translate(error: DBAPIError, where: str) -> StoreError:
    cause = error.orig
    name = getattr(cause, "sqlite_errorname", "")
    state = getattr(cause, "sqlstate", None)
    # SQLite says no more than "I/O error" when its -shm file finds no room.
    is_full = name == "SQLITE_FULL" or (name.startswith("SQLITE_IOERR") and not _has_room(where))
    if is_full or state == _POSTGRES_DISK_FULL:
        return StoreFullError(f"no room to write the store {where}: disk is full; free some space and try again")
    if name.startswith(_LOCKED) or state in _POSTGRES_LOCKED:
        return StoreBusyError(
            f"store {where} is in use by another program; stop that and try again ({_first_line(cause)})"
        )
    for prefix, advice in _ADVICE.items():
        if name.startswith(prefix):
            return StoreError(f"store {where} {advice} ({_first_line(cause)})")
    return StoreError(f"store {where}: {_first_line(cause)}")


def _has_room(path: str) -> bool:
    try:
        disk = os.statvfs(Path(path).parent)
    except OSError:
        return True
    return disk.f_bavail * disk.f_frsize >= _MIN_ROOM_BYTES


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
