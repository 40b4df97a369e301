"""Store of uploaded bundles: files named by their SHA-256, checked only for their structure.

Devices verify the signatures; they do not trust the coordinator.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.bundles.archive import MAX_BUNDLE_FILE_BYTES, read_bundle
from edgefl.bundles.manifest import BundleKind, BundleManifest
from edgefl.core.errors import BundleError, NotFoundError, StoreError
from edgefl.core.types import Json
from edgefl.system.atomic_files import make_private_directory, make_store_error, sync_directory

log = logging.getLogger(__name__)

SUFFIX = ".bundle"
MIN_HASH_DIGITS = 6
MAX_BUNDLES = 20
UPLOAD_PREFIX = ".upload-"
STALE_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBundle:
    """A bundle in the coordinator's folder."""

    sha256: str
    num_bytes: int
    kept_at: float
    manifest: BundleManifest

    def to_json(self) -> Json:
        manifest = self.manifest
        return {
            "sha256": self.sha256, "bytes": self.num_bytes, "kept_at": self.kept_at, "kind": str(manifest.kind),
            "name": manifest.name, "version": manifest.version, "serial": manifest.serial, "key": manifest.key,
            "wheels": [wheel.file for wheel in manifest.wheels],
        }  # fmt: skip


class BundleStore:
    """The folder of a coordinator's bundles."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BUNDLE_FILE_BYTES) -> None:
        self.folder, self._max_bytes = folder, max_bytes

    def start_upload(self) -> BundleUpload:
        """Returns an upload, which takes a bundle by chunks.

        Raises:
            StoreError: there is no room.
        """
        make_private_directory(self.folder)
        self._remove_stale_uploads()
        try:
            return BundleUpload(self, self._max_bytes)
        except OSError as error:
            raise make_store_error(self.folder, error) from None

    def get_path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}{SUFFIX}"

    def list_bundles(self) -> list[StoredBundle]:
        """Returns the valid bundles, newest first; skips those damaged, or of an unknown format."""
        bundles = []
        for path in self.folder.glob(f"*{SUFFIX}") if self.folder.is_dir() else ():
            try:
                bundles.append(self.read(path))
            except (BundleError, StoreError) as error:
                log.warning("%s is left aside: %s", path, error)
        return sorted(bundles, key=lambda bundle: bundle.kept_at, reverse=True)

    def find(self, text: str) -> StoredBundle:
        """Returns a bundle by its SHA-256, or a prefix of it.

        Raises:
            NotFoundError: there is none, or several match.
        """
        matches = [
            bundle
            for bundle in self.list_bundles()
            if len(text) >= MIN_HASH_DIGITS and bundle.sha256.startswith(text)
        ]
        if len(matches) != 1:
            raise NotFoundError(f"{len(matches)} bundles begin with {text[:64]!r}; bring it with --bundle FILE")
        return matches[0]

    def find_release(self, version: str) -> StoredBundle:
        """Returns the newest bundle of a release.

        Raises:
            NotFoundError: this version was never uploaded.
        """
        releases = [bundle for bundle in self.list_bundles() if bundle.manifest.kind is BundleKind.RELEASE]
        matches = [bundle for bundle in releases if bundle.manifest.version == version]
        if not matches:
            known_versions = ", ".join(sorted({bundle.manifest.version for bundle in releases})) or "none"
            raise NotFoundError(
                f"the coordinator has no release {version!r} (it has: {known_versions}); bring it: --bundle FILE"
            )
        return max(matches, key=lambda bundle: bundle.manifest.serial)

    def read(self, path: Path) -> StoredBundle:
        """Returns the bundle in a file of the folder."""
        try:
            with path.open("rb") as file:
                manifest, status = read_bundle(file).manifest, path.stat()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        return StoredBundle(sha256=path.stem, num_bytes=status.st_size, kept_at=status.st_mtime, manifest=manifest)

    def prune(self, keep: Collection[str]) -> None:
        """Removes all bundles but the newest and those in `keep`."""
        for bundle in self.list_bundles()[MAX_BUNDLES:]:
            if bundle.sha256 not in keep:
                self.get_path(bundle.sha256).unlink(missing_ok=True)

    def _remove_stale_uploads(self) -> None:
        """Removes uploads left over from a killed coordinator."""
        for path in self.folder.glob(f"{UPLOAD_PREFIX}*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_AFTER_S:
                    path.unlink()


class BundleUpload:
    """Upload of a bundle; `close` removes an unfinished one."""

    def __init__(self, store: BundleStore, max_bytes: int) -> None:
        self._store, self._max_bytes = store, max_bytes
        handle, name = tempfile.mkstemp(dir=store.folder, prefix=UPLOAD_PREFIX)
        self._temporary_path, self._file = Path(name), os.fdopen(handle, "w+b")
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def write(self, chunk: bytes) -> None:
        """Adds the next chunk; raises BundleError beyond the size limit, StoreError when the disk is full."""
        self._num_bytes += len(chunk)
        if self._num_bytes > self._max_bytes:
            raise BundleError(f"the bundle has more than {self._max_bytes} bytes")
        self._digest.update(chunk)
        try:
            self._file.write(chunk)
        except OSError as error:
            raise make_store_error(self._temporary_path, error) from None

    def complete(self) -> StoredBundle:
        """Checks the structure of a complete bundle and moves it into the store.

        Raises:
            BundleError: it is no valid bundle.
            StoreError: it cannot be written.
        """
        path = self._store.get_path(self._digest.hexdigest())
        try:
            self._file.flush()
            read_bundle(self._file)
            os.fsync(self._file.fileno())
            self._temporary_path.replace(path)
            sync_directory(self._store.folder)
        except OSError as error:
            raise make_store_error(self._temporary_path, error) from None
        return self._store.read(path)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._temporary_path.unlink(missing_ok=True)
