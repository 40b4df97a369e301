"""Presence of devices, from status messages, last wills, heartbeats and any other contact; and clones of them.

A pure state machine: every call gets the time (any monotonic clock, in seconds) and returns what changed.

- A will means that a connection broke, not yet that the device is dead: it is *late* at once and *gone* when no
  sign of life follows within one heartbeat. A Wi-Fi hiccup therefore costs no assignment.
- Silence makes a device *late* after two missed heartbeats and *gone* after three.
- While our own link to the broker is down no state changes, and afterwards every device gets the full time again.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from edgefl.core.errors import NetworkError
from edgefl.core.protocol import (
    GONE_AFTER_HEARTBEATS,
    HEARTBEAT_JITTER,
    HEARTBEAT_S,
    LATE_AFTER_HEARTBEATS,
    Heartbeat,
    PresenceState,
    StatusMessage,
)

SESSION_CONFLICT_THRESHOLD = 3
SESSION_CONFLICT_WINDOW_S = 120.0

MAX_INSTANCES = 8
"""Maximum number of instances remembered per device, and as many rejected ones."""
MAX_ID_CHARS = 64
WARNING_TTL_S = 3600.0
"""How long a device counts as cloned after its clone was last seen."""
_ID_PREFIX_CHARS = 8


class DevicePresence(StrEnum):
    """`gone` is silent, `offline` disconnected cleanly; neither gets work. `late` and `draining` are present."""

    ONLINE = "online"
    LATE = "late"
    GONE = "gone"
    OFFLINE = "offline"
    DRAINING = "draining"


PRESENT_STATES = frozenset({DevicePresence.ONLINE, DevicePresence.LATE, DevicePresence.DRAINING})


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceChanged:
    """One change of state; `before` is None for a device that was never seen before."""

    device_id: str
    before: DevicePresence | None
    after: DevicePresence
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConflict:
    """Two sessions of one device take turns: its card was probably cloned, or its state directory copied."""

    device_id: str
    reason: str = "flapping sessions"


PresenceEvent = PresenceChanged | SessionConflict


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceRecord:
    """Presence of one device; `silent_s` is the time since its last sign of life."""

    device_id: str
    state: DevicePresence
    session_no: int
    boot_id: str
    silent_s: float
    heartbeat: Heartbeat | None


@dataclass(slots=True)
class _TrackedDevice:
    state: DevicePresence | None = None
    announced_state: DevicePresence = DevicePresence.ONLINE
    session_no: int = 0
    boot_id: str = ""
    last_contact_s: float = 0.0
    last_will_s: float | None = None
    heartbeat: Heartbeat | None = None
    previous_boot_ids: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    conflict_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=SESSION_CONFLICT_THRESHOLD))
    is_last_message_conflicting: bool = False


class PresenceTracker:
    """Keeps the state of every device. Starts with the link to the broker down; see `on_broker_link`."""

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S, jitter: float = HEARTBEAT_JITTER) -> None:
        longest_s = heartbeat_s * (1 + jitter)
        self._late_after_s = LATE_AFTER_HEARTBEATS * longest_s
        self._gone_after_s = GONE_AFTER_HEARTBEATS * longest_s
        self._gone_after_will_s = longest_s
        self._devices: dict[str, _TrackedDevice] = {}
        self._is_broker_link_up = False
        self._broker_link_up_s = 0.0

    def on_status(self, device_id: str, status: StatusMessage, now_s: float) -> list[PresenceEvent]:
        """Handles a `status` message: one of the device, or its last will.

        Raises:
            NetworkError: its state is unknown.
        """
        if status.state not in set(PresenceState):
            raise NetworkError(f"malformed status: state is {status.state!r}, expected online, offline or draining")
        device = self._devices.setdefault(device_id, _TrackedDevice())
        if status.state == PresenceState.OFFLINE:
            return self._on_offline(device_id, device, status, now_s)
        if self._is_outdated(device, status) and device.state in PRESENT_STATES:
            return self._on_conflicting_session(device_id, device, now_s)
        events = self._start_session(device_id, device, status, now_s)
        draining = status.state == PresenceState.DRAINING
        device.announced_state = DevicePresence.DRAINING if draining else DevicePresence.ONLINE
        return events + self._mark_alive(device_id, device, now_s, f"status {status.state}")

    def on_heartbeat(self, device_id: str, heartbeat: Heartbeat, now_s: float) -> list[PresenceEvent]:
        """Handles a heartbeat; one newer than the will of its session overrides it."""
        device = self._devices.setdefault(device_id, _TrackedDevice())
        if heartbeat.session_no < device.session_no and device.state in PRESENT_STATES:
            return self._on_conflicting_session(device_id, device, now_s)
        if not self._is_newer(device, heartbeat):
            return []
        device.is_last_message_conflicting = False
        device.heartbeat = heartbeat
        device.session_no = heartbeat.session_no
        if device.announced_state is DevicePresence.OFFLINE:
            device.announced_state = DevicePresence.ONLINE
        return self._mark_alive(device_id, device, now_s, "heartbeat")

    def on_contact(self, device_id: str, now_s: float) -> list[PresenceEvent]:
        """Handles any other contact, such as a request over HTTPS; it cannot undo a goodbye."""
        device = self._devices.setdefault(device_id, _TrackedDevice())
        return self._mark_alive(device_id, device, now_s, "contact")

    def on_broker_link(self, *, connected: bool, now_s: float) -> None:
        """Sets whether our own link to the broker is up; while it is down no device becomes late or gone."""
        if connected and not self._is_broker_link_up:
            self._broker_link_up_s = now_s
        self._is_broker_link_up = connected

    def tick(self, now_s: float) -> list[PresenceEvent]:
        """Returns the devices that became late or gone by silence; call it once a second."""
        if not self._is_broker_link_up:
            return []
        events: list[PresenceEvent] = []
        for device_id, device in self._devices.items():
            change = self._check_silence(device, now_s)
            if change is not None:
                events += _set_state(device_id, device, *change)
        return events

    def remove(self, device_id: str) -> None:
        """Drops a device that was removed, or that joined anew and counts its sessions from one again."""
        self._devices.pop(device_id, None)

    def get_state(self, device_id: str) -> DevicePresence | None:
        device = self._devices.get(device_id)
        return device.state if device else None

    def get_last_heartbeat(self, device_id: str) -> Heartbeat | None:
        """Returns the last heartbeat of a device's present session, if it sent one."""
        device = self._devices.get(device_id)
        return device.heartbeat if device else None

    def list_records(self, now_s: float) -> list[PresenceRecord]:
        """Returns one record per known device, sorted by id."""
        return [
            PresenceRecord(
                device_id=name,
                state=device.state,
                session_no=device.session_no,
                boot_id=device.boot_id,
                silent_s=max(0.0, now_s - device.last_contact_s),
                heartbeat=device.heartbeat,
            )
            for name, device in sorted(self._devices.items())
            if device.state is not None
        ]

    def _on_offline(
        self, device_id: str, device: _TrackedDevice, status: StatusMessage, now_s: float
    ) -> list[PresenceEvent]:
        if self._is_outdated(device, status):
            return []
        device.session_no, device.boot_id = status.session_no, status.boot_id
        if not status.will:
            device.announced_state, device.last_will_s = DevicePresence.OFFLINE, None
            return _set_state(device_id, device, DevicePresence.OFFLINE, "said goodbye")
        if device.state is None:
            # A retained will from before our start: no work is pending for this device.
            return _set_state(device_id, device, DevicePresence.GONE, "last will")
        if device.state not in PRESENT_STATES:
            return []
        device.last_will_s = now_s
        late = DevicePresence.LATE if device.state is DevicePresence.ONLINE else device.state
        return _set_state(device_id, device, late, "last will")

    def _mark_alive(self, device_id: str, device: _TrackedDevice, now_s: float, reason: str) -> list[PresenceEvent]:
        device.last_contact_s, device.last_will_s = now_s, None
        return _set_state(device_id, device, device.announced_state, reason)

    def _start_session(
        self, device_id: str, device: _TrackedDevice, status: StatusMessage, now_s: float
    ) -> list[PresenceEvent]:
        device.is_last_message_conflicting = False
        is_earlier_boot = status.boot_id in device.previous_boot_ids
        if device.boot_id and status.boot_id != device.boot_id:
            device.previous_boot_ids.append(device.boot_id)
        if status.session_no != device.session_no:
            device.heartbeat = None
        device.session_no, device.boot_id = status.session_no, status.boot_id
        # No device returns to an earlier boot id: this one has a clone.
        return _record_session_conflict(device_id, device, now_s) if is_earlier_boot else []

    def _on_conflicting_session(self, device_id: str, device: _TrackedDevice, now_s: float) -> list[PresenceEvent]:
        if device.is_last_message_conflicting:
            return []
        device.is_last_message_conflicting = True
        return _record_session_conflict(device_id, device, now_s)

    @staticmethod
    def _is_outdated(device: _TrackedDevice, status: StatusMessage) -> bool:
        if status.boot_id == device.boot_id or not device.boot_id:
            return status.session_no < device.session_no
        # A new boot may count from one again (a new card), so only a goodbye of an earlier boot is old for certain.
        if status.state == PresenceState.OFFLINE:
            return status.session_no < device.session_no or status.boot_id in device.previous_boot_ids
        return False

    @staticmethod
    def _is_newer(device: _TrackedDevice, heartbeat: Heartbeat) -> bool:
        last = device.heartbeat
        return last is None or heartbeat.session_no != last.session_no or heartbeat.seq > last.seq

    def _check_silence(self, device: _TrackedDevice, now_s: float) -> tuple[DevicePresence, str] | None:
        """Returns the state that follows from silence, and the reason; None for no change."""
        if device.state not in PRESENT_STATES:
            return None
        if device.last_will_s is not None and now_s >= self._compute_will_deadline_s(device.last_will_s):
            return DevicePresence.GONE, "last will and no sign of life since"
        silent_s = now_s - max(device.last_contact_s, self._broker_link_up_s)
        if silent_s >= self._gone_after_s:
            return DevicePresence.GONE, f"silent for {silent_s:.1f} s"
        if silent_s >= self._late_after_s and device.state is DevicePresence.ONLINE:
            return DevicePresence.LATE, f"silent for {silent_s:.1f} s"
        return None

    def _compute_will_deadline_s(self, will_s: float) -> float:
        return max(will_s, self._broker_link_up_s) + self._gone_after_will_s


def _set_state(device_id: str, device: _TrackedDevice, after: DevicePresence, reason: str) -> list[PresenceEvent]:
    previous = device.state
    if previous is after:
        return []
    device.state = after
    return [PresenceChanged(device_id=device_id, before=previous, after=after, reason=reason)]


def _record_session_conflict(device_id: str, device: _TrackedDevice, now_s: float) -> list[PresenceEvent]:
    device.conflict_times_s.append(now_s)
    if (
        len(device.conflict_times_s) < SESSION_CONFLICT_THRESHOLD
        or now_s - device.conflict_times_s[0] > SESSION_CONFLICT_WINDOW_S
    ):
        return []
    device.conflict_times_s.clear()
    return [SessionConflict(device_id=device_id)]


@dataclass(slots=True, kw_only=True, eq=False)
class AgentInstance:
    """One agent process of a device.

    Attributes:
        instance_id: its random id.
        number: its serial number among the instances of the device, in order of first contact.
        address, board: the source address of its requests, and a hash of the board; empty if unknown.
        session_no: of its newest connection to the broker, 0 before the first.
    """

    instance_id: str
    number: int
    address: str = ""
    board: str = ""
    session_no: int = 0

    def format_identity(self) -> str:
        """Returns a description that tells it from another instance."""
        board = f", board {self.board[:_ID_PREFIX_CHARS]}" if self.board else ""
        return f"boot {self.instance_id[:_ID_PREFIX_CHARS]}{board}" + (f", at {self.address}" if self.address else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloneRejected:
    """The later of two live agents with one identity is rejected: just `detected`, or connected again."""

    device_id: str
    rejected_boot_id: str
    reason: str
    detected: bool = False


@dataclass(slots=True)
class _DeviceInstances:
    num_seen: int = 0
    instances: dict[str, AgentInstance] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    last_rejected_s: float = 0.0


class CloneDetector:
    """Tells two live agents with one identity, a copied card or directory, from a restart. Pure, as the rest.

    Every agent process makes a random instance id at its start (`boot_id`), keeps it only in memory, and sends it
    with every status, heartbeat and request. A restart ends one instance before the next starts: the lock of the
    state directory ensures that. So only one thing proves two agents: an instance that is alive *after* a later one
    was seen. Order of arrival proves nothing, since a paused coordinator or a cut cable may deliver late what a dead
    process had sent before. Two things do:

    - Requests: every answer carries a stamp, the number of instances of this device seen so far, and the next request
      repeats it. An instance that repeats a stamp that counts a later one has read an answer after that one started.
    - MQTT: a status of a new session, after a status of the later instance. A broker disconnects the one when the
      other connects, with everything still on the way, so only a live agent can come back with another session. Last
      wills and goodbyes, which the broker may send for a dead agent, prove nothing.

    The later of the two is rejected, for as long as its process lives. Nothing on the wire tells which is the
    original, both hold the same key; but the earlier one has the device's work, its caches and residuals, and every
    run that goes on knows it, while rejecting the later one costs nothing. So a copy that is plugged in beside a
    working device changes nothing for it. Where the original is the later one (its copy was switched on while it lay
    in a drawer) the operator is told as well, and decides; neither is locked out, since a rejection ends with its
    process. The work that they had is no better sign: a copy that took over for a second may have pulled an
    assignment.
    """

    def __init__(self, epoch: str = "") -> None:
        """Creates a detector without devices.

        Args:
            epoch: tells the stamps of this coordinator process from those of others; random if empty.
        """
        self._epoch = epoch or secrets.token_hex(4)
        self._devices: dict[str, _DeviceInstances] = {}

    def get_stamp(self, device_id: str) -> str:
        """Returns the stamp for an answer to a device."""
        device = self._devices.get(device_id)
        return f"{self._epoch}.{device.num_seen if device else 0}"

    def on_request(
        self, device_id: str, instance_id: str, *, stamp: str, address: str, now_s: float
    ) -> list[CloneRejected]:
        """Handles a signed request; `stamp` is the newest that the instance has read, empty before the first."""
        device, instance = self._find_or_add(device_id, instance_id, now_s)
        if instance is None:
            return []
        instance.address = address or instance.address
        epoch, _, count = stamp.partition(".")
        if epoch != self._epoch or not count.isdecimal() or len(count) > MAX_ID_CHARS:
            return []
        return self._reject_clones(
            device_id, device, instance, [i for i in _list_later(device, instance) if i.number <= int(count)], now_s
        )

    def on_connect(
        self, device_id: str, instance_id: str, *, session_no: int, board: str, now_s: float
    ) -> list[CloneRejected]:
        """Handles an MQTT status sent by a present device itself, not by the broker for it."""
        device, instance = self._find_or_add(device_id, instance_id, now_s)
        if instance is None:
            return []
        instance.board = board[:MAX_ID_CHARS] or instance.board
        if session_no <= instance.session_no:
            return []
        instance.session_no = session_no
        return self._reject_clones(
            device_id, device, instance, [i for i in _list_later(device, instance) if i.session_no], now_s
        )

    def get_rejection_reason(self, device_id: str, instance_id: str) -> str | None:
        """Returns why an instance is rejected; None if it is not."""
        device = self._devices.get(device_id)
        return device.rejected.get(instance_id[:MAX_ID_CHARS]) if device is not None else None

    def is_known(self, device_id: str, instance_id: str) -> bool:
        """Returns whether an instance is among the remembered or rejected ones."""
        device, instance_id = self._devices.get(device_id), instance_id[:MAX_ID_CHARS]
        return device is not None and (instance_id in device.instances or instance_id in device.rejected)

    def get_warning(self, device_id: str, now_s: float) -> str | None:
        """Returns a warning about a clone for the operator; None if none was seen lately."""
        device = self._devices.get(device_id)
        if device is None or not device.rejected or now_s - device.last_rejected_s > WARNING_TTL_S:
            return None
        return next(reversed(device.rejected.values()))

    def remove(self, device_id: str) -> None:
        """Drops a device that was removed."""
        self._devices.pop(device_id, None)

    def _find_or_add(
        self, device_id: str, instance_id: str, now_s: float
    ) -> tuple[_DeviceInstances, AgentInstance | None]:
        """Returns the accepted instance, added if new; None for a rejected one, or one without an id."""
        device, instance_id = self._devices.setdefault(device_id, _DeviceInstances()), instance_id[:MAX_ID_CHARS]
        if instance_id in device.rejected:
            device.last_rejected_s = now_s
            return device, None
        if instance_id and instance_id not in device.instances:
            device.num_seen += 1
            device.instances[instance_id] = AgentInstance(instance_id=instance_id, number=device.num_seen)
            if len(device.instances) > MAX_INSTANCES:
                del device.instances[next(iter(device.instances))]
        return device, device.instances.get(instance_id)

    @staticmethod
    def _reject_clones(
        device_id: str, device: _DeviceInstances, alive: AgentInstance, later: list[AgentInstance], now_s: float
    ) -> list[CloneRejected]:
        events = []
        for clone in later:
            del device.instances[clone.instance_id]
            known_place = "the same board" if alive.board and alive.board == clone.board else "another board"
            place = known_place if alive.board and clone.board else "perhaps another board"
            reason = (
                f"refused the later of two agents ({clone.format_identity()}) on {place}; "
                f"kept the other ({alive.format_identity()})"
            )
            device.rejected[clone.instance_id], device.last_rejected_s = reason, now_s
            if len(device.rejected) > MAX_INSTANCES:
                del device.rejected[next(iter(device.rejected))]
            events.append(
                CloneRejected(device_id=device_id, rejected_boot_id=clone.instance_id, reason=reason, detected=True)
            )
        return events


def _list_later(device: _DeviceInstances, instance: AgentInstance) -> list[AgentInstance]:
    return [other for other in device.instances.values() if other.number > instance.number]
