"""Clone detection: tells two live agents with one identity, a copied card or directory, from a restart.

Every agent process makes a random instance id at its start (`boot_id`), keeps it only in memory, and sends it with
every status, heartbeat and request. A restart ends one instance before the next starts: the lock of the state
directory ensures that. So only one thing proves two agents: an instance that is alive *after* a later one was seen.
Order of arrival proves nothing, since a paused coordinator or a cut cable may deliver late what a dead process had
sent before. Two things do:

- Requests: every answer carries a stamp, the number of instances of this device seen so far, and the next request
  repeats it. An instance that repeats a stamp that counts a later one has read an answer after that one started.
- MQTT: a status of a new session, after a status of the later instance. A broker disconnects the one when the other
  connects, with everything still on the way, so only a live agent can come back with another session. Last wills and
  goodbyes, which the broker may send for a dead agent, prove nothing.

The later of the two is rejected, for as long as its process lives. Nothing on the wire tells which is the original,
both hold the same key; but the earlier one has the device's work, its caches and residuals, and every run that goes
on knows it, while rejecting the later one costs nothing. So a copy that is plugged in beside a working device changes
nothing for it. Where the original is the later one (its copy was switched on while it lay in a drawer) the operator
is told as well, and decides; neither is locked out, since a rejection ends with its process. The work that they had
is no better sign: a copy that took over for a second may have pulled an assignment.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

MAX_INSTANCES = 8
"""Maximum number of instances remembered per device, and as many rejected ones."""
MAX_ID_CHARS = 64
WARNING_TTL_S = 3600.0
"""How long a device counts as cloned after its clone was last seen."""
_ID_PREFIX_CHARS = 8


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
    """Detects cloned device identities. Pure: every call gets the time, in seconds of any monotonic clock."""

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
