"""Participation: which devices train, for how much and in which codec, whose updates count, and who evaluates.

The selection excludes boards that do not qualify and reduces load on unhealthy ones; the guard rejects updates that
would corrupt the model, and blocks a device that keeps sending them. Where a run file leaves the codec of updates
open (`auto`), its selection is part of the policy, too. Evaluation never blocks a round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from edgefl.core.config import EvaluateOn
from edgefl.core.types import (
    Array,
    DeviceInfo,
    DeviceThroughput,
    EvaluateInstruction,
    Event,
    FleetView,
    HealthMetrics,
    ModelSpec,
    Progress,
    Role,
    SparseTensor,
    Tensors,
    TrainInstruction,
    Update,
)

REDUCED_BUDGET_FRACTION = 0.5
"""Budget fraction of an unhealthy board."""
MAX_NORMS = 32
MIN_NORMS = 5
"""Minimum number of norms for a meaningful ratio to their median."""


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


class FilteredFleetView:
    """A fleet view whose `idle` excludes some devices; all else is unchanged.

    `is_excluded` selects the busy devices that get no more work, see `can_receive_work`; `blocked_devices` are never
    asked again.
    """

    def __init__(
        self,
        view: FleetView,
        idle: Sequence[str],
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


def can_receive_work(device_id: str, view: FleetView) -> bool:
    """Returns whether a busy device may get more work: it is not listed as idle."""
    return device_id in view.devices and not (isinstance(view, FilteredFleetView) and view.is_excluded(device_id))


def is_blocked(device_id: str, view: FleetView) -> bool:
    """Returns whether a device is blocked, since its updates were rejected too often."""
    return isinstance(view, FilteredFleetView) and device_id in view.blocked_devices


@dataclass(slots=True, kw_only=True)
class UpdateGuard:
    """Rejects updates that would corrupt the model; an accepted update clears the strikes.

    `max_norm` bounds the Euclidean norm over all tensors, `max_norm_ratio` its ratio to the median of the last ones.
    Where devices are nodes of a graph (`has_full_models`) an update holds a whole model, or none; then neither norm
    applies.
    """

    has_full_models: bool = False
    shapes: ModelSpec = ()
    max_norm: float | None = None
    max_norm_ratio: float | None = None
    flag_after: int = 3
    rejection_counts: dict[str, int] = field(default_factory=dict)
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_NORMS))
    blocked_devices: set[str] = field(default_factory=set)

    def rejection_reason(self, update: Update) -> str | None:
        """Returns why an update is rejected, or None."""
        norm = 0.0
        if self.has_full_models and not update.tensors:
            return None
        reason = self._find_mismatch(update.tensors)
        if reason is None:
            norm = _compute_norm(update.tensors)
            reason = self._find_norm_violation(norm)
        if reason is None:
            self.rejection_counts.pop(update.device_id, None)
            self.norms.append(norm)
            return None
        count = self.record_rejection(update.device_id)
        if count < self.flag_after:
            return reason
        return f"{reason}; refused {count} times in a row, so {update.device_id} is flagged and not asked again"

    def record_rejection(self, device_id: str) -> int:
        """Counts a rejection, and returns the number in a row."""
        count = self.rejection_counts[device_id] = self.rejection_counts.get(device_id, 0) + 1
        if count >= self.flag_after:
            self.blocked_devices.add(device_id)
        return count

    def _find_mismatch(self, tensors: Tensors) -> str | None:
        for spec in self.shapes:
            if spec.name not in tensors:
                return f"the update has no tensor {spec.name!r}"
            tensor = tensors[spec.name]
            if tensor.shape != spec.shape:
                return f"tensor {spec.name!r} has shape {tensor.shape}, the model's is {spec.shape}"
        return None

    def _find_norm_violation(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return "the update holds a NaN or an infinity: its training has diverged"
        if self.has_full_models:
            return None
        if self.max_norm is not None and norm > self.max_norm:
            return f"the update's norm is {norm:.4g}, at most {self.max_norm:g} is let in"
        if self.max_norm_ratio is not None and len(self.norms) >= MIN_NORMS:
            usual = float(np.median(self.norms))
            if norm > self.max_norm_ratio * usual:
                return f"the update's norm is {norm:.4g}, {norm / max(usual, 1e-30):.3g} times the usual {usual:.4g}"
        return None


class CodecPolicy(Protocol):
    """Selects the codec of every assignment by the results of earlier ones (`compression.codec_selection`).

    `link_estimates` is a dataclass with all its state, to be saved over a restart.
    """

    link_estimates: Any

    def adapt_instruction(self, instruction: TrainInstruction) -> TrainInstruction: ...
    def observe(self, event: Event, accuracy: float | None) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParticipationPolicy:
    """Implements `ParticipationPolicy` with a selection, a guard and, where there is one, a codec policy."""

    selection: DeviceSelection = DeviceSelection()
    guard: UpdateGuard = field(default_factory=UpdateGuard)
    codec_policy: CodecPolicy | None = None

    @property
    def blocked_devices(self) -> Collection[str]:
        return self.guard.blocked_devices

    def eligible_view(self, view: FleetView) -> FleetView:
        blocked = self.guard.blocked_devices
        if self.selection.is_empty and not blocked:
            return view
        devices, health, should_rest = view.devices, view.health, self.selection.unhealthy_policy == "rest"

        def is_excluded(device_id: str) -> bool:
            if device_id in blocked or not self.selection.is_satisfied_by(devices[device_id]):
                return True
            return should_rest and self.selection.is_unhealthy(health.get(device_id))

        idle = [device_id for device_id in view.idle if not is_excluded(device_id)]
        return FilteredFleetView(view, idle, is_excluded, blocked)

    def adapt_instruction(self, order: TrainInstruction, view: FleetView) -> TrainInstruction:
        if self.codec_policy is not None:
            order = self.codec_policy.adapt_instruction(order)
        # A reduced block would differ from its other copies, and a node's exchange has no budget to reduce.
        if order.block is not None or order.plan.node is not None:
            return order
        if self.selection.unhealthy_policy != "smaller" or not self.selection.is_unhealthy(
            view.health.get(order.device_id)
        ):
            return order
        return self.selection.reduce_budget(order)

    def rejection_reason(self, update: Update) -> str | None:
        return self.guard.rejection_reason(update)

    def record_rejection(self, device_id: str) -> None:
        self.guard.record_rejection(device_id)

    def observe(self, event: Event, accuracy: float | None) -> None:
        if self.codec_policy is not None:
            self.codec_policy.observe(event, accuracy)


def _is_above(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value > limit


def _compute_norm(tensors: Tensors) -> float:
    """Returns the norm over all float tensors; NaN or infinite when an entry is."""
    total = 0.0
    for tensor in tensors.values():
        values: Array = tensor.values if isinstance(tensor, SparseTensor) else tensor
        if values.dtype.kind in "fc":
            flat = values.reshape(-1).astype(np.float32 if values.dtype == np.float16 else values.dtype, copy=False)
            with np.errstate(over="ignore", invalid="ignore"):  # the norm overflows too, and the update is rejected
                total += float(np.dot(flat, flat))
    return math.sqrt(total) if total >= 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSchedule:
    """Schedules evaluations after every `every` rounds and after the last one.

    `evaluate_on` is one source, or `auto`: every evaluator (the coordinator's own shard, devices with the role
    evaluator), and without any, the devices' local test splits. Where devices have models of their own, an evaluator
    evaluates the global model and each of them, a device the global one and its own.
    """

    every: int = 1
    evaluate_on: EvaluateOn = "auto"

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
                return evaluators or [info for info in devices if info.role == Role.TRAINER]


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
