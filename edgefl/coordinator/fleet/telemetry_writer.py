"""Telemetry writer: batches heartbeats, presence, capabilities and events into the store."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.coordinator.fleet.presence import CloneRejected, PresenceChanged, SessionConflict
from edgefl.coordinator.fleet.registry import (
    DataDrifted,
    DeviceRegistry,
    DeviceRestarted,
    ExamplesChanged,
    RegistryEvent,
    parse_shard_errors,
)
from edgefl.core.claims import DATA_DRIFTED, EXAMPLES_CHANGED
from edgefl.core.errors import NotFoundError
from edgefl.core.protocol import Capabilities, Heartbeat, ProgressReport, StatusMessage, Topic
from edgefl.core.types import Json, Progress
from edgefl.storage.repositories.records import HeartbeatRow
from edgefl.storage.store import Store
from edgefl.system.retries import RateLimitedLog

log = logging.getLogger(__name__)

PRUNE_INTERVAL_S = 3600.0
DAY_S = 86_400.0
MAX_VERSION_CHARS = 40
MAX_PENDING_ROWS = 20_000
"""Maximum number of buffered heartbeats, and of events; the oldest beyond it are dropped, and counted."""

SHARD_UNREADABLE = "shard-unreadable"
MAX_JUMP_S = 86_400.0
SETTLING_TIME_S = 3600.0
"""A clock is trusted this long after its last jump, or after a start that does not follow the stored times."""


@dataclass(slots=True)
class _PendingTelemetry:
    """Buffered telemetry; `num_dropped` heartbeats and events were dropped beyond the limit."""

    heartbeats: list[HeartbeatRow] = field(default_factory=list)
    capabilities: dict[str, tuple[Capabilities, float]] = field(default_factory=dict)
    events: list[tuple[RegistryEvent, float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    num_dropped: int = 0

    def merge(self, newer: _PendingTelemetry) -> _PendingTelemetry:
        """Returns both, without the oldest rows beyond the limit."""
        heartbeats, events = [*self.heartbeats, *newer.heartbeats], [*self.events, *newer.events]
        num_excess = max(0, len(heartbeats) - MAX_PENDING_ROWS) + max(0, len(events) - MAX_PENDING_ROWS)
        return _PendingTelemetry(
            heartbeats=heartbeats[-MAX_PENDING_ROWS:],
            capabilities=self.capabilities | newer.capabilities,
            events=events[-MAX_PENDING_ROWS:],
            versions=self.versions | newer.versions,
            num_dropped=self.num_dropped + newer.num_dropped + num_excess,
        )


class TelemetryWriter:
    """Buffers MQTT messages and registry events of any thread; `flush` writes them, in one thread.

    Args:
        store: where they are written.
        registry: gets each message first.
        clock: Unix seconds.
        on_progress: called with progress reports, which are not stored.
        on_heartbeat: called with heartbeats of known devices.
        keep_history_days: how long updates of finished runs, five-minute rows, and events of presence and rejection
            are kept; None to keep them for ever.
        monotonic: seconds, monotonic.
    """

    def __init__(  # noqa: PLR0913 a keyword for each part
        self,
        *,
        store: Store,
        registry: DeviceRegistry,
        clock: Callable[[], float],
        on_progress: Callable[[Progress], None],
        on_heartbeat: Callable[[str, Heartbeat], None],
        keep_history_days: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_history_days = keep_history_days
        self._store, self._registry, self._clock = store, registry, clock
        self._on_progress, self._on_heartbeat = on_progress, on_heartbeat
        self._pending, self._rate_limit = _PendingTelemetry(), RateLimitedLog(log)
        self._known_versions: dict[str, str] = {}
        self._lock = threading.Lock()
        self._monotonic, self._stable_clock = monotonic, StableClock(clock, monotonic)
        self._next_prune_s = -math.inf
        registry.subscribe(self._on_registry_event)

    def on_message(self, device_id: str, kind: Topic, payload: bytes) -> None:
        """Handles one MQTT message of a device.

        Raises:
            NetworkError: it is malformed.
        """
        match kind:
            case Topic.STATUS:
                if payload:
                    self._record_status(device_id, StatusMessage.load(payload))
            case Topic.HEARTBEAT:
                self._record_heartbeat(device_id, Heartbeat.load(payload))
            case Topic.CAPABILITIES:
                if payload:
                    self._record_capabilities(device_id, Capabilities.load(payload))
            case Topic.PROGRESS:
                report = ProgressReport.load(payload)
                self._on_progress(
                    Progress(
                        device_id=device_id,
                        assignment_id=report.assignment,
                        iteration=report.iteration,
                        seconds_per_iteration=report.seconds_per_iteration,
                        age_s=report.age_s,
                    )
                )

    def flush(self) -> None:
        """Writes the buffered telemetry in one transaction, and prunes old rows every `PRUNE_INTERVAL_S`.

        Raises:
            StoreError: it cannot be written; the telemetry stays buffered, within the limit.
        """
        if not self._stable_clock.is_started:  # before anything new is stored
            self._stable_clock.start(self._store.get_newest_heartbeat_time())
        with self._lock:
            pending, self._pending = self._pending, _PendingTelemetry()
        if pending != _PendingTelemetry():
            try:
                self._write(pending)
            except BaseException:  # an interrupt too: no telemetry may be lost
                with self._lock:
                    self._pending = pending.merge(self._pending)
                raise
        now, now_s = self._stable_clock.now(), self._monotonic()
        if now is not None and now_s >= self._next_prune_s:
            self._next_prune_s = now_s + PRUNE_INTERVAL_S
            self._store.prune_heartbeats(now)
            self._store.prune_rejected_events()
            if self._keep_history_days is not None:
                self._store.prune_history(now - self._keep_history_days * DAY_S)

    def _write(self, pending: _PendingTelemetry) -> None:
        with self._store.batch():
            for device_id, version in pending.versions.items():
                self._write_version(device_id, version)
            self._store.record_heartbeats(pending.heartbeats)
            for device_id, (report, at) in pending.capabilities.items():
                self._write_capabilities(device_id, report, at)
            if pending.num_dropped:
                message = f"{pending.num_dropped} heartbeats and events were dropped: the store could not be written"
                log.warning("%s", message)
                self._store.record_event("events-dropped", message, at=self._clock())
            for event, at in pending.events:
                self._write_event(event, at)

    def _record_status(self, device_id: str, status: StatusMessage) -> None:
        """Records a status, and the device's version if that has changed."""
        self._registry.record_status(device_id, status)
        with self._lock:
            if status.version and self._known_versions.get(device_id) != status.version:
                self._known_versions[device_id] = status.version
                self._pending.versions[device_id] = status.version[:MAX_VERSION_CHARS]

    def _record_heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        if self._registry.get_device(device_id) is None:
            return
        self._registry.record_heartbeat(device_id, heartbeat)
        self._on_heartbeat(device_id, heartbeat)
        row = HeartbeatRow(device_id=device_id, at=self._clock(), heartbeat=heartbeat)
        with self._lock:
            self._pending.heartbeats.append(row)

    def _record_capabilities(self, device_id: str, capabilities: Capabilities) -> None:
        self._registry.record_capabilities(device_id, capabilities)
        with self._lock:
            self._pending.capabilities[device_id] = capabilities, self._clock()

    def _on_registry_event(self, event: RegistryEvent) -> None:
        limited = ExamplesChanged | DataDrifted
        if isinstance(event, limited) and not self._rate_limit.is_due(f"{type(event).__name__} {event.device_id}"):
            return
        if isinstance(event, CloneRejected) and not event.detected:
            return
        if isinstance(event, PresenceChanged | SessionConflict | DeviceRestarted | CloneRejected | limited):
            with self._lock:
                self._pending.events.append((event, self._clock()))

    def _write_version(self, device_id: str, version: str) -> None:
        try:
            self._store.update_device(device_id, version=version)
        except NotFoundError:
            log.info("dropped the version of %s: it was removed", device_id)

    def _write_capabilities(self, device_id: str, report: Capabilities, at: float) -> None:
        try:
            record_capabilities(self._store, device_id, report.facts, report.shards, at=at)
            info = self._registry.get_device(device_id)
            self._store.update_device(device_id, examples=dict(info.examples) if info else {})
        except NotFoundError:
            log.info("dropped the capabilities of %s: it was removed", device_id)

    def _write_event(self, event: RegistryEvent, at: float) -> None:
        match event:
            case PresenceChanged():
                log.info("%s is %s (%s)", event.device_id, event.after, event.reason)
                self._store.record_event(f"device-{event.after}", event.reason, at=at, device_id=event.device_id)
                try:
                    self._store.update_device(event.device_id, presence=str(event.after))
                except NotFoundError:
                    log.debug("%s was removed meanwhile", event.device_id)
            case SessionConflict():
                log.warning("%s: two of it take turns; was its card cloned?", event.device_id)
                self._store.record_event("device-flapping", event.reason, at=at, device_id=event.device_id)
            case CloneRejected():
                log.warning("%s: its card or state directory was copied: %s", event.device_id, event.reason)
                self._store.record_event("device-cloned", event.reason, at=at, device_id=event.device_id)
            case ExamplesChanged():
                self._store.record_event(EXAMPLES_CHANGED, event.reason, at=at, device_id=event.device_id)
            case DataDrifted():
                log.warning("%s: its data has drifted: %s", event.device_id, event.reason)
                self._store.record_event(DATA_DRIFTED, event.reason, at=at, device_id=event.device_id)
            case DeviceRestarted():
                self._store.record_event("device-restarted", "a new agent", at=at, device_id=event.device_id)


def record_capabilities(store: Store, device_id: str, facts: Json, shards: Json, *, at: float) -> None:
    """Stores a device's capabilities; if they are new, also records their shard errors as events.

    Raises:
        NotFoundError: no such device.
    """
    if store.record_capabilities(device_id, facts, shards, at):
        for task, reason in parse_shard_errors(facts).items():
            store.record_event(SHARD_UNREADABLE, f"{task}: {reason}", at=at, device_id=device_id, data={"task": task})


class StableClock:
    """Unix time that ignores recent jumps. Not thread-safe.

    A machine without a clock chip may start in any year, and be set right later.

    Args:
        clock: Unix seconds.
        monotonic: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock, self._monotonic = clock, monotonic
        self._offset_s: float | None = None
        self._trusted_from_s = 0.0

    @property
    def is_started(self) -> bool:
        return self._offset_s is not None

    def start(self, newest_at: float | None) -> None:
        """Starts it; `newest_at` is the newest time stored before this start."""
        now, now_s = self._clock(), self._monotonic()
        is_continuous = newest_at is not None and abs(now - newest_at) <= MAX_JUMP_S
        self._offset_s, self._trusted_from_s = now - now_s, now_s if is_continuous else now_s + SETTLING_TIME_S

    def now(self) -> float | None:
        """Returns Unix seconds; None while the clock is not trusted. Call it regularly, to notice jumps."""
        now, now_s = self._clock(), self._monotonic()
        if self._offset_s is None or abs(now - now_s - self._offset_s) > MAX_JUMP_S:
            self._offset_s, self._trusted_from_s = now - now_s, now_s + SETTLING_TIME_S
        return now if now_s >= self._trusted_from_s else None
