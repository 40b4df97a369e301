"""Presence of devices, from status messages, last wills, heartbeats and any other contact.

A pure state machine: every call gets the time (any monotonic clock, in seconds) and returns what changed.

- A will means that a connection broke, not yet that the device is dead: it is *late* at once and *gone* when no
  sign of life follows within one heartbeat. A Wi-Fi hiccup therefore costs no assignment.
- Silence makes a device *late* after two missed heartbeats and *gone* after three.
- While our own link to the broker is down no state changes, and afterwards every device gets the full time again.
"""

from __future__ import annotations

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
