"""Brings releases and task packs to devices and knows what became of them; goes on after a crash.

The coordinator carries bundles and trusts none: what a board runs is for the board and its signers to decide.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl import __version__
from edgefl.bundles.manifest import Kind
from edgefl.coordinator.fleet.presence import PRESENT
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.rollouts.bundle_files import BundleFiles, KeptBundle
from edgefl.coordinator.rollouts.rollout import Step, advance, begin, canary_clock, check_canaries, removed
from edgefl.coordinator.rollouts.rollout_thread import RolloutThread
from edgefl.coordinator.rollouts.telling import (
    MAX_REASON_CHARS,
    Commander,
    News,
    Teller,
    new_id,
    present,
    reason_of,
)
from edgefl.errors import ConfigError, EdgeflError, NotFoundError, UsageError
from edgefl.protocol import EVALUATOR_NAME, CommandKind, Heartbeat, check_version
from edgefl.storage.deployment_records import DeploymentStatus, DeviceStage
from edgefl.storage.installation_records import InstallationDeviceRecord, InstallationRecord
from edgefl.storage.store import Store
from edgefl.types import DeviceInfo, Json

log = logging.getLogger(__name__)

CANARY_S = 1800.0
AT_WORK = frozenset({"fetching", "requested"})
REPORTED = {
    "running": (DeviceStage.RUNNING, "updated"),
    "refused": (DeviceStage.REFUSED, "update-refused"),
    "failed": (DeviceStage.FAILED, "update-failed"),
    "rolled-back": (DeviceStage.ROLLED_BACK, "update-rolled-back"),
}
"""What a device may report, the stage it has then, and the event."""
_UNANSWERED = frozenset({DeviceStage.TOLD, DeviceStage.SUPERSEDED})
OLDER = "its agent is older than this: it says nothing of updates; update it by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationWish:
    """What an operator asks for.

    Attributes:
        bundle: SHA-256 of a bundle that the coordinator has; else `version`.
        version: of a release that it has.
        devices: by name; None for every device that can be updated from afar.
        canary: how many get it first; 0 for all at once.
        canary_s: how long these have to report that they run it, from when they are done with older installations.
    """

    bundle: str | None = None
    version: str | None = None
    devices: tuple[str, ...] | None = None
    canary: int = 0
    canary_s: float = CANARY_S

    def __post_init__(self) -> None:
        if (self.bundle is None) == (self.version is None):
            raise ConfigError("an installation needs a bundle or the version of a release, and not both")
        check_canaries(self.canary, self.canary_s)


class Installations:
    """All installations of a coordinator; `submit` and `heard` may be called from any thread."""

    def __init__(
        self,
        *,
        store: Store,
        roster: Roster,
        files: BundleFiles,
        commander: Commander,
        on_fatal: Callable[[EdgeflError], None],
    ) -> None:
        self._store, self._roster, self.files = store, roster, files
        self._news, self._teller = News(), Teller(roster, commander)
        self._thread = RolloutThread("installations", self._look, on_fatal)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def submit(self, wish: InstallationWish) -> tuple[InstallationRecord, dict[str, str]]:
        """Keeps a new installation; returns it, and the devices that are left out, with the reason.

        Raises:
            NotFoundError: no such bundle or device.
            VersionError: the release does not work with this coordinator.
            UsageError: no device could take it.
        """
        bundle = self.files.find(wish.bundle) if wish.bundle is not None else self.files.release(wish.version or "")
        if bundle.manifest.kind is Kind.RELEASE:
            check_version(bundle.manifest.version, __version__)
        names, left_out = self._targets(wish.devices)
        record = _record(wish, bundle)
        with self._store.batch(durable=True):
            self._store.add_installation(record, names)
            for name in names:
                message = f"{record.installation_id}: {record.kind} {record.name} {record.version}"
                self._store.record_event("update-requested", message, at=time.time(), device_id=name)
            first = begin(
                record, self._store.installation_devices(record.installation_id), present(self._roster), time.time()
            )
            self._apply(record, first)
        log.info(
            "installation %s: %s %s to %d devices", record.installation_id, record.name, record.version, len(names)
        )
        self.files.prune({one.sha256 for one in self._store.open_installations()})
        self._thread.wake()
        return self._store.installation(record.installation_id), left_out

    def heard(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Takes note of what a device says about its last installation."""
        if self._news.note(device_id, heartbeat.installation):
            self._thread.wake()

    def offer(self, installation_id: str, device_id: str) -> Json:
        """Returns what a device has to know to fetch the bundle.

        Raises:
            NotFoundError: there is no such installation for this device.
        """
        record = self._offered(installation_id, device_id)
        return {
            "installation": record.installation_id, "sha256": record.sha256, "bytes": record.bytes_file,
            "kind": record.kind, "name": record.name, "version": record.version,
        }  # fmt: skip

    def file(self, installation_id: str, device_id: str) -> Path:
        """Returns the file that a device fetches; raises as `offer`."""
        path = self.files.path(self._offered(installation_id, device_id).sha256)
        if not path.is_file():
            raise NotFoundError("the coordinator has the bundle no more; bring it again")
        return path

    def _offered(self, installation_id: str, device_id: str) -> InstallationRecord:
        record = self._store.installation(installation_id)
        rows = self._store.installation_devices(installation_id)
        if not any(row.device_id == device_id and row.state is DeviceStage.TOLD for row in rows):
            raise NotFoundError(f"installation {installation_id} is not for {device_id} now")
        return record

    def _targets(self, names: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
        """Returns who gets it, and who does not for which reason; a device that was named must be able to."""
        reasons = {info.device_id: why_not(info) for info in self._roster.known() if info.device_id != EVALUATOR_NAME}
        for name in names or ():
            if name not in reasons:
                raise NotFoundError(f"no device {name!r}; `edgefl devices list` shows them")
            if reason := reasons[name]:
                raise UsageError(f"{name} cannot be updated from here: {reason}")
        left_out = {} if names is not None else {name: reason for name, reason in reasons.items() if reason}
        chosen = sorted(set(names) if names is not None else reasons.keys() - left_out.keys())
        if not chosen:
            told = "; ".join(f"{name}: {reason}" for name, reason in sorted(left_out.items())[:5])
            raise UsageError(f"no device can be updated from here ({told or 'none has joined'})")
        return chosen, left_out

    def _look(self) -> bool:
        heard = self._thread.each(self._news.waiting(), lambda name: self._news.hand_on(name, self._take))
        busy: set[str] = set()
        return self._thread.each(self._store.open_installations(), lambda record: self._step(record, busy)) and heard

    def _take(self, device_id: str, said: Json) -> None:
        rows = self._store.device_installations(device_id)
        row = next((row for row in rows if row.installation_id == said.get("id")), None)
        if row is not None and row.state in _UNANSWERED and str(said.get("state")) in REPORTED:
            self._report(row, said)

    def _report(self, row: InstallationDeviceRecord, said: Json) -> None:
        stage, event = REPORTED[str(said["state"])]
        reason = reason_of(said)
        values = {"state": stage, "reason": reason, "reported_at": time.time()}
        record = self._store.installation(row.installation_id)
        message = f"{row.installation_id}: {record.name} {record.version}" + (f", {reason}" if reason else "")
        with self._store.batch(durable=True):
            self._store.set_installation_devices(row.installation_id, {row.device_id: values})
            self._store.record_event(event, message, at=time.time(), device_id=row.device_id)
        log.info("%s: %s: %s", row.device_id, event, message)

    def _step(self, record: InstallationRecord, busy: set[str]) -> None:
        rows = self._store.installation_devices(record.installation_id)
        if (step := removed(rows, self._is_known)) is not None:
            self._apply(record, step)
            rows = self._store.installation_devices(record.installation_id)
        if (step := canary_clock(record, rows, lambda name: self._is_queued(name, busy), time.time())) is not None:
            self._apply(record, step)
            record = replace(record, **step.values)
        if (step := advance(record, rows, time.time())) is not None:
            self._apply(record, step)
        self._tell(record.installation_id, busy)

    def _apply(self, record: InstallationRecord, step: Step) -> None:
        with self._store.batch(durable=True):
            self._store.set_installation_devices(record.installation_id, step.devices)
            if step.values:
                self._store.set_installation(record.installation_id, **step.values)
        if status := step.values.get("status"):
            log.info("installation %s is %s %s", record.installation_id, status, step.values.get("reason") or "")

    def _is_known(self, device_id: str) -> bool:
        return self._roster.info(device_id) is not None

    def _is_queued(self, device_id: str, busy: set[str]) -> bool:
        """Returns whether a device is there, and has an older installation to answer first."""
        return device_id in busy and self._roster.state(device_id) in PRESENT

    def _tell(self, installation_id: str, busy: set[str]) -> None:
        """Sends the command to those that are there and are not at it yet; the others get it later.

        Args:
            installation_id: what they are to install.
            busy: devices that have not answered an older one yet; those of this one are added. Each gets one bundle
                at a time: two would share a slow link, and the updater takes one request.
        """

        def is_at_it(heartbeat: Heartbeat) -> bool:
            said = heartbeat.installation or {}
            return said.get("id") == installation_id and str(said.get("state")) in AT_WORK

        for row in self._store.installation_devices(installation_id):
            if row.state is DeviceStage.TOLD and row.device_id not in busy:
                busy.add(row.device_id)
                self._teller.tell(row.device_id, CommandKind.INSTALL, installation_id, is_at_it=is_at_it)


def why_not(info: DeviceInfo) -> str:
    """Returns why a device cannot be updated from here, as it says itself; empty when it can."""
    said = info.capabilities.get("installs")
    if not isinstance(said, dict):
        return OLDER
    return "" if said.get("able") is True else str(said.get("reason") or "it does not say why")[:MAX_REASON_CHARS]


def _record(wish: InstallationWish, bundle: KeptBundle) -> InstallationRecord:
    manifest = bundle.manifest
    return InstallationRecord(
        installation_id=new_id(),
        kind=str(manifest.kind),
        name=manifest.name,
        version=manifest.version,
        key=manifest.key,
        sha256=bundle.sha256,
        bytes_file=bundle.num_bytes,
        canary=wish.canary,
        canary_s=wish.canary_s,
        status=DeploymentStatus.PREPARING,
        created_at=time.time(),
    )
