"""Files that are there whole or not at all, also after a power cut."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from edgefl.storage.failures import full_disk_explained

_CHUNK_BYTES = 1 << 20
TEMPORARY_SUFFIX = ".tmp"


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Writes a file so that `path` is either as before or complete and durable.

    Raises:
        StoreFullError: no room; nothing is left behind.
    """
    with full_disk_explained(str(path)):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=TEMPORARY_SUFFIX)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
            sync_directory(path.parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(temporary).unlink()
            raise


def sync_directory(directory: Path) -> None:
    """Makes names that were made or removed in `directory` durable."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_private_directory(directory: Path) -> None:
    """Makes `directory` for its owner only, and its name durable, unless it is there."""
    if not directory.is_dir():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_directory(directory.parent)


def sha256_of_file(path: Path) -> str:
    """Returns the hex SHA-256 of a file without holding it in memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
