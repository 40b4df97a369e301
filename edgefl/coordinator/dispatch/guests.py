"""Who stands at the door of a run, and how far each is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from edgefl.coordinator.dispatch.participants import FleetRun, why_untrained
from edgefl.coordinator.fleet.roster import Roster
from edgefl.protocol import Phase
from edgefl.types import DeviceInfo, Role


class Stand(StrEnum):
    """How far a device is."""

    ASKED = "asked"
    READY = "ready"
    REFUSED = "refused"


@dataclass(slots=True, kw_only=True)
class Guest:
    """One device at the door.

    Attributes:
        phase, stand: which question is out or was answered last, and what came of it.
        asked_s, sent_s: when it was first asked, and when the newest question left.
        missed_s: since when the newest question was handed out and is not held; it may still be on the way.
        instruction_id: of the question that is out, empty for none.
        version: of the model that went along, None for none.
        reason: why it cannot take part.
        is_busy, work: it is at something else, and at what.
        is_nudged: it was asked for a heartbeat.
        is_new: it is ready, and nobody has been told.
        is_told: the history says that it was left out.
    """

    device_id: str
    asked_s: float
    phase: Phase = Phase.CAN
    stand: Stand = Stand.ASKED
    sent_s: float = 0.0
    missed_s: float | None = None
    instruction_id: str = ""
    version: int | None = None
    reason: str = ""
    is_busy: bool = False
    work: str = ""
    is_nudged: bool = False
    is_new: bool = False
    is_told: bool = False


@dataclass(slots=True, kw_only=True)
class Guests:
    """All who stand there, and who should; `ready_s` is how long one may take on `clock`."""

    run: FleetRun
    roster: Roster
    ready_s: float
    clock: Callable[[], float]
    by_device: dict[str, Guest] = field(default_factory=dict)

    def lacking(self) -> dict[str, str]:
        """Returns the devices that the run file means and that are not ready, and why."""
        return {name: self.why_not(name) for name in self.meant() if self.stand_of(name) is not Stand.READY}

    def meant(self) -> list[str]:
        """Returns the devices that the run file means, sorted, whether they are there or not."""
        run = self.run
        if run.names and not run.groups:
            return sorted(run.names)
        trainers = [info for info in self.roster.known() if info.role == Role.TRAINER]
        return sorted(
            info.device_id
            for info in trainers
            if (not run.groups or not set(run.groups).isdisjoint(info.groups))
            and (not run.names or info.device_id in run.names)
            and (run.groups or not self._why_never(info))
        )

    def stand_of(self, device_id: str) -> Stand | None:
        """Returns how far a device is; None for one that may still come."""
        guest, info = self.by_device.get(device_id), self.roster.info(device_id)
        if guest is None and (info is None or self._why_never(info)):
            return Stand.REFUSED
        return guest.stand if guest is not None else None

    def why_not(self, device_id: str) -> str:
        """Returns why a device that is not ready is not."""
        guest, info = self.by_device.get(device_id), self.roster.info(device_id)
        if guest is not None:
            is_late = self.clock() >= guest.asked_s + self.ready_s
            silent = f"it has not answered within {self.ready_s:g} s" if is_late else "it has not answered yet"
            return guest.reason or (f"it is busy with {guest.work}" if guest.is_busy else f"{silent} ({guest.phase})")
        if info is None:
            return "there is no such device in the fleet"
        return self._why_never(info) or f"it is {self.roster.standing(device_id) or 'not there'}"

    def _why_never(self, info: DeviceInfo) -> str:
        """Returns why a device could not take part even if it were there; empty where it could."""
        if info.role != Role.TRAINER:
            return f"it is an {info.role}, and trains nothing"
        if self.run.task not in info.tasks:
            return f"it has no shard for task {self.run.task!r}; on the board: edgefl device shard add"
        return why_untrained(info, needs_torch=self.run.needs_torch)
