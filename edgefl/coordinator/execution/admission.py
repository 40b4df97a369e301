"""Admits devices to a run in three phases: *can*, *prepare*, *go*.

*can*: a device reports whether it has shard, task, memory and disk. *prepare*: it fetches the first model and keeps
it beside its warm shard. *go*: the run starts with the devices that are ready. Where it requires more of them it does
not start, and the ready devices drop what they prepared. Late joiners go through the same phases.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from edgefl import __version__
from edgefl.coordinator.execution.fleet_view import AdmissionStatus, Candidate, Candidates, LiveFleetView, RunSpec
from edgefl.coordinator.execution.messaging import RESEND_AFTER_S, DeviceNotifier, InstructionTransport
from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import (
    DeviceAdded,
    DeviceChanged,
    DeviceRegistry,
    DeviceRemoved,
    DeviceRestarted,
    HeldInstructions,
    RegistryEvent,
)
from edgefl.coordinator.flower.messages import PreparedBody, Reply
from edgefl.coordinator.flower.superlink import prepare_body
from edgefl.core.conditions import parse_blocker
from edgefl.core.errors import NetworkError, RunFailedError
from edgefl.core.protocol import HANDED_BACK_KEY, Command, CommandKind, ReadinessPhase
from edgefl.core.types import DeviceAvailable, Json

log = logging.getLogger(__name__)

HEARTBEAT_REQUEST_AFTER_S = 0.5
"""A device that has not answered by then is asked for a heartbeat, which names what it is busy with."""
REJOIN_TIMEOUT_S = 15.0
"""How long a resumed run waits for its previous devices: they find a new coordinator in seconds."""
MAX_REASON_CHARS = 300
MAX_NAMES = 10

RecordEvent = Callable[[str, str, str], None]
"""(kind of event, device, message)"""
GetModel = Callable[[], tuple[int, PreparedBody]]
"""() -> (newest version, its full encoded model)"""


class NotEnoughDevicesError(RunFailedError):
    """Raised when too few devices are ready; the run has dispatched nothing."""


class AdmissionEvent(StrEnum):
    """Kinds of admission events in the history."""

    REJECTED = "device-rejected"
    ADMITTED = "device-admitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequirements:
    """Requirements that devices must meet before a run starts.

    Attributes:
        require: how many devices must be ready: `all` that the run file selects, `any`, or a number.
        ready_s: how long a device may take for both phases.
        model_fingerprint: of the model of the coordinator's task; see `protocol.layout_of`.
        memory_bytes, disk_bytes: what must be free on a device.
        should_prefetch_model: the first model goes along with *prepare*.
        previous_devices: devices that took part before the run was resumed; see `REJOIN_TIMEOUT_S`.
        is_resumed: the run goes on where it was: previous devices are not queried, it starts when they are back, and
            `require` does not apply.
    """

    require: int | str = "any"
    ready_s: float = 30.0
    model_fingerprint: str = ""
    memory_bytes: int = 0
    disk_bytes: int = 0
    should_prefetch_model: bool = True
    previous_devices: tuple[str, ...] = ()
    is_resumed: bool = False


@dataclass(slots=True, kw_only=True)
class AdmissionController:
    """Admission of devices to one run. Not thread-safe: used by the run's thread alone.

    Attributes:
        run, requirements: which devices are selected, and what they must meet.
        transport, notifier, registry: where queries go, and the registry of devices.
        clock: seconds, monotonic.
        record_event: writes an event to the history.
        get_model: returns the model to prefetch; called when a device is to prepare.
        on_prefetched: called with the device and the version of the model that it now holds.
    """

    run: RunSpec
    requirements: AdmissionRequirements
    transport: InstructionTransport
    notifier: DeviceNotifier
    registry: DeviceRegistry
    clock: Callable[[], float]
    record_event: RecordEvent
    get_model: GetModel
    on_prefetched: Callable[[str, int], None]
    is_started: bool = False
    _waiting_since_s: float | None = None
    _candidates: Candidates = field(init=False)
    _traffic: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._candidates = Candidates(
            run=self.run, registry=self.registry, ready_s=self.requirements.ready_s, clock=self.clock
        )

    def is_admitted(self, device_id: str) -> bool:
        """Returns whether a device may be given work."""
        candidate = self._candidates.by_device.get(device_id)
        return self.is_started and candidate is not None and candidate.status is AdmissionStatus.READY

    def query(self, device_id: str, *, should_repeat: bool = False) -> None:
        """Queries a device, also one rejected before; with `should_repeat` also one whose answer is pending."""
        candidate = self._candidates.by_device.get(device_id)
        if candidate is not None and (
            candidate.status is AdmissionStatus.READY
            or (candidate.status is AdmissionStatus.PENDING and not should_repeat)
        ):
            return
        if candidate is not None:
            self.transport.cancel(candidate.message_id)
        if self.requirements.is_resumed and device_id in self.requirements.previous_devices:
            self._candidates.by_device[device_id] = Candidate(
                device_id=device_id, first_query_s=self.clock(), status=AdmissionStatus.READY, is_unannounced=True
            )
            return
        was_rejected = candidate is not None and candidate.is_rejection_recorded
        self._candidates.by_device[device_id] = Candidate(
            device_id=device_id, first_query_s=self.clock(), is_rejection_recorded=was_rejected
        )
        self._send_query(self._candidates.by_device[device_id])

    def remove(self, device_id: str) -> None:
        """Removes a device that is gone; one already admitted stays admitted for when it comes back."""
        candidate = self._candidates.by_device.get(device_id)
        if candidate is not None and not (self.is_started and candidate.status is AdmissionStatus.READY):
            self.transport.cancel(candidate.message_id)
            del self._candidates.by_device[device_id]

    def on_restart(self, device_id: str) -> None:
        """Repeats the query to an agent that restarted before it was ready."""
        candidate = self._candidates.by_device.get(device_id)
        if candidate is not None and candidate.status is not AdmissionStatus.READY:
            self.query(device_id, should_repeat=True)

    def on_reply(self, device_id: str, reply: Reply) -> bool:
        """Handles a reply; returns whether it answered an admission query."""
        candidate = self._candidates.by_device.get(device_id)
        if candidate is None or not candidate.message_id or candidate.message_id != reply.instruction_id:
            return False
        bytes_up, bytes_down = self._traffic.get(device_id, (0, 0))
        self._traffic[device_id] = bytes_up + reply.bytes_up, bytes_down + reply.bytes_down
        candidate.message_id, candidate.is_busy = "", False
        if "ready" not in reply.header:
            log.info("%s knows no such question: its agent is older", device_id)
            self._accept(candidate)
        elif reply.header["ready"] is not True:
            if parse_blocker(reply.header.get(HANDED_BACK_KEY)) is not None:  # it is asked again when it is free
                self.registry.record_blocker(device_id, reply.header[HANDED_BACK_KEY])
                self.remove(device_id)
                return True
            self._reject(candidate, str(reply.header.get("reason", "it gave no reason")))
        elif candidate.phase is ReadinessPhase.CAN:
            candidate.phase = ReadinessPhase.PREPARE
            self._send_query(candidate)
        else:
            self._accept(candidate)
            if candidate.model_version is not None:
                self.on_prefetched(device_id, candidate.model_version)
        return True

    def on_heartbeat(self, device_id: str, held_ids: tuple[str, ...], at_s: float) -> None:
        """Handles a heartbeat: the device may be busy, or its query lost."""
        candidate, heartbeat = self._candidates.by_device.get(device_id), self.registry.get_heartbeat(device_id)
        if (
            candidate is None
            or candidate.status is not AdmissionStatus.PENDING
            or at_s < candidate.sent_s + HEARTBEAT_REQUEST_AFTER_S
        ):
            return
        assignment = heartbeat.assignment if heartbeat is not None else None
        if assignment == self._make_wire_id(candidate.phase):  # it is getting ready
            candidate.is_busy, candidate.not_held_since_s = False, None
            return
        candidate.is_busy, candidate.current_assignment = bool(assignment), assignment or ""
        if assignment:  # left over from another run, or from an earlier incarnation of this one
            command = Command(id=f"finish-early-{assignment}", kind=CommandKind.FINISH_EARLY, argument=assignment)
            self.notifier.send_command(device_id, command)
            return
        is_not_held = (
            self.transport.is_delivered(candidate.message_id) and self._make_wire_id(candidate.phase) not in held_ids
        )
        candidate.not_held_since_s = (candidate.not_held_since_s or at_s) if is_not_held else None
        since_s = candidate.not_held_since_s if self.transport.is_known(candidate.message_id) else candidate.sent_s
        if since_s is not None and at_s >= since_s + RESEND_AFTER_S:
            log.warning("asking %s again: the question got lost on the way", device_id)
            self.transport.cancel(candidate.message_id)
            self._send_query(candidate)

    def get_not_ready(self) -> dict[str, str]:
        """Returns why devices that the run could have are not ready, by id."""
        return self._candidates.get_not_ready(with_unselected=True)

    def get_statuses(self) -> dict[str, AdmissionStatus]:
        """Returns the status of every device that was asked, by id."""
        return {name: candidate.status for name, candidate in self._candidates.by_device.items()}

    def pop_traffic(self, device_id: str) -> tuple[int, int]:
        """Returns and clears the bytes up and down that a device spent on admission."""
        return self._traffic.pop(device_id, (0, 0))

    def next_deadline_s(self) -> float | None:
        """Returns when to poll again, in seconds of `clock`; None for no deadline."""
        now_s = self.clock()
        deadlines = (
            []
            if self.is_started or self._waiting_since_s is None
            else [self._waiting_since_s + self.requirements.ready_s]
        )
        if deadlines and self.requirements.previous_devices:
            deadlines.append((self._waiting_since_s or 0.0) + REJOIN_TIMEOUT_S)
        for candidate in self._candidates.by_device.values():
            if candidate.status is AdmissionStatus.PENDING:
                deadlines += (
                    [candidate.sent_s + HEARTBEAT_REQUEST_AFTER_S] if not candidate.is_heartbeat_requested else []
                )
                deadlines.append(candidate.first_query_s + self.requirements.ready_s)
        return min((deadline_s for deadline_s in deadlines if deadline_s > now_s), default=None)

    def poll(self) -> list[str]:
        """Returns the devices newly admitted.

        Raises:
            NotEnoughDevicesError: fewer devices are ready than the run requires, or all were rejected.
        """
        now_s = self.clock()
        self._waiting_since_s = now_s if self._waiting_since_s is None else self._waiting_since_s
        self._request_heartbeats(now_s)
        if not self.is_started and self._can_start(now_s):
            self.is_started = True
            self._record_start()
        if not self.is_started:
            return []
        admitted = [
            candidate
            for candidate in self._candidates.by_device.values()
            if candidate.status is AdmissionStatus.READY and candidate.is_unannounced
        ]
        for candidate in admitted:
            candidate.is_unannounced = False
            if candidate.is_rejection_recorded:
                self.record_event(AdmissionEvent.ADMITTED, candidate.device_id, "it is ready now")
        return [candidate.device_id for candidate in admitted]

    def close(self) -> None:
        """Cancels pending queries; if the run never started, devices drop what they prepared."""
        for candidate in self._candidates.by_device.values():
            if candidate.message_id:
                self.transport.cancel(candidate.message_id)
            if not self.is_started and candidate.phase is ReadinessPhase.PREPARE:
                command = Command(id=uuid.uuid4().hex, kind=CommandKind.END, argument=self.run.run_id)
                self.notifier.send_command(candidate.device_id, command)

    def _can_start(self, now_s: float) -> bool:
        requirements, candidates = self.requirements, self._candidates.by_device.values()
        if requirements.is_resumed:
            return not self._is_awaiting_previous(now_s)
        is_waiting = any(
            candidate.status is AdmissionStatus.PENDING
            and not candidate.is_busy
            and now_s < candidate.first_query_s + requirements.ready_s
            for candidate in candidates
        ) or self._is_awaiting_previous(now_s)
        num_ready = sum(candidate.status is AdmissionStatus.READY for candidate in candidates)
        if requirements.require == "any":
            if not is_waiting and not num_ready and self._has_only_rejections(now_s):
                self._raise_not_enough(
                    "no device can take part",
                    {g.device_id: self._candidates.get_reason(g.device_id) for g in candidates},
                )
            return bool(num_ready) and not is_waiting
        not_ready, is_timed_out = self._candidates.get_not_ready(), self._is_timed_out(now_s)
        if requirements.require == "all":
            has_rejection = any(self._candidates.get_status(name) is AdmissionStatus.REJECTED for name in not_ready)
            if has_rejection or (is_timed_out and (not_ready or not num_ready)):
                self._raise_not_enough("all devices are required", not_ready)
            return bool(num_ready) and not not_ready
        if is_timed_out and num_ready < int(requirements.require):
            self._raise_not_enough(
                f"{requirements.require} devices are required and {num_ready} are ready", not_ready
            )
        return num_ready >= int(requirements.require) and not is_waiting

    def _is_awaiting_previous(self, now_s: float) -> bool:
        is_away = any(name not in self._candidates.by_device for name in self.requirements.previous_devices)
        return is_away and now_s < (self._waiting_since_s or 0.0) + REJOIN_TIMEOUT_S

    def _is_timed_out(self, now_s: float) -> bool:
        return now_s >= (self._waiting_since_s or 0.0) + self.requirements.ready_s

    def _has_only_rejections(self, now_s: float) -> bool:
        """Returns whether every device is rejected; absent ones may still come until the time-out."""
        rejected = [
            candidate.device_id
            for candidate in self._candidates.by_device.values()
            if candidate.status is AdmissionStatus.REJECTED
        ]
        is_every_selected_rejected = all(
            self._candidates.get_status(device_id) is AdmissionStatus.REJECTED
            for device_id in self._candidates.list_selected()
        )
        return bool(rejected) and (is_every_selected_rejected or self._is_timed_out(now_s))

    def _raise_not_enough(self, what: str, not_ready: Mapping[str, str]) -> None:
        for device_id, reason in not_ready.items():
            self.record_event(AdmissionEvent.REJECTED, device_id, reason)
        reasons = "; ".join(f"{device_id}: {reason}" for device_id, reason in [*not_ready.items()][:MAX_NAMES])
        suffix = f"; and {len(not_ready) - MAX_NAMES} more" if len(not_ready) > MAX_NAMES else ""
        raise NotEnoughDevicesError(f"the run has not begun, {what}: {reasons or 'none is there'}{suffix}")

    def _record_start(self) -> None:
        not_ready = self._candidates.get_not_ready() if self.run.names or self.run.groups else {}
        not_ready |= {
            candidate.device_id: self._candidates.get_reason(candidate.device_id)
            for candidate in self._candidates.by_device.values()
            if candidate.status is not AdmissionStatus.READY
        }
        for device_id, reason in not_ready.items():
            self._record_rejection(device_id, reason)
        num_ready = sum(
            candidate.status is AdmissionStatus.READY for candidate in self._candidates.by_device.values()
        )
        log.info("run %s: %d devices are ready, %d are left out", self.run.run_id, num_ready, len(not_ready))

    def _record_rejection(self, device_id: str, reason: str) -> None:
        log.warning("%s is left out: %s", device_id, reason)
        self.record_event(AdmissionEvent.REJECTED, device_id, reason)
        if device_id in self._candidates.by_device:
            self._candidates.by_device[device_id].is_rejection_recorded = True

    def _accept(self, candidate: Candidate) -> None:
        candidate.status, candidate.is_unannounced = AdmissionStatus.READY, True
        self.registry.accept_board(candidate.device_id, self.run.run_id)

    def _reject(self, candidate: Candidate, reason: str, *, is_transient: bool = False) -> None:
        candidate.status, candidate.reason = AdmissionStatus.REJECTED, " ".join(reason.split())[:MAX_REASON_CHARS]
        if self.is_started:
            self._record_rejection(candidate.device_id, candidate.reason)
        if not is_transient:
            self.registry.decline_board(candidate.device_id, self.run.run_id)

    def _request_heartbeats(self, now_s: float) -> None:
        """Requests a heartbeat of devices that have not answered yet."""
        for candidate in self._candidates.by_device.values():
            if (
                candidate.status is AdmissionStatus.PENDING
                and not candidate.is_heartbeat_requested
                and now_s >= candidate.sent_s + HEARTBEAT_REQUEST_AFTER_S
            ):
                candidate.is_heartbeat_requested = True
                self.notifier.send_command(
                    candidate.device_id, Command(id=uuid.uuid4().hex, kind=CommandKind.HEARTBEAT)
                )

    def _make_wire_id(self, phase: ReadinessPhase) -> str:
        return f"{self.run.run_id}/{phase}"

    def _send_query(self, candidate: Candidate) -> None:
        """Sends a device the query of its phase and a wake-up."""
        candidate.sent_s, candidate.not_held_since_s, candidate.is_heartbeat_requested = self.clock(), None, False
        header, body = self._create_query(candidate)
        node_id = self.registry.get_node_id(candidate.device_id)
        if node_id is None:
            self._reject(candidate, "it has not joined")
            return
        try:
            candidate.message_id = self.transport.send(node_id, kind="train", header=header, body=body)
        except NetworkError as error:
            self._reject(candidate, str(error), is_transient=True)
            return
        self.notifier.notify(candidate.device_id)

    def _create_query(self, candidate: Candidate) -> tuple[Json, PreparedBody]:
        requirements = self.requirements
        header: Json = {
            **self.run.header,
            "assignment": self._make_wire_id(candidate.phase),
            "phase": str(candidate.phase),
        }
        if candidate.phase is ReadinessPhase.CAN:
            needs = {"memory_bytes": requirements.memory_bytes, "disk_bytes": requirements.disk_bytes}
            return {
                **header,
                "edgefl": __version__,
                "layout": requirements.model_fingerprint,
                "needs": needs,
            }, prepare_body(b"")
        # In a started run there will be a newer model by its first instruction.
        if not requirements.should_prefetch_model or self.is_started:
            return header, prepare_body(b"")
        candidate.model_version, body = self.get_model()
        return {**header, "version": candidate.model_version}, body


class RunMembership:
    """Late joiners and leavers of a run. Not thread-safe: used by the run's thread alone.

    Args:
        admission: of the run; None to admit every device.
        view: knows which devices are eligible, and receives the admitted ones.
        registry: the device registry.
    """

    def __init__(self, admission: AdmissionController | None, view: LiveFleetView, registry: DeviceRegistry) -> None:
        self._admission, self._view, self._registry = admission, view, registry
        self._is_started = False

    def poll(self) -> list[DeviceAvailable]:
        """Queries devices not queried yet, and returns the newly admitted.

        Starts when the run first waits: only then replies are processed and the model is known.

        Raises:
            RunFailedError: fewer devices are ready than the run requires.
        """
        if self._admission is None:
            return []
        if not self._is_started:
            self._is_started = True
            for info in self._registry.list_schedulable(self._view.run_id):
                if self._view.is_eligible(info.device_id):
                    self._admission.query(info.device_id)
        admitted = self._admission.poll()
        for device_id in admitted:
            self._view.admit(device_id)
        return [DeviceAvailable(device_id=device_id) for device_id in admitted]

    def on_registry_event(self, event: RegistryEvent) -> None:
        """Forwards arrivals, departures, restarts and held instructions to admission."""
        if self._admission is None:
            return
        match event:
            case (
                PresenceChanged(after=DevicePresence.GONE | DevicePresence.OFFLINE | DevicePresence.DRAINING)
                | DeviceRemoved()
            ):
                self._admission.remove(event.device_id)
            case PresenceChanged(after=DevicePresence.ONLINE, before=before) if before is DevicePresence.LATE:
                pass
            case DeviceChanged() if (
                self._registry.is_drained(event.device_id)
                or self._registry.get_blocker(event.device_id, self._view.run_id) is not None
                or self._registry.get_allotted_run(event.device_id) not in {None, self._view.run_id}
            ):
                self._admission.remove(event.device_id)
            case PresenceChanged(after=DevicePresence.ONLINE) | DeviceAdded() | DeviceChanged():
                if self._is_started and self._view.is_eligible(event.device_id):
                    self._admission.query(event.device_id)
            case DeviceRestarted():
                self._admission.on_restart(event.device_id)
            case HeldInstructions():
                self._admission.on_heartbeat(event.device_id, event.assignment_ids, event.at_s)
            case _:
                pass

    def on_reply(self, device_id: str, reply: Reply) -> bool:
        """Returns whether a reply answered an admission query."""
        return self._admission is not None and self._admission.on_reply(device_id, reply)

    def get_not_ready(self) -> dict[str, str]:
        """Returns why devices that the run could have are not ready, by id."""
        return self._admission.get_not_ready() if self._admission is not None else {}

    def get_statuses(self) -> dict[str, AdmissionStatus]:
        """Returns the status of every device that was asked, by id."""
        return self._admission.get_statuses() if self._admission is not None else {}

    def pop_traffic(self, device_id: str) -> tuple[int, int]:
        """Returns and clears the bytes up and down that a device spent on admission."""
        return self._admission.pop_traffic(device_id) if self._admission is not None else (0, 0)

    def next_deadline_s(self) -> float | None:
        """Returns when to poll admission next."""
        return self._admission.next_deadline_s() if self._admission is not None else None

    def close(self) -> None:
        if self._admission is not None:
            self._admission.close()
