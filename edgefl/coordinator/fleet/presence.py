"""Who is there: status, last wills, heartbeats and any other contact, judged together.

A pure state machine: every call gets the time (any monotonic clock, in seconds) and returns what changed.

- A will means that a connection broke, not yet that a board is dead: the device is *late* at once and *gone* when no
  sign of life follows within one heartbeat. A Wi-Fi hiccup therefore costs no assignment.
- Silence makes a device *late* after two missed heartbeats and *gone* after three.
- While our own link to the broker is down nobody is judged, and afterwards everybody gets the full time again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from edgefl.errors import NetworkError
from edgefl.protocol import (
    GONE_AFTER_HEARTBEATS,
    HEARTBEAT_JITTER,
    HEARTBEAT_S,
    LATE_AFTER_HEARTBEATS,
    Heartbeat,
    PresenceState,
    Status,
)

FLAPS_UNTIL_REPORTED = 3
FLAP_WINDOW_S = 120.0


class DeviceState(StrEnum):
    """`gone` fell silent, `offline` said goodbye; neither gets work. `late` and `draining` are still present."""

    ONLINE = "online"
    LATE = "late"
    GONE = "gone"
    OFFLINE = "offline"
    DRAINING = "draining"


PRESENT = frozenset({DeviceState.ONLINE, DeviceState.LATE, DeviceState.DRAINING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One change of state; `before` is None for a device that was never seen before."""

    device_id: str
    before: DeviceState | None
    after: DeviceState
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flapping:
    """Two sessions of one device take turns: its card was probably cloned, or its state directory copied."""

    device_id: str
    reason: str = "flapping sessions"


PresenceEvent = Transition | Flapping


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """What presence knows of one device; `silent_s` is the time since its last sign of life."""

    device_id: str
    state: DeviceState
    session_no: int
    boot_id: str
    silent_s: float
    heartbeat: Heartbeat | None


@dataclass(slots=True)
class _Device:
    state: DeviceState | None = None
    announced: DeviceState = DeviceState.ONLINE
    session_no: int = 0
    boot_id: str = ""
    last_life_s: float = 0.0
    will_s: float | None = None
    heartbeat: Heartbeat | None = None
    former_boots: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    flaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=FLAPS_UNTIL_REPORTED))
    rival_was_last: bool = False


class Presence:
    """Keeps the state of every device. Starts with the link to the broker down; see `bus`."""

    def __init__(self, *, heartbeat_s: float = HEARTBEAT_S, jitter: float = HEARTBEAT_JITTER) -> None:
        longest_s = heartbeat_s * (1 + jitter)
        self._late_after_s = LATE_AFTER_HEARTBEATS * longest_s
        self._gone_after_s = GONE_AFTER_HEARTBEATS * longest_s
        self._gone_after_will_s = longest_s
        self._devices: dict[str, _Device] = {}
        self._bus_is_up = False
        self._bus_up_s = 0.0

    def status(self, device_id: str, status: Status, now_s: float) -> list[PresenceEvent]:
        """Takes a `status` message: what the device says of itself, or its last will.

        Raises:
            NetworkError: it names no state that we know.
        """
        if status.state not in set(PresenceState):
            raise NetworkError(f"malformed status: state is {status.state!r}, expected online, offline or draining")
        device = self._devices.setdefault(device_id, _Device())
        if status.state == PresenceState.OFFLINE:
            return self._left(device_id, device, status, now_s)
        if self._is_outdated(device, status) and device.state in PRESENT:
            return self._rival(device_id, device, now_s)
        events = self._new_session(device_id, device, status, now_s)
        draining = status.state == PresenceState.DRAINING
        device.announced = DeviceState.DRAINING if draining else DeviceState.ONLINE
        return events + self._alive(device_id, device, now_s, f"status {status.state}")

    def heartbeat(self, device_id: str, heartbeat: Heartbeat, now_s: float) -> list[PresenceEvent]:
        """Takes a heartbeat; one that is newer than the will of its session overrides it."""
        device = self._devices.setdefault(device_id, _Device())
        if heartbeat.session_no < device.session_no and device.state in PRESENT:
            return self._rival(device_id, device, now_s)
        if not self._is_newer(device, heartbeat):
            return []
        device.rival_was_last = False
        device.heartbeat = heartbeat
        device.session_no = heartbeat.session_no
        if device.announced is DeviceState.OFFLINE:
            device.announced = DeviceState.ONLINE
        return self._alive(device_id, device, now_s, "heartbeat")

    def seen(self, device_id: str, now_s: float) -> list[PresenceEvent]:
        """Takes any other contact, such as a request over HTTPS; it cannot undo a goodbye."""
        device = self._devices.setdefault(device_id, _Device())
        return self._alive(device_id, device, now_s, "contact")

    def bus(self, *, connected: bool, now_s: float) -> None:
        """Says whether our own link to the broker is up; while it is down nobody becomes late or gone."""
        if connected and not self._bus_is_up:
            self._bus_up_s = now_s
        self._bus_is_up = connected

    def tick(self, now_s: float) -> list[PresenceEvent]:
        """Returns who became late or gone by silence; call it at `next_check_s` or about once a second."""
        if not self._bus_is_up:
            return []
        events: list[PresenceEvent] = []
        for device_id, device in self._devices.items():
            judged = self._judge(device, now_s)
            if judged is not None:
                events += _change(device_id, device, *judged)
        return events

    def next_check_s(self) -> float | None:
        """Returns the earliest time at which silence can change something, or None."""
        if not self._bus_is_up:
            return None
        times = [at for device in self._devices.values() for at in self._deadlines_s(device)]
        return min(times, default=None)

    def forget(self, device_id: str) -> None:
        """Drops a device that was removed, or that joined anew and counts its sessions from one again."""
        self._devices.pop(device_id, None)

    def state(self, device_id: str) -> DeviceState | None:
        device = self._devices.get(device_id)
        return device.state if device else None

    def last_heartbeat(self, device_id: str) -> Heartbeat | None:
        """Returns the last heartbeat of a device's present session, if it sent one."""
        device = self._devices.get(device_id)
        return device.heartbeat if device else None

    def is_present(self, device_id: str) -> bool:
        return self.state(device_id) in PRESENT

    def present(self) -> list[str]:
        """Returns the ids of those online, late or draining, sorted."""
        return sorted(name for name, device in self._devices.items() if device.state in PRESENT)

    def records(self, now_s: float) -> list[DeviceRecord]:
        """Returns one record per known device, sorted by id."""
        return [
            DeviceRecord(
                device_id=name,
                state=device.state,
                session_no=device.session_no,
                boot_id=device.boot_id,
                silent_s=max(0.0, now_s - device.last_life_s),
                heartbeat=device.heartbeat,
            )
            for name, device in sorted(self._devices.items())
            if device.state is not None
        ]

    def _left(self, device_id: str, device: _Device, status: Status, now_s: float) -> list[PresenceEvent]:
        if self._is_outdated(device, status):
            return []
        device.session_no, device.boot_id = status.session_no, status.boot_id
        if not status.will:
            device.announced, device.will_s = DeviceState.OFFLINE, None
            return _change(device_id, device, DeviceState.OFFLINE, "said goodbye")
        if device.state is None:
            # A retained will that lay there before we came: nobody waits for this device.
            return _change(device_id, device, DeviceState.GONE, "last will")
        if device.state not in PRESENT:
            return []
        device.will_s = now_s
        late = DeviceState.LATE if device.state is DeviceState.ONLINE else device.state
        return _change(device_id, device, late, "last will")

    def _alive(self, device_id: str, device: _Device, now_s: float, reason: str) -> list[PresenceEvent]:
        device.last_life_s, device.will_s = now_s, None
        return _change(device_id, device, device.announced, reason)

    def _new_session(self, device_id: str, device: _Device, status: Status, now_s: float) -> list[PresenceEvent]:
        device.rival_was_last = False
        returned = status.boot_id in device.former_boots
        if device.boot_id and status.boot_id != device.boot_id:
            device.former_boots.append(device.boot_id)
        if status.session_no != device.session_no:
            device.heartbeat = None
        device.session_no, device.boot_id = status.session_no, status.boot_id
        # No board boots back into an earlier boot: this one has a twin.
        return _flap(device_id, device, now_s) if returned else []

    def _rival(self, device_id: str, device: _Device, now_s: float) -> list[PresenceEvent]:
        if device.rival_was_last:
            return []
        device.rival_was_last = True
        return _flap(device_id, device, now_s)

    @staticmethod
    def _is_outdated(device: _Device, status: Status) -> bool:
        if status.boot_id == device.boot_id or not device.boot_id:
            return status.session_no < device.session_no
        # A new boot may count from one again (a new card), so only a goodbye of an earlier boot is old for certain.
        if status.state == PresenceState.OFFLINE:
            return status.session_no < device.session_no or status.boot_id in device.former_boots
        return False

    @staticmethod
    def _is_newer(device: _Device, heartbeat: Heartbeat) -> bool:
        last = device.heartbeat
        return last is None or heartbeat.session_no != last.session_no or heartbeat.seq > last.seq

    def _judge(self, device: _Device, now_s: float) -> tuple[DeviceState, str] | None:
        """Returns the state that silence calls for, and why; None when it calls for nothing."""
        if device.state not in PRESENT:
            return None
        if device.will_s is not None and now_s >= self._will_deadline_s(device.will_s):
            return DeviceState.GONE, "last will and no sign of life since"
        silent_s = now_s - max(device.last_life_s, self._bus_up_s)
        if silent_s >= self._gone_after_s:
            return DeviceState.GONE, f"silent for {silent_s:.1f} s"
        if silent_s >= self._late_after_s and device.state is DeviceState.ONLINE:
            return DeviceState.LATE, f"silent for {silent_s:.1f} s"
        return None

    def _will_deadline_s(self, will_s: float) -> float:
        return max(will_s, self._bus_up_s) + self._gone_after_will_s

    def _deadlines_s(self, device: _Device) -> list[float]:
        if device.state not in PRESENT:
            return []
        since_s = max(device.last_life_s, self._bus_up_s)
        silence_s = self._late_after_s if device.state is DeviceState.ONLINE else self._gone_after_s
        will = [] if device.will_s is None else [self._will_deadline_s(device.will_s)]
        return [since_s + silence_s, *will]


def _change(device_id: str, device: _Device, after: DeviceState, reason: str) -> list[PresenceEvent]:
    before = device.state
    if before is after:
        return []
    device.state = after
    return [Transition(device_id=device_id, before=before, after=after, reason=reason)]


def _flap(device_id: str, device: _Device, now_s: float) -> list[PresenceEvent]:
    device.flaps_s.append(now_s)
    if len(device.flaps_s) < FLAPS_UNTIL_REPORTED or now_s - device.flaps_s[0] > FLAP_WINDOW_S:
        return []
    device.flaps_s.clear()
    return [Flapping(device_id=device_id)]
