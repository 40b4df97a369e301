"""Life cycle of instructions: download, computation, upload, and their interruptions."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.core.clusters import CLUSTER_FIGURE
from edgefl.core.conditions import Blocker, ConditionsEndedError, format_blocker
from edgefl.core.errors import DataError, SecureAggregationError
from edgefl.core.types import (
    BASE_BYTE_KEY,
    EPSILON,
    EvaluateInstruction,
    Event,
    InstructionFailed,
    Progress,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.device.conditions.gate import CHECK_INTERVAL_S
from edgefl.engine.fleet_state import FleetState
from edgefl.simulation.backends.trainer import (
    EncodedModel,
    TrainingBackend,
    TrainingFailedError,
    TrainingJob,
    TrainingResult,
)
from edgefl.simulation.collective_groups import CollectiveGroups
from edgefl.simulation.device import REPORT_INTERVAL_S, InFlightWork, SimulatedDevice
from edgefl.simulation.network import SimulatedDownlink, SimulatedNetwork, SimulationEventQueue
from edgefl.simulation.secure_boards import SecureBoards, is_step_without_training, make_training_instruction

_ROUNDING_S = 1e-9
"""Of the sum of two latencies."""


def make_failure(
    instruction: TrainInstruction | EvaluateInstruction, outcome: UpdateStatus, reason: str
) -> InstructionFailed:
    return InstructionFailed(
        device_id=instruction.device_id, assignment_id=instruction.assignment_id, outcome=outcome, reason=reason
    )


class InstructionLifecycle:
    """Sends instructions to their devices and returns updates.

    Args:
        event_queue: virtual time.
        network: transfers of models and updates.
        downlink: encodes models.
        backend: the training.
        state: updated with each device's work.
        publish: called with updates, losses and progress.
        on_blocked: called when a device hands an instruction back, as its conditions do not hold.
    """

    def __init__(  # noqa: PLR0913 one keyword per collaborator
        self,
        *,
        event_queue: SimulationEventQueue,
        network: SimulatedNetwork,
        downlink: SimulatedDownlink,
        backend: TrainingBackend,
        state: FleetState,
        publish: Callable[[Event], None],
        on_blocked: Callable[[SimulatedDevice, Blocker], None],
    ) -> None:
        self._event_queue, self._network, self._backend = event_queue, network, backend
        self._downlink = downlink
        self._state, self._publish, self._on_blocked = state, publish, on_blocked
        self._in_flight: dict[str, InFlightWork] = {}
        self._secure_boards = SecureBoards()
        self._groups = CollectiveGroups(event_queue, downlink, restart=self._train_again, deliver=self._deliver)

    def dispatch(
        self,
        instruction: TrainInstruction,
        device: SimulatedDevice,
        model: EncodedModel,
        num_bytes: int,
        *,
        base_bytes: int = 0,
    ) -> None:
        """Sends an instruction and a model of `num_bytes` to a device, its base included where it needs that."""
        now_s = self._event_queue.now_s
        work = InFlightWork(
            instruction=instruction,
            device=device,
            boot_count=device.boot_count,
            job=TrainingJob(instruction=make_training_instruction(instruction), model=model),
            dispatched_s=now_s,
            download_bytes=num_bytes,
            base_bytes=base_bytes,
        )
        self._in_flight[instruction.assignment_id] = work
        self._state.assign(instruction)
        if instruction.deadline_s is not None:
            self._event_queue.schedule(now_s + instruction.deadline_s, self._on_deadline, work)
        if not device.is_up:
            self._groups.break_later(instruction)
            return  # its failure is not detected yet; this instruction is failed with the others
        if (collective := instruction.plan.collective) is not None:
            if collective.resend:
                self._event_queue.schedule(now_s + device.compute_latency_s(now_s), self._resend, work)
                return
            self._groups.join(work, collective)
        if device.conditions is not None:
            try:
                device.conditions.charge_download(num_bytes, base_bytes=base_bytes)
            except ConditionsEndedError as error:
                if base_bytes:
                    self._downlink.cancel_base_download(device.device_id)
                self._groups.break_later(instruction)
                at_s = now_s + device.compute_latency_s(now_s)
                self._event_queue.schedule(at_s, self._refuse, (work, error.blocker))
                return
        device.schedule_work(work)
        is_next = len(self._state.busy[device.device_id]) == 1 and device.current is None
        if is_next and work.max_iterations is not None and not work.is_open_ended and instruction.plan.node is None:
            # Training can start while others still download: the result is needed in any case. Only a device's
            # newest work can be rolled back, so any void computation of it is cancelled first.
            work.job.iterations = work.max_iterations
            self._start_training(work)
        self._network.send_down(device, num_bytes, self._on_download_end, work)

    def finish_early(self, assignment_id: str) -> None:
        """Tells a device to finish an instruction now; no effect on a finished one."""
        self._state.finish_early(assignment_id)
        work = self._in_flight.get(assignment_id)
        if work is not None and not work.is_finishing_early:
            self._event_queue.schedule(
                self._event_queue.now_s + work.device.compute_latency_s(self._event_queue.now_s),
                self._on_finish_early,
                work,
            )

    def discard_work(self, device: SimulatedDevice) -> None:
        """Discards a failed device's work; the failure is not detected yet."""
        started = [*device.queue, *([device.current] if device.current else [])]
        in_flight = [self._in_flight[name] for name in self._state.busy.get(device.device_id, ())]
        for work in [*started, *in_flight]:
            self._cancel_training(work)
            self._groups.break_later(work.instruction)
        device.queue.clear()
        device.current = None
        if device.conditions is not None:
            device.conditions.reboot()
        device.downlink_free_s = device.uplink_free_s = 0.0
        device.model_version = None

    def reject(self, instruction: TrainInstruction) -> None:
        """Notes that an instruction never reaches its device."""
        self._groups.break_later(instruction)

    def fail_all(self, device: SimulatedDevice, reason: str) -> None:
        """Fails all instructions of a device."""
        for assignment_id in list(self._state.busy.get(device.device_id, ())):
            self._fail(self._in_flight[assignment_id], UpdateStatus.LOST, reason)

    def _on_download_end(self, work: InFlightWork) -> None:
        if work.is_orphaned or work.is_completed:
            return
        work.received_s = self._event_queue.now_s
        work.device.queue.append(work)
        self._start_next(work.device)

    def _start_next(self, device: SimulatedDevice) -> None:
        """Starts the oldest queued work if the device is idle."""
        while device.queue and device.current is None:
            work = device.queue.popleft()
            if work.is_completed:
                continue
            device.start_work(work, self._event_queue.now_s)
            if not self._may_start(work):
                return
            self._schedule_check(work)
            self._event_queue.schedule(work.due_s, self._on_compute_end, (work, work.due_s))
            if work.is_open_ended:
                self._schedule_report(work, 0)
            elif (
                work.instruction.plan.node is None
            ):  # a node's training cannot be rolled back, so it runs when it is due
                self._start_training(work)

    def _may_start(self, work: InFlightWork) -> bool:
        """Returns whether the conditions allow a work that is about to be computed; hands it back where not."""
        conditions = work.device.conditions
        if conditions is None:
            return True
        is_dense = (work.instruction.codec or "dense") == "dense"  # the update is as large as the model
        first_bytes = work.download_bytes - work.base_bytes if is_dense else 0
        return self._goes_on(work, lambda: conditions.start_work(first_bytes))

    def _start_training(self, work: InFlightWork) -> None:
        if not work.job.is_started and not is_step_without_training(work):
            work.job.is_started = True
            self._backend.start(work.job)

    def _cancel_training(self, work: InFlightWork) -> None:
        if work.job.is_started and work.result is None:
            work.job.is_started = False
            self._backend.cancel(work.job)

    def _on_compute_end(self, argument: tuple[InFlightWork, float]) -> None:
        work, due_s = argument
        board = work.device
        if work.is_orphaned or work.due_s != due_s or board.current is not work:
            return  # it was told to finish early meanwhile, or its device failed
        board.current = None
        if board.conditions is not None:
            board.conditions.end_work()
        if work.is_completed:
            self._cancel_training(work)
        else:
            self._send_update(work)
        self._start_next(board)

    def _send_update(self, work: InFlightWork) -> None:
        self._start_training(work)
        try:
            work.result = self._make_result(work)
        except (TrainingFailedError, SecureAggregationError, DataError) as error:
            self._fail(work, UpdateStatus.FAILED, str(error))
            return
        if work.instruction.plan.collective is not None:
            self._groups.on_trained(work, work.result)
        else:
            self._deliver(work, work.result)

    def _make_result(self, work: InFlightWork) -> TrainingResult:
        if is_step_without_training(work):
            return self._secure_boards.answer(work)
        result = self._backend.get_result(work.job)
        return result if work.instruction.plan.secure is None else self._secure_boards.mask(work, result)

    def _deliver(self, work: InFlightWork, result: TrainingResult) -> None:
        conditions = work.device.conditions
        if conditions is not None and not self._goes_on(work, lambda: conditions.charge_upload(result.num_bytes)):
            return
        work.result, work.finished_s = result, self._event_queue.now_s
        self._network.send_up(work.device, result.num_bytes, self._on_upload_end, work)

    def _schedule_check(self, work: InFlightWork) -> None:
        """Schedules the next look at the conditions: between two iterations, as often as a live device."""
        if work.device.conditions is None:
            return
        now_s = self._event_queue.now_s
        ends_s = work.compute_end_s(work.count_iterations(now_s + CHECK_INTERVAL_S) + 1)
        if now_s < ends_s < work.due_s:
            self._event_queue.schedule(ends_s, self._check_conditions, work)

    def _check_conditions(self, work: InFlightWork) -> None:
        conditions = work.device.conditions
        if work.is_orphaned or work.device.current is not work or conditions is None:
            return
        if self._goes_on(work, conditions.continue_work):
            self._schedule_check(work)

    def _goes_on(self, work: InFlightWork, step: Callable[[], None]) -> bool:
        """Returns whether the conditions allow a step; hands the work back where not."""
        try:
            step()
        except ConditionsEndedError as error:
            self._hand_back(work, error.blocker)
            return False
        return True

    def _hand_back(self, work: InFlightWork, blocker: Blocker) -> None:
        """Ends a device's work: it is lost, and the device gets none until it is free."""
        device = work.device
        if device.current is work and device.conditions is not None:
            device.current = None
            device.conditions.end_work()
        if work.is_completed:
            self._cancel_training(work)
        else:
            self._fail(work, UpdateStatus.LOST, format_blocker(blocker))
        self._on_blocked(device, blocker)
        self._start_next(device)

    def _refuse(self, argument: tuple[InFlightWork, Blocker]) -> None:
        work, blocker = argument
        if not work.is_orphaned and not work.is_completed:
            self._fail(work, UpdateStatus.LOST, format_blocker(blocker))
            self._on_blocked(work.device, blocker)

    def _train_again(self, work: InFlightWork) -> None:
        """Starts another training of a collective."""
        if work.is_completed or work.is_orphaned:
            return
        work.device.schedule_work(work)
        work.device.queue.append(work)
        self._start_next(work.device)

    def _resend(self, work: InFlightWork) -> None:
        collective = work.instruction.plan.collective
        if work.is_orphaned or work.is_completed or collective is None:
            return
        if not self._groups.resend(work, collective):
            self._fail(work, UpdateStatus.FAILED, f"it holds no displacement of {collective.resend} any more")

    def _on_upload_end(self, work: InFlightWork) -> None:
        if work.is_orphaned or work.is_completed or work.result is None:
            return
        now_s, trained = self._event_queue.now_s, work.result
        metrics = self._build_metrics(work, trained, now_s)
        metrics = self._state.accept_metrics(work.instruction, metrics, elapsed_s=now_s - work.dispatched_s)
        self._complete(work)
        self._state.record_transfer(
            work.instruction.device_id,
            up_bytes_per_s=trained.num_bytes / max(1e-9, now_s - work.finished_s),
            down_bytes_per_s=work.download_bytes / max(1e-9, work.received_s - work.dispatched_s),
        )
        update = Update(
            assignment_id=work.instruction.assignment_id,
            device_id=work.instruction.device_id,
            base_version=work.instruction.base_version,
            tensors=trained.tensors,
            metrics=metrics,
            received_s=now_s,
            messages=trained.messages,
        )
        self._publish(update)

    @staticmethod
    def _build_metrics(work: InFlightWork, result: TrainingResult, now_s: float) -> UpdateMetrics:
        compute_s = work.earlier_compute_s + work.due_s - work.started_s
        power_w = work.device.profile.power_w
        return UpdateMetrics(
            iterations=work.earlier_iterations + work.job.iterations,
            num_examples=result.num_examples,
            loss=result.loss,
            compute_s=compute_s,
            energy_j=None if power_w is None else power_w * compute_s,
            send_s=max(0.0, now_s - work.dispatched_s - compute_s),
            bytes_up=result.num_bytes + result.exchanged_bytes[0],
            bytes_down=work.download_bytes + result.exchanged_bytes[1],
            extra={
                **work.extra,
                **({BASE_BYTE_KEY: float(work.base_bytes)} if work.base_bytes else {}),
                **({} if result.cluster is None else {CLUSTER_FIGURE: float(result.cluster)}),
                **({} if result.epsilon is None else {EPSILON: result.epsilon}),
            },
            **work.device.summarise_health(work.started_s, work.due_s),
        )

    def _on_finish_early(self, work: InFlightWork) -> None:
        if work.is_finishing_early or work.is_orphaned or work.is_completed:
            return
        if work.result is not None:
            work.is_finishing_early = True  # of a collective: no more than one iteration in each later training
            return
        self._shorten(work)
        if work.device.current is work:
            self._start_training(work)

    def _shorten(self, work: InFlightWork) -> None:
        """Ends an instruction after its present iteration; one not started runs a single iteration."""
        is_running, now_s = work.device.current is work, self._event_queue.now_s
        work.is_finishing_early = True
        iterations = 1
        if is_running:
            is_waiting = now_s <= work.answered_s  # it stands still, between two iterations
            iterations = work.queried_iterations if is_waiting else work.count_iterations(now_s) + 1
        if work.max_iterations is not None and iterations > work.max_iterations:
            return
        if work.job.iterations and iterations >= work.job.iterations:
            return
        self._cancel_training(work)
        work.job.iterations = iterations
        if is_running:
            # Not before now: an iteration that ends in this very instant may by rounding lie behind us.
            work.due_s = max(self._event_queue.now_s, work.compute_end_s(iterations))
            self._event_queue.schedule(work.due_s, self._on_compute_end, (work, work.due_s))

    def _on_deadline(self, work: InFlightWork) -> None:
        if work.is_completed:
            return
        if not work.is_orphaned and work.result is None:
            self._shorten(work)
        self._fail(work, UpdateStatus.LOST, f"not back within {work.instruction.deadline_s or 0:g} s")

    def _schedule_report(self, work: InFlightWork, iteration: int) -> None:
        """Reports after the first iteration, then no more often than a live device does."""
        next_iteration = (
            max(iteration, work.count_iterations(work.reported_s + REPORT_INTERVAL_S) if iteration else 0) + 1
        )
        if next_iteration <= work.job.iterations:
            ends_s = work.compute_end_s(next_iteration) - work.query_s
            self._event_queue.schedule(ends_s, self._send_report, (work, next_iteration))

    def _send_report(self, argument: tuple[InFlightWork, int]) -> None:
        work, iteration = argument
        if work.is_orphaned or work.is_completed or work.device.current is not work:
            return
        now_s = work.reported_s = self._event_queue.now_s
        latency_s = work.device.compute_latency_s(now_s)
        if work.is_answered:
            work.queried_iterations, work.answered_s = iteration, now_s + 2 * latency_s + _ROUNDING_S
        report = Progress(
            device_id=work.instruction.device_id,
            assignment_id=work.instruction.assignment_id,
            iteration=iteration,
            seconds_per_iteration=(now_s - work.started_s) / iteration,
            age_s=0.0,
        )
        self._event_queue.schedule(now_s + latency_s, self._on_report, (work, report))
        self._schedule_report(work, iteration)

    def _on_report(self, argument: tuple[InFlightWork, Progress]) -> None:
        work, report = argument
        if not work.is_completed:
            report = self._state.bound_progress(report, elapsed_s=self._event_queue.now_s - work.dispatched_s)
            self._state.record_progress(report)
            self._publish(report)

    def _fail(self, work: InFlightWork, outcome: UpdateStatus, reason: str) -> None:
        if work.device.current is not work:
            self._cancel_training(work)
        work.device.model_version = None  # as live: the model that it holds is unknown now
        self._complete(work)
        if work.instruction.plan.collective is not None:
            self._groups.break_group(work.instruction.plan.collective.group)
        self._publish(make_failure(work.instruction, outcome, reason))

    def _complete(self, work: InFlightWork) -> None:
        work.is_completed = True
        del self._in_flight[work.instruction.assignment_id]
        device_id = work.device.device_id
        if work.device.conditions is not None and device_id in self._state.devices:  # as a reply says it
            self._state.update_device(device_id, work.device.reported_info)
        self._state.complete(work.instruction)
