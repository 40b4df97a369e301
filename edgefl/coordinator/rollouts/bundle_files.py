"""Bundles that an operator has brought: files named by their SHA-256, looked at for their structure and no more.

Whether a signature is right is for the boards to say, which trust nobody here.
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

from edgefl.bundles.archive import MAX_FILE_BYTES, read_bundle
from edgefl.bundles.manifest import Kind, Manifest
from edgefl.errors import BundleError, NotFoundError, StoreError
from edgefl.files import make_private_directory, store_error, sync_directory
from edgefl.types import Json

log = logging.getLogger(__name__)

SUFFIX = ".bundle"
MIN_DIGITS = 6
KEPT_BUNDLES = 20
PART_PREFIX = ".upload-"
STALE_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBundle:
    """A bundle in the coordinator's folder."""

    sha256: str
    num_bytes: int
    kept_at: float
    manifest: Manifest

    def as_json(self) -> Json:
        manifest = self.manifest
        return {
            "sha256": self.sha256, "bytes": self.num_bytes, "kept_at": self.kept_at, "kind": str(manifest.kind),
            "name": manifest.name, "version": manifest.version, "serial": manifest.serial, "key": manifest.key,
            "wheels": [wheel.file for wheel in manifest.wheels],
        }  # fmt: skip


class BundleFiles:
    """The folder of a coordinator's bundles."""

    def __init__(self, folder: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.folder, self._max_bytes = folder, max_bytes

    def begin(self) -> Upload:
        """Returns what takes a bundle piece by piece.

        Raises:
            StoreError: there is no room to begin.
        """
        make_private_directory(self.folder)
        self._sweep()
        try:
            return Upload(self, self._max_bytes)
        except OSError as error:
            raise store_error(self.folder, error) from None

    def path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}{SUFFIX}"

    def kept(self) -> list[KeptBundle]:
        """Returns the bundles, newest first; what is damaged, or of another edgefl's making, is none."""
        found = []
        for path in self.folder.glob(f"*{SUFFIX}") if self.folder.is_dir() else ():
            try:
                found.append(self.look(path))
            except (BundleError, StoreError) as error:
                log.warning("%s is left aside: %s", path, error)
        return sorted(found, key=lambda one: one.kept_at, reverse=True)

    def find(self, text: str) -> KeptBundle:
        """Returns a bundle by its SHA-256, or the beginning of one.

        Raises:
            NotFoundError: there is none, or several begin so.
        """
        found = [one for one in self.kept() if len(text) >= MIN_DIGITS and one.sha256.startswith(text)]
        if len(found) != 1:
            raise NotFoundError(f"{len(found)} bundles begin with {text[:64]!r}; bring it with --bundle FILE")
        return found[0]

    def release(self, version: str) -> KeptBundle:
        """Returns the newest bundle of a release.

        Raises:
            NotFoundError: this version was never brought here.
        """
        releases = [one for one in self.kept() if one.manifest.kind is Kind.RELEASE]
        found = [one for one in releases if one.manifest.version == version]
        if not found:
            there = ", ".join(sorted({one.manifest.version for one in releases})) or "none"
            raise NotFoundError(
                f"the coordinator has no release {version!r} (it has: {there}); bring it: --bundle FILE"
            )
        return max(found, key=lambda one: one.manifest.serial)

    def look(self, path: Path) -> KeptBundle:
        """Returns what a file in the folder is."""
        try:
            with path.open("rb") as file:
                manifest, found = read_bundle(file).manifest, path.stat()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        return KeptBundle(sha256=path.stem, num_bytes=found.st_size, kept_at=found.st_mtime, manifest=manifest)

    def prune(self, keep: Collection[str]) -> None:
        """Lets go of all bundles but the newest and those in `keep`."""
        for one in self.kept()[KEPT_BUNDLES:]:
            if one.sha256 not in keep:
                self.path(one.sha256).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Removes what a coordinator that was killed left of an upload."""
        for path in self.folder.glob(f"{PART_PREFIX}*"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_AFTER_S:
                    path.unlink()


class Upload:
    """A bundle on its way in; `close` removes what was not finished."""

    def __init__(self, files: BundleFiles, max_bytes: int) -> None:
        self._files, self._max_bytes = files, max_bytes
        handle, name = tempfile.mkstemp(dir=files.folder, prefix=PART_PREFIX)
        self._part, self._file = Path(name), os.fdopen(handle, "w+b")
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def write(self, piece: bytes) -> None:
        """Takes the next piece; raises BundleError when it is one too many, StoreError when the disk is full."""
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise BundleError(f"the bundle has more than {self._max_bytes} bytes")
        self._digest.update(piece)
        try:
            self._file.write(piece)
        except OSError as error:
            raise store_error(self._part, error) from None

    def finish(self) -> KeptBundle:
        """Keeps the bundle, once it is whole and looks like one.

        Raises:
            BundleError: it does not.
            StoreError: it cannot be written.
        """
        path = self._files.path(self._digest.hexdigest())
        try:
            self._file.flush()
            read_bundle(self._file)
            os.fsync(self._file.fileno())
            self._part.replace(path)
            sync_directory(self._files.folder)
        except OSError as error:
            raise store_error(self._part, error) from None
        return self._files.look(path)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
        self._part.unlink(missing_ok=True)
