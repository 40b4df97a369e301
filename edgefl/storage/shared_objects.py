"""Files that the hosts of one fleet share, by key: in a folder that all of them mount, or in an S3 storage."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from edgefl.core.errors import NotFoundError, StoreError, UsageError
from edgefl.system.atomic_files import copy_file, make_private_directory, make_store_error, sync_directory
from edgefl.system.object_storage import (
    SCHEME,
    ObjectAddress,
    download_file,
    list_objects,
    parse_address,
    remove_object,
    upload_file,
)

_FOLDER_SCHEME = "file://"


class SharedObjects(Protocol):
    """Immutable files by key; a key is `EPOCH/SHA256` and written by one host alone.

    Raises:
        EdgeflError: the storage cannot be used.
    """

    def save(self, key: str, path: Path, sha256: str) -> None:
        """Copies a file into the storage, durably; the same key and content again changes nothing.

        Raises a `DataError` where its SHA-256 is another one.
        """

    def load(self, key: str, path: Path, sha256: str) -> None:
        """Copies a file out of the storage, atomically; raises a `NotFoundError` where there is none."""

    def remove(self, key: str) -> None:
        """Removes a file, if it is there."""

    def list_keys(self) -> list[str]:
        """Returns all keys."""


class FolderObjects:
    """Shared objects in a folder that every host mounts at the same or another place."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, key: str, path: Path, sha256: str) -> None:
        target = self._root / key
        make_private_directory(target.parent)
        try:
            copy_file(path, target, sha256)
        except OSError as error:
            raise make_store_error(target, error) from None

    def load(self, key: str, path: Path, sha256: str) -> None:
        try:
            copy_file(self._root / key, path, sha256)
        except FileNotFoundError:
            raise NotFoundError(f"there is no file {self._root / key}") from None
        except OSError as error:
            raise make_store_error(path, error) from None

    def remove(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._root / key).unlink()
            sync_directory((self._root / key).parent)

    def list_keys(self) -> list[str]:
        return [path.relative_to(self._root).as_posix() for path in self._root.glob("*/*") if path.is_file()]


class S3Objects:
    """Shared objects under a prefix of a bucket."""

    def __init__(self, folder: ObjectAddress) -> None:
        self._folder = folder

    def save(self, key: str, path: Path, sha256: str) -> None:
        upload_file(path, self._folder.join(key), replace=True, sha256=sha256)

    def load(self, key: str, path: Path, sha256: str) -> None:
        download_file(self._folder.join(key), path, sha256=sha256)

    def remove(self, key: str) -> None:
        remove_object(self._folder.join(key))

    def list_keys(self) -> list[str]:
        return list_objects(self._folder)


def open_shared_objects(url: str) -> SharedObjects:
    """Returns the shared objects at `s3://BUCKET/PREFIX` or `file:///FOLDER`.

    Raises:
        UsageError: the URL is neither.
        StoreError: there is no such folder.
    """
    if url.startswith(SCHEME):
        return S3Objects(parse_address(url if url.endswith("/") else f"{url}/"))
    parts = urlsplit(url)
    if not url.startswith(_FOLDER_SCHEME) or parts.netloc or not parts.path.strip("/"):
        raise UsageError(f"--models must be s3://BUCKET/PREFIX or file:///FOLDER, got {url!r:.200}")
    root = Path(unquote(parts.path))
    if not root.is_dir():
        raise StoreError(f"there is no folder {root} for the shared models; mount it, or make it, on every host")
    return FolderObjects(root)
