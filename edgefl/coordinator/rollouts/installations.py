"""Installations of releases and task packs on devices; survives restarts.

The coordinator distributes bundles and trusts none: a device decides by their signatures what it runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl import __version__
from edgefl.bundles.manifest import BundleKind
from edgefl.coordinator.fleet.presence import PRESENT_STATES
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.rollouts.bundle_store import BundleStore, StoredBundle
from edgefl.coordinator.rollouts.controller import RolloutController
from edgefl.coordinator.rollouts.notifications import (
    MAX_REASON_CHARS,
    CommandSender,
    RolloutNotifier,
    StatusUpdates,
    list_present,
    make_rollout_id,
    parse_reason,
)
from edgefl.coordinator.rollouts.state_machine import (
    RolloutTransition,
    advance_rollout,
    check_canaries,
    fail_removed_devices,
    start_rollout,
    update_canary_deadline,
)
from edgefl.core.errors import ConfigError, EdgeflError, NotFoundError, UsageError
from edgefl.core.protocol import EVALUATOR_NAME, CommandKind, Heartbeat, check_version
from edgefl.core.types import DeviceInfo, Json
from edgefl.storage.repositories.deployment_records import RolloutStage, RolloutStatus
from edgefl.storage.repositories.installation_records import InstallationDeviceRecord, InstallationRecord
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

DEFAULT_CANARY_S = 1800.0
IN_PROGRESS_STATES = frozenset({"fetching", "requested"})
REPORTED_STAGES = {
    "running": (RolloutStage.RUNNING, "updated"),
    "refused": (RolloutStage.REJECTED, "update-refused"),
    "failed": (RolloutStage.FAILED, "update-failed"),
    "rolled-back": (RolloutStage.ROLLED_BACK, "update-rolled-back"),
}
"""State that a device may report -> (its stage, kind of event)."""
_REPORTABLE_STAGES = frozenset({RolloutStage.NOTIFIED, RolloutStage.SUPERSEDED})
OUTDATED_AGENT_REASON = "its agent is older than this: it says nothing of updates; update it by hand"


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


class InstallationService:
    """All installations of a coordinator; `submit` and `on_heartbeat` may be called from any thread."""

    def __init__(
        self,
        *,
        store: Store,
        registry: DeviceRegistry,
        bundle_store: BundleStore,
        command_sender: CommandSender,
        on_fatal: Callable[[EdgeflError], None],
    ) -> None:
        self._store, self._registry, self.bundle_store = store, registry, bundle_store
        self._status_updates, self._notifier = StatusUpdates(), RolloutNotifier(registry, command_sender)
        self._controller = RolloutController("installations", self._reconcile, on_fatal)

    def start(self) -> None:
        self._controller.start()

    def stop(self) -> None:
        self._controller.stop()

    def submit(self, request: InstallationRequest) -> tuple[InstallationRecord, dict[str, str]]:
        """Stores a new installation; returns it, and the excluded devices with the reason.

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
        if bundle.manifest.kind is BundleKind.RELEASE:
            check_version(bundle.manifest.version, __version__)
        names, excluded = self._select_devices(request.devices)
        record = _make_record(request, bundle)
        with self._store.batch(durable=True):
            self._store.add_installation(record, names)
            for name in names:
                message = f"{record.installation_id}: {record.kind} {record.name} {record.version}"
                self._store.record_event("update-requested", message, at=time.time(), device_id=name)
            first_step = start_rollout(
                record,
                self._store.list_installation_devices(record.installation_id),
                list_present(self._registry),
                time.time(),
            )
            self._apply(record, first_step)
        log.info(
            "installation %s: %s %s to %d devices", record.installation_id, record.name, record.version, len(names)
        )
        self.bundle_store.prune({installation.sha256 for installation in self._store.list_open_installations()})
        self._controller.wake()
        return self._store.get_installation(record.installation_id), excluded

    def on_heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Records the installation status in a heartbeat."""
        if self._status_updates.record(device_id, heartbeat.installation):
            self._controller.wake()

    def offer(self, installation_id: str, device_id: str) -> Json:
        """Returns the offer that a device needs to fetch the bundle.

        Raises:
            NotFoundError: there is no such installation for this device.
        """
        record = self._find_offered(installation_id, device_id)
        return {
            "installation": record.installation_id, "sha256": record.sha256, "bytes": record.bytes_file,
            "kind": record.kind, "name": record.name, "version": record.version,
        }  # fmt: skip

    def get_file(self, installation_id: str, device_id: str) -> Path:
        """Returns the file that a device fetches; raises as `offer`."""
        path = self.bundle_store.get_path(self._find_offered(installation_id, device_id).sha256)
        if not path.is_file():
            raise NotFoundError("the coordinator has the bundle no more; bring it again")
        return path

    def _find_offered(self, installation_id: str, device_id: str) -> InstallationRecord:
        record = self._store.get_installation(installation_id)
        rows = self._store.list_installation_devices(installation_id)
        if not any(row.device_id == device_id and row.state is RolloutStage.NOTIFIED for row in rows):
            raise NotFoundError(f"installation {installation_id} is not for {device_id} now")
        return record

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

    def _reconcile(self) -> bool:
        all_reported = self._controller.run_each(
            self._status_updates.list_pending(), lambda name: self._status_updates.dispatch(name, self._on_report)
        )
        busy: set[str] = set()
        return (
            self._controller.run_each(
                self._store.list_open_installations(), lambda record: self._advance(record, busy)
            )
            and all_reported
        )

    def _on_report(self, device_id: str, report: Json) -> None:
        rows = self._store.list_device_installations(device_id)
        row = next((row for row in rows if row.installation_id == report.get("id")), None)
        if row is not None and row.state in _REPORTABLE_STAGES and str(report.get("state")) in REPORTED_STAGES:
            self._record_report(row, report)

    def _record_report(self, row: InstallationDeviceRecord, report: Json) -> None:
        stage, event = REPORTED_STAGES[str(report["state"])]
        reason = parse_reason(report)
        values = {"state": stage, "reason": reason, "reported_at": time.time()}
        record = self._store.get_installation(row.installation_id)
        message = f"{row.installation_id}: {record.name} {record.version}" + (f", {reason}" if reason else "")
        with self._store.batch(durable=True):
            self._store.update_installation_devices(row.installation_id, {row.device_id: values})
            self._store.record_event(event, message, at=time.time(), device_id=row.device_id)
        log.info("%s: %s: %s", row.device_id, event, message)

    def _advance(self, record: InstallationRecord, busy: set[str]) -> None:
        rows = self._store.list_installation_devices(record.installation_id)
        if (step := fail_removed_devices(rows, self._is_known)) is not None:
            self._apply(record, step)
            rows = self._store.list_installation_devices(record.installation_id)
        if (
            step := update_canary_deadline(record, rows, lambda name: self._is_queued(name, busy), time.time())
        ) is not None:
            self._apply(record, step)
            record = replace(record, **step.values)
        if (step := advance_rollout(record, rows, time.time())) is not None:
            self._apply(record, step)
        self._notify_devices(record.installation_id, busy)

    def _apply(self, record: InstallationRecord, step: RolloutTransition) -> None:
        with self._store.batch(durable=True):
            self._store.update_installation_devices(record.installation_id, step.devices)
            if step.values:
                self._store.update_installation(record.installation_id, **step.values)
        if status := step.values.get("status"):
            log.info("installation %s is %s %s", record.installation_id, status, step.values.get("reason") or "")

    def _is_known(self, device_id: str) -> bool:
        return self._registry.get_device(device_id) is not None

    def _is_queued(self, device_id: str, busy: set[str]) -> bool:
        """Returns whether a device is present, and has an older installation to answer first."""
        return device_id in busy and self._registry.get_state(device_id) in PRESENT_STATES

    def _notify_devices(self, installation_id: str, busy: set[str]) -> None:
        """Sends the command to present devices that have not started; the others get it later.

        Args:
            installation_id: to be installed.
            busy: devices that have not answered an older one yet; those of this one are added. Each gets one bundle
                at a time: two would share a slow link, and the updater takes one request.
        """

        def is_in_progress(heartbeat: Heartbeat) -> bool:
            status = heartbeat.installation or {}
            return status.get("id") == installation_id and str(status.get("state")) in IN_PROGRESS_STATES

        for row in self._store.list_installation_devices(installation_id):
            if row.state is RolloutStage.NOTIFIED and row.device_id not in busy:
                busy.add(row.device_id)
                self._notifier.notify(
                    row.device_id, CommandKind.INSTALL, installation_id, is_in_progress=is_in_progress
                )


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


def _make_record(request: InstallationRequest, bundle: StoredBundle) -> InstallationRecord:
    manifest = bundle.manifest
    return InstallationRecord(
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
