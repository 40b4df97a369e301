"""Installations of releases and task packs on devices, and the store of uploaded bundles.

The coordinator distributes bundles and trusts none: a device decides by their signatures what it runs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl import __version__
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.rollouts.service import MAX_REASON_CHARS, RolloutService, make_rollout_id
from edgefl.coordinator.rollouts.state_machine import check_canaries
from edgefl.core.errors import BundleError, ConfigError, NotFoundError, StoreError, UsageError
from edgefl.core.protocol import EVALUATOR_NAME, CommandKind, check_version
from edgefl.core.types import DeviceInfo, Json
from edgefl.storage.repositories.rollouts import InstallationRecord, RolloutDeviceRecord, RolloutStage, RolloutStatus
from edgefl.storage.store import Store
from edgefl.system.atomic_files import make_private_directory, make_store_error, sync_directory, write_atomic
from edgefl.system.bundles.archive import (
    MAX_BUNDLE_FILE_BYTES,
    BundleKind,
    BundleManifest,
    SignedManifest,
    read_bundle,
)

log = logging.getLogger(__name__)

DEFAULT_CANARY_S = 1800.0
OUTDATED_AGENT_REASON = "its agent is older than this: it says nothing of updates; update it by hand"
SUFFIX, SIGNED_SUFFIX = ".bundle", ".signed"
MIN_HASH_DIGITS = 6
MAX_BUNDLES = 20
UPLOAD_PREFIX = ".upload-"
STALE_AFTER_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationRequest:
    """An operator's request for an installation.

    Attributes:
        bundle: SHA-256 of a bundle that the coordinator has; else `version`.
        version: of a release that it has.
        devices: by name; None for every device that can be updated remotely.
        canary: number of devices that get it first; 0 for all at once.
        canary_s: how long these have to report that they run it, after any older installation.
    """

    bundle: str | None = None
    version: str | None = None
    devices: tuple[str, ...] | None = None
    canary: int = 0
    canary_s: float = DEFAULT_CANARY_S

    def __post_init__(self) -> None:
        if (self.bundle is None) == (self.version is None):
            raise ConfigError("an installation needs a bundle or the version of a release, and not both")
        check_canaries(self.canary, self.canary_s)


InstallationService = RolloutService[InstallationRequest, InstallationRecord]


class Installations:
    """The kind of rollout that brings a release or task pack; see `RolloutKind`."""

    request = InstallationRequest
    artefact = "bundle"
    commands: Mapping[RolloutStage, CommandKind] = {RolloutStage.NOTIFIED: CommandKind.INSTALL}
    # A device that was slow is believed.
    reports: Mapping[RolloutStage, Collection[RolloutStage]] = {
        stage: {RolloutStage.NOTIFIED, RolloutStage.SUPERSEDED}
        for stage in (RolloutStage.RUNNING, RolloutStage.REJECTED, RolloutStage.FAILED, RolloutStage.ROLLED_BACK)
    }
    states_in_progress: Collection[str] = ("fetching", "requested")
    offered_stages: Collection[RolloutStage] = (RolloutStage.NOTIFIED,)
    is_ready = True
    is_queued = True

    def __init__(self, *, store: Store, registry: DeviceRegistry, bundle_store: BundleStore) -> None:
        self.repository = store.installations
        self._store, self._registry, self.bundle_store = store, registry, bundle_store

    def plan(self, request: InstallationRequest) -> tuple[InstallationRecord, list[str], dict[str, str]]:
        """Returns the new installation, its devices, and the excluded ones with the reason.

        Raises:
            NotFoundError: no such bundle or device.
            VersionError: the release does not work with this coordinator.
            UsageError: no device could take it.
        """
        bundle = (
            self.bundle_store.find(request.bundle)
            if request.bundle is not None
            else self.bundle_store.find_release(request.version or "")
        )
        manifest = bundle.manifest
        if manifest.kind is BundleKind.MODEL:
            raise UsageError(f"{manifest.name} is a model; deploy it: edgefl model deploy MODEL --bundle FILE")
        if manifest.kind is BundleKind.RELEASE:
            check_version(manifest.version, __version__)
        names, excluded = self._select_devices(request.devices)
        record = InstallationRecord(
            installation_id=make_rollout_id(),
            kind=str(manifest.kind),
            name=manifest.name,
            version=manifest.version,
            key=manifest.key,
            sha256=bundle.sha256,
            bytes_file=bundle.num_bytes,
            canary=request.canary,
            canary_s=request.canary_s,
            status=RolloutStatus.PREPARING,
            created_at=time.time(),
        )
        return record, names, excluded

    def on_submitted(self, record: InstallationRecord, names: Sequence[str]) -> None:
        message = f"{record.installation_id}: {record.kind} {record.name} {record.version}"
        for name in names:
            self._store.record_event("installation-requested", message, at=time.time(), device_id=name)

    def prepare(self, record: InstallationRecord) -> Mapping[str, Any]:  # noqa: ARG002 the bundle is there already
        return {}

    def prune(self) -> None:
        self.bundle_store.prune({record.sha256 for record in self.repository.list_open()})

    def make_offer(self, record: InstallationRecord) -> Json:
        return {
            "installation": record.installation_id, "sha256": record.sha256, "bytes": record.bytes_file,
            "kind": record.kind, "name": record.name, "version": record.version,
        }  # fmt: skip

    def get_path(self, record: InstallationRecord) -> Path:
        path = self.bundle_store.get_path(record.sha256)
        if not path.is_file():
            raise NotFoundError("the coordinator has the bundle no more; bring it again")
        return path

    def on_status(self, record: InstallationRecord, status: str, reason: str | None) -> None:
        """Each device has its own events."""

    def describe_report(self, record: InstallationRecord, stage: RolloutStage) -> tuple[str, str]:
        event = f"installation-{stage}"
        return event, f"{record.name} {record.version}"

    def parse_scores(self, report: Json) -> Mapping[str, Any]:  # noqa: ARG002 it has none
        return {}

    def on_other_report(self, device_id: str, rows: Sequence[RolloutDeviceRecord], report: Json) -> None:
        """A device keeps what it has installed."""

    def add_late_devices(self) -> None:
        """Software is brought to a new device by hand."""

    def _select_devices(self, names: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
        """Returns the selected devices, and the excluded ones with the reason; raises for a named one."""
        reasons = {
            info.device_id: get_incompatibility_reason(info)
            for info in self._registry.list_devices()
            if info.device_id != EVALUATOR_NAME
        }
        for name in names or ():
            if name not in reasons:
                raise NotFoundError(f"no device {name!r}; `edgefl devices list` shows them")
            if reason := reasons[name]:
                raise UsageError(f"{name} cannot be updated from here: {reason}")
        excluded = {} if names is not None else {name: reason for name, reason in reasons.items() if reason}
        selected = sorted(set(names) if names is not None else reasons.keys() - excluded.keys())
        if not selected:
            details = "; ".join(f"{name}: {reason}" for name, reason in sorted(excluded.items())[:5])
            raise UsageError(f"no device can be updated from here ({details or 'none has joined'})")
        return selected, excluded


def get_incompatibility_reason(info: DeviceInfo) -> str:
    """Returns why a device cannot be updated remotely, in its own words; empty if it can."""
    installs = info.capabilities.get("installs")
    if not isinstance(installs, dict):
        return OUTDATED_AGENT_REASON
    return (
        ""
        if installs.get("able") is True
        else str(installs.get("reason") or "it does not say why")[:MAX_REASON_CHARS]
    )


def read_signed(folder: Path, sha256: str | None) -> str | None:
    """Returns manifest and signatures of a model that `BundleStore.extract_model` wrote; None for an unsigned one."""
    try:
        return (folder / f"{sha256}{SIGNED_SUFFIX}").read_text()
    except FileNotFoundError:
        return None


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

    def extract_model(self, sha256: str, folder: Path) -> None:
        """Writes a signed model for devices: its file by SHA-256, and manifest and signatures beside it.

        Raises:
            NotFoundError: no bundle holds it any more.
            BundleError: the bundle is damaged.
        """
        models = [bundle for bundle in self.list_bundles() if bundle.manifest.kind is BundleKind.MODEL]
        stored = next((bundle for bundle in models if bundle.manifest.wheels[0].sha256 == sha256), None)
        if stored is None:
            raise NotFoundError("the coordinator has its signed bundle no more; bring it again")
        make_private_directory(folder)
        with self.get_path(stored.sha256).open("rb") as file:
            bundle = read_bundle(file)
            bundle.extract_wheel(bundle.manifest.wheels[0], folder / f"{sha256}.onnx")
        signed = SignedManifest(
            manifest_bytes=bundle.manifest_bytes, signatures=bundle.signatures, manifest=bundle.manifest
        )
        write_atomic(folder / f"{sha256}{SIGNED_SUFFIX}", signed.encode().encode())
        sync_directory(folder)

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
