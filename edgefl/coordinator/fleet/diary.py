"""Keeps the fleet's diary: heartbeats in batches, presence, capabilities and what else happened, into the store."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl.coordinator.fleet.presence import Flapping, Transition
from edgefl.coordinator.fleet.roster import Restarted, Roster, RosterEvent
from edgefl.coordinator.fleet.settled_clock import SettledClock
from edgefl.coordinator.fleet.shard_faults import record_capabilities
from edgefl.coordinator.fleet.twins import Cloned
from edgefl.errors import NotFoundError
from edgefl.protocol import Capabilities, Heartbeat, ProgressReport, Status, Topic
from edgefl.storage.records import HeartbeatRow
from edgefl.storage.store import Store
from edgefl.types import Progress

log = logging.getLogger(__name__)

PRUNE_EVERY_S = 3600.0
DAY_S = 86_400.0
MAX_VERSION_CHARS = 40
MAX_WAITING = 20_000
"""So many heartbeats, and as many events, wait for a store that cannot be written; the oldest go, and are counted."""


@dataclass(slots=True)
class _Waiting:
    """What has gathered; `num_dropped` heartbeats and events are lost, since there were too many to wait."""

    heartbeats: list[HeartbeatRow] = field(default_factory=list)
    capabilities: dict[str, tuple[Capabilities, float]] = field(default_factory=dict)
    events: list[tuple[RosterEvent, float]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    num_dropped: int = 0

    def followed_by(self, newer: _Waiting) -> _Waiting:
        """Returns both, without the oldest where they are too many."""
        heartbeats, events = [*self.heartbeats, *newer.heartbeats], [*self.events, *newer.events]
        too_many = max(0, len(heartbeats) - MAX_WAITING) + max(0, len(events) - MAX_WAITING)
        return _Waiting(
            heartbeats=heartbeats[-MAX_WAITING:],
            capabilities=self.capabilities | newer.capabilities,
            events=events[-MAX_WAITING:],
            versions=self.versions | newer.versions,
            num_dropped=self.num_dropped + newer.num_dropped + too_many,
        )


class Diary:
    """Takes MQTT messages and roster events in any thread; `flush` writes them, in one.

    Args:
        store: where it all goes.
        roster: is told first.
        clock: Unix seconds.
        on_progress: told of progress reports, which are not kept.
        on_heartbeat: told of heartbeats of known devices.
        keep_history_days: how long updates of runs that are over, five-minute rows, and who came, went or was
            refused, are kept; None is for ever.
        monotonic: seconds that nobody sets.
    """

    def __init__(  # noqa: PLR0913 a keyword for each part
        self,
        *,
        store: Store,
        roster: Roster,
        clock: Callable[[], float],
        on_progress: Callable[[Progress], None],
        on_heartbeat: Callable[[str, Heartbeat], None],
        keep_history_days: float | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_history_days = keep_history_days
        self._store, self._roster, self._clock = store, roster, clock
        self._on_progress, self._on_heartbeat = on_progress, on_heartbeat
        self._waiting = _Waiting()
        self._known_versions: dict[str, str] = {}
        self._lock = threading.Lock()
        self._monotonic, self._settled = monotonic, SettledClock(clock, monotonic)
        self._next_prune_s = -math.inf
        roster.listen(self._heard)

    def message(self, device_id: str, kind: Topic, payload: bytes) -> None:
        """Takes one MQTT message of a device.

        Raises:
            NetworkError: it is malformed.
        """
        match kind:
            case Topic.STATUS:
                if payload:
                    self._status(device_id, Status.load(payload))
            case Topic.HEARTBEAT:
                self._heartbeat(device_id, Heartbeat.load(payload))
            case Topic.CAPABILITIES:
                if payload:
                    self._capable(device_id, Capabilities.load(payload))
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
        """Writes what has gathered, in one transaction; rolls old heartbeats up now and then.

        Raises:
            StoreError: it cannot be written; what has gathered waits for the next call, within a bound.
        """
        if not self._settled.has_begun:  # before anything of now is stored
            self._settled.begin(self._store.newest_heartbeat_at())
        with self._lock:
            waiting, self._waiting = self._waiting, _Waiting()
        if waiting != _Waiting():
            try:
                self._write(waiting)
            except BaseException:
                with self._lock:
                    self._waiting = waiting.followed_by(self._waiting)
                raise
        now, now_s = self._settled.now(), self._monotonic()
        if now is not None and now_s >= self._next_prune_s:
            self._next_prune_s = now_s + PRUNE_EVERY_S
            self._store.prune_heartbeats(now)
            self._store.prune_refused()
            if self._keep_history_days is not None:
                self._store.prune_history(now - self._keep_history_days * DAY_S)

    def _write(self, waiting: _Waiting) -> None:
        with self._store.batch():
            for device_id, version in waiting.versions.items():
                self._write_version(device_id, version)
            self._store.record_heartbeats(waiting.heartbeats)
            for device_id, (report, at) in waiting.capabilities.items():
                self._write_capabilities(device_id, report, at)
            if waiting.num_dropped:
                message = f"{waiting.num_dropped} heartbeats and events were dropped: the store could not be written"
                log.warning("%s", message)
                self._store.record_event("diary-dropped", message, at=self._clock())
            for event, at in waiting.events:
                self._write_event(event, at)

    def _status(self, device_id: str, status: Status) -> None:
        """Takes what a device says of itself; its version changes when it is updated."""
        self._roster.note_status(device_id, status)
        with self._lock:
            if status.version and self._known_versions.get(device_id) != status.version:
                self._known_versions[device_id] = status.version
                self._waiting.versions[device_id] = status.version[:MAX_VERSION_CHARS]

    def _heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        if self._roster.info(device_id) is None:
            return
        self._roster.note_heartbeat(device_id, heartbeat)
        self._on_heartbeat(device_id, heartbeat)
        row = HeartbeatRow(
            device_id=device_id,
            at=self._clock(),
            seq=heartbeat.seq,
            session_no=heartbeat.session_no,
            uptime_s=heartbeat.uptime_s,
            clock_skew_s=heartbeat.clock_skew_s,
            temperature_c=heartbeat.temperature_c,
            throttled=heartbeat.throttled,
            cpu_fraction=heartbeat.cpu_fraction,
            memory_fraction=heartbeat.memory_fraction,
            memory_bytes=heartbeat.memory_bytes,
            disk_free_bytes=heartbeat.disk_free_bytes,
            battery_fraction=heartbeat.battery_fraction,
            power_w=heartbeat.power_w,
            run=heartbeat.run,
            iteration=heartbeat.iteration,
        )
        with self._lock:
            self._waiting.heartbeats.append(row)

    def _capable(self, device_id: str, capabilities: Capabilities) -> None:
        self._roster.note_capabilities(device_id, capabilities)
        with self._lock:
            self._waiting.capabilities[device_id] = capabilities, self._clock()

    def _heard(self, event: RosterEvent) -> None:
        if isinstance(event, Transition | Flapping | Restarted | Cloned):
            with self._lock:
                self._waiting.events.append((event, self._clock()))

    def _write_version(self, device_id: str, version: str) -> None:
        try:
            self._store.update_device(device_id, version=version)
        except NotFoundError:
            log.info("dropped the version of %s: it was removed", device_id)

    def _write_capabilities(self, device_id: str, report: Capabilities, at: float) -> None:
        try:
            record_capabilities(self._store, device_id, report.facts, report.shards, at=at)
            info = self._roster.info(device_id)
            self._store.update_device(device_id, examples=dict(info.examples) if info else {})
        except NotFoundError:
            log.info("dropped the capabilities of %s: it was removed", device_id)

    def _write_event(self, event: RosterEvent, at: float) -> None:
        match event:
            case Transition():
                log.info("%s is %s (%s)", event.device_id, event.after, event.reason)
                self._store.record_event(f"device-{event.after}", event.reason, at=at, device_id=event.device_id)
                try:
                    self._store.update_device(event.device_id, presence=str(event.after))
                except NotFoundError:
                    log.debug("%s was removed meanwhile", event.device_id)
            case Flapping():
                log.warning("%s: two of it take turns; was its card cloned?", event.device_id)
                self._store.record_event("device-flapping", event.reason, at=at, device_id=event.device_id)
            case Cloned():
                log.warning("%s: its card or state directory was copied: %s", event.device_id, event.reason)
                self._store.record_event("device-cloned", event.reason, at=at, device_id=event.device_id)
            case Restarted():
                self._store.record_event("device-restarted", "a new agent", at=at, device_id=event.device_id)
