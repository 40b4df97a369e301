"""Files that are there whole or not at all, also after a power cut; used wherever state is kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from edgefl.errors import StoreError, StoreFullError

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TEMPORARY_SUFFIX = ".tmp"
DATABASE_NAME = "edgefl.db"
"""The store, in the directory of a coordinator or of a simulation."""
_CHUNK_BYTES = 1 << 20
_HALF = re.compile(r"\..+\.[a-z0-9_]{8}" + re.escape(TEMPORARY_SUFFIX))
"""The names that `open_whole` writes under."""


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file of mode 0600 that is, at any instant, the old one or the new one; durable on return.

    Raises:
        StoreFullError: no room; nothing is left behind.
        StoreError: it cannot be written for another reason.
    """
    try:
        with open_whole(path) as file:
            file.write(content)
    except OSError as error:
        raise store_error(path, error) from None


@contextlib.contextmanager
def open_whole(path: Path, *, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Gives a file to write into; it appears under its name, durably, only when the block ends well.

    Errors of the operating system pass.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # so that nobody takes it for one that was left behind
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)
            _give_to_owner(file.fileno(), path.parent)
            os.fsync(file.fileno())
        Path(name).replace(path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def forget_halves(folder: Path) -> None:
    """Removes what a power cut left half written in a folder and below it; what is being written stays."""
    for place, _, names in os.walk(folder):
        for name in names:
            if _HALF.fullmatch(name):
                path = Path(place) / name
                with contextlib.suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def make_private_directory(directory: Path) -> None:
    """Makes `directory` for its owner only, and its name durable.

    Raises:
        StoreFullError: no room for it.
        StoreError: it cannot be made for another reason.
    """
    try:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened_directory(directory) as handle:
                _give_to_owner(handle, directory.parent)
            sync_directory(directory.parent)
        directory.chmod(0o700)
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise store_error(directory, error) from None
        raise StoreError(f"{directory} cannot be made: {error.strerror or error}") from None


def sync_directory(directory: Path) -> None:
    """Makes names that were made or removed in `directory` durable."""
    with _opened_directory(directory) as handle:
        os.fsync(handle)


def is_held(lock: Path) -> bool:
    """Returns whether a process holds this lock file; writes nothing."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def sha256_of_file(path: Path) -> str:
    """Returns the hex SHA-256 of a file without holding it in memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def store_error(path: Path, error: OSError) -> StoreError:
    """Returns what an error of the operating system means for a file that had to be written."""
    if error.errno in FULL_ERRNOS:
        return StoreFullError(f"{path} cannot be written: {error.strerror}; free some space and try again")
    return StoreError(f"{path} cannot be written: {error.strerror or error}")


@contextlib.contextmanager
def _opened_directory(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def _give_to_owner(handle: int, folder: Path) -> None:
    """Gives what root has just made in somebody's private folder to them, who could not read it otherwise."""
    owner = folder.stat()
    if os.geteuid() != 0 or owner.st_uid == 0 or owner.st_mode & 0o077:
        return
    # A root without the right to give files away, as in some containers, keeps them; what reads them is root as well.
    with contextlib.suppress(PermissionError):
        os.fchown(handle, owner.st_uid, owner.st_gid)
