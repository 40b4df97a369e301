"""Device registry: presence, capabilities and speed of the devices of the fleet. Thread-safe.

Everything that reaches the coordinator (MQTT, HTTPS) is recorded here. The registry tracks presence and publishes
changes to its subscribers: the telemetry writer and the live fleet.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from edgefl.coordinator.fleet.allotments import BoardAllotments, BoardClaim
from edgefl.coordinator.fleet.presence import (
    CloneDetector,
    CloneRejected,
    DevicePresence,
    PresenceEvent,
    PresenceRecord,
    PresenceTracker,
)
from edgefl.core.allowance import Allowance, parse_allowance
from edgefl.core.claims import GROWTH_PERIOD_S, bound_reported_examples, format_drift, parse_drift
from edgefl.core.conditions import DOWNLOAD, Blocker, format_blocker, parse_blocker
from edgefl.core.protocol import EVALUATOR_NAME, Capabilities, Heartbeat, PresenceState, StatusMessage
from edgefl.core.safe_text import escape_start
from edgefl.core.types import DeviceInfo, HealthMetrics, Role
from edgefl.engine.fleet_state import update_moving_average

E = TypeVar("E")

_SCHEDULABLE_STATES = frozenset({DevicePresence.ONLINE, DevicePresence.LATE})
_HEARTBEAT_FIELDS = ("temperature_c", "throttled", "run", "iteration")
MAX_SHARD_ERRORS, MAX_ERROR_CHARS = 8, 200
ASK_AGAIN_S, MAX_BLOCKED_S = 60.0, 3600.0
"""How long the conditions of a run keep a device from it after the last word: without a time, and at most."""
MAX_RUN_BLOCKERS = 16
"""Runs whose conditions are remembered of one device; the oldest is dropped."""
NEVER_SEEN = "never seen"
DEFAULT_STATUS_ROW: Mapping[str, Any] = MappingProxyType(
    {
        "presence": NEVER_SEEN,
        "drained": False,
        "blocked": None,
        "allowance": None,
        "silent_s": None,
        "cloned": None,
        "problem": None,
        "drift": None,
        "allotted_to": None,
        **dict.fromkeys(_HEARTBEAT_FIELDS),
        "seconds_per_iteration": None,
    }
)
"""Status row of a device that has joined and never been seen."""


@dataclass(frozen=True, kw_only=True)
class DeviceEvent:
    """What happened to one device, as subscribers of the registry are told."""

    device_id: str


class DeviceRestarted(DeviceEvent):
    """The agent of a device is a new process: its memory is lost."""


@dataclass(frozen=True, kw_only=True)
class HeldInstructions(DeviceEvent):
    """The assignments that a device reports as held, as of `at_s`."""

    assignment_ids: tuple[str, ...]
    at_s: float


class DeviceAdded(DeviceEvent):
    """A device joined, or joined again: its role, groups or data may differ."""


class DeviceChanged(DeviceEvent):
    """A device reported new capabilities or shards, may train or not, or works for another run."""


@dataclass(frozen=True, kw_only=True)
class ExamplesChanged(DeviceEvent):
    """A device reported other numbers of examples than before; `reason` says which, and what counts of them."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class DataDrifted(DeviceEvent):
    """A device's newest data is far from its reference, and was not before; `reason` says which task and column."""

    reason: str


class DeviceRemoved(DeviceEvent):
    """A device was removed from the fleet; it will never answer."""


RegistryEvent = (
    PresenceEvent
    | DeviceRestarted
    | HeldInstructions
    | DeviceAdded
    | DeviceChanged
    | ExamplesChanged
    | DataDrifted
    | DeviceRemoved
    | CloneRejected
)
RegistrySubscriber = Callable[[RegistryEvent], None]


@dataclass(slots=True)
class _RegistryEntry:
    info: DeviceInfo
    node_id: int
    boot_id: str = ""
    seconds_per_iteration: float | None = None
    is_drained: bool = False
    blocker: Blocker | None = None
    run_blockers: dict[str, tuple[Blocker, float]] = field(default_factory=dict)
    working_run: str | None = None
    allowance: Allowance | None = None
    shortages: dict[str, str] = field(default_factory=dict)
    known_examples: dict[str, int] = field(default_factory=dict)
    grown_s: float = -math.inf
    was_seen: bool = False


class EventBus(Generic[E]):
    """Events are enqueued under the caller's lock and published outside it. Thread-safe.

    One thread publishes at a time, and no other waits for it: a concurrent `publish` leaves its events to that one.
    So a subscriber may cause events, which are published after the present one.
    """

    def __init__(self) -> None:
        self._subscribers: tuple[Callable[[E], None], ...] = ()
        self._pending: deque[E] = deque()
        self._subscribers_lock, self._publish_lock = threading.Lock(), threading.Lock()

    def subscribe(self, subscriber: Callable[[E], None]) -> Callable[[], None]:
        """Calls `subscriber` with every event; returns a function that unsubscribes it."""
        with self._subscribers_lock:
            self._subscribers = (*self._subscribers, subscriber)

        def end() -> None:
            with self._subscribers_lock:
                self._subscribers = tuple(other for other in self._subscribers if other is not subscriber)

        return end

    def enqueue(self, events: Iterable[E]) -> None:
        """Queues events for `publish`, in the order of these calls; call it under the lock that orders the events."""
        self._pending.extend(events)

    def publish(self) -> None:
        """Passes queued events to all subscribers; raises their errors, and leaves the rest for the next call."""
        # Checked again after the release: events enqueued meanwhile were left to the holder of the lock.
        while self._pending and self._publish_lock.acquire(blocking=False):
            try:
                self._publish_all()
            finally:
                self._publish_lock.release()

    def _publish_all(self) -> None:
        while self._pending:
            event = self._pending.popleft()
            for subscriber in self._subscribers:
                subscriber(event)


class DeviceRegistry:
    """Registry of the fleet's devices. Thread-safe.

    Subscribers are called outside the lock, with one event at a time in order of occurrence, possibly in another
    thread than the caller's.
    """

    def __init__(self, presence: PresenceTracker, clock: Callable[[], float]) -> None:
        self._presence, self._clock, self._clone_detector = presence, clock, CloneDetector()
        self._entries: dict[str, _RegistryEntry] = {}
        self._device_by_node: dict[int, str] = {}
        self._run_blocked_ids: set[str] = set()
        self._allotments = BoardAllotments(self._is_kept_from)
        self._event_bus = EventBus[RegistryEvent]()
        self._lock = threading.RLock()

    def subscribe(self, subscriber: RegistrySubscriber) -> Callable[[], None]:
        """Calls `subscriber` with every event; returns a function that unsubscribes it."""
        return self._event_bus.subscribe(subscriber)

    def add(  # noqa: PLR0913 what is known of a device
        self,
        device_id: str,
        *,
        node_id: int,
        role: str,
        groups: Sequence[str],
        examples: Mapping[str, int],
        facts: Mapping[str, Any] | None = None,
        was_seen: bool = False,
    ) -> None:
        """Adds a device that has joined, or joined again.

        `facts` are its newest capabilities; `was_seen` says that an earlier coordinator has seen it.
        """
        is_own = device_id == EVALUATOR_NAME
        source = "coordinator" if is_own else ("evaluator" if role == Role.EVALUATOR else "device")
        info = DeviceInfo(
            device_id=device_id,
            role=Role(role),
            groups=tuple(groups),
            tasks=tuple(sorted(examples)),
            examples=dict(examples),
            source=source,
            capabilities=facts or {},
            blocks=_parse_blocks((facts or {}).get("blocks")),
        )
        with self._lock:
            former = self._entries.get(device_id)
            if former is not None and former.node_id == node_id:
                info_with_capabilities = replace(
                    info, capabilities=former.info.capabilities, blocks=former.info.blocks
                )
                former.info = info_with_capabilities if facts is None else info
            else:
                if former is not None:
                    self._device_by_node.pop(former.node_id, None)
                self._entries[device_id] = _RegistryEntry(info=info, node_id=node_id, was_seen=was_seen)
                self._device_by_node[node_id] = device_id
            self._event_bus.enqueue([DeviceAdded(device_id=device_id)])
            self._allotments.accept(device_id)
            self._allot(device_id)
        self._event_bus.publish()

    def remove(self, device_id: str) -> int | None:
        """Removes a device; returns its node id."""
        with self._lock:
            self._presence.remove(device_id)
            self._clone_detector.remove(device_id)
            entry = self._entries.pop(device_id, None)
            if entry is None:
                return None
            self._device_by_node.pop(entry.node_id, None)
            self._allotments.remove(device_id)
            self._event_bus.enqueue([DeviceRemoved(device_id=device_id)])
        self._event_bus.publish()
        return entry.node_id

    def get_device_id(self, node_id: int) -> str | None:
        return self._device_by_node.get(node_id)

    def get_node_id(self, device_id: str) -> int | None:
        entry = self._entries.get(device_id)
        return entry.node_id if entry else None

    def get_device(self, device_id: str) -> DeviceInfo | None:
        entry = self._entries.get(device_id)
        return entry.info if entry else None

    def get_state(self, device_id: str) -> DevicePresence | None:
        with self._lock:
            return self._presence.get_state(device_id)

    def list_devices(self) -> list[DeviceInfo]:
        """Returns all devices that have joined, present or not."""
        with self._lock:
            return [entry.info for entry in self._entries.values()]

    def list_schedulable(self, run_id: str | None = None) -> list[DeviceInfo]:
        """Returns the devices that can be given work: present, not draining and not blocked, sorted by id.

        Args:
            run_id: of the run whose work that is; where it is None, no run's conditions block a device.
        """
        with self._lock:
            devices = [self.get_schedulable(device_id, run_id) for device_id in sorted(self._entries)]
        return [info for info in devices if info is not None]

    def get_schedulable(self, device_id: str, run_id: str | None = None) -> DeviceInfo | None:
        """Returns a device if it can be given work now: of a run, or at all."""
        with self._lock:
            entry = self._entries.get(device_id)
            is_able = (
                entry is not None
                and not entry.is_drained
                and self.get_blocker(device_id, run_id) is None
                and (run_id is None or self._allotments.get_run(device_id) in {None, run_id})
                and self._presence.get_state(device_id) in _SCHEDULABLE_STATES
            )
            return entry.info if entry is not None and is_able else None

    def open_run(self, claim: BoardClaim) -> None:
        """Allots boards to a run that is active from now on, or claims others than before."""
        with self._lock:
            self._allotments.open(claim)
            self._allot_all()
        self._event_bus.publish()

    def close_run(self, run_id: str) -> None:
        """Releases the boards of a run that is active no longer."""
        with self._lock:
            self._allotments.close(run_id)
            for entry in self._entries.values():
                entry.shortages.pop(run_id, None)
            self._allot_all()
        self._event_bus.publish()

    def _is_kept_from(self, device_id: str, run_id: str) -> bool:
        """Returns whether a run cannot use a device now: by its own conditions, or as no work of it fits."""
        return run_id in _list_kept_from(self._entries[device_id])

    def decline_board(self, device_id: str, run_id: str) -> None:
        """Releases a board that its run cannot use now to a run that can, if there is one."""
        with self._lock:
            self._allotments.decline(device_id, run_id)
            self._allot(device_id)
        self._event_bus.publish()

    def accept_board(self, device_id: str, run_id: str) -> None:
        """Records that a run can use a board that it declined before."""
        with self._lock:
            self._allotments.accept(device_id, run_id)
            self._allot(device_id)
        self._event_bus.publish()

    def get_allotted_run(self, device_id: str) -> str | None:
        """Returns the active run that a board works for."""
        return self._allotments.get_run(device_id)

    def list_obtainable(self, run_id: str, priority: int, *, without: str | None = None) -> list[DeviceInfo]:
        """Returns the devices that a run of this priority could be given now, if run `without` were not active."""
        with self._lock:
            devices = [
                self.get_schedulable(device_id)
                for device_id in sorted(self._entries)
                if self._allotments.is_obtainable(device_id, run_id, priority, without=without)
            ]
            return [info for info in devices if info is not None and self.get_blocker(info.device_id, run_id) is None]

    def _allot_all(self) -> None:
        for device_id in self._entries:
            self._allot(device_id)

    def _allot(self, device_id: str) -> None:
        """Allots a device anew, under the lock."""
        entry = self._entries.get(device_id)
        if entry is not None and self._allotments.update(entry.info):
            self._event_bus.enqueue([DeviceChanged(device_id=device_id)])

    def is_reachable(self, device_id: str) -> bool:
        """Returns whether a device is present and not draining, blocked or not."""
        with self._lock:
            return self._presence.get_state(device_id) in _SCHEDULABLE_STATES and not self.is_drained(device_id)

    def get_blocker(self, device_id: str, run_id: str | None = None) -> Blocker | None:
        """Returns why a device may not train now, as it last reported: at all, or, with `run_id`, for this run."""
        entry = self._entries.get(device_id)
        if entry is None or (entry.blocker is not None and not entry.blocker.run):
            return entry.blocker if entry is not None else None
        return entry.run_blockers[run_id][0] if run_id is not None and run_id in entry.run_blockers else None

    def get_reported_blocker(self, device_id: str) -> Blocker | None:
        """Returns why a device may not train now, for people; it may be a condition of one run only."""
        entry = self._entries.get(device_id)
        return entry.blocker if entry else None

    def record_blocker(self, device_id: str, reported: object) -> None:
        """Records why a device may not train now, as of a heartbeat or reply; None or nonsense: it may."""
        with self._lock:
            self._set_blocker(device_id, parse_blocker(reported))
        self._event_bus.publish()

    def get_allowance(self, device_id: str, run_id: str, now_s: float) -> Allowance | None:
        """Returns what the hours and budgets of a device allow a run, on a clock on which it is `now_s`."""
        entry = self._entries.get(device_id)
        if entry is None or entry.allowance is None:
            return None
        return entry.allowance.select_run(run_id).shift(now_s - self._clock())

    def record_allowance(self, device_id: str, reported: object) -> None:
        """Records what the hours and budgets of a device allow, as of a heartbeat or reply; None or nonsense: all."""
        with self._lock:
            self._set_allowance(device_id, reported)
        self._event_bus.publish()

    def _set_allowance(self, device_id: str, reported: object) -> None:
        """Sets what a device allows, under the lock; who plans with it is told where it allows more than before.

        Where it allows less, they find that at its next answer, which is when it is chosen again.
        """
        entry, allowance = self._entries.get(device_id), parse_allowance(reported)
        if entry is None or (entry.allowance is None and allowance is None):
            return
        now_s, former = self._clock(), entry.allowance
        entry.allowance = None if allowance is None else allowance.shift(now_s)
        if entry.allowance is None or not entry.allowance.is_within(former):
            self._event_bus.enqueue([DeviceChanged(device_id=device_id)])

    def record_shortage(self, device_id: str, run_id: str, blocker: Blocker | None) -> str:
        """Records why no work of a run fits into the hours and budgets of a device; None where one does.

        A device that no work of its run fits into goes to another run that can use it.

        Args:
            device_id: of the device.
            run_id: of the run.
            blocker: `free_at_s` counts from now.

        Returns:
            the reason in one line; empty for None.
        """
        reason = format_unfit(blocker) if blocker is not None else ""
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is None:
                return reason
            was_short = entry.shortages.pop(run_id, None) is not None
            if reason:
                entry.shortages[run_id] = reason
            if was_short != bool(reason):
                self._allot(device_id)
        self._event_bus.publish()
        return reason

    def _set_blocker(self, device_id: str, blocker: Blocker | None, working_run: str | None = None) -> None:
        """Sets why a device may not train now, under the lock.

        A device tells of one blocker, and of the conditions of the run whose instruction was its last. So those of
        another run count until it tells of that run, or works for it, or they are over.
        """
        entry = self._entries.get(device_id)
        if entry is None:
            return
        former, former_kept = _list_blocked(entry), _list_kept_from(entry)
        entry.blocker, entry.working_run = blocker, working_run
        if blocker is None and working_run is not None:
            entry.run_blockers.pop(working_run, None)
        if blocker is not None and blocker.run:
            entry.run_blockers.pop(blocker.run, None)
            entry.run_blockers[blocker.run] = blocker, self._clock() + self._compute_blocked_s(blocker)
            if len(entry.run_blockers) > MAX_RUN_BLOCKERS:
                del entry.run_blockers[next(iter(entry.run_blockers))]
            self._run_blocked_ids.add(device_id)
        if _list_blocked(entry) != former:
            self._event_bus.enqueue([DeviceChanged(device_id=device_id)])
        if _list_blocked(entry) != former or _list_kept_from(entry) != former_kept:
            self._allot(device_id)

    @staticmethod
    def _compute_blocked_s(blocker: Blocker) -> float:
        """Returns how long the conditions of a run count; a time that is over by the coordinator's clock is none."""
        left_s = -1.0 if blocker.free_at_s is None else blocker.free_at_s - time.time()
        return min(left_s, MAX_BLOCKED_S) if left_s > 0 else ASK_AGAIN_S

    def _drop_past_blockers(self) -> None:
        """Drops conditions of runs that count no longer, under the lock."""
        now_s = self._clock()
        for device_id in list(self._run_blocked_ids):
            entry = self._entries.get(device_id)
            past = [run for run, (_, until_s) in entry.run_blockers.items() if until_s <= now_s] if entry else []
            if entry is not None and past:
                entry.run_blockers = {run: kept for run, kept in entry.run_blockers.items() if run not in past}
                self._event_bus.enqueue([DeviceChanged(device_id=device_id)])
                self._allot(device_id)
            if entry is None or not entry.run_blockers:
                self._run_blocked_ids.discard(device_id)

    def is_drained(self, device_id: str) -> bool:
        """Returns whether the operator has drained the device, whatever state it reports."""
        entry = self._entries.get(device_id)
        return entry is not None and entry.is_drained

    def format_presence(self, device_id: str) -> str:
        """Returns the word for a device's state: one of `DevicePresence`, or `NEVER_SEEN`."""
        return _format_presence(self.get_state(device_id), self._entries.get(device_id))

    def explain_absence(self, device_id: str, run_id: str | None = None) -> str:
        """Returns why a device gets no work: of this run, or of any, or of the one that it has the conditions of."""
        presence = DevicePresence.DRAINING if self.is_drained(device_id) else self.format_presence(device_id)
        blocker = self.get_blocker(device_id, run_id) or self.get_reported_blocker(device_id)
        if blocker is not None and presence in _SCHEDULABLE_STATES:
            return f"it may not train now: {format_blocker(blocker)}"
        entry = self._entries.get(device_id)
        if entry is not None and run_id in entry.shortages and presence in _SCHEDULABLE_STATES:
            return entry.shortages[run_id or ""]
        holder = self.get_allotted_run(device_id)
        if presence in _SCHEDULABLE_STATES and run_id is not None and holder not in {None, run_id}:
            return f"it works for run {holder}"
        return "it was never seen" if presence == NEVER_SEEN else f"it is {presence}"

    def set_drained(self, device_id: str, *, drained: bool) -> None:
        """Drains or resumes a device; does nothing for an unknown one."""
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is None or entry.is_drained == drained:
                return
            entry.is_drained = drained
            self._event_bus.enqueue([DeviceChanged(device_id=device_id)])
        self._event_bus.publish()

    def get_seconds_per_iteration(self, device_id: str) -> float | None:
        """Returns the smoothed seconds per iteration of a device; None if unknown."""
        entry = self._entries.get(device_id)
        return entry.seconds_per_iteration if entry else None

    def list_status_rows(self) -> list[dict[str, Any]]:
        """Returns one row per device for the operator: presence, last heartbeat, shards."""
        with self._lock:
            records = {record.device_id: record for record in self._list_presence_records()}
            rows = []
            for device_id, entry in sorted(self._entries.items()):
                record = records.get(device_id)
                heartbeat = record.heartbeat if record else None
                facts = entry.info.capabilities
                rows.append(
                    {
                        **DEFAULT_STATUS_ROW,
                        "device_id": device_id,
                        "presence": _format_presence(record.state if record else None, entry),
                        **({"silent_s": round(record.silent_s, 1)} if record else {}),
                        "drained": entry.is_drained,
                        "blocked": _format_blocked(entry),
                        "allowance": entry.allowance.describe(self._clock()) or None if entry.allowance else None,
                        "cloned": self._clone_detector.get_warning(device_id, self._clock()),
                        "drift": format_drift(parse_drift(facts)) if "drift" in facts else None,
                        "problem": find_problem(entry.info) if "shard_errors" in facts else None,
                        "allotted_to": self._allotments.get_run(device_id),
                        **({name: getattr(heartbeat, name) for name in _HEARTBEAT_FIELDS} if heartbeat else {}),
                        "seconds_per_iteration": entry.seconds_per_iteration,
                    }
                )
            return rows

    def count_by_presence(self) -> Counter[str]:
        """Returns the number of devices by the `presence` of `list_status_rows`."""
        with self._lock:
            states = {record.device_id: record.state for record in self._list_presence_records()}
            return Counter(_format_presence(states.get(name), entry) for name, entry in self._entries.items())

    @property
    def health(self) -> Mapping[str, HealthMetrics]:
        """Live health of the devices that sent a heartbeat."""
        return _LiveHealth(self)

    def list_heartbeats(self) -> dict[str, Heartbeat]:
        """Returns the last heartbeat of every device that sent one, by id, sorted."""
        with self._lock:
            return {
                record.device_id: record.heartbeat
                for record in self._list_presence_records()
                if record.heartbeat is not None
            }

    def get_heartbeat(self, device_id: str) -> Heartbeat | None:
        with self._lock:
            return self._presence.get_last_heartbeat(device_id)

    def record_speed(self, device_id: str, seconds_per_iteration: float) -> None:
        """Updates the smoothed speed of a device."""
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is not None:
                entry.seconds_per_iteration = update_moving_average(
                    entry.seconds_per_iteration, seconds_per_iteration
                )

    def record_status(self, device_id: str, status: StatusMessage) -> None:
        events: list[RegistryEvent] = []
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is None:
                return
            events += self._detect_clone(device_id, status)
            if self._clone_detector.get_rejection_reason(device_id, status.boot_id) is None:
                events += self._presence.on_status(device_id, status, self._clock())
                if status.state != "offline" and status.boot_id != entry.boot_id:
                    if entry.boot_id:
                        events.insert(0, DeviceRestarted(device_id=device_id))
                    entry.boot_id = status.boot_id
            self._event_bus.enqueue(events)
        self._event_bus.publish()

    def record_heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        with self._lock:
            if (
                device_id not in self._entries
                or self._clone_detector.get_rejection_reason(device_id, heartbeat.boot_id or "") is not None
            ):
                return
            self._set_blocker(device_id, parse_blocker(heartbeat.blocked), heartbeat.run)
            self._set_allowance(device_id, heartbeat.allowance)
            now_s = self._clock()
            self._event_bus.enqueue(self._presence.on_heartbeat(device_id, heartbeat, now_s))
            held = HeldInstructions(device_id=device_id, assignment_ids=tuple(heartbeat.holding), at_s=now_s)
            self._event_bus.enqueue([held])
        self._event_bus.publish()

    def record_capabilities(self, device_id: str, capabilities: Capabilities) -> None:
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is None:
                return
            former = {**entry.known_examples, **entry.info.examples}
            if self._clock() - entry.grown_s >= GROWTH_PERIOD_S:
                entry.known_examples, entry.grown_s = former, self._clock()
            entry.known_examples = {**entry.info.examples, **entry.known_examples}
            examples = bound_reported_examples(entry.known_examples, capabilities.shards)
            changes = [
                f"{task}: {former[task]} before, reported {capabilities.shards[task]}, counted {count}"
                for task, count in examples.items()
                if former.get(task, count) != count
            ]
            if changes:
                self._event_bus.enqueue([ExamplesChanged(device_id=device_id, reason="; ".join(changes))])
            if drifted := _find_new_drift(entry.info.capabilities, capabilities.facts):
                self._event_bus.enqueue([DataDrifted(device_id=device_id, reason=drifted)])
            entry.info = replace(
                entry.info,
                capabilities=capabilities.facts,
                examples=examples,
                tasks=tuple(sorted(examples)),
                blocks=_parse_blocks(capabilities.facts.get("blocks")),
            )
            self._event_bus.enqueue([DeviceChanged(device_id=device_id)])
            self._allotments.accept(device_id)
            self._allot(device_id)
        self._event_bus.publish()

    def record_contact(self, node_id: int) -> None:
        with self._lock:
            device_id = self._device_by_node.get(node_id)
            if device_id:
                self._event_bus.enqueue(self._presence.on_contact(device_id, self._clock()))
        self._event_bus.publish()

    def record_request(self, node_id: int, instance_id: str, *, stamp: str, address: str) -> str | None:
        """Records a signed request of an agent process; returns why it is rejected, None if it is not.

        Args:
            node_id: of the signer.
            instance_id: random id of the process.
            stamp: the newest that it has read, of `get_stamp`.
            address: source of the request.
        """
        with self._lock:
            device_id = self._device_by_node.get(node_id)
            if device_id is None or not instance_id:
                return None
            self._event_bus.enqueue(self._detect_restart(device_id, instance_id))
            clones = self._clone_detector.on_request(
                device_id, instance_id, stamp=stamp, address=address, now_s=self._clock()
            )
            rejection = self._clone_detector.get_rejection_reason(device_id, instance_id)
            if clones:
                # Pending instructions may have gone to the clone: send them again, as after a restart.
                self._event_bus.enqueue([*clones, DeviceRestarted(device_id=device_id)])
        self._event_bus.publish()
        return rejection

    def get_stamp(self, node_id: int) -> str:
        """Returns the stamp for an answer, which the next request repeats; see `CloneDetector`."""
        with self._lock:
            return self._clone_detector.get_stamp(self._device_by_node.get(node_id, ""))

    def get_clone_warning(self, device_id: str) -> str | None:
        """Returns a warning about a clone of a device rejected lately; None if there was none."""
        with self._lock:
            return self._clone_detector.get_warning(device_id, self._clock())

    def record_broker_link(self, *, connected: bool) -> None:
        with self._lock:
            self._presence.on_broker_link(connected=connected, now_s=self._clock())

    def tick(self) -> None:
        """Updates presence by silence, and what conditions of runs are over; called about twice a second."""
        with self._lock:
            self._drop_past_blockers()
            self._event_bus.enqueue(self._presence.tick(self._clock()))
        self._event_bus.publish()

    def _detect_clone(self, device_id: str, status: StatusMessage) -> list[RegistryEvent]:
        """Returns the clone events of a status."""
        if status.state == PresenceState.OFFLINE:
            return []
        reason = self._clone_detector.get_rejection_reason(device_id, status.boot_id)
        clones = self._clone_detector.on_connect(
            device_id, status.boot_id, session_no=status.session_no, board=status.board, now_s=self._clock()
        )
        if reason is not None:
            return [CloneRejected(device_id=device_id, rejected_boot_id=status.boot_id, reason=reason)]
        return [*clones]

    def _detect_restart(self, device_id: str, instance_id: str) -> list[RegistryEvent]:
        """Returns the restart event of the first request of a new process, ahead of its MQTT status."""
        entry = self._entries[device_id]
        if self._clone_detector.is_known(
            device_id, instance_id
        ):  # a late request of a dead process, or its status came first
            return []
        is_another, entry.boot_id = entry.boot_id not in {"", instance_id}, instance_id
        return [DeviceRestarted(device_id=device_id)] if is_another else []

    def _list_presence_records(self) -> list[PresenceRecord]:
        return self._presence.list_records(self._clock())


def _list_blocked(entry: _RegistryEntry) -> set[str]:
    """Returns the runs that a device may not train for; an empty one stands for all of them."""
    return {*entry.run_blockers, *([""] if entry.blocker is not None and not entry.blocker.run else [])}


def _list_kept_from(entry: _RegistryEntry) -> set[str]:
    """Returns the runs that cannot use a device: by conditions of theirs, or as no work of them fits.

    What keeps only new work from it takes no board from the run that it works for.
    """
    blocked = {
        run_id
        for run_id, (blocker, _) in entry.run_blockers.items()
        if blocker.kind != DOWNLOAD or run_id != entry.working_run
    }
    return blocked.union(entry.shortages)


def format_unfit(blocker: Blocker) -> str:
    """Returns why no work fits into the hours and budgets of a device, in one line; `free_at_s` counts from now."""
    free_in_s = blocker.free_at_s
    return format_blocker(replace(blocker, free_at_s=None if free_in_s is None else time.time() + free_in_s))


def _format_blocked(entry: _RegistryEntry) -> str | None:
    """Returns why a device may not train now, or why no work of a run fits; None where nothing is in the way."""
    if entry.blocker is not None:
        return format_blocker(entry.blocker)
    return next((f"run {run_id}: {reason}" for run_id, reason in entry.shortages.items()), None)


def _format_presence(state: DevicePresence | None, entry: _RegistryEntry | None) -> str:
    if state is None:  # of this coordinator; an earlier one may have seen it
        return DevicePresence.OFFLINE.value if entry is not None and entry.was_seen else NEVER_SEEN
    return state.value


def parse_shard_errors(facts: Mapping[str, Any]) -> dict[str, str]:
    """Returns `shard_errors` of a device's capabilities, by task; drops invalid entries, and shortens long ones."""
    reported = facts.get("shard_errors")
    if not isinstance(reported, dict):
        return {}
    errors = [(str(task), reason) for task, reason in reported.items() if isinstance(reason, str)][:MAX_SHARD_ERRORS]
    return {escape_start(task, MAX_ERROR_CHARS): escape_start(reason, MAX_ERROR_CHARS) for task, reason in errors}


def find_problem(info: DeviceInfo) -> str | None:
    """Returns what keeps a device from data that it was given: an unreadable shard, a missing module."""
    errors = parse_shard_errors(info.capabilities)
    return "; ".join(f"shard of {task}: {reason}" for task, reason in errors.items()) or None


def _find_new_drift(former: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    """Returns which large drifts a device tells of that it did not before, as one line; None where there are none."""
    known = {task for task, claim in parse_drift(former).items() if claim.is_large}
    return format_drift(
        {task: claim for task, claim in parse_drift(facts).items() if claim.is_large and task not in known}
    )


def _parse_blocks(reported: object) -> dict[str, tuple[int, ...]]:
    """Returns the blocks of redundant shards by task; drops invalid ones."""
    if not isinstance(reported, Mapping):
        return {}
    return {
        str(task): tuple(block for block in blocks if isinstance(block, int) and not isinstance(block, bool))
        for task, blocks in reported.items()
        if isinstance(blocks, list)
    }


class _LiveHealth(Mapping[str, HealthMetrics]):
    """Current health of the devices that sent a heartbeat."""

    def __init__(self, registry: DeviceRegistry) -> None:
        self._registry = registry

    def __getitem__(self, device_id: str) -> HealthMetrics:
        heartbeat = self._registry.get_heartbeat(device_id)
        if heartbeat is None:
            raise KeyError(device_id)
        throttled = heartbeat.throttled
        return HealthMetrics(
            temperature_c=heartbeat.temperature_c,
            is_throttled=None if throttled is None else throttled != "ok",
            battery_fraction=heartbeat.battery_fraction,
            power_w=heartbeat.power_w,
            is_metered=heartbeat.metered,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry.list_heartbeats())

    def __len__(self) -> int:
        return len(self._registry.list_heartbeats())
