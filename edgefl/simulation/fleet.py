"""The simulated fleet: an event queue in virtual time in place of devices and networks.

Presence, churn, evaluation and the events of the round loop; `instruction_lifecycle` carries instructions and
updates. All times follow from profiles and seeds; the training is real. Every event costs O(log n) in the number of
devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from numpy.random import Generator

from edgefl.core.claims import ClaimLimits
from edgefl.core.conditions import Blocker, format_blocker
from edgefl.core.errors import RunFailedError
from edgefl.core.types import (
    DeviceAvailable,
    DeviceInfo,
    EvaluateInstruction,
    Event,
    FinishEarlyInstruction,
    HealthMetrics,
    Instruction,
    InstructionFailed,
    ModelProvider,
    Role,
    TrainInstruction,
    Update,
    UpdateStatus,
    derive_rng,
)
from edgefl.engine.fleet_state import FleetState
from edgefl.simulation.backends.trainer import EncodedModel, TrainingBackend, TrainingFailedError
from edgefl.simulation.conditions import ConditionSettings
from edgefl.simulation.device import SimulatedDevice
from edgefl.simulation.instruction_lifecycle import InstructionLifecycle, make_failure
from edgefl.simulation.network import SimulatedDownlink, SimulatedNetwork, SimulationEventQueue

MAX_IDLE_WAITS = 10_000
"""Number of waits without events after which the run fails, if none can follow."""
MAX_CONSECUTIVE_LOSSES = 1000
"""Number of instructions lost in a row, and 20 per device, after which the run fails: no device is in time."""

MAX_BLOCKED_S = 62 * 86_400.0
"""Virtual time without work or result after which the run fails: every budget of a month has begun anew meanwhile."""


class ChurnSimulator:
    """Takes devices down and brings them back.

    Args:
        event_queue: virtual time.
        failure_detection_s: time until the coordinator detects a lost device.
        on_failure: called when a device fails.
        on_failure_detected: called when the coordinator detects it, unless the device is back by then.
        on_recovery: called when it is running again.
    """

    def __init__(
        self,
        event_queue: SimulationEventQueue,
        *,
        failure_detection_s: float,
        on_failure: Callable[[SimulatedDevice], None],
        on_failure_detected: Callable[[SimulatedDevice], None],
        on_recovery: Callable[[SimulatedDevice], None],
    ) -> None:
        self._event_queue, self._failure_detection_s = event_queue, failure_detection_s
        self._on_failure, self._on_failure_detected, self._on_recovery = on_failure, on_failure_detected, on_recovery
        self._rngs: dict[str, Generator] = {}

    def register(self, device: SimulatedDevice) -> None:
        """Schedules a device's first absence; one that is away from the start is marked as such."""
        start_s, end_s = self._compute_next_absence(device)
        if start_s > 0:
            self._schedule_failure(device, start_s, end_s)
            return
        device.is_up = device.is_present = False
        if math.isfinite(end_s):
            self._event_queue.schedule(end_s, self._recover, device)

    def _schedule_failure(self, device: SimulatedDevice, start_s: float, end_s: float) -> None:
        if math.isfinite(start_s):
            self._event_queue.schedule(start_s, self._fail, (device, end_s))

    def _fail(self, argument: tuple[SimulatedDevice, float]) -> None:
        board, end_s = argument
        board.is_up = False
        board.boot_count += 1
        self._on_failure(board)
        self._event_queue.schedule(
            self._event_queue.now_s + self._failure_detection_s, self._detect_failure, (board, board.boot_count)
        )
        if math.isfinite(end_s):
            self._event_queue.schedule(end_s, self._recover, board)

    def _detect_failure(self, argument: tuple[SimulatedDevice, int]) -> None:
        board, boot_count = argument
        if board.boot_count == boot_count and not board.is_up and board.is_present:
            board.is_present = False
            self._on_failure_detected(board)

    def _recover(self, device: SimulatedDevice) -> None:
        device.is_up = device.is_present = True
        self._on_recovery(device)
        self._schedule_failure(device, *self._compute_next_absence(device))

    def _compute_next_absence(self, device: SimulatedDevice) -> tuple[float, float]:
        now_s = self._event_queue.now_s
        scheduled = next((absence for absence in device.profile.offline if absence[1] > now_s), (math.inf, math.inf))
        return min((max(scheduled[0], now_s), scheduled[1]), self._draw_absence(device))

    def _draw_absence(self, device: SimulatedDevice) -> tuple[float, float]:
        profile = device.profile
        if profile.mtbf_s is None or profile.mttr_s is None:
            return math.inf, math.inf
        # A separate stream: the same devices fail at the same times whatever their instructions.
        if device.device_id not in self._rngs:
            self._rngs[device.device_id] = derive_rng(device.seed, "absence", device.device_id)
        rng = self._rngs[device.device_id]
        start_s = self._event_queue.now_s + float(rng.exponential(profile.mtbf_s))
        return start_s, start_s + float(rng.exponential(profile.mttr_s))


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


class _SimulatedHealth(Mapping[str, HealthMetrics]):
    """Health metrics of the devices whose profiles define them."""

    def __init__(self, devices: Mapping[str, SimulatedDevice], event_queue: SimulationEventQueue) -> None:
        self._devices, self._event_queue = devices, event_queue

    def __getitem__(self, device_id: str) -> HealthMetrics:
        health = self._devices[device_id].compute_health(self._event_queue.now_s)
        if health is None:
            raise KeyError(device_id)
        return health

    def __iter__(self) -> Iterator[str]:
        return (
            name for name, board in self._devices.items() if board.compute_health(self._event_queue.now_s) is not None
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SimulatedFleet:
    """Implements `Fleet` in virtual time.

    Args:
        devices: of the fleet.
        backend: trains and evaluates.
        downlink: encodes models and counts their bytes.
        settings: common to all devices.
        evaluators: evaluators besides the devices: on the coordinator's own data, without traffic.
        limits: of what devices claim.
        conditions: of the run, and where the boards keep theirs; None where all are always free.

    Raises:
        ConfigError: the conditions of a board could never hold.
    """

    def __init__(  # noqa: PLR0913 one keyword per collaborator
        self,
        devices: Sequence[SimulatedDevice],
        *,
        backend: TrainingBackend,
        downlink: SimulatedDownlink,
        settings: SimulationSettings | None = None,
        evaluators: Sequence[DeviceInfo] = (),
        limits: ClaimLimits | None = None,
        conditions: ConditionSettings | None = None,
    ) -> None:
        self._backend, self._downlink, self._settings = backend, downlink, settings or SimulationSettings()
        self._event_queue, self._events = SimulationEventQueue(), list[Event]()
        self._devices = {board.device_id: board for board in devices}
        self._members: frozenset[str] | None = None
        self._state = FleetState(_SimulatedHealth(self._devices, self._event_queue), limits=limits)
        for info in evaluators:
            self._state.update_device(info.device_id, info)
        self._lifecycle = InstructionLifecycle(
            event_queue=self._event_queue,
            network=SimulatedNetwork(
                self._event_queue,
                up_bytes_per_s=self._settings.up_bytes_per_s,
                down_bytes_per_s=self._settings.down_bytes_per_s,
            ),
            downlink=downlink,
            backend=backend,
            state=self._state,
            publish=self._publish,
            on_blocked=self._set_blocker,
        )
        self._num_idle_waits = self._num_lost = 0
        self._last_event_s = 0.0
        presence = ChurnSimulator(
            self._event_queue,
            failure_detection_s=self._settings.failure_detection_s,
            on_failure=self._lifecycle.discard_work,
            on_failure_detected=self._on_failure_detected,
            on_recovery=self._on_recovery,
        )
        for board in devices:
            presence.register(board)
            if conditions is not None and board.info.role == Role.TRAINER:
                board.conditions = conditions.make_conditions(
                    board.device_id, board.profile, lambda: self._event_queue.now_s
                )
            if board.conditions is not None:
                self._set_blocker(board, board.conditions.find_blocker())
            elif board.is_present:
                self._state.update_device(board.device_id, board.info)

    @property
    def now_s(self) -> float:
        return self._event_queue.now_s

    def view(self) -> FleetState:
        self._state.start_turn(self.now_s)
        return self._state

    def dispatch(self, instructions: Sequence[Instruction], source: ModelProvider) -> None:
        """Dispatches instructions now; one that cannot be dispatched comes back as `InstructionFailed`."""
        for instruction in instructions:
            match instruction:
                case TrainInstruction():
                    self._assign(instruction, source)
                case EvaluateInstruction():
                    at_s = self.now_s + self._settings.evaluation_duration_s
                    self._event_queue.schedule(
                        at_s, self._evaluate, (instruction, self._downlink.get_model(instruction.subject, source))
                    )
                case FinishEarlyInstruction():
                    self._lifecycle.finish_early(instruction.assignment_id)

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
            raise self._make_idle_error()
        return events

    def _make_idle_error(self) -> RunFailedError:
        num_trainers = sum(info.role == Role.TRAINER for info in self._state.devices.values())
        return RunFailedError(
            f"nothing happens any more at {self.now_s:.0f} virtual seconds: {num_trainers} of "
            f"{len(self._devices)} devices are there, none of them is given work, "
            "and nobody will come back: look at [devices] min_memory_bytes, accelerator and unhealthy_policy, "
            "at [privacy] separation and participations, which may let too few take part, "
            "at the hours and budgets of [conditions], which may hold no work, "
            "and at whom the strategy itself asks"
        )

    def _make_blocked_error(self) -> RunFailedError:
        """Returns why nothing happens though boards look: the conditions of the first one that is not free."""
        for board in self._devices.values():
            blocker = board.conditions.find_blocker() if board.conditions is not None and board.is_up else None
            if blocker is not None:
                return RunFailedError(
                    f"nothing has happened for {MAX_BLOCKED_S / 86_400:g} virtual days: too few boards are free by "
                    f"[conditions], or hours and budgets hold no work; {board.device_id}: {format_blocker(blocker)}"
                )
        return self._make_idle_error()

    def _publish(self, event: Event) -> None:
        self._events.append(event)
        if not isinstance(event, DeviceAvailable):  # a board that allows more each day may never get any work
            self._last_event_s = self.now_s
        if isinstance(event, Update):
            self._num_lost = 0
        elif isinstance(event, InstructionFailed) and event.outcome == UpdateStatus.LOST:
            self._num_lost += 1
            if self._num_lost > max(MAX_CONSECUTIVE_LOSSES, 20 * len(self._devices)):
                raise RunFailedError(
                    f"no device is ever back in time: {self._num_lost} assignments in a row were lost, the last at "
                    f"{self.now_s:.3g} virtual seconds; {event.device_id}: {event.reason}"
                )

    def _assign(self, instruction: TrainInstruction, provider: ModelProvider) -> None:
        if self._settings.join_at_start and self._members is None:
            present = (name for name, device in self._devices.items() if device.is_present)
            self._members = frozenset((*self._state.devices, *present))
        board = self._devices.get(instruction.device_id)
        if board is None or instruction.device_id not in self._state.devices:
            self._event_queue.schedule(self.now_s, self._reject, instruction)
            return
        base_bytes = self._downlink.count_base_bytes(board.device_id)
        if instruction.plan.node is None and not instruction.plan.messages and instruction.sends_model:
            num_bytes = self._downlink.start_download(board, provider)
        else:
            num_bytes = self._downlink.count_peer_download_bytes(instruction, provider)
        model = self._downlink.get_global_model(provider)
        self._last_event_s = self.now_s
        self._lifecycle.dispatch(instruction, board, model, num_bytes, base_bytes=base_bytes)

    def _reject(self, instruction: TrainInstruction | EvaluateInstruction) -> None:
        if isinstance(instruction, TrainInstruction):
            self._lifecycle.reject(instruction)
        self._publish(make_failure(instruction, UpdateStatus.FAILED, f"{instruction.device_id} is not there"))

    def _evaluate(self, request: tuple[EvaluateInstruction, EncodedModel]) -> None:
        instruction, encoded = request
        info = self._state.devices.get(instruction.device_id)
        if info is None:
            self._reject(instruction)
            return
        is_board = info.role == Role.TRAINER
        try:
            scores = self._backend.evaluate(instruction.device_id if is_board else None, encoded)
        except TrainingFailedError as error:
            self._publish(make_failure(instruction, UpdateStatus.FAILED, str(error)))
            return
        result = instruction.make_result(
            source=info.source,
            num_examples=scores.num_examples,
            loss=scores.loss,
            accuracy=scores.accuracy,
            bytes_down=len(encoded.body) if is_board else 0,
            metrics=scores.values,
            sums=scores.sums,
        )
        self._publish(self._state.bound_evaluation(result))

    def _on_failure_detected(self, device: SimulatedDevice) -> None:
        self._lifecycle.fail_all(device, "device gone: it fell silent")
        self._state.update_device(device.device_id, None)

    def _on_recovery(self, device: SimulatedDevice) -> None:
        # Back before the failure was detected: the contents of its memory are lost all the same.
        self._lifecycle.fail_all(device, "its agent restarted")
        if device.conditions is not None:
            self._check_conditions(device)
        else:
            self._add_device(device)

    def _add_device(self, device: SimulatedDevice) -> None:
        name = device.device_id
        if name not in self._state.devices and (self._members is None or name in self._members):
            self._state.update_device(name, device.reported_info)
            self._publish(DeviceAvailable(device_id=name))

    def _check_conditions(self, board: SimulatedDevice) -> None:
        """Looks at the conditions of an idle board, and whether the run may choose it."""
        assert board.conditions is not None
        if board.device_id in self._state.busy or not board.is_up:  # a board that works looks by itself
            self._schedule_check(board, None)
            return
        self._set_blocker(board, board.conditions.find_blocker())
        if self.now_s - self._last_event_s > MAX_BLOCKED_S:
            raise self._make_blocked_error()

    def _set_blocker(self, board: SimulatedDevice, blocker: Blocker | None) -> None:
        """Records what keeps a board from work, if anything."""
        if blocker is not None:
            self._state.update_device(board.device_id, None)
        elif board.device_id in self._state.devices:
            self._update_allowance(board)
        elif board.is_present:
            self._add_device(board)
        self._schedule_check(board, blocker)

    def _update_allowance(self, board: SimulatedDevice) -> None:
        """Updates what a board allows; the run looks at it again where it is another one, such as on a new day."""
        former, info = self._state.devices[board.device_id].allowance, board.reported_info
        if info.allowance is not None and not info.allowance.is_within(former):
            self._publish(DeviceAvailable(device_id=board.device_id))
        self._state.update_device(board.device_id, info)

    def _schedule_check(self, board: SimulatedDevice, blocker: Blocker | None) -> None:
        assert board.conditions is not None
        if not board.is_up:
            return  # it looks when it is back; checks of one that stays away would never end
        board.next_check_s = board.conditions.compute_next_check_s(blocker)
        self._event_queue.schedule(board.next_check_s, self._on_check_time, board)

    def _on_check_time(self, board: SimulatedDevice) -> None:
        if board.next_check_s == self.now_s:  # else it has looked since
            self._check_conditions(board)
