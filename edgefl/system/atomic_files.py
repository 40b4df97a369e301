"""Atomic, durable file writes that survive power cuts; used for all persistent state."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from edgefl.core.errors import DataError, StoreBusyError, StoreError, StoreFullError

DISK_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TEMPORARY_SUFFIX = ".tmp"
DATABASE_NAME = "edgefl.db"
"""The store, in the directory of a coordinator or of a simulation."""
_CHUNK_BYTES = 1 << 20
_TEMPORARY_NAME = re.compile(r"\..+\.[a-z0-9_]{8}" + re.escape(TEMPORARY_SUFFIX))
"""Names of the temporary files of `open_atomic`."""


class ChildPath:
    """Attribute of an object with a folder `root`: the path of this name in it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _owner_type: type | None = None) -> Path:
        path: Path = owner.root / self._name
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files: the CA of the other side, our certificate and its key.

    `check_hostname` may be False when the coordinator is reached under names that its certificate does not hold: the
    fleet's CA, which signs no other server, vouches for it all the same. It is for devices alone.
    """

    ca: Path
    cert: Path
    key: Path
    check_hostname: bool = True


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Writes a file of mode 0600 that is, at any instant, the old one or the new one; durable on return.

    Raises:
        StoreFullError: no room; nothing is left behind.
        StoreError: it cannot be written, for another reason.
    """
    try:
        with open_atomic(path) as file:
            file.write(content)
    except OSError as error:
        raise make_store_error(path, error) from None


@contextlib.contextmanager
def open_atomic(path: Path, *, mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Yields a file to write into; it is durably renamed to `path` only when the block succeeds.

    Errors of the operating system propagate.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # so that `remove_temporary_files` leaves it alone
            yield file
            file.flush()
            if mode != 0o600:  # which it has: a confined process may change none
                os.fchmod(file.fileno(), mode)
            give_to_owner(file.fileno(), path.parent)
            os.fsync(file.fileno())
        Path(name).replace(path)
        sync_directory(path.parent)
    except BaseException:  # an interrupt too: no temporary file stays
        with contextlib.suppress(FileNotFoundError):
            Path(name).unlink()
        raise


def remove_temporary_files(folder: Path) -> None:
    """Removes temporary files left by a power cut, recursively; files being written stay."""
    for directory, _, names in os.walk(folder):
        for name in names:
            if _TEMPORARY_NAME.fullmatch(name):
                path = Path(directory) / name
                with contextlib.suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def make_private_directory(directory: Path) -> None:
    """Creates `directory` for its owner only, durably.

    Raises:
        StoreFullError: no room.
        StoreError: it cannot be created, for another reason.
    """
    try:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _open_directory(directory) as descriptor:
                give_to_owner(descriptor, directory.parent)
            sync_directory(directory.parent)
        directory.chmod(0o700)
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise make_store_error(directory, error) from None
        raise StoreError(f"{directory} cannot be made: {error.strerror or error}") from None


def sync_directory(directory: Path) -> None:
    """Makes creations and removals of names in `directory` durable."""
    with _open_directory(directory) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def lock_file(path: Path, error_message: str) -> Iterator[None]:
    """Holds a lock file for the block; the lock ends with its process, the file stays.

    Raises:
        StoreBusyError: another process has it; the text is `error_message`.
        StoreError: the file cannot be written.
    """
    with contextlib.ExitStack() as closers:
        try:
            file = closers.enter_context(path.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreBusyError(error_message) from None
        except OSError as error:
            if error.errno in DISK_FULL_ERRNOS:
                raise make_store_error(path, error) from None
            raise StoreError(f"{path} cannot be locked: {error.strerror or error}") from None
        yield


def is_locked(lock: Path) -> bool:
    """Returns whether a process holds this lock file; writes nothing."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def compute_sha256(path: Path) -> str:
    """Returns the hex SHA-256 of a file without holding it in memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def copy_file(source: Path, target: Path, sha256: str) -> None:
    """Copies a file atomically if it has this SHA-256; `target` is unchanged otherwise.

    Raises:
        DataError: it has another one.
        OSError: it cannot be read or written.
    """
    digest = hashlib.sha256()
    with source.open("rb") as file, open_atomic(target) as copy:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
        if digest.hexdigest() != sha256:
            raise DataError(f"{source} must have SHA-256 {sha256}, got {digest.hexdigest()}; bring the file again")


def make_store_error(path: Path, error: OSError) -> StoreError:
    """Returns the store error for an `OSError` while writing a file."""
    if error.errno in DISK_FULL_ERRNOS:
        return StoreFullError(f"{path} cannot be written: {error.strerror}; free some space and try again")
    return StoreError(f"{path} cannot be written: {error.strerror or error}")


@contextlib.contextmanager
def _open_directory(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def give_to_owner(handle: int, folder: Path) -> None:
    """Changes the owner of a file made by root in a user's private folder to that user."""
    info = folder.stat()
    if os.geteuid() != 0 or info.st_uid == 0 or info.st_mode & 0o077:
        return
    # Root without CAP_CHOWN, as in some containers, keeps them; their reader is root as well.
    with contextlib.suppress(PermissionError):
        os.fchown(handle, info.st_uid, info.st_gid)
