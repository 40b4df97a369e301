"""The devices of the fleet: who is there, what they can do, how fast they are. Shared by all threads.

Everything that reaches the coordinator (MQTT, HTTPS) is told to the roster, which keeps presence and passes on what
changed to those who listen: the store's diary and the running fleet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from edgefl.coordinator.fleet.listeners import Listeners
from edgefl.coordinator.fleet.live_vitals import LiveVitals
from edgefl.coordinator.fleet.presence import DeviceRecord, DeviceState, Presence, PresenceEvent
from edgefl.coordinator.fleet.twins import Cloned, Twins, TwinTried
from edgefl.protocol import EVALUATOR_NAME, Capabilities, Heartbeat, PresenceState, Status
from edgefl.types import DeviceInfo, Role, Vitals

_ABLE = frozenset({DeviceState.ONLINE, DeviceState.LATE})
SMOOTHING = 0.3
"""Weight of the newest measurement in a device's smoothed speed."""
_TOLD = ("temperature_c", "run", "iteration")
NEVER_SEEN: Mapping[str, Any] = MappingProxyType(
    {
        "presence": "never seen",
        "drained": False,
        "silent_s": None,
        "cloned": None,
        **dict.fromkeys(_TOLD),
        "seconds_per_iteration": None,
    }
)
"""The operator's facts of a device that has joined and that nobody has heard of yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """The agent of a device is a new process: what it held in memory is gone."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The assignments that a device says it has, as of `at_s`."""

    device_id: str
    assignment_ids: tuple[str, ...]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A device joined, or joined again: its role, groups or data may be others."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A device reported new capabilities or shards."""

    device_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """A device was taken out of the fleet; it will never answer."""

    device_id: str


RosterEvent = PresenceEvent | Restarted | Holding | Added | Changed | Removed | Cloned | TwinTried
Listener = Callable[[RosterEvent], None]


@dataclass(slots=True)
class _Entry:
    info: DeviceInfo
    node_id: int
    boot_id: str = ""
    seconds_per_iteration: float | None = None
    is_drained: bool = False


class Roster:
    """Keeps the fleet; every call is safe from any thread.

    Listeners are called outside the lock, with one event after the other as they happened, perhaps by another thread
    than the one whose call it was.
    """

    def __init__(self, presence: Presence, clock: Callable[[], float]) -> None:
        self._presence, self._clock, self._twins = presence, clock, Twins()
        self._entries: dict[str, _Entry] = {}
        self._by_node: dict[int, str] = {}
        self._listeners = Listeners[RosterEvent]()
        self._lock = threading.RLock()

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with every event; returns what ends that."""
        return self._listeners.listen(listener)

    def add(
        self,
        device_id: str,
        *,
        node_id: int,
        role: str,
        groups: Sequence[str],
        examples: Mapping[str, int],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes in a device that has joined, or has joined again; `facts` are its newest capabilities."""
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
            blocks=_blocks((facts or {}).get("blocks")),
        )
        with self._lock:
            former = self._entries.get(device_id)
            if former is not None and former.node_id == node_id:
                kept = replace(info, capabilities=former.info.capabilities, blocks=former.info.blocks)
                former.info = kept if facts is None else info
            else:
                if former is not None:
                    self._by_node.pop(former.node_id, None)
                self._entries[device_id] = _Entry(info=info, node_id=node_id)
                self._by_node[node_id] = device_id
            self._listeners.note([Added(device_id=device_id)])
        self._listeners.tell()

    def remove(self, device_id: str) -> int | None:
        """Forgets a device; returns its node id."""
        with self._lock:
            self._presence.forget(device_id)
            self._twins.forget(device_id)
            entry = self._entries.pop(device_id, None)
            if entry is None:
                return None
            self._by_node.pop(entry.node_id, None)
            self._listeners.note([Removed(device_id=device_id)])
        self._listeners.tell()
        return entry.node_id

    def device_of(self, node_id: int) -> str | None:
        return self._by_node.get(node_id)

    def node_of(self, device_id: str) -> int | None:
        entry = self._entries.get(device_id)
        return entry.node_id if entry else None

    def info(self, device_id: str) -> DeviceInfo | None:
        entry = self._entries.get(device_id)
        return entry.info if entry else None

    def state(self, device_id: str) -> DeviceState | None:
        with self._lock:
            return self._presence.state(device_id)

    def known(self) -> list[DeviceInfo]:
        """Returns all devices that have joined, present or not."""
        with self._lock:
            return [entry.info for entry in self._entries.values()]

    def workers(self) -> list[DeviceInfo]:
        """Returns the devices that can be given work: present and not draining, sorted by id."""
        with self._lock:
            found = [self.worker(device_id) for device_id in sorted(self._entries)]
        return [info for info in found if info is not None]

    def worker(self, device_id: str) -> DeviceInfo | None:
        """Returns a device if it can be given work now."""
        with self._lock:
            entry = self._entries.get(device_id)
            is_able = entry is not None and not entry.is_drained and self._presence.state(device_id) in _ABLE
            return entry.info if entry is not None and is_able else None

    def is_drained(self, device_id: str) -> bool:
        """Returns whether an operator wants the device to get no more work, whatever it says itself."""
        entry = self._entries.get(device_id)
        return entry is not None and entry.is_drained

    def standing(self, device_id: str) -> str:
        """Returns in a word how a device is, empty if it was never seen; what an operator wants comes first."""
        return str(DeviceState.DRAINING) if self.is_drained(device_id) else str(self.state(device_id) or "")

    def set_drained(self, device_id: str, *, drained: bool) -> None:
        """Gives a device no more work, or work again; nothing where there is no such device."""
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is None or entry.is_drained == drained:
                return
            entry.is_drained = drained
            self._listeners.note([Changed(device_id=device_id)])
        self._listeners.tell()

    def speed_of(self, device_id: str) -> float | None:
        """Returns how many seconds an iteration of a device took lately."""
        entry = self._entries.get(device_id)
        return entry.seconds_per_iteration if entry else None

    def facts(self) -> list[dict[str, Any]]:
        """Returns one row per device for the operator: presence, last heartbeat, shards."""
        with self._lock:
            records = {record.device_id: record for record in self._records()}
            rows = []
            for device_id, entry in sorted(self._entries.items()):
                record = records.get(device_id)
                heartbeat = record.heartbeat if record else None
                rows.append(
                    {
                        **NEVER_SEEN,
                        "device_id": device_id,
                        **({"presence": str(record.state), "silent_s": round(record.silent_s, 1)} if record else {}),
                        "drained": entry.is_drained,
                        "cloned": self._twins.shown(device_id, self._clock()),
                        **({name: getattr(heartbeat, name) for name in _TOLD} if heartbeat else {}),
                        "seconds_per_iteration": entry.seconds_per_iteration,
                    }
                )
            return rows

    @property
    def vitals(self) -> Mapping[str, Vitals]:
        """How the boards are that sent a heartbeat; looked up when it is asked for."""
        return LiveVitals(self)

    def heartbeats(self) -> dict[str, Heartbeat]:
        """Returns the last heartbeat of every device that sent one, by id, sorted."""
        with self._lock:
            return {record.device_id: record.heartbeat for record in self._records() if record.heartbeat is not None}

    def heartbeat(self, device_id: str) -> Heartbeat | None:
        with self._lock:
            return self._presence.last_heartbeat(device_id)

    def note_speed(self, device_id: str, seconds_per_iteration: float) -> None:
        """Remembers how fast a device was, smoothed, for the operator."""
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is not None:
                entry.seconds_per_iteration = smoothed(entry.seconds_per_iteration, seconds_per_iteration)

    def note_status(self, device_id: str, status: Status) -> None:
        events: list[RosterEvent] = []
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is None:
                return
            events += self._twin_of_status(device_id, status)
            if self._twins.refusal(device_id, status.boot_id) is None:
                events += self._presence.status(device_id, status, self._clock())
                if status.state != "offline" and status.boot_id != entry.boot_id:
                    if entry.boot_id:
                        events.insert(0, Restarted(device_id=device_id))
                    entry.boot_id = status.boot_id
            self._listeners.note(events)
        self._listeners.tell()

    def note_heartbeat(self, device_id: str, heartbeat: Heartbeat) -> None:
        with self._lock:
            if device_id not in self._entries or self._twins.refusal(device_id, heartbeat.boot_id or "") is not None:
                return
            now_s = self._clock()
            self._listeners.note(self._presence.heartbeat(device_id, heartbeat, now_s))
            holding = Holding(device_id=device_id, assignment_ids=tuple(heartbeat.holding), at_s=now_s)
            self._listeners.note([holding])
        self._listeners.tell()

    def note_capabilities(self, device_id: str, capabilities: Capabilities) -> None:
        examples = {task: count for task, count in capabilities.shards.items() if isinstance(count, int)}
        with self._lock:
            entry = self._entries.get(device_id)
            if entry is None:
                return
            entry.info = replace(
                entry.info,
                capabilities=capabilities.facts,
                examples=examples,
                tasks=tuple(sorted(examples)),
                blocks=_blocks(capabilities.facts.get("blocks")),
            )
            self._listeners.note([Changed(device_id=device_id)])
        self._listeners.tell()

    def note_contact(self, node_id: int) -> None:
        with self._lock:
            device_id = self._by_node.get(node_id)
            if device_id:
                self._listeners.note(self._presence.seen(device_id, self._clock()))
        self._listeners.tell()

    def note_call(self, node_id: int, instance: str, *, stamp: str, address: str) -> str | None:
        """Takes a signed request of one agent process; returns why that is refused, None if it is not.

        Args:
            node_id: who has signed.
            instance: what the process calls itself.
            stamp: the newest that it has read, of `stamp`.
            address: where it calls from.
        """
        with self._lock:
            device_id = self._by_node.get(node_id)
            if device_id is None or not instance:
                return None
            self._listeners.note(self._restart_of_call(device_id, instance))
            found = self._twins.called(device_id, instance, stamp=stamp, address=address, now_s=self._clock())
            refusal = self._twins.refusal(device_id, instance)
            if found:
                # What waited for the device may have gone to its twin: as after a restart, it is given again.
                self._listeners.note([*found, Restarted(device_id=device_id)])
        self._listeners.tell()
        return refusal

    def stamp(self, node_id: int) -> str:
        """Returns what an answer to a device carries, and its next request repeats; see `twins`."""
        with self._lock:
            return self._twins.stamp(self._by_node.get(node_id, ""))

    def cloned(self, device_id: str) -> str | None:
        """Returns in words that a twin of a device was refused lately, None if there was none."""
        with self._lock:
            return self._twins.shown(device_id, self._clock())

    def note_bus(self, *, connected: bool) -> None:
        with self._lock:
            self._presence.bus(connected=connected, now_s=self._clock())

    def tick(self) -> None:
        """Finds out who fell silent; called about twice a second."""
        with self._lock:
            self._listeners.note(self._presence.tick(self._clock()))
        self._listeners.tell()

    def _twin_of_status(self, device_id: str, status: Status) -> list[RosterEvent]:
        """Returns whether a status shows that there are two agents, or comes from the one that is refused."""
        if status.state == PresenceState.OFFLINE:
            return []
        reason = self._twins.refusal(device_id, status.boot_id)
        found = self._twins.connected(
            device_id, status.boot_id, session_no=status.session_no, board=status.board, now_s=self._clock()
        )
        if reason is not None:
            return [TwinTried(device_id=device_id, refused=status.boot_id, reason=reason)]
        return [*found]

    def _restart_of_call(self, device_id: str, instance: str) -> list[RosterEvent]:
        """Returns whether the first request of a process follows another one, before or without a word over MQTT."""
        entry = self._entries[device_id]
        if self._twins.knows(device_id, instance):  # a dead one's late request, or one whose status was here first
            return []
        is_another, entry.boot_id = entry.boot_id not in {"", instance}, instance
        return [Restarted(device_id=device_id)] if is_another else []

    def _records(self) -> list[DeviceRecord]:
        return self._presence.records(self._clock())


def smoothed(before: float | None, newest: float) -> float:
    """Returns the moving average of a measurement, the newest one included."""
    return newest if before is None else before + SMOOTHING * (newest - before)


def _blocks(reported: object) -> dict[str, tuple[int, ...]]:
    """Returns the blocks of redundant shards by task; what is none is left out."""
    if not isinstance(reported, Mapping):
        return {}
    return {
        str(task): tuple(block for block in blocks if isinstance(block, int) and not isinstance(block, bool))
        for task, blocks in reported.items()
        if isinstance(blocks, list)
    }
