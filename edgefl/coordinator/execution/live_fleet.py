"""Live fleet: sends instructions to devices through Flower and MQTT, and turns replies into events.

Replies, presence and progress arrive in other threads and go into one queue; all else happens in the thread of the
run, inside `dispatch` and `wait`. A device that dies, fails or takes too long leaves `busy`, with an
`InstructionFailed` that names the reason.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl.coordinator.execution.admission import (
    REJOIN_TIMEOUT_S,
    AdmissionController,
    AdmissionRequirements,
    NotEnoughDevicesError,
    RecordEvent,
    RunMembership,
)
from edgefl.coordinator.execution.fleet_view import AdmissionStatus, IdleRunReporter, LiveFleetView, RunSpec
from edgefl.coordinator.execution.headers import (
    LINEAGE_KEY,
    RECORD_KEY,
    RunIncarnations,
    create_instruction_header,
    find_foreign_part,
    has_all_reductions,
    is_ahead,
    parse_evaluate_result,
    parse_part_log,
    parse_peer_messages,
    parse_update_metrics,
)
from edgefl.coordinator.execution.messaging import (
    BoundedEventQueue,
    DeviceNotifier,
    InFlightInstructions,
    InstructionTransport,
    LoadItem,
    PendingInstruction,
)
from edgefl.coordinator.execution.model_distribution import PREFETCHED_KEY, REPLY_ONLY, ModelDistributor, ModelPayload
from edgefl.coordinator.fleet.presence import DevicePresence, PresenceChanged
from edgefl.coordinator.fleet.registry import (
    DeviceChanged,
    DeviceRegistry,
    DeviceRemoved,
    DeviceRestarted,
    HeldInstructions,
    RegistryEvent,
)
from edgefl.coordinator.flower.messages import Reply, spool_to_disk
from edgefl.coordinator.flower.superlink import prepare_body
from edgefl.core.claims import CLAIM_BOUNDED
from edgefl.core.conditions import format_blocker, parse_blocker
from edgefl.core.errors import CodecError, EdgeflError, NetworkError, SplitSessionError
from edgefl.core.protocol import (
    ADAPT_KEY,
    ALLOWANCE_KEY,
    BASE_TRAFFIC_KEY,
    COMPILED_KEY,
    HANDED_BACK_KEY,
    IGNORES_REPLY_KEY,
    NEXT_MODEL_HASH_KEY,
    QUERIES_KEY,
)
from edgefl.core.types import (
    NUM_REDUCTIONS,
    DeviceAvailable,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    Instruction,
    InstructionFailed,
    Json,
    ModelProvider,
    Progress,
    StopRequested,
    TrainInstruction,
    Update,
    UpdateStatus,
    size_of_tensors,
)
from edgefl.engine.fleet_state import DispatchedInstruction
from edgefl.storage.lineage import LINEAGE_BEGAN
from edgefl.storage.store import REJECTED_EVENT_KIND

log = logging.getLogger(__name__)

EVALUATION_DEADLINE_S = 600.0
JOB_LOGGED = "job-log"
"""Kind of the events of what a job logs on its boards."""
SHORTAGE = "no-work-fits"
"""Kind of the event of a device whose hours or budgets no longer hold a work of the run."""
SHORTAGE_INTERVAL_S = 1.0
MAX_REASON_CHARS = 500
MAX_BASE_DOWNLOADS = 2
"""Times that a device may say it has fetched the base of a run; more is not counted."""
MAX_DECODED_BYTES = 32 * 1024 * 1024
MAX_LOST_SESSIONS = 20
"""An assignment of a split network is lost after more answers than these whose rest was lost."""
MAX_FOREIGN_REPLIES = 1
"""An assignment is rejected after more answers of another lineage or model than these."""
MAX_HAND_BACKS, HAND_BACK_PERIOD_S = 3, 3600.0
"""A device that hands back more often within an hour, without an answer between, has failed."""


class InterruptedRunError(EdgeflError):
    """Raised when the coordinator stops; the run can be resumed."""


class RunGivesWayError(InterruptedRunError):
    """Raised when a run gives way to another, for lack of boards or by priority; it is queued again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SendFailure:
    """An instruction that could not be sent; `wait` reports it, like all failures."""

    wire_id: str
    reason: str


_QueueItem = Reply | RegistryEvent | Progress | StopRequested | InterruptedRunError | _SendFailure


class LiveFleet:
    """Implements `Fleet` for one run. `post` may be called from any thread, all else from the run's.

    Args:
        run, transport, registry, notifier: the run, its messages, and the devices.
        clock: seconds, monotonic.
        requirements: of admission; None to admit every device.
        record_event: writes an event of a device, or of the run if the device is empty, to the history.
        run_clock: the run's own time, for the view; `clock` if None.
        max_decoded_bytes: `wait` returns once it has decoded this much, before the rest is decoded.
        spool_folder: where replies beyond the memory limit are spooled; None for the system's temporary files.
        on_waiting: called with what the run waits for, and with an empty text once it has work.
    """

    def __init__(  # noqa: PLR0913 the parts of a run, by name
        self,
        *,
        run: RunSpec,
        transport: InstructionTransport,
        registry: DeviceRegistry,
        notifier: DeviceNotifier,
        clock: Callable[[], float],
        requirements: AdmissionRequirements | None = None,
        record_event: RecordEvent = lambda _kind, _device, _message: None,
        run_clock: Callable[[], float] | None = None,
        max_decoded_bytes: int = MAX_DECODED_BYTES,
        spool_folder: Path | None = None,
        on_waiting: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.registry, self.clock, self._record_event = registry, clock, record_event
        self._incarnations = run.incarnations or RunIncarnations(run.run_id)
        self._run = run
        self._spool_folder = spool_folder
        self._queue = BoundedEventQueue[_QueueItem](self._spool_reply)
        self._backlog: deque[_QueueItem] = deque()
        self._max_decoded_bytes = max_decoded_bytes
        self._in_flight = InFlightInstructions(
            transport=transport,
            notifier=notifier,
            get_node_id=registry.get_node_id,
            on_send_failed=self._on_send_failed,
            make_store_header=self._make_store_header,
        )
        self._distributor = ModelDistributor(run)
        admission = self._make_admission(requirements, transport, notifier) if requirements is not None else None
        self._resumed_until_s: float | None = None
        self._has_renewed_lineage = False
        self._hand_backs: dict[str, list[float]] = {}
        self._shortages: dict[str, str] = {}
        self._shortages_due_s, self._awaits_shortages = clock(), False
        self._base_bytes: dict[str, int] = {}
        self._interruption: InterruptedRunError | None = None
        self._queries: dict[str, int] = {}
        self._view = LiveFleetView(
            run,
            registry,
            run_clock or clock,
            is_admitted=admission.is_admitted if admission else lambda _: True,
            on_bounded=lambda claim: record_event(CLAIM_BOUNDED, claim.device_id, str(claim)),
        )
        self._membership = RunMembership(admission, self._view, registry)
        self._idle_reporter = IdleRunReporter(
            run,
            clock,
            lambda kind, message: record_event(kind, "", message),
            get_not_ready=lambda: {**self._shortages, **self._membership.get_not_ready()},
            on_waiting=on_waiting,
        )
        self._unsubscribe = registry.subscribe(self._queue.put)

    def _make_admission(
        self, requirements: AdmissionRequirements, transport: InstructionTransport, notifier: DeviceNotifier
    ) -> AdmissionController:
        return AdmissionController(
            run=self._run,
            requirements=requirements,
            transport=transport,
            notifier=notifier,
            registry=self.registry,
            clock=self.clock,
            record_event=self._record_event,
            get_model=self._distributor.get_newest_model,
            on_prefetched=self._distributor.record_prefetch,
        )

    @property
    def run_id(self) -> str:
        return self._run.run_id

    def post(self, item: Reply | Progress | StopRequested | InterruptedRunError) -> None:
        """Queues an item for the run; a reply beyond the memory limit waits a little, then is spooled."""
        self._queue.put(item, len(item.body) if isinstance(item, Reply) else 0)

    def _spool_reply(self, item: _QueueItem) -> LoadItem[_QueueItem] | None:
        spooled_body = spool_to_disk(item.body, self._spool_folder) if isinstance(item, Reply) else None
        if not isinstance(item, Reply) or spooled_body is None:
            return None
        reply_without_body = replace(item, body=b"")

        def load() -> Reply | None:
            try:
                return replace(reply_without_body, body=spooled_body.read())
            except OSError as error:  # its device still has the answer, and is asked for it again
                log.warning(
                    "a reply of %s is lost: %s", self.registry.get_device_id(reply_without_body.node_id), error
                )
                return None

        return load

    @property
    def has_started(self) -> bool:
        """Whether training was dispatched."""
        return self._idle_reporter.has_started

    def close(self, *, will_resume: bool = False) -> None:
        """Unsubscribes and closes the Flower run; unless it will resume, devices are asked to finish early."""
        self._unsubscribe()
        self._queue.close()
        self._membership.close()
        self._view.close()
        self._in_flight.close(should_finish_early=not will_resume)

    def view(self) -> LiveFleetView:
        return self._view.refresh()

    def get_admission_statuses(self) -> dict[str, AdmissionStatus]:
        """Returns the status of every device that was asked whether it can take part, by id."""
        return self._membership.get_statuses()

    def dispatch(self, instructions: Sequence[Instruction], source: ModelProvider) -> None:
        """Sends every instruction and wake-up; one that cannot be sent comes back as `InstructionFailed`."""
        self._distributor.update_source(source)
        self._update_shortages()
        for instruction in instructions:
            if isinstance(instruction, FinishEarlyInstruction):
                self._view.finish_early(instruction.assignment_id)
                self._in_flight.finish_early(self._incarnations.get_wire_id(instruction.assignment_id))
            else:
                self._view.assign(instruction)
                if isinstance(instruction, TrainInstruction) and self._shortages.pop(instruction.device_id, ""):
                    self.registry.record_shortage(instruction.device_id, self.run_id, None)  # it fits
                self._idle_reporter.has_started |= isinstance(instruction, TrainInstruction)
                payload, now_s = self._distributor.create_payload(instruction, source), self.clock()
                pending = self._make_pending(instruction, payload, now_s)
                self._add_split(pending, source)
                self._in_flight.dispatch(pending)

    def _update_shortages(self) -> None:
        """Records which idle devices no work fits into, once a second at most: in history, registry and waiting."""
        now_s, is_short = self.clock(), bool(self._view.limited or self._shortages)
        self._awaits_shortages = is_short and now_s < self._shortages_due_s
        if self._awaits_shortages or not is_short:
            return
        self._shortages_due_s = now_s + SHORTAGE_INTERVAL_S
        for device_id in sorted(self._view.limited.union(self._shortages).difference(self._view.busy)):
            if device_id not in self._view.devices and self._works_for_another(device_id):
                continue  # as no work of this run fits
            blocker = self._run.find_shortage(self._view, device_id)
            if blocker is not None and blocker.free_at_s is not None:
                blocker = replace(blocker, free_at_s=blocker.free_at_s - self._view.now_s)
            former = self._shortages.pop(device_id, "")
            if reason := self.registry.record_shortage(device_id, self.run_id, blocker):
                self._shortages[device_id] = reason
                if not former:
                    self._record_event(SHORTAGE, device_id, reason)

    def _works_for_another(self, device_id: str) -> bool:
        return self.registry.get_allotted_run(device_id) not in {None, self.run_id}

    def resume_in_flight(self, in_flight: Sequence[DispatchedInstruction], source: ModelProvider) -> None:
        """Resumes instructions that an earlier coordinator dispatched; devices may have finished them by now.

        A device that reports an assignment as held is asked for the answer; one that does not is sent it again.
        Evaluations are always sent again.
        """
        self._distributor.update_source(source)
        self._idle_reporter.has_started = True
        now_s, no_body = self.clock(), prepare_body(b"")
        for dispatched in in_flight:
            unsent = ModelPayload(
                body=no_body, header=self._distributor.name_newest(dispatched.instruction, REPLY_ONLY)
            )
            pending = self._make_pending(dispatched.instruction, unsent, dispatched.dispatched_s)
            pending.paused_s = dispatched.paused_s
            self._add_split(pending, source)
            self._in_flight.add(pending)
            if isinstance(dispatched.instruction, EvaluateInstruction):
                self._resend_evaluation(pending, source)
        self._resumed_until_s = now_s + REJOIN_TIMEOUT_S
        for device_id in dict.fromkeys(dispatched.instruction.device_id for dispatched in in_flight):
            self._in_flight.request_heartbeat(device_id)
        log.info(
            "%d instructions were out when the coordinator ended; their devices are asked for them", len(in_flight)
        )

    def _add_split(self, pending: PendingInstruction, source: ModelProvider) -> None:
        """Makes the rest of the network ready for the batches of an assignment, before its device has it."""
        if self._run.split is not None and isinstance(pending.instruction, TrainInstruction):
            examples = self._view.claim_limits.examples.get(pending.instruction.device_id)
            self._run.split.add(pending.wire_id, pending.instruction, source, num_examples=examples)

    def _resend_evaluation(self, pending: PendingInstruction, source: ModelProvider) -> None:
        instruction = pending.instruction
        if (
            not isinstance(instruction, EvaluateInstruction)
            or instruction.version != source.version
            or instruction.subject
        ):
            self._on_send_failed(pending.wire_id, "the model that it evaluates went with the coordinator")
            return
        payload = self._distributor.create_payload(instruction, source)
        pending.body, pending.model_header = payload.body, payload.header
        self._in_flight.resend(pending, "the coordinator restarted")

    def _reconcile(self, event: HeldInstructions) -> list[Event]:
        """Resends lost instructions, and requests answers that a device held when the coordinator ended."""
        events = self._fail_unheld(event)
        for pending in self._in_flight.list_for_device(event.device_id):
            if pending.message_id:
                continue
            if pending.wire_id in event.assignment_ids:
                pending.sent_s = self.clock()
                self._in_flight.resend(pending, "its answer is wanted")
            else:
                events += self._resend_full_model(pending, "it does not hold it any more")
        self._in_flight.reconcile(event)
        return events

    def _fail_unheld(self, event: HeldInstructions) -> list[Event]:
        """Fails what a device that may not train now will not fetch; it keeps, or hands back, what it has."""
        blocker = self.registry.get_blocker(event.device_id, self.run_id)
        if blocker is None:
            return []
        return [
            self._fail(pending, UpdateStatus.LOST, format_blocker(blocker))
            for pending in self._in_flight.list_for_device(event.device_id)
            if pending.wire_id not in event.assignment_ids and pending.sent_s < event.at_s
        ]

    def _fail_unresumed(self) -> list[Event]:
        """Fails instructions of an earlier coordinator whose devices have not reported in time."""
        if self._resumed_until_s is None or self.clock() < self._resumed_until_s:
            return []
        self._resumed_until_s = None
        return [
            self._fail(
                pending, UpdateStatus.LOST, f"not heard of within {REJOIN_TIMEOUT_S:g} s of the coordinator's restart"
            )
            for pending in self._in_flight
            if not pending.message_id
        ]

    def _make_pending(
        self, instruction: TrainInstruction | EvaluateInstruction, payload: ModelPayload, dispatched_s: float
    ) -> PendingInstruction:
        header = create_instruction_header(self._incarnations, instruction)
        deadline_s = instruction.deadline_s if isinstance(instruction, TrainInstruction) else EVALUATION_DEADLINE_S
        return PendingInstruction(
            wire_id=header["assignment"],
            instruction=instruction,
            header={**self._run.header, **header},
            body=payload.body,
            dispatched_s=dispatched_s,
            deadline_s=None if deadline_s is None else dispatched_s + deadline_s,
            sent_s=self.clock(),
            model_header=payload.header,
        )

    def _on_send_failed(self, wire_id: str, reason: str) -> None:
        self._queue.put(_SendFailure(wire_id=wire_id, reason=reason))

    def wait(self, until_s: float) -> Sequence[Event]:
        """Returns the next events, at once if there are any, else by `until_s` at the latest.

        Raises:
            InterruptedRunError: the coordinator stops, or the run has begun and waited too long for devices.
            RunFailedError: fewer devices are ready than the run requires, or it has waited too long for them.
        """
        self._answer_queries()
        while True:
            if self._interruption is not None:
                raise self._interruption
            if self._awaits_shortages:
                self._update_shortages()
            has_work = bool(self._view.busy) or self._in_flight.next_deadline_s() is not None
            self._idle_reporter.has_started |= bool(self._view.speeds)  # of a run that goes on where it was
            if self._idle_reporter.poll(self._list_able(), has_work=has_work):
                return []  # so that the event is committed now
            if (reason := self._idle_reporter.find_overdue_reason()) is not None:
                # A run that has begun keeps what it has, and can be resumed.
                raise (InterruptedRunError if self._idle_reporter.has_started else NotEnoughDevicesError)(reason)
            events = [*self._fail_overdue(), *self._fail_unresumed(), *self._membership.poll()]
            batch = list(self._backlog)  # the queue is read again once these are processed
            if not batch:
                batch = self._queue.get_batch(0.0 if events else self._next_wake_s(until_s) - self.clock())
            # Replies first: an instruction no longer held may have been answered at the same time.
            self._backlog = deque(sorted(batch, key=lambda item: not isinstance(item, Reply)))
            num_bytes = 0
            while self._backlog and num_bytes < self._max_decoded_bytes and self._interruption is None:
                item_events = self._process_item(self._backlog.popleft())
                num_bytes += sum(size_of_tensors(event.tensors) for event in item_events if isinstance(event, Update))
                events += item_events
            events += self._membership.poll()
            if events or (self.clock() >= until_s and self._interruption is None):
                return events

    def _list_able(self) -> Sequence[str]:
        """Returns the idle devices that a work fits into."""
        idle = self._view.idle
        return idle if not self._shortages else [name for name in idle if name not in self._shortages]

    def _answer_queries(self) -> None:
        """Lets the devices go on that the strategy, which has seen their queries, does not ask to finish."""
        for wire_id, iteration in self._queries.items():
            self._in_flight.continue_training(wire_id, iteration)
        self._queries.clear()

    def _next_wake_s(self, until_s: float) -> float:
        admission_s, idle_poll_s = self._membership.next_deadline_s(), self._idle_reporter.next_poll_s()
        shortages_s = self._shortages_due_s if self._awaits_shortages else None
        deadlines = (
            self._in_flight.next_deadline_s(), admission_s, idle_poll_s, self._resumed_until_s, shortages_s
        )  # fmt: skip
        return min([until_s, *(time_s for time_s in deadlines if time_s is not None)])

    def _fail_overdue(self) -> list[Event]:
        return [
            self._fail(
                pending,
                UpdateStatus.LOST,
                f"not back within {(pending.deadline_s or 0.0) - pending.dispatched_s:g} s",
            )
            for pending in self._in_flight.finish_overdue(self.clock())
        ]

    def _process_item(self, item: _QueueItem) -> list[Event]:
        match item:
            case InterruptedRunError():
                self._interruption = item  # raised once the events before it are in the journal
                return []
            case Reply():
                return self._on_reply(item)
            case Progress():
                return self._on_progress(item)
            case StopRequested():
                return [item]
            case _SendFailure():
                pending = self._in_flight.get(item.wire_id)
                return [self._fail(pending, UpdateStatus.FAILED, item.reason)] if pending else []
            case _:
                return self._on_registry_event(item)

    def _on_registry_event(self, event: RegistryEvent) -> list[Event]:
        self._membership.on_registry_event(event)
        match event:
            case PresenceChanged(after=DevicePresence.GONE | DevicePresence.OFFLINE):
                return self._fail_all(event.device_id, f"device {event.after}: {event.reason}")
            case DeviceRemoved():
                return self._fail_all(event.device_id, "device removed")
            case PresenceChanged(after=DevicePresence.ONLINE, before=before) if before is not DevicePresence.LATE:
                self._in_flight.request_heartbeat(event.device_id)  # commands sent before it was online are lost
                return [DeviceAvailable(device_id=event.device_id)]
            case DeviceChanged():
                return [*self._fail_taken(event.device_id), DeviceAvailable(device_id=event.device_id)]
            case DeviceRestarted() | HeldInstructions():
                return (
                    self._on_restart(event.device_id)
                    if isinstance(event, DeviceRestarted)
                    else self._reconcile(event)
                )
            case _:
                return []

    def _fail_taken(self, device_id: str) -> list[Event]:
        """Recalls the work of a board that now works for another run."""
        run_id = self.registry.get_allotted_run(device_id)
        if not self._works_for_another(device_id):
            return []
        for pending in self._in_flight.list_for_device(device_id):
            self._in_flight.finish_early(pending.wire_id)
        return self._fail_all(device_id, f"its board works for run {run_id} now")

    def _on_restart(self, device_id: str) -> list[Event]:
        """Resends the work of a restarted agent, which has lost its model."""
        self._distributor.remove_device(device_id)
        events: list[Event] = []
        for pending in self._in_flight.list_for_device(device_id):
            if not pending.message_id:
                continue  # its first heartbeat lists what it still holds
            if {"base_version", PREFETCHED_KEY, "has_stored_reply"} & set(pending.model_header):
                events += self._resend_full_model(pending, "its agent restarted")
            else:
                self._in_flight.resend(pending, "its agent restarted")
        return events

    def _resend_full_model(
        self, pending: PendingInstruction, reason: str, extra_header: Json | None = None
    ) -> list[Event]:
        """Resends an instruction with the full model in place of a delta; fails it if that is gone."""
        payload = (
            self._distributor.create_full_payload(pending.instruction)
            if isinstance(pending.instruction, TrainInstruction)
            else None
        )
        if payload is None:
            return [self._fail(pending, UpdateStatus.LOST, f"needs a whole model that is kept no longer: {reason}")]
        pending.body, pending.sent_s = payload.body, self.clock()
        pending.model_header = {**payload.header, **(extra_header or {})}
        self._in_flight.resend(pending, reason)
        return []

    def _measure_elapsed_s(self, pending: PendingInstruction) -> float:
        """Returns the seconds since an instruction was dispatched, the coordinator's absence included."""
        return self.clock() - pending.dispatched_s + pending.paused_s

    def _on_progress(self, report: Progress) -> list[Event]:
        pending = self._in_flight.get(report.assignment_id)
        if pending is None or pending.instruction.device_id != report.device_id:
            return []
        progress = self._view.bound_progress(
            replace(report, assignment_id=pending.instruction.assignment_id),
            elapsed_s=self._measure_elapsed_s(pending),
        )
        self._view.record_progress(progress)
        if self._waits_for_answer(pending.instruction):
            self._queries[pending.wire_id] = report.iteration
        return [progress]

    def _waits_for_answer(self, instruction: TrainInstruction | EvaluateInstruction) -> bool:
        """Returns whether the progress reports of an instruction's device are queries; an older agent's never are."""
        if not isinstance(instruction, TrainInstruction) or instruction.plan.fallback_iterations is None:
            return False
        info = self.registry.get_device(instruction.device_id)
        return info is not None and info.capabilities.get(QUERIES_KEY) is True

    def _fail_all(self, device_id: str, reason: str) -> list[Event]:
        return [
            self._fail(pending, UpdateStatus.LOST, reason) for pending in self._in_flight.list_for_device(device_id)
        ]

    def _complete(self, pending: PendingInstruction) -> None:
        self._in_flight.complete(pending)
        if self._run.split is not None:
            self._run.split.remove(pending.wire_id)
        self._view.complete(pending.instruction)

    def _fail(self, pending: PendingInstruction, status: UpdateStatus, reason: str) -> InstructionFailed:
        self._complete(pending)
        instruction = pending.instruction
        if isinstance(instruction, TrainInstruction):
            self._distributor.remove_device(instruction.device_id)
        return InstructionFailed(
            device_id=instruction.device_id,
            assignment_id=instruction.assignment_id,
            outcome=status,
            reason=reason[:MAX_REASON_CHARS],
        )

    def _on_reply(self, reply: Reply) -> list[Event]:
        """Turns a reply into an event; drops one without a pending instruction (a repeat, a late one)."""
        reply = add_base_traffic(
            reply, self._run.header, self.registry.get_device_id(reply.node_id), self._base_bytes
        )
        pending = self._find_pending(reply)
        if pending is None:
            return []
        if ALLOWANCE_KEY in reply.header:
            self.registry.record_allowance(pending.instruction.device_id, reply.header[ALLOWANCE_KEY])
            self._view.admit(pending.instruction.device_id)
        foreign_part = self._find_foreign_part(pending, reply)
        if foreign_part is not None:
            return self._on_foreign_reply(pending, reply, foreign_part)
        return self._on_own_reply(pending, reply)

    def _on_own_reply(self, pending: PendingInstruction, reply: Reply) -> list[Event]:
        if reply.header.get("requires_full_model") is True and reply.instruction_id != pending.message_id:
            return []  # about an older message; the newest is on its way
        if reply.header.get("requires_full_model") is True and not _has_full_model(pending):
            return self._resend_full_model(pending, str(reply.header.get("error", "it lost the model")))
        self._record_part_log(pending, reply.header)
        if "error" in reply.header:
            return [self._on_error(pending, reply.header)]
        try:
            event = self._decode_reply(pending, reply)
        except SplitSessionError as error:
            return self._on_lost_session(pending, reply, str(error))
        except (CodecError, NetworkError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            reason = f"unusable reply: {error}"
            self._record_event(REJECTED_EVENT_KIND, pending.instruction.device_id, reason[:MAX_REASON_CHARS])
            return [self._fail(pending, UpdateStatus.REJECTED, reason)]
        self._complete(pending)
        self._hand_backs.pop(pending.instruction.device_id, None)
        if isinstance(event, Update) and NUM_REDUCTIONS in event.metrics.extra:
            sha256 = str(reply.header.get(NEXT_MODEL_HASH_KEY))
            self._distributor.record_next_model(event.device_id, event.base_version + 1, sha256)
        return [event]

    def _on_error(self, pending: PendingInstruction, header: Json) -> InstructionFailed:
        """Fails an instruction; one that its device hands back is lost, as by a device that vanished.

        One that hands back again and again without an answer between has failed: it may not want to work. What it
        hands back by the run's own conditions does not count.
        """
        status, device_id, reported = UpdateStatus.FAILED, pending.instruction.device_id, header.get(HANDED_BACK_KEY)
        blocker = parse_blocker(reported)
        if blocker is not None:
            self.registry.record_blocker(device_id, reported)
        if blocker is not None and blocker.run == self.run_id:
            status = UpdateStatus.LOST
        elif blocker is not None:
            since_s = self.clock() - HAND_BACK_PERIOD_S
            recent = [moment for moment in self._hand_backs.get(device_id, ()) if moment > since_s]
            self._hand_backs[device_id] = [*recent, self.clock()][-MAX_HAND_BACKS:]
            status = UpdateStatus.LOST if len(recent) < MAX_HAND_BACKS else UpdateStatus.FAILED
        return self._fail(pending, status, str(header["error"]))

    def _record_part_log(self, pending: PendingInstruction, header: Json) -> None:
        """Writes what a part of a job logged to the history, bounded whatever its device sent."""
        instruction = pending.instruction
        if self._run.encode_input is None or not isinstance(instruction, TrainInstruction):
            return
        for line in parse_part_log(header):
            self._record_event(JOB_LOGGED, instruction.device_id, f"part {instruction.block}: {line}")

    def _on_lost_session(self, pending: PendingInstruction, reply: Reply, reason: str) -> list[Event]:
        """Sends an assignment again whose rest is lost: the device trains it anew, its answer is worth nothing."""
        if reply.instruction_id != pending.message_id:
            return []  # the newest message is on its way
        pending.num_lost_sessions += 1
        if pending.num_lost_sessions > MAX_LOST_SESSIONS:
            return [self._fail(pending, UpdateStatus.LOST, reason)]
        return self._resend_full_model(pending, reason, {IGNORES_REPLY_KEY: True})

    def _find_foreign_part(self, pending: PendingInstruction, reply: Reply) -> str | None:
        if self._run.lineage is None:
            return None
        sent = {**pending.model_header, **pending.store_header}
        return find_foreign_part(sent, reply.header, newest_record=self._run.get_newest_record())

    def _on_foreign_reply(self, pending: PendingInstruction, reply: Reply, reason: str) -> list[Event]:
        """Rejects the answer of another lineage or model; its assignment is trained anew, unless that was tried."""
        device_id = pending.instruction.device_id
        self._record_event(REJECTED_EVENT_KIND, device_id, f"foreign reply for {pending.wire_id}: {reason}")
        if is_ahead(reply.header, self._run.get_newest_record()) and not self._has_renewed_lineage:
            return self._renew_lineage(reason)
        if reply.instruction_id != pending.message_id:
            return []  # the newest message is on its way
        pending.num_foreign_replies += 1
        if pending.num_foreign_replies > MAX_FOREIGN_REPLIES:
            return [self._fail(pending, UpdateStatus.REJECTED, f"foreign reply: {reason}")]
        return self._repeat(pending, "its answer is of another state of the store")

    def _renew_lineage(self, reason: str) -> list[Event]:
        """Begins a new lineage, once: the store is an older state than its devices know, as after a disk snapshot."""
        lineage = self._run.lineage
        assert lineage is not None
        self._has_renewed_lineage = True
        lineage.renew()
        self._record_event(LINEAGE_BEGAN, "", f"the store was rolled back: {reason}; all work under way is repeated")
        log.warning("the store was rolled back: %s; all work under way is repeated", reason)
        return [event for pending in self._in_flight for event in self._repeat(pending, "the store was rolled back")]

    def _repeat(self, pending: PendingInstruction, reason: str) -> list[Event]:
        """Sends an instruction again with its model."""
        if isinstance(pending.instruction, TrainInstruction) and not _has_full_model(pending):
            return self._resend_full_model(pending, reason)
        pending.sent_s = self.clock()
        self._in_flight.resend(pending, reason)
        return []

    def _make_store_header(self) -> Json:
        lineage = self._run.lineage
        if lineage is None:
            return {}
        return {LINEAGE_KEY: lineage.lineage_id, RECORD_KEY: self._run.get_newest_record()}

    def _find_pending(self, reply: Reply) -> PendingInstruction | None:
        """Returns the pending instruction of a reply; None if it was for admission, or there is none."""
        device_id, wire_id = self.registry.get_device_id(reply.node_id), str(reply.header.get("assignment"))
        if device_id is not None and self._membership.on_reply(device_id, reply):
            return None
        pending = self._in_flight.get(wire_id)
        if pending is None or pending.instruction.device_id != device_id:
            if pending is not None and device_id is not None:
                self._record_event(
                    REJECTED_EVENT_KIND,
                    device_id,
                    f"its reply names an assignment of {pending.instruction.device_id}",
                )
            pending = self._in_flight.find_by_message(reply.instruction_id)
        if pending is None or pending.instruction.device_id != device_id:
            log.info("dropped a reply of %s for %.80s: nobody waits for it", device_id, wire_id)
            return None
        return pending

    def _decode_reply(self, pending: PendingInstruction, reply: Reply) -> Update | EvaluateResult:
        instruction, header = pending.instruction, reply.header
        if header.get("assignment") != pending.wire_id:
            raise ValueError(f"it names {header.get('assignment')!r:.80}, asked was {pending.wire_id!r}")
        if isinstance(instruction, EvaluateInstruction):
            info = self.registry.get_device(instruction.device_id)
            source = info.source if info else "device"
            result = parse_evaluate_result(instruction, header["metrics"], source, reply.body, self._run.metrics)
            result = replace(result, bytes_up=reply.bytes_up, bytes_down=reply.bytes_down)
            return self._view.bound_evaluation(result)
        messages, body = parse_peer_messages(instruction, header, reply.body)
        batch_bytes_up = batch_bytes_down = 0
        if self._run.split is not None:
            body, batch_bytes_up, batch_bytes_down = self._run.split.join(
                pending.wire_id, header, header["metrics"]["iterations"], body
            )
        metrics = parse_update_metrics(
            header["metrics"],
            turnaround_s=self.clock() - pending.dispatched_s,
            bytes_up=reply.bytes_up + batch_bytes_up,
            bytes_down=reply.bytes_down + batch_bytes_down,
            prefetch_bytes=self._membership.pop_traffic(instruction.device_id),
            base_bytes=reply.base_bytes,
        )
        plan = instruction.plan
        has_messages = plan.node is not None or plan.secure is not None
        can_be_empty = has_messages or has_all_reductions(instruction, metrics)
        tensors = self._run.decode(body) if body or not can_be_empty else {}
        metrics = self._view.accept_metrics(instruction, metrics, elapsed_s=self._measure_elapsed_s(pending))
        if metrics.iterations > 0 and self._run.encode_input is None:  # a part of a job is no iteration
            self.registry.record_speed(instruction.device_id, metrics.compute_s / metrics.iterations)
        return Update(
            assignment_id=instruction.assignment_id,
            device_id=instruction.device_id,
            base_version=instruction.base_version,
            tensors=tensors,
            metrics=metrics,
            body=body or None,
            received_s=self.clock(),
            messages=messages,
        )


def add_base_traffic(reply: Reply, run_header: Json, device_id: str | None, claimed: dict[str, int]) -> Reply:
    """Returns a reply with the bytes of base and compiled task that its device says it has fetched.

    In all of a run, until its coordinator starts again, a device is believed no more than `MAX_BASE_DOWNLOADS` of the
    files: `claimed` has the bytes by device, and is updated.
    """
    fetched = reply.header.get(BASE_TRAFFIC_KEY)
    plans = run_header.get(ADAPT_KEY, {}).get("base_bytes", 0), run_header.get(COMPILED_KEY, {}).get("bytes", 0)
    if not any(plans) or device_id is None:
        return reply
    if isinstance(fetched, bool) or not isinstance(fetched, int) or fetched <= 0:
        return reply
    before, base_bytes = claimed.get(device_id, 0), sum(map(int, plans))
    counted = min(fetched, base_bytes, MAX_BASE_DOWNLOADS * base_bytes - before)
    claimed[device_id] = before + counted
    return replace(reply, bytes_down=reply.bytes_down + counted, base_bytes=counted)


def _has_full_model(pending: PendingInstruction) -> bool:
    """Returns whether an instruction's message held the full model."""
    partial_keys = {"base_version", PREFETCHED_KEY} & set(pending.model_header)
    return not partial_keys and pending.model_header.get("has_model") is not False
