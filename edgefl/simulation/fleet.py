"""The simulated fleet: an event queue in virtual time in place of devices and networks.

Presence, evaluation and the events of the round loop; `instruction_lifecycle` carries instructions and updates. All
times follow from profiles and seeds; the training is real. Every event costs O(log n) in the number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgefl.core.errors import RunFailedError
from edgefl.core.types import (
    DeviceAvailable,
    DeviceInfo,
    EvaluateInstruction,
    EvaluateResult,
    Event,
    FinishEarlyInstruction,
    Instruction,
    InstructionFailed,
    ModelProvider,
    Role,
    TrainInstruction,
    Update,
    UpdateStatus,
)
from edgefl.simulation.backends.backend import EncodedModel, TrainingBackend, TrainingFailedError
from edgefl.simulation.churn import ChurnSimulator
from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.downlink import SimulatedDownlink
from edgefl.simulation.event_queue import SimulationEventQueue
from edgefl.simulation.fleet_view import SimulatedFleetView
from edgefl.simulation.instruction_lifecycle import InstructionLifecycle, make_failure
from edgefl.simulation.network import SimulatedNetwork

MAX_IDLE_WAITS = 10_000
"""Number of waits without events after which the run fails, if none can follow."""
MAX_CONSECUTIVE_LOSSES = 1000
"""Number of instructions lost in a row, and 20 per device, after which the run fails: no device is in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """Settings common to all devices.

    Attributes:
        up_bytes_per_s, down_bytes_per_s: of the coordinator's link, from the devices' side; None for no limit.
        failure_detection_s: time until a lost device is detected.
        evaluation_duration_s: duration of an evaluation; it blocks no other work of the device.
        join_at_start: devices absent at the first dispatch stay out of the run.
    """

    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    failure_detection_s: float = 15.0
    evaluation_duration_s: float = 0.0
    join_at_start: bool = False


class SimulatedFleet:
    """Implements `Fleet` in virtual time.

    Args:
        devices: in the order of the fleet view.
        backend: trains and evaluates.
        downlink: encodes models and counts their bytes.
        settings: common to all devices.
        evaluators: evaluators besides the devices: on the coordinator's own data, without traffic.
    """

    def __init__(
        self,
        devices: Sequence[SimulatedDevice],
        *,
        backend: TrainingBackend,
        downlink: SimulatedDownlink,
        settings: SimulationSettings | None = None,
        evaluators: Sequence[DeviceInfo] = (),
    ) -> None:
        self._backend, self._downlink, self._settings = backend, downlink, settings or SimulationSettings()
        self._event_queue, self._events = SimulationEventQueue(), list[Event]()
        self._view = SimulatedFleetView(self._event_queue, devices, evaluators)
        self._lifecycle = InstructionLifecycle(
            event_queue=self._event_queue,
            network=SimulatedNetwork(
                self._event_queue,
                up_bytes_per_s=self._settings.up_bytes_per_s,
                down_bytes_per_s=self._settings.down_bytes_per_s,
            ),
            backend=backend,
            view=self._view,
            publish=self._publish,
        )
        self._num_idle_waits = self._num_lost = 0
        presence = ChurnSimulator(
            self._event_queue,
            failure_detection_s=self._settings.failure_detection_s,
            on_failure=self._lifecycle.discard_work,
            on_failure_detected=self._on_failure_detected,
            on_recovery=self._on_recovery,
        )
        for board in devices:
            presence.register(board)
            if board.is_present:
                self._view.add_device(board)

    @property
    def now_s(self) -> float:
        return self._event_queue.now_s

    def view(self) -> SimulatedFleetView:
        return self._view

    def dispatch(self, orders: Sequence[Instruction], source: ModelProvider) -> None:
        """Dispatches instructions now; one that cannot be dispatched comes back as `InstructionFailed`."""
        for order in orders:
            match order:
                case TrainInstruction():
                    self._assign(order, source)
                case EvaluateInstruction():
                    at_s = self.now_s + self._settings.evaluation_duration_s
                    self._event_queue.schedule(
                        at_s, self._evaluate, (order, self._downlink.get_model(order.subject, source))
                    )
                case FinishEarlyInstruction():
                    self._lifecycle.finish_early(order.assignment_id)

    def wait(self, until_s: float) -> Sequence[Event]:
        """Returns all events of the next instant that has any, up to `until_s`.

        Raises:
            RunFailedError: no device works and none will ever return, or none returns in time.
        """
        while not self._events and self._event_queue.advance(until_s):
            pass
        events, self._events = self._events, []
        if not events and math.isfinite(until_s):
            self._event_queue.now_s = max(self.now_s, until_s)
        self._num_idle_waits = 0 if events or not self._event_queue.is_empty else self._num_idle_waits + 1
        if self._num_idle_waits > MAX_IDLE_WAITS:
            num_trainers = sum(info.role == Role.TRAINER for info in self._view.devices.values())
            raise RunFailedError(
                f"nothing happens any more at {self.now_s:.0f} virtual seconds: {num_trainers} of "
                f"{len(self._view.simulated_devices)} devices are there, none of them is given work, "
                "and nobody will come back: look at [devices] min_memory_bytes, accelerator and unwell, "
                "and at whom the strategy itself asks"
            )
        return events

    def _publish(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Update):
            self._num_lost = 0
        elif isinstance(event, InstructionFailed) and event.outcome == UpdateStatus.LOST:
            self._num_lost += 1
            if self._num_lost > max(MAX_CONSECUTIVE_LOSSES, 20 * len(self._view.simulated_devices)):
                raise RunFailedError(
                    f"no device is ever back in time: {self._num_lost} assignments in a row were lost, the last at "
                    f"{self.now_s:.3g} virtual seconds; {event.device_id}: {event.reason}"
                )

    def _assign(self, instruction: TrainInstruction, provider: ModelProvider) -> None:
        if self._settings.join_at_start:
            self._view.freeze_membership()
        board = self._view.simulated_devices.get(instruction.device_id)
        if board is None or instruction.device_id not in self._view.devices:
            self._event_queue.schedule(self.now_s, self._reject, instruction)
            return
        if instruction.plan.node is None and not instruction.plan.inbox:
            num_bytes = self._downlink.start_download(board, provider)
        else:
            num_bytes = self._downlink.count_peer_download_bytes(instruction, provider)
        self._lifecycle.dispatch(instruction, board, self._downlink.get_global_model(provider), num_bytes)

    def _reject(self, instruction: TrainInstruction | EvaluateInstruction) -> None:
        self._publish(make_failure(instruction, UpdateStatus.FAILED, f"{instruction.device_id} is not there"))

    def _evaluate(self, request: tuple[EvaluateInstruction, EncodedModel]) -> None:
        order, encoded = request
        info = self._view.devices.get(order.device_id)
        if info is None:
            self._reject(order)
            return
        is_board = info.role == Role.TRAINER
        try:
            scores = self._backend.evaluate(order.device_id if is_board else None, encoded)
        except TrainingFailedError as error:
            self._publish(make_failure(order, UpdateStatus.FAILED, str(error)))
            return
        self._publish(
            EvaluateResult(
                assignment_id=order.assignment_id,
                device_id=order.device_id,
                version=order.version,
                round=order.round,
                source=info.source,
                num_examples=scores.num_examples,
                loss=scores.loss,
                accuracy=scores.accuracy,
                bytes_down=len(encoded.body) if is_board else 0,
                subject=order.subject,
            )
        )

    def _on_failure_detected(self, device: SimulatedDevice) -> None:
        self._lifecycle.fail_all(device, "device gone: it fell silent")
        self._view.remove_device(device)

    def _on_recovery(self, device: SimulatedDevice) -> None:
        # Back before the failure was detected: the contents of its memory are lost all the same.
        self._lifecycle.fail_all(device, "its agent restarted")
        if self._view.add_device(device):
            self._publish(DeviceAvailable(device_id=device.device_id))
