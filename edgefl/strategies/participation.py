"""Participation: which devices train, for how much and in which codec, whose updates count, and who evaluates.

The selection excludes boards that do not qualify and reduces load on unhealthy ones, the planner those whose hours or
budgets hold no work; the guard refuses or clips updates that would corrupt the model (`update_guard`). Where a run
file leaves the codec of updates open (`auto`), its selection is part of the policy, too. Evaluation never blocks a
round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from edgefl.core.allowance import MAX_AMOUNT, MIN_RATE, WorkCost
from edgefl.core.conditions import Blocker
from edgefl.core.config import EvaluateOn
from edgefl.core.types import (
    ClippedUpdate,
    Decision,
    DeviceInfo,
    DeviceThroughput,
    EvaluateInstruction,
    Event,
    FinishEarlyInstruction,
    FleetView,
    HealthMetrics,
    InstructionFailed,
    Progress,
    Role,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateStatus,
)
from edgefl.strategies.update_guard import UpdateGuard

REDUCED_BUDGET_FRACTION = 0.5
"""Budget fraction of an unhealthy board."""
MIN_UPLOAD_S = 60.0
"""Least time after the end of its hours in which an update of a board is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSelection:
    """Requirements of `[devices]`; `unhealthy_policy` is `smaller`, `rest` or `ignore`, None requires nothing."""

    min_memory_bytes: int | None = None
    needs_accelerator: bool = False
    max_temperature_c: float | None = None
    min_battery: float | None = None
    unhealthy_policy: str = "smaller"

    @property
    def is_empty(self) -> bool:
        return self.min_memory_bytes is None and not self.needs_accelerator and self.unhealthy_policy != "rest"

    def is_satisfied_by(self, info: DeviceInfo) -> bool:
        """Returns whether the board qualifies; one that reports no memory is assumed to have enough."""
        memory = info.capabilities.get("memory_bytes")
        if self.min_memory_bytes is not None and isinstance(memory, int) and memory < self.min_memory_bytes:
            return False
        return not self.needs_accelerator or bool(info.capabilities.get("accelerators"))

    def is_unhealthy(self, health: HealthMetrics | None) -> bool:
        """Returns whether the board is throttled, too hot, or on little battery."""
        if health is None or self.unhealthy_policy == "ignore":
            return False
        too_hot = _is_above(health.temperature_c, self.max_temperature_c)
        too_empty = _is_above(self.min_battery, health.battery_fraction)
        return bool(health.is_throttled) or too_hot or too_empty

    def reduce_budget(self, instruction: TrainInstruction) -> TrainInstruction:
        """Returns the same assignment with a smaller budget, at least one iteration."""
        plan = instruction.plan
        if plan.iterations is not None:
            plan = replace(plan, iterations=max(1, math.floor(plan.iterations * REDUCED_BUDGET_FRACTION)))
        elif plan.epochs is not None:
            plan = replace(plan, epochs=plan.epochs * REDUCED_BUDGET_FRACTION)
        elif plan.seconds is not None:
            plan = replace(plan, seconds=plan.seconds * REDUCED_BUDGET_FRACTION)
        return replace(instruction, plan=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPlanner:
    """Foresees what the next work costs a board, by its last ones, and whether its hours and budgets hold it.

    What is not known yet is taken to fit: the board judges each work by itself.

    Attributes:
        plan: of a work; None where the strategy has no common one.
        task, test_fraction: of the run.
        speed_name: of the run's model among the `steps_per_s` that a board has measured itself.
        can_shorten: a work may have any number of iterations, from one on.
        count_bytes: () -> expected bytes of a model and of an update.
    """

    plan: TrainConfig | None
    task: str
    test_fraction: float = 0.0
    speed_name: str = ""
    can_shorten: bool = False
    count_bytes: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)

    def find_shortage(self, view: FleetView, device_id: str) -> Blocker | None:
        """Returns why the next work does not fit into a board's hours and budgets; None where it does.

        Args:
            view: the fleet.
            device_id: one of its devices.
        """
        info = view.devices.get(device_id)
        if info is None or info.allowance is None:
            return None
        cost = self._estimate(info, view, self._find_speed(info, view))
        num_works = 1 + len(view.busy.get(device_id, ()))  # those that it has count again: none is finished yet
        if num_works > 1:
            seconds = None if cost.seconds is None else num_works * cost.seconds
            cost = replace(cost, seconds=seconds, num_bytes=num_works * cost.num_bytes)
        return info.allowance.find_shortage(cost, view.now_s)

    def fit(self, instruction: TrainInstruction, view: FleetView) -> TrainInstruction:
        """Returns an instruction with no more iterations and time than its board's hours and budgets have.

        Iterations are cut where the algorithm leaves them open, never below one. The deadline is at most the end of
        the hours, and the time that an update takes to arrive.
        """
        info = view.devices.get(instruction.device_id)
        if info is None or info.allowance is None:
            return instruction
        speed, seconds = view.speeds.get(instruction.device_id), self._find_speed(info, view)
        if seconds is None:
            return instruction
        exchange_s = None if speed is None else speed.exchange_s
        plan = instruction.plan
        if self.can_shorten and plan.iterations is not None and plan.collective is None:
            fitting = info.allowance.count_fitting(seconds, view.now_s, download_s=(exchange_s or 0.0) / 2)
            if fitting is not None and fitting < plan.iterations:
                usual, fitting = plan.fallback_iterations, max(1, fitting)
                fallback = None if usual is None else min(usual, fitting)
                plan = replace(plan, iterations=fitting, fallback_iterations=fallback)
        deadline_s, window = instruction.deadline_s, info.allowance.window
        if (
            deadline_s is not None
            and exchange_s is not None
            and window is not None
            and not window.is_past(view.now_s)
        ):
            left_s = max(0.0, window.ends_s - view.now_s)
            deadline_s = min(deadline_s, left_s + max(MIN_UPLOAD_S, 2 * exchange_s))
        return replace(instruction, plan=plan, deadline_s=deadline_s)

    def _find_speed(self, info: DeviceInfo, view: FleetView) -> float | None:
        """Returns the seconds of an iteration: measured in this run, else by the board itself."""
        speed = view.speeds.get(info.device_id)
        if speed is not None and speed.seconds_per_iteration:
            return speed.seconds_per_iteration
        steps_per_s = info.capabilities.get("steps_per_s")
        measured = steps_per_s.get(self.speed_name) if isinstance(steps_per_s, Mapping) else None
        if isinstance(measured, int | float) and MIN_RATE <= measured <= MAX_AMOUNT:
            return 1 / measured
        return None

    def _estimate(self, info: DeviceInfo, view: FleetView, seconds_per_iteration: float | None) -> WorkCost:
        speed, plan = view.speeds.get(info.device_id) or DeviceThroughput(), self.plan
        seconds: float | None = None
        if plan is not None and plan.seconds is not None and not self.can_shorten:
            seconds = plan.seconds + (seconds_per_iteration or 0.0)
        elif plan is not None and seconds_per_iteration is not None:
            num_examples = round((1 - self.test_fraction) * info.examples.get(self.task, 0))
            iterations = 1 if self.can_shorten else plan.count_iterations(max(1, num_examples))
            seconds = None if iterations is None else iterations * seconds_per_iteration
        num_bytes = 0.0
        if info.allowance is not None and any(budget.kind == "traffic" for budget in info.allowance.budgets):
            down, up = speed.bytes_down, speed.bytes_up
            usual = self.count_bytes() if down is None or up is None else (0.0, 0.0)
            num_bytes = (usual[0] if down is None else down) + (usual[1] if up is None else up)
        return WorkCost(seconds=seconds, download_s=(speed.exchange_s or 0.0) / 2, num_bytes=num_bytes)


class FilteredFleetView:
    """A fleet view whose `idle` excludes some devices; all else is unchanged.

    `idle` is made of `is_excluded` when it is first read, where it is None. `is_excluded` selects the busy devices
    that get no more work, too, see `can_receive_work`; `blocked_devices` are never asked again.
    """

    def __init__(
        self,
        view: FleetView,
        idle: Sequence[str] | None,
        is_excluded: Callable[[str], bool] = lambda _: False,
        blocked_devices: Collection[str] = (),
    ) -> None:
        self._view, self._idle, self.is_excluded, self.blocked_devices = view, idle, is_excluded, blocked_devices

    @property
    def now_s(self) -> float:
        return self._view.now_s

    @property
    def devices(self) -> Mapping[str, DeviceInfo]:
        return self._view.devices

    @property
    def idle(self) -> Sequence[str]:
        if self._idle is None:
            self._idle = [device_id for device_id in self._view.idle if not self.is_excluded(device_id)]
        return self._idle

    @property
    def busy(self) -> Mapping[str, Sequence[str]]:
        return self._view.busy

    @property
    def speeds(self) -> Mapping[str, DeviceThroughput]:
        return self._view.speeds

    @property
    def progress(self) -> Mapping[str, Progress]:
        return self._view.progress

    @property
    def health(self) -> Mapping[str, HealthMetrics]:
        return self._view.health

    @property
    def limited(self) -> Collection[str]:
        return self._view.limited


def can_receive_work(device_id: str, view: FleetView) -> bool:
    """Returns whether a busy device may get more work: it is not listed as idle."""
    return device_id in view.devices and not (isinstance(view, FilteredFleetView) and view.is_excluded(device_id))


def is_blocked(device_id: str, view: FleetView) -> bool:
    """Returns whether a device is blocked, since its updates were rejected too often."""
    return isinstance(view, FilteredFleetView) and device_id in view.blocked_devices


class HeldFleetView(FilteredFleetView):
    """A fleet view in which the devices of held updates are still busy with them."""

    def __init__(self, view: FleetView, held: Mapping[str, Sequence[str]]) -> None:
        super().__init__(view, [device_id for device_id in view.idle if device_id not in held])
        self._busy = {**view.busy, **{name: (*ids, *view.busy.get(name, ())) for name, ids in held.items()}}

    @property
    def busy(self) -> Mapping[str, Sequence[str]]:
        return self._busy


class CodecPolicy(Protocol):
    """Selects the codec of every assignment by the results of earlier ones (`compression.codec_selection`).

    `link_estimates` is a dataclass with all its state, to be saved over a restart.
    """

    link_estimates: Any

    def adapt_instruction(self, instruction: TrainInstruction, *, is_metered: bool = False) -> TrainInstruction: ...
    def observe(self, event: Event, accuracy: float | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParticipationPolicy:
    """Implements `ParticipationPolicy` with a selection, a guard and, where there are, a codec policy and a planner.

    With `counts_failures` a failure of a device's work counts against it as a rejected update does.
    """

    selection: DeviceSelection = DeviceSelection()
    guard: UpdateGuard = field(default_factory=UpdateGuard)
    codec_policy: CodecPolicy | None = None
    planner: WorkPlanner | None = None
    counts_failures: bool = False

    @property
    def blocked_devices(self) -> Collection[str]:
        return self.guard.state.quarantined

    def eligible_view(self, view: FleetView) -> FleetView:
        blocked, planner = self.guard.state.quarantined, self.planner
        limited = view.limited if planner is not None else ()
        if self.selection.is_empty and not blocked and not limited:
            return view
        devices, health, should_rest = view.devices, view.health, self.selection.unhealthy_policy == "rest"

        def is_excluded(device_id: str) -> bool:
            if device_id in blocked or not self.selection.is_satisfied_by(devices[device_id]):
                return True
            if should_rest and self.selection.is_unhealthy(health.get(device_id)):
                return True
            if planner is None or device_id not in limited:
                return False
            return planner.find_shortage(view, device_id) is not None

        return FilteredFleetView(view, None, is_excluded, blocked)

    def adapt_instruction(self, instruction: TrainInstruction, view: FleetView) -> TrainInstruction:
        if not instruction.plan.has_training:
            return instruction
        if self.codec_policy is not None:
            health = view.health.get(instruction.device_id)
            is_metered = health is not None and health.is_metered is True
            instruction = self.codec_policy.adapt_instruction(instruction, is_metered=is_metered)
        # A reduced block would differ from its other copies, and a node's exchange has no budget to reduce.
        if instruction.block is not None or instruction.plan.node is not None:
            return instruction
        if self.planner is not None and view.limited:
            instruction = self.planner.fit(instruction, view)
        if self.selection.unhealthy_policy != "smaller" or not self.selection.is_unhealthy(
            view.health.get(instruction.device_id)
        ):
            return instruction
        return self.selection.reduce_budget(instruction)

    def rejection_reason(self, update: Update) -> str | None:
        return self.guard.rejection_reason(update)

    def is_strike(self, failure: InstructionFailed) -> bool:
        is_own_failure = failure.outcome in {UpdateStatus.FAILED, UpdateStatus.REJECTED}
        return failure.is_strike or (self.counts_failures and is_own_failure)

    def record_rejection(self, device_id: str) -> None:
        self.guard.record_rejection(device_id)

    def observe(self, event: Event, accuracy: float | None) -> None:
        if self.codec_policy is not None:
            self.codec_policy.observe(event, accuracy)

    def admit(self, update: Update) -> Sequence[Update]:
        return self.guard.admit(update)

    def release(self, view: FleetView) -> Sequence[Update]:
        return self.guard.release(view)

    def hold_view(self, view: FleetView) -> FleetView:
        held = self.guard.list_held()
        return HeldFleetView(view, held) if held else view

    def observe_decision(self, decision: Decision) -> Decision:
        held = self.guard.list_held()
        if not any(instruction.device_id in held for instruction in decision.instructions):
            return decision
        # The strategy has stopped waiting for the others: it recalls, or asks once more.
        self.guard.release_next()
        instructions = tuple(
            instruction
            for instruction in decision.instructions
            if not (
                isinstance(instruction, FinishEarlyInstruction) and instruction.assignment_id in self.guard.state.held
            )
        )
        return replace(decision, instructions=instructions, next_wake_s=0.0)

    def record_version(self, version: int) -> None:
        self.guard.record_version(version)

    def pop_clipped(self) -> Sequence[ClippedUpdate]:
        return self.guard.pop_clipped()


def _is_above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """Schedules evaluations after every `every` rounds and after the last one.

    `evaluate_on` is one source, or `auto`: every evaluator (the coordinator's own shard, devices with the role
    evaluator), and without any, the devices' local test splits. Where devices have models of their own, an evaluator
    evaluates the global model and each of them, a device the global one and its own. With `can_use_trainers` false
    `auto` takes evaluators alone.
    """

    every: int = 1
    evaluate_on: EvaluateOn = "auto"
    can_use_trainers: bool = True

    def __call__(
        self, version: int, round_number: int, view: FleetView, is_last: bool, model_owners: Collection[str] = ()
    ) -> Sequence[EvaluateInstruction]:
        """Returns the evaluations of `version`, which ended round `round_number`.

        Args:
            version: of the model.
            round_number: of the round.
            view: the fleet.
            is_last: whether the run ends with this version.
            model_owners: the devices that have models of their own.
        """
        if self.evaluate_on == "none" or (not is_last and round_number % self.every):
            return ()
        evaluators = self._find_evaluators(view)
        pairs = [*((info.device_id, "") for info in evaluators), *_pair_with_models(evaluators, model_owners)]
        return tuple(
            EvaluateInstruction(
                assignment_id=_format_assignment_id(version, device_id, subject),
                device_id=device_id,
                version=version,
                round=round_number,
                subject=subject,
            )
            for device_id, subject in pairs
        )

    def _find_evaluators(self, view: FleetView) -> list[DeviceInfo]:
        devices = [view.devices[device_id] for device_id in sorted(view.devices)]
        evaluators = [info for info in devices if info.role == Role.EVALUATOR]
        match self.evaluate_on:
            case "coordinator" | "evaluator":
                return [info for info in evaluators if info.source == self.evaluate_on]
            case "devices":
                return [info for info in devices if info.role == Role.TRAINER]
            case _:
                trainers = [info for info in devices if info.role == Role.TRAINER and self.can_use_trainers]
                return evaluators or trainers


def _pair_with_models(devices: Sequence[DeviceInfo], model_owners: Collection[str]) -> list[tuple[str, str]]:
    """Returns pairs of evaluator and model owner, grouped by owner, as each model is encoded once."""
    owners = set(model_owners)
    evaluators = [info.device_id for info in devices if info.role == Role.EVALUATOR]
    trainers = [info.device_id for info in devices if info.role == Role.TRAINER and info.device_id in owners]
    evaluator_pairs = [(device_id, subject) for subject in sorted(owners) for device_id in evaluators]
    return [*evaluator_pairs, *((device_id, device_id) for device_id in trainers)]


def _format_assignment_id(version: int, device_id: str, model_owner: str) -> str:
    # Names may contain hyphens, but no colons, so the separator keeps the id unambiguous.
    return f"e{version}-{device_id}:{model_owner}" if model_owner else f"e{version}-{device_id}"
