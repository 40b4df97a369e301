"""Service of rollouts, one for each kind: offer, canaries, reports, the rest, and back again.

A rollout brings a model, a release or a task pack to devices. The service survives restarts: every step is in the
store before it is taken.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from edgefl.coordinator.fleet.presence import PRESENT_STATES
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.rollouts.state_machine import (
    RolloutTransition,
    advance_rollout,
    fail_removed_devices,
    fail_rollout,
    start_rollout,
    supersede_rollout,
    update_canary_deadline,
)
from edgefl.core.errors import RETRYABLE_STORE_ERRORS, EdgeflError, NotFoundError, StoreError
from edgefl.core.protocol import Command, CommandKind, Heartbeat
from edgefl.core.types import DeviceInfo, Json
from edgefl.storage.repositories.rollouts import (
    RolloutDeviceRecord,
    RolloutRecord,
    RolloutRepository,
    RolloutStage,
    RolloutStatus,
)
from edgefl.storage.store import Store

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
RESEND_AFTER_S = 15.0
"""A device that does not report a command is sent it again after this."""
MAX_REASON_CHARS = 500

T = TypeVar("T")
RequestT = TypeVar("RequestT")
RecordT = TypeVar("RecordT", bound=RolloutRecord)


class RolloutKind(Protocol[RequestT, RecordT]):
    """What a kind of rollout adds to the life cycle.

    Attributes:
        request: class of an operator's request.
        repository: has the rollouts.
        artefact: its name in URLs and messages.
        commands: stage of a device -> the command that it gets.
        reports: stage that a device may report -> the stages that it must have for it.
        states_in_progress: states in which a device is at work on the rollout.
        offered_stages: stages of the devices that may fetch the artefact.
        is_ready: whether the artefact exists before the rollout, which then starts at once.
        is_queued: whether a device gets one rollout at a time, else newer ones cancel older ones.
    """

    request: type[RequestT]
    repository: RolloutRepository[RecordT]
    artefact: str
    commands: Mapping[RolloutStage, CommandKind]
    reports: Mapping[RolloutStage, Collection[RolloutStage]]
    states_in_progress: Collection[str]
    offered_stages: Collection[RolloutStage]
    is_ready: bool
    is_queued: bool

    def plan(self, request: RequestT) -> tuple[RecordT, list[str], dict[str, str] | None]:
        """Returns the new rollout, its devices, and the excluded ones with the reason, where it tells them.

        Raises:
            NotFoundError: no such artefact or device.
            UsageError: no device could take it.
        """

    def on_submitted(self, record: RecordT, names: Sequence[str]) -> None:
        """Records the events of a new rollout."""

    def prepare(self, record: RecordT) -> Mapping[str, Any]:
        """Makes the artefact; returns the columns of the rollout that describe it."""

    def prune(self) -> None:
        """Removes artefacts that no device can get any more."""

    def make_offer(self, record: RecordT) -> Json:
        """Returns what a device needs to fetch and check the artefact."""

    def get_path(self, record: RecordT) -> Path:
        """Returns the file of the artefact; raises NotFoundError if it is gone."""

    def on_status(self, record: RecordT, status: str, reason: str | None) -> None:
        """Records the event of a new status."""

    def describe_report(self, record: RecordT, stage: RolloutStage) -> tuple[str, str]:
        """Returns the kind and the text of the event of a device's report."""

    def parse_scores(self, report: Json) -> Mapping[str, Any]:
        """Returns further columns that a report fills."""

    def on_other_report(self, device_id: str, rows: Sequence[RolloutDeviceRecord], report: Json) -> None:
        """Handles a status that reports no step of a rollout; `rows` are the device's, newest first."""

    def add_late_devices(self) -> None:
        """Adds devices that joined after a rollout to all devices."""


class RolloutService(Generic[RequestT, RecordT]):
    """All rollouts of one kind; `submit` and `on_heartbeat` may be called from any thread.

    One thread advances them every second, and at once when there is news; errors are isolated per rollout.

    Args:
        kind: of the rollouts.
        store: has them.
        registry: of the devices.
        send_command: sends a command to a device.
        on_fatal: called when the store is unusable; a full or locked one is retried.
    """

    def __init__(
        self,
        kind: RolloutKind[RequestT, RecordT],
        *,
        store: Store,
        registry: DeviceRegistry,
        send_command: Callable[[str, Command], None],
        on_fatal: Callable[[EdgeflError], None],
    ) -> None:
        self.kind, self.name = kind, kind.repository.kind
        self._rollouts, self._store, self._registry = kind.repository, store, registry
        self._send_command, self._on_fatal = send_command, on_fatal
        self._status_updates = StatusUpdates()
        self._sent_s: dict[tuple[str, CommandKind, str], float] = {}
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{self.name}s", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: RequestT) -> tuple[RecordT, dict[str, str] | None]:
        """Plans and stores a new rollout; returns it and the excluded devices, and raises, as `RolloutKind.plan`."""
        return self.add(*self.kind.plan(request))

    def add(
        self, record: RecordT, names: Sequence[str], excluded: dict[str, str] | None = None
    ) -> tuple[RecordT, dict[str, str] | None]:
        """Stores a rollout that was planned; returns it and the excluded devices."""
        with self._store.batch(durable=True):
            self._rollouts.add(record, names)
            self.kind.on_submitted(record, names)
            if self.kind.is_ready:
                self._prepare(record)
        if self.kind.is_ready:
            self.kind.prune()  # after the transaction: other writers wait for it, and a deletion is not undone
        log.info("%s %s: %d devices", self.name, record.id, len(names))
        self._wake.set()
        return self._rollouts.get(record.id), excluded

    def on_heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        """Records the status of a rollout in a heartbeat."""
        if self._status_updates.record(device_id, getattr(heartbeat, self.name)):
            self._wake.set()

    def make_offer(self, rollout_id: str, device_id: str) -> Json:
        """Returns the offer that a device needs to fetch and check the artefact.

        Raises:
            NotFoundError: there is no such rollout for this device.
        """
        return self.kind.make_offer(self._find_offered(rollout_id, device_id))

    def get_file(self, rollout_id: str, device_id: str) -> Path:
        """Returns the file that a device fetches; raises as `make_offer`."""
        return self.kind.get_path(self._find_offered(rollout_id, device_id))

    def _find_offered(self, rollout_id: str, device_id: str) -> RecordT:
        record = self._rollouts.get(rollout_id)
        stages = {row.device_id: row.state for row in self._rollouts.list_devices(record.id)}
        if record.status is RolloutStatus.PREPARING or stages.get(device_id) not in self.kind.offered_stages:
            raise NotFoundError(f"{self.name} {rollout_id} is not for {device_id} now")
        return record

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(POLL_INTERVAL_S)
            self._wake.clear()
            try:
                succeeded = self._reconcile()
            except RETRYABLE_STORE_ERRORS as error:  # the store is full or locked: temporary
                log.warning("the %ss wait: %s", self.name, error)
                succeeded = False
            except StoreError as error:
                self._on_fatal(error)
                return
            except Exception:  # the boundary of the thread: it must go on
                log.exception("the %ss stumbled; they are looked at again", self.name)
                succeeded = False
            if not succeeded:
                self._stopping.wait(POLL_INTERVAL_S)

    def _reconcile(self) -> bool:
        """Records all reports and advances all rollouts once; returns whether all succeeded."""
        all_reported = self._run_each(
            self._status_updates.list_pending(), lambda name: self._status_updates.dispatch(name, self._on_report)
        )
        busy: set[str] = set()
        all_advanced = self._run_each(self._rollouts.list_open(), lambda record: self._advance(record, busy))
        self.kind.add_late_devices()
        return all_reported and all_advanced

    def _run_each(self, items: Iterable[T], step: Callable[[T], None]) -> bool:
        """Runs a step for each item until stopped; returns whether all succeeded."""
        succeeded = True
        for item in items:
            try:
                if not self._stopping.is_set():
                    step(item)
            except StoreError:
                raise
            except Exception:  # the boundary of one rollout: the others must go on
                log.exception("%ss: %s stumbled; it is tried again", self.name, item)
                succeeded = False
        return succeeded

    def _on_report(self, device_id: str, report: Json) -> None:
        rows = self._rollouts.list_of_device(device_id)
        row = next((row for row in rows if row.rollout_id == report.get("id")), None)
        stage = next((stage for stage in self.kind.reports if stage == report.get("state")), None)
        if row is not None and stage is not None and row.state in self.kind.reports[stage]:
            self._record_report(row, stage, report)
        else:
            self.kind.on_other_report(device_id, rows, report)

    def _record_report(self, row: RolloutDeviceRecord, stage: RolloutStage, report: Json) -> None:
        reason, now = parse_reason(report), time.time()
        values = {"state": stage, "reason": reason, "reported_at": now, **self.kind.parse_scores(report)}
        event, text = self.kind.describe_report(self._rollouts.get(row.rollout_id), stage)
        message = f"{row.rollout_id}: {text}" + (f", {reason}" if reason else "")
        with self._store.batch(durable=True):
            self._rollouts.update_devices(row.rollout_id, {row.device_id: values})
            self._store.record_event(event, message, at=now, device_id=row.device_id)
        log.info("%s: %s %s", row.device_id, self.name, message)

    def _advance(self, record: RecordT, busy: set[str]) -> None:
        rows = self._rollouts.list_devices(record.id)
        if (step := fail_removed_devices(rows, lambda name: self._registry.get_device(name) is not None)) is not None:
            self._apply(record, step)
            rows = self._rollouts.list_devices(record.id)
        if record.status is RolloutStatus.PREPARING:
            self._prepare(record)
            self.kind.prune()
        else:
            # A canary that is away has no other rollout under way: its time goes on.
            is_queued = lambda name: name in busy and self._registry.get_state(name) in PRESENT_STATES  # noqa: E731 beside its use
            if (step := update_canary_deadline(record, rows, is_queued, time.time())) is not None:
                self._apply(record, step)
                record = replace(record, **step.values)
            if (step := advance_rollout(record, rows, time.time())) is not None:
                self._apply(record, step)
        self._notify_devices(record.id, busy)

    def _prepare(self, record: RecordT) -> None:
        """Makes the artefact for the devices and takes the first step."""
        rows, now = self._rollouts.list_devices(record.id), time.time()
        if all(row.state is RolloutStage.SUPERSEDED for row in rows):
            step = supersede_rollout(rows, now)
        else:
            try:
                described = self.kind.prepare(record)
            except StoreError:
                raise
            except Exception as error:  # a user's task is exported here; its error fails this rollout
                log.warning("the %s of %s cannot be exported", self.kind.artefact, record.id, exc_info=True)
                reason = f"the {self.kind.artefact} cannot be exported: {error}"
                step = fail_rollout(record, rows, reason, now)
            else:
                first_step = start_rollout(record, rows, list_present(self._registry), now)
                step = replace(first_step, values={**first_step.values, **described})
        self._apply(record, step)

    def _apply(self, record: RecordT, step: RolloutTransition) -> None:
        status, reason = step.values.get("status"), step.values.get("reason")
        with self._store.batch(durable=True):
            self._rollouts.update_devices(record.id, step.devices)
            if step.values:
                self._rollouts.update(record.id, **step.values)
            if status is not None:
                log.info("%s %s is %s %s", self.name, record.id, status, reason or "")
                self.kind.on_status(record, str(status), reason)

    def _notify_devices(self, rollout_id: str, busy: set[str]) -> None:
        """Sends commands to present devices that have not acted on them; the others get theirs later.

        Args:
            rollout_id: that they are to act on.
            busy: devices that have not answered an older rollout yet, where they get one at a time: two would share
                a slow link, and an updater takes one request. Those of this one are added.
        """
        for row in self._rollouts.list_devices(rollout_id):
            command = self.kind.commands.get(row.state)
            if command is None or row.device_id in busy:
                continue
            if self.kind.is_queued:
                busy.add(row.device_id)
            self._notify(row, command)

    def _notify(self, row: RolloutDeviceRecord, kind: CommandKind) -> None:
        """Sends a command to a device that is there and not at it, at most every `RESEND_AFTER_S`."""
        device_id, rollout_id, heartbeat = row.device_id, row.rollout_id, self._registry.get_heartbeat(row.device_id)
        # A session sends its first heartbeat once it has subscribed: an earlier command would be lost.
        if heartbeat is None or self._registry.get_state(device_id) not in PRESENT_STATES:
            return
        status = getattr(heartbeat, self.name) or {}
        is_at_it = status.get("id") == rollout_id and str(status.get("state")) in self.kind.states_in_progress
        if row.state is RolloutStage.NOTIFIED and is_at_it:
            return
        key, now_s = (device_id, kind, rollout_id), time.monotonic()
        if now_s - self._sent_s.get(key, -RESEND_AFTER_S) >= RESEND_AFTER_S:
            self._sent_s[key] = now_s
            # A new id each time: an agent that restarted, or was not ready, must not take it for a completed one.
            command_id = f"{kind}-{rollout_id}-{uuid.uuid4().hex[:8]}"
            self._send_command(device_id, Command(id=command_id, kind=kind, argument=rollout_id))


class StatusUpdates:
    """The last rollout status of each device, dispatched once per change.

    Any thread may record; only one may dispatch.
    """

    def __init__(self) -> None:
        self._last_status: dict[str, Json | None] = {}
        self._pending: dict[str, Json] = {}
        self._lock = threading.Lock()

    def record(self, device_id: str, status: Json | None) -> bool:
        """Records the status in a heartbeat; returns whether it is new."""
        with self._lock:
            if device_id in self._last_status and self._last_status[device_id] == status:
                return False
            self._last_status[device_id], self._pending[device_id] = status, status or {}
        return True

    def list_pending(self) -> list[str]:
        """Returns the devices with an undispatched status."""
        with self._lock:
            return list(self._pending)

    def dispatch(self, device_id: str, handler: Callable[[str, Json], None]) -> None:
        """Passes a device's new status to `handler`; keeps it if that raises, since it is reported only once."""
        with self._lock:
            status = self._pending[device_id]
        handler(device_id, status)
        with self._lock:
            if self._pending[device_id] is status:  # no newer status meanwhile
                del self._pending[device_id]


def list_present(registry: DeviceRegistry) -> list[DeviceInfo]:
    """Returns the present devices."""
    return [info for info in registry.list_devices() if registry.get_state(info.device_id) in PRESENT_STATES]


def make_rollout_id() -> str:
    """Returns the id of a new rollout, which starts with the UTC time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def parse_reason(status: Any) -> str | None:
    """Returns the reason in a device's status, shortened."""
    reason = status.get("reason")
    return str(reason)[:MAX_REASON_CHARS] if reason else None
