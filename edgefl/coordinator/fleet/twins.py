"""Tells two agents with one identity, a card or a state directory that was copied, from one that was restarted.

Every agent process makes a random instance id when it starts (`boot_id`), keeps it in memory alone, and says it with
every status, heartbeat and request. A restart ends one instance before the next begins: the lock of the state
directory sees to that. So two agents are proven by one thing alone: an instance that is alive *after* a later one was
heard. Order of arrival proves nothing, since a coordinator that stood still, or a cable that was cut, may hand over
late what a dead process had sent before. Two things do:

- Requests: every answer carries a stamp, the number of instances of this device that have been heard so far, and the
  next request says it again. Who repeats a stamp that counts a later instance has read an answer after that began.
- MQTT: a status of a new session, behind a status of the later instance. A broker cuts off the connection of the one
  when the other connects, with all that is still on the way in it, so only a living agent can come back with another
  session. Last wills and goodbyes, which the broker may send for the dead, prove nothing.

The later of the two is refused, for as long as its process lives. Nothing on the wire says which of them is the
original, both hold the same key; but the earlier one has the device's work, its caches and residuals, and every run
that goes on knows it, while the later one costs nothing to turn away. So a copy that is plugged in beside a board at
work changes nothing for that board. Where the original is the later one (its copy was switched on while it lay in a
drawer) the operator is told as well, and settles it; neither is locked out, since a refusal ends with its process.
The work that they had is no better sign: a copy that took over for a second may have pulled an assignment.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

KEPT_INSTANCES = 8
"""So many instances of a device are remembered, and as many that were refused."""
MAX_ID_CHARS = 64
SHOWN_S = 3600.0
"""A device counts as cloned for so long after its twin was last heard."""
_SHOWN_CHARS = 8


@dataclass(slots=True, kw_only=True, eq=False)
class Instance:
    """One agent process of a device, as far as it is known.

    Attributes:
        instance: what it calls itself.
        number: it was the so many-th of its device that was heard.
        address, board: where its requests come from, and a hash that tells boards apart; empty where nobody said.
        session_no: of its newest connection to the broker, 0 before the first.
    """

    instance: str
    number: int
    address: str = ""
    board: str = ""
    session_no: int = 0

    def told(self) -> str:
        """Returns in words what tells it from another."""
        board = f", board {self.board[:_SHOWN_CHARS]}" if self.board else ""
        return f"boot {self.instance[:_SHOWN_CHARS]}{board}" + (f", at {self.address}" if self.address else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloned:
    """Two agents with one identity are there at once; the later one is refused from now on."""

    device_id: str
    refused: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinTried:
    """An agent that was refused has come back to the broker."""

    device_id: str
    refused: str
    reason: str


@dataclass(slots=True)
class _Device:
    num_heard: int = 0
    instances: dict[str, Instance] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    tried_s: float = 0.0


class Twins:
    """Pure: every call gets what was heard, and the time in seconds of any monotonic clock."""

    def __init__(self, life: str = "") -> None:
        """Begins with nobody known.

        Args:
            life: tells the stamps of this coordinator process from those of others; made at random when empty.
        """
        self._life = life or secrets.token_hex(4)
        self._devices: dict[str, _Device] = {}

    def stamp(self, device_id: str) -> str:
        """Returns what an answer to this device has to carry."""
        device = self._devices.get(device_id)
        return f"{self._life}.{device.num_heard if device else 0}"

    def called(self, device_id: str, instance: str, *, stamp: str, address: str, now_s: float) -> list[Cloned]:
        """Takes a signed request; `stamp` is the newest that the instance has read, empty before its first answer."""
        device, known = self._met(device_id, instance, now_s)
        if known is None:
            return []
        known.address = address or known.address
        life, _, count = stamp.partition(".")
        if life != self._life or not count.isdecimal() or len(count) > MAX_ID_CHARS:
            return []
        return self._judged(
            device_id, device, known, [i for i in _later(device, known) if i.number <= int(count)], now_s
        )

    def connected(self, device_id: str, instance: str, *, session_no: int, board: str, now_s: float) -> list[Cloned]:
        """Takes a status, over MQTT, of a device that says it is there; nothing that the broker says in its name."""
        device, known = self._met(device_id, instance, now_s)
        if known is None:
            return []
        known.board = board[:MAX_ID_CHARS] or known.board
        if session_no <= known.session_no:
            return []
        known.session_no = session_no
        return self._judged(device_id, device, known, [i for i in _later(device, known) if i.session_no], now_s)

    def refusal(self, device_id: str, instance: str) -> str | None:
        """Returns why an instance is refused, None if it is not."""
        device = self._devices.get(device_id)
        return device.refused.get(instance[:MAX_ID_CHARS]) if device is not None else None

    def knows(self, device_id: str, instance: str) -> bool:
        """Says whether an instance has been heard, or refused, as far back as they are remembered."""
        device, instance = self._devices.get(device_id), instance[:MAX_ID_CHARS]
        return device is not None and (instance in device.instances or instance in device.refused)

    def shown(self, device_id: str, now_s: float) -> str | None:
        """Returns for the operator that a device has a twin, None if none was heard lately."""
        device = self._devices.get(device_id)
        if device is None or not device.refused or now_s - device.tried_s > SHOWN_S:
            return None
        return next(reversed(device.refused.values()))

    def forget(self, device_id: str) -> None:
        """Drops a device that was removed."""
        self._devices.pop(device_id, None)

    def _met(self, device_id: str, instance: str, now_s: float) -> tuple[_Device, Instance | None]:
        """Returns an instance that counts, a new one too; None for one that is refused, or says no name."""
        device, instance = self._devices.setdefault(device_id, _Device()), instance[:MAX_ID_CHARS]
        if instance in device.refused:
            device.tried_s = now_s
            return device, None
        if instance and instance not in device.instances:
            device.num_heard += 1
            device.instances[instance] = Instance(instance=instance, number=device.num_heard)
            if len(device.instances) > KEPT_INSTANCES:
                del device.instances[next(iter(device.instances))]
        return device, device.instances.get(instance)

    @staticmethod
    def _judged(
        device_id: str, device: _Device, alive: Instance, later: list[Instance], now_s: float
    ) -> list[Cloned]:
        events = []
        for twin in later:
            del device.instances[twin.instance]
            kind = "the same board" if alive.board and alive.board == twin.board else "another board"
            where = kind if alive.board and twin.board else "perhaps another board"
            reason = f"refused the later of two agents ({twin.told()}) on {where}; kept the other ({alive.told()})"
            device.refused[twin.instance], device.tried_s = reason, now_s
            if len(device.refused) > KEPT_INSTANCES:
                del device.refused[next(iter(device.refused))]
            events.append(Cloned(device_id=device_id, refused=twin.instance, reason=reason))
        return events


def _later(device: _Device, than: Instance) -> list[Instance]:
    return [other for other in device.instances.values() if other.number > than.number]
