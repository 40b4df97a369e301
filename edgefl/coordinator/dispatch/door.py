"""The door of a run: nobody gets work who has not said that it can, and made itself ready.

Three phases, as in a commit in three steps. *can*: a device says whether it has shard, task, memory and disk.
*prepare*: it fetches the first model and keeps it beside its warm shard. *go*: the run begins, with those that are
ready, or not at all where it requires more of them; then whoever was ready forgets. Devices that come later pass the
same door.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from edgefl import __version__
from edgefl.coordinator.dispatch.guests import Guest, Guests, Stand
from edgefl.coordinator.dispatch.outstanding import LOST_AFTER_S, Bell, Mail
from edgefl.coordinator.dispatch.participants import FleetRun
from edgefl.coordinator.fleet.roster import Roster
from edgefl.coordinator.mail import PreparedBody, Reply
from edgefl.coordinator.superlink import prepare_body
from edgefl.errors import NetworkError, RunFailedError
from edgefl.protocol import Command, CommandKind, Phase
from edgefl.types import Json

log = logging.getLogger(__name__)

BUSY_AFTER_S = 0.5
"""Who has not answered after so long is asked for a heartbeat, which says what keeps it."""
COME_BACK_S = 15.0
"""A run that is taken up again waits so long for those who took part: boards find a new coordinator in seconds."""
MAX_REASON_CHARS = 300
NAMED = 10


class NotReadyError(RunFailedError):
    """Too few devices are ready, and the run has given nothing out."""


class Event(StrEnum):
    """What the history keeps of a door."""

    LEFT_OUT = "device-left-out"
    LET_IN = "device-let-in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a run asks of its devices before it begins.

    Attributes:
        require: how many must be ready: `all` that the run file means, `any`, or a number.
        ready_s: how long a device may take for both phases.
        layout: which model the coordinator's task has; see `protocol.layout_of`.
        memory_bytes, disk_bytes: what must be free on a board.
        sends_model: the first model goes along with *prepare*.
        expected: devices that took part before the run was taken up again; see `COME_BACK_S`.
        has_begun: the run goes on where it was: the expected are asked nothing, it begins when they are back, and
            nobody is required.
    """

    require: int | str = "any"
    ready_s: float = 30.0
    layout: str = ""
    memory_bytes: int = 0
    disk_bytes: int = 0
    sends_model: bool = True
    expected: tuple[str, ...] = ()
    has_begun: bool = False


Note = Callable[[str, str, str], None]
"""(kind of event, device, message)"""
Model = Callable[[], tuple[int, PreparedBody]]
"""The newest version, and its whole model as it travels."""


@dataclass(slots=True, kw_only=True)
class Door:
    """Used by the thread of the run alone; see the module.

    Attributes:
        run, terms: what is asked.
        mail, bell, roster: how devices are asked, and what is known of them.
        clock: seconds, monotone.
        note: keeps an event.
        model: asked when a device is to prepare.
        on_prepared: told the device and the version of a model that it holds now.
    """

    run: FleetRun
    terms: Terms
    mail: Mail
    bell: Bell
    roster: Roster
    clock: Callable[[], float]
    note: Note
    model: Model
    on_prepared: Callable[[str, int], None]
    is_open: bool = False
    _begun_s: float | None = None
    _guests: Guests = field(init=False)
    _bytes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._guests = Guests(run=self.run, roster=self.roster, ready_s=self.terms.ready_s, clock=self.clock)

    def admits(self, device_id: str) -> bool:
        """Returns whether a device may be given work."""
        guest = self._guests.by_device.get(device_id)
        return self.is_open and guest is not None and guest.stand is Stand.READY

    def meet(self, device_id: str, *, anew: bool = False) -> None:
        """Asks a device that has come; one that said no once more, with `anew` also one whose answer is out."""
        guest = self._guests.by_device.get(device_id)
        if guest is not None and (guest.stand is Stand.READY or (guest.stand is Stand.ASKED and not anew)):
            return
        if guest is not None:
            self.mail.cancel(guest.instruction_id)
        if self.terms.has_begun and device_id in self.terms.expected:
            self._guests.by_device[device_id] = Guest(
                device_id=device_id, asked_s=self.clock(), stand=Stand.READY, is_new=True
            )
            return
        is_told = guest is not None and guest.is_told
        self._guests.by_device[device_id] = Guest(device_id=device_id, asked_s=self.clock(), is_told=is_told)
        self._send(self._guests.by_device[device_id])

    def leave(self, device_id: str) -> None:
        """Takes note that a device is gone; one that took part already does so again when it comes back."""
        guest = self._guests.by_device.get(device_id)
        if guest is not None and not (self.is_open and guest.stand is Stand.READY):
            self.mail.cancel(guest.instruction_id)
            del self._guests.by_device[device_id]

    def restarted(self, device_id: str) -> None:
        """Asks an agent anew that was asked before it restarted."""
        guest = self._guests.by_device.get(device_id)
        if guest is not None and guest.stand is not Stand.READY:
            self.meet(device_id, anew=True)

    def answered(self, device_id: str, reply: Reply) -> bool:
        """Takes an answer; returns whether it was one for the door."""
        guest = self._guests.by_device.get(device_id)
        if guest is None or not guest.instruction_id or guest.instruction_id != reply.instruction_id:
            return False
        up, down = self._bytes.get(device_id, (0, 0))
        self._bytes[device_id] = up + reply.bytes_up, down + reply.bytes_down
        guest.instruction_id, guest.is_busy = "", False
        if "ready" not in reply.header:
            log.info("%s knows no such question: its agent is older", device_id)
            guest.stand, guest.is_new = Stand.READY, True
        elif reply.header["ready"] is not True:
            self._refuse(guest, str(reply.header.get("reason", "it gave no reason")))
        elif guest.phase is Phase.CAN:
            guest.phase = Phase.PREPARE
            self._send(guest)
        else:
            guest.stand, guest.is_new = Stand.READY, True
            if guest.version is not None:
                self.on_prepared(device_id, guest.version)
        return True

    def heard(self, device_id: str, holding: tuple[str, ...], at_s: float) -> None:
        """Takes a heartbeat: it may say that a device is busy, or that the question got lost."""
        guest, heartbeat = self._guests.by_device.get(device_id), self.roster.heartbeat(device_id)
        if guest is None or guest.stand is not Stand.ASKED or at_s < guest.sent_s + BUSY_AFTER_S:
            return
        work = heartbeat.assignment if heartbeat is not None else None
        guest.is_busy, guest.work = bool(work), work or ""
        if work:  # left over from another run, or from an earlier life of this one
            command = Command(id=f"recall-{work}", kind=CommandKind.RECALL, argument=work)
            self.bell.command(device_id, command)
            return
        is_missed = self.mail.is_delivered(guest.instruction_id) and self._key(guest.phase) not in holding
        guest.missed_s = (guest.missed_s or at_s) if is_missed else None
        since_s = guest.missed_s if self.mail.is_known(guest.instruction_id) else guest.sent_s
        if since_s is not None and at_s >= since_s + LOST_AFTER_S:
            log.warning("asking %s again: the question got lost on the way", device_id)
            self.mail.cancel(guest.instruction_id)
            self._send(guest)

    def take_bytes(self, device_id: str) -> tuple[int, int]:
        """Returns the bytes up and down that a device spent at the door, once."""
        return self._bytes.pop(device_id, (0, 0))

    def next_deadline_s(self) -> float | None:
        """Returns when to look again."""
        now_s = self.clock()
        times = [] if self.is_open or self._begun_s is None else [self._begun_s + self.terms.ready_s]
        if times and self.terms.expected:
            times.append((self._begun_s or 0.0) + COME_BACK_S)
        for guest in self._guests.by_device.values():
            if guest.stand is Stand.ASKED:
                times += [guest.sent_s + BUSY_AFTER_S] if not guest.is_nudged else []
                times.append(guest.asked_s + self.terms.ready_s)
        return min((time for time in times if time > now_s), default=None)

    def turn(self) -> list[str]:
        """Returns who may work from now on.

        Raises:
            NotReadyError: fewer are ready than the run requires, or nobody can do it.
        """
        now_s = self.clock()
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        self._nudge(now_s)
        if not self.is_open and self._may_go(now_s):
            self.is_open = True
            self._tell_start()
        if not self.is_open:
            return []
        admitted = [guest for guest in self._guests.by_device.values() if guest.stand is Stand.READY and guest.is_new]
        for guest in admitted:
            guest.is_new = False
            if guest.is_told:
                self.note(Event.LET_IN, guest.device_id, "it is ready now")
        return [guest.device_id for guest in admitted]

    def close(self) -> None:
        """Takes back what was asked; where the run never began, devices forget what they prepared."""
        for guest in self._guests.by_device.values():
            if guest.instruction_id:
                self.mail.cancel(guest.instruction_id)
            if not self.is_open and guest.phase is Phase.PREPARE:
                command = Command(id=uuid.uuid4().hex, kind=CommandKind.END, argument=self.run.run_id)
                self.bell.command(guest.device_id, command)

    def _may_go(self, now_s: float) -> bool:
        terms, guests = self.terms, self._guests.by_device.values()
        if terms.has_begun:
            return not self._awaits_former(now_s)
        waits = any(
            guest.stand is Stand.ASKED and not guest.is_busy and now_s < guest.asked_s + terms.ready_s
            for guest in guests
        ) or self._awaits_former(now_s)
        num_ready = sum(guest.stand is Stand.READY for guest in guests)
        if terms.require == "any":
            if not waits and not num_ready and self._is_hopeless(now_s):
                self._fail(
                    "no device can take part", {g.device_id: self._guests.why_not(g.device_id) for g in guests}
                )
            return bool(num_ready) and not waits
        lacking, is_late = self._guests.lacking(), self._is_late(now_s)
        if terms.require == "all":
            refused = any(self._guests.stand_of(name) is Stand.REFUSED for name in lacking)
            if refused or (is_late and (lacking or not num_ready)):
                self._fail("all devices are required", lacking)
            return bool(num_ready) and not lacking
        if is_late and num_ready < int(terms.require):
            self._fail(f"{terms.require} devices are required and {num_ready} are ready", lacking)
        return num_ready >= int(terms.require) and not waits

    def _awaits_former(self, now_s: float) -> bool:
        is_away = any(name not in self._guests.by_device for name in self.terms.expected)
        return is_away and now_s < (self._begun_s or 0.0) + COME_BACK_S

    def _is_late(self, now_s: float) -> bool:
        return now_s >= (self._begun_s or 0.0) + self.terms.ready_s

    def _is_hopeless(self, now_s: float) -> bool:
        """Returns whether all have said no; who is away may still come, for a while."""
        refused = [guest.device_id for guest in self._guests.by_device.values() if guest.stand is Stand.REFUSED]
        all_said_no = all(self._guests.stand_of(device_id) is Stand.REFUSED for device_id in self._guests.meant())
        return bool(refused) and (all_said_no or self._is_late(now_s))

    def _fail(self, what: str, lacking: Mapping[str, str]) -> None:
        for device_id, reason in lacking.items():
            self.note(Event.LEFT_OUT, device_id, reason)
        said = "; ".join(f"{device_id}: {reason}" for device_id, reason in [*lacking.items()][:NAMED])
        more = f"; and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
        raise NotReadyError(f"the run has not begun, {what}: {said or 'none is there'}{more}")

    def _tell_start(self) -> None:
        lacking = self._guests.lacking() if self.run.names or self.run.groups else {}
        lacking |= {
            guest.device_id: self._guests.why_not(guest.device_id)
            for guest in self._guests.by_device.values()
            if guest.stand is not Stand.READY
        }
        for device_id, reason in lacking.items():
            self._tell_left_out(device_id, reason)
        num_ready = sum(guest.stand is Stand.READY for guest in self._guests.by_device.values())
        log.info("run %s: %d devices are ready, %d are left out", self.run.run_id, num_ready, len(lacking))

    def _tell_left_out(self, device_id: str, reason: str) -> None:
        log.warning("%s is left out: %s", device_id, reason)
        self.note(Event.LEFT_OUT, device_id, reason)
        if device_id in self._guests.by_device:
            self._guests.by_device[device_id].is_told = True

    def _refuse(self, guest: Guest, reason: str) -> None:
        guest.stand, guest.reason = Stand.REFUSED, " ".join(reason.split())[:MAX_REASON_CHARS]
        if self.is_open:
            self._tell_left_out(guest.device_id, guest.reason)

    def _nudge(self, now_s: float) -> None:
        """Asks those for a heartbeat who have not answered yet."""
        for guest in self._guests.by_device.values():
            if guest.stand is Stand.ASKED and not guest.is_nudged and now_s >= guest.sent_s + BUSY_AFTER_S:
                guest.is_nudged = True
                self.bell.command(guest.device_id, Command(id=uuid.uuid4().hex, kind=CommandKind.BEAT))

    def _key(self, phase: Phase) -> str:
        return f"{self.run.run_id}/{phase}"

    def _send(self, guest: Guest) -> None:
        """Sends a device the question of its phase, and rings."""
        guest.sent_s, guest.missed_s, guest.is_nudged = self.clock(), None, False
        header, body = self._question(guest)
        node_id = self.roster.node_of(guest.device_id)
        if node_id is None:
            self._refuse(guest, "it has not joined")
            return
        try:
            guest.instruction_id = self.mail.send(node_id, kind="train", header=header, body=body)
        except NetworkError as error:
            self._refuse(guest, str(error))
            return
        self.bell.ring(guest.device_id)

    def _question(self, guest: Guest) -> tuple[Json, PreparedBody]:
        terms = self.terms
        header: Json = {**self.run.header, "assignment": self._key(guest.phase), "phase": str(guest.phase)}
        if guest.phase is Phase.CAN:
            needs = {"memory_bytes": terms.memory_bytes, "disk_bytes": terms.disk_bytes}
            return {**header, "edgefl": __version__, "layout": terms.layout, "needs": needs}, prepare_body(b"")
        if not terms.sends_model or self.is_open:  # by its first work there will be another one
            return header, prepare_body(b"")
        guest.version, body = self.model()
        return {**header, "version": guest.version}, body
