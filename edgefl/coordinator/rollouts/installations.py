"""Brings releases and task packs to devices and knows what became of them; goes on after a crash.

The coordinator carries bundles and trusts none: what a board runs is for the board and its signers to decide.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl import __version__
from edgefl.bundles.manifest import Kind
from edgefl.coordinator.fleet.presence import PRESENT
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.rollouts.bundle_files import BundleFiles, KeptBundle
from edgefl.coordinator.rollouts.deployments import MAX_REASON_CHARS, TELL_AGAIN_S, TICK_S, Commander
from edgefl.coordinator.rollouts.rollout import Step, advance, begin
from edgefl.errors import ConfigError, EdgeflError, NotFoundError, StoreError, UsageError
from edgefl.protocol import EVALUATOR_NAME, Command, CommandKind, Heartbeat, check_version
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
        canary_s: how long these have to report that they run it.
    """

    bundle: str | None = None
    version: str | None = None
    devices: tuple[str, ...] | None = None
    canary: int = 0
    canary_s: float = CANARY_S

    def __post_init__(self) -> None:
        if (self.bundle is None) == (self.version is None):
            raise ConfigError("an installation needs a bundle or the version of a release, and not both")
        if self.canary < 0:
            raise ConfigError(f"canary must be 0 or more devices, got {self.canary}")
        if not 0 < self.canary_s <= 7 * 24 * 3600:
            raise ConfigError(f"the canaries' time must be above 0 and at most a week, got {self.canary_s} s")


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
        self._store, self._roster, self._commander, self._on_fatal = store, roster, commander, on_fatal
        self.files = files
        self._told_s: dict[tuple[str, str], float] = {}
        self._news: dict[str, Json] = {}
        self._known: dict[str, Json | None] = {}
        self._lock = threading.Lock()
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="installations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

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
                record, self._store.installation_devices(record.installation_id), self._present(), time.time()
            )
            self._apply(record, first)
        log.info(
            "installation %s: %s %s to %d devices", record.installation_id, record.name, record.version, len(names)
        )
        self.files.prune({one.sha256 for one in self._store.open_installations()})
        self._wake.set()
        return self._store.installation(record.installation_id), left_out

    def heard(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Takes note of what a device says about its last installation."""
        told = heartbeat.installation
        with self._lock:
            if told is None or self._known.get(device_id) == told:
                return
            self._known[device_id], self._news[device_id] = told, told
        self._wake.set()

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

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(TICK_S)
            self._wake.clear()
            try:
                self._take_news()
                for record in self._store.open_installations():
                    self._step(record)
            except StoreError as error:
                self._on_fatal(error)
                return
            except Exception:  # the boundary of the thread: what comes next must still be carried out
                log.exception("the installations stumbled; they are looked at again")
                self._stopping.wait(TICK_S)

    def _take_news(self) -> None:
        with self._lock:
            news, self._news = self._news, {}
        for device_id, said in news.items():
            rows = self._store.device_installations(device_id)
            row = next((row for row in rows if row.installation_id == said.get("id")), None)
            if row is not None and row.state in _UNANSWERED and said.get("state") in REPORTED:
                self._report(row, said)

    def _report(self, row: InstallationDeviceRecord, said: Json) -> None:
        stage, event = REPORTED[str(said["state"])]
        reason = str(said["reason"])[:MAX_REASON_CHARS] if said.get("reason") else None
        values = {"state": stage, "reason": reason, "reported_at": time.time()}
        record = self._store.installation(row.installation_id)
        message = f"{row.installation_id}: {record.name} {record.version}" + (f", {reason}" if reason else "")
        with self._store.batch(durable=True):
            self._store.set_installation_devices(row.installation_id, {row.device_id: values})
            self._store.record_event(event, message, at=time.time(), device_id=row.device_id)
        log.info("%s: %s: %s", row.device_id, event, message)

    def _step(self, record: InstallationRecord) -> None:
        rows = self._store.installation_devices(record.installation_id)
        if (step := advance(record, rows, time.time())) is not None:
            self._apply(record, step)
        self._tell(record.installation_id)

    def _apply(self, record: InstallationRecord, step: Step) -> None:
        with self._store.batch(durable=True):
            self._store.set_installation_devices(record.installation_id, step.devices)
            self._store.set_installation(record.installation_id, **step.values)
        if status := step.values.get("status"):
            log.info("installation %s is %s %s", record.installation_id, status, step.values.get("reason") or "")

    def _tell(self, installation_id: str) -> None:
        """Sends the command to those that are there and are not at it yet; the others get it later."""
        now_s, heartbeats = time.monotonic(), self._roster.heartbeats()
        for row in self._store.installation_devices(installation_id):
            heartbeat = heartbeats.get(row.device_id)
            # The first heartbeat of a session comes when its subscriptions stand: before it, a command would be lost.
            if row.state is not DeviceStage.TOLD or heartbeat is None:
                continue
            key, said = (installation_id, row.device_id), heartbeat.installation or {}
            is_at_it = said.get("id") == installation_id and str(said.get("state")) in AT_WORK
            is_due = now_s - self._told_s.get(key, -TELL_AGAIN_S) >= TELL_AGAIN_S
            if is_due and not is_at_it and self._roster.state(row.device_id) in PRESENT:
                self._told_s[key] = now_s
                # A new id each time: an agent that has started anew must not take it for one that is done.
                command_id = f"install-{installation_id}-{uuid.uuid4().hex[:8]}"
                command = Command(id=command_id, kind=CommandKind.INSTALL, argument=installation_id)
                self._commander.command(row.device_id, command)

    def _present(self) -> list[DeviceInfo]:
        return [info for info in self._roster.known() if self._roster.state(info.device_id) in PRESENT]


def why_not(info: DeviceInfo) -> str:
    """Returns why a device cannot be updated from here, as it says itself; empty when it can."""
    said = info.capabilities.get("installs")
    if not isinstance(said, dict):
        return OLDER
    return "" if said.get("able") is True else str(said.get("reason") or "it does not say why")[:MAX_REASON_CHARS]


def _record(wish: InstallationWish, bundle: KeptBundle) -> InstallationRecord:
    manifest = bundle.manifest
    return InstallationRecord(
        installation_id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}",
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
