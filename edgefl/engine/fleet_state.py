"""Mutable fleet state of a run, in memory: the one `FleetView` of live, replayed and simulated fleets.

The live fleet fills it from registry events, a resumed run from its journal, the simulator in virtual time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from edgefl.core.claims import ClaimLimits
from edgefl.core.types import (
    BASE_BYTE_KEY,
    PREFETCH_BYTE_KEYS,
    DeviceInfo,
    DeviceThroughput,
    EvaluateInstruction,
    EvaluateResult,
    HealthMetrics,
    Progress,
    Role,
    TrainInstruction,
    UpdateMetrics,
)

SMOOTHING_FACTOR = 0.3
"""Weight of the newest measurement in a moving average."""


def update_moving_average(previous: float | None, newest: float) -> float:
    """Returns the moving average of a measurement, the newest one included."""
    return newest if previous is None else previous + SMOOTHING_FACTOR * (newest - previous)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedInstruction:
    """An in-flight instruction, and when it was dispatched, in seconds of the run's own clock.

    `paused_s` are seconds since then in which that clock stood still, as the coordinator was away.
    """

    instruction: TrainInstruction | EvaluateInstruction = field(metadata={"stored_as": "order"})
    dispatched_s: float
    paused_s: float = 0.0


class _PresentDevices(Mapping[str, DeviceInfo]):
    """Present devices, in the order of their ids whoever came last."""

    def __init__(self) -> None:
        self.by_id: dict[str, DeviceInfo] = {}

    def __getitem__(self, device_id: str) -> DeviceInfo:
        return self.by_id[device_id]

    def __contains__(self, device_id: object) -> bool:
        return device_id in self.by_id

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.by_id))


class FleetState:
    """Implements `FleetView`, and has the instructions in flight.

    Every look-up costs O(1); iterating the devices sorts them.

    `busy` holds training only: evaluations never make a device busy. Speeds are those of this run: those of another
    model or batch are not comparable.

    Args:
        health: of the devices.
        limits: of what devices claim; None for those without a task.

    Attributes:
        in_flight: instructions by assignment id, in the order of dispatch; `busy` has those that train.
        finishing_early: ids of those in flight that were asked to finish early.
        limited: devices with an allowance.
    """

    def __init__(
        self, health: Mapping[str, HealthMetrics] | None = None, *, limits: ClaimLimits | None = None
    ) -> None:
        self.claim_limits = limits or ClaimLimits()
        self.now_s = 0.0
        self.devices = _PresentDevices()
        self.idle: list[str] = []
        self.limited: set[str] = set()
        self.in_flight: dict[str, DispatchedInstruction] = {}
        self.finishing_early: set[str] = set()
        self.busy: dict[str, list[str]] = {}
        self.speeds: dict[str, DeviceThroughput] = {}
        self.progress: dict[str, Progress] = {}
        self.health: Mapping[str, HealthMetrics] = {} if health is None else health

    def start_turn(self, now_s: float) -> None:
        """Starts a turn, with its time."""
        self.now_s = now_s

    def update_device(self, device_id: str, info: DeviceInfo | None) -> None:
        """Updates a device; None removes one that may not work any more."""
        if info is not None:
            self.devices.by_id[device_id] = info
        else:
            self.devices.by_id.pop(device_id, None)
        is_limited = info is not None and info.allowance is not None
        (self.limited.add if is_limited else self.limited.discard)(device_id)
        self._update_idle(device_id)

    def assign(self, instruction: TrainInstruction | EvaluateInstruction) -> None:
        """Adds an instruction that is dispatched in this turn."""
        self.in_flight[instruction.assignment_id] = DispatchedInstruction(
            instruction=instruction, dispatched_s=self.now_s
        )
        if not isinstance(instruction, TrainInstruction):
            return
        self.claim_limits.record_order(instruction.device_id, self.devices.by_id.get(instruction.device_id))
        self.busy.setdefault(instruction.device_id, []).append(instruction.assignment_id)
        self._update_idle(instruction.device_id)

    def finish_early(self, assignment_id: str) -> None:
        """Marks an instruction in flight as asked to finish early."""
        if assignment_id in self.in_flight:
            self.finishing_early.add(assignment_id)

    def complete(self, instruction: TrainInstruction | EvaluateInstruction) -> None:
        """Removes an instruction that was answered or given up."""
        del self.in_flight[instruction.assignment_id]
        self.finishing_early.discard(instruction.assignment_id)
        if not isinstance(instruction, TrainInstruction):
            return
        outstanding = self.busy[instruction.device_id]
        outstanding.remove(instruction.assignment_id)
        if not outstanding:
            del self.busy[instruction.device_id]
        report = self.progress.get(instruction.device_id)
        if report is not None and report.assignment_id == instruction.assignment_id:
            del self.progress[instruction.device_id]
        self._update_idle(instruction.device_id)

    def record_progress(self, progress: Progress) -> None:
        self.progress[progress.device_id] = progress

    def bound_progress(self, report: Progress, *, elapsed_s: float) -> Progress:
        """Returns the report with its claims bounded; `elapsed_s` are since its instruction was dispatched."""
        dispatched = self.in_flight.get(report.assignment_id)
        if dispatched is None or not isinstance(dispatched.instruction, TrainInstruction):
            return report
        return self.claim_limits.bound_progress(report, dispatched.instruction.plan, elapsed_s=elapsed_s)

    def bound_evaluation(self, result: EvaluateResult) -> EvaluateResult:
        """Returns the evaluation with its claims bounded."""
        return self.claim_limits.bound_evaluation(result, self.devices.by_id.get(result.device_id))

    def accept_metrics(
        self, instruction: TrainInstruction, metrics: UpdateMetrics, *, elapsed_s: float
    ) -> UpdateMetrics:
        """Returns an update's metrics with their claims bounded, and updates its device's speed from them.

        Args:
            instruction: in flight, that the update followed.
            metrics: as the device claims.
            elapsed_s: from dispatch to arrival.
        """
        metrics = self.claim_limits.bound_metrics(
            metrics,
            instruction,
            elapsed_s=elapsed_s,
            is_finishing_early=instruction.assignment_id in self.finishing_early,
            speeds=self.speeds,
        )
        self.record_speed(instruction.device_id, metrics)
        return metrics

    def record_speed(self, device_id: str, metrics: UpdateMetrics) -> None:
        """Updates the moving averages of a device's speed from an update, and the sizes of what it sends and gets."""
        if metrics.iterations:
            previous = self.speeds.get(device_id, DeviceThroughput())
            average_s = update_moving_average(previous.seconds_per_iteration, metrics.compute_s / metrics.iterations)
            # What it got once, before the run or with this update, is no part of the next one.
            once = [metrics.extra.get(name, 0.0) for name in (*PREFETCH_BYTE_KEYS, BASE_BYTE_KEY)]
            up, down = max(0.0, metrics.bytes_up - once[0]), max(0.0, metrics.bytes_down - once[1] - once[2])
            self.speeds[device_id] = replace(
                previous,
                seconds_per_iteration=average_s,
                exchange_s=update_moving_average(previous.exchange_s, metrics.send_s),
                bytes_up=up,
                bytes_down=down if previous.bytes_down is None else min(previous.bytes_down, down),
            )

    def record_transfer(self, device_id: str, *, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        """Updates the moving averages of a device's link, once its speed is known."""
        if (previous := self.speeds.get(device_id)) is not None:
            self.speeds[device_id] = replace(
                previous,
                up_bytes_per_s=update_moving_average(previous.up_bytes_per_s, up_bytes_per_s),
                down_bytes_per_s=update_moving_average(previous.down_bytes_per_s, down_bytes_per_s),
            )

    def restore(
        self,
        in_flight: Mapping[str, DispatchedInstruction],
        finishing_early: Collection[str],
        speeds: Mapping[str, DeviceThroughput],
        progress: Mapping[str, Progress],
    ) -> None:
        """Restores work and measurements from a snapshot, in a state without work."""
        for dispatched in in_flight.values():
            self.assign(dispatched.instruction)
        self.in_flight, self.finishing_early = dict(in_flight), set(finishing_early)
        self.speeds, self.progress = dict(speeds), dict(progress)

    def restore_from(self, other: FleetState) -> None:
        """Copies work, speeds and progress from another state; the devices stay its own."""
        self.in_flight, self.finishing_early = dict(other.in_flight), set(other.finishing_early)
        self.busy = {device_id: list(names) for device_id, names in other.busy.items()}
        self.speeds, self.progress = dict(other.speeds), dict(other.progress)
        self.claim_limits.restore(other.claim_limits.examples, other.claim_limits.first_examples)
        for device_id in [*self.devices]:
            self._update_idle(device_id)

    def _update_idle(self, device_id: str) -> None:
        """Adds a device to the idle list or removes it, by its present state."""
        info = self.devices.by_id.get(device_id)
        is_idle = info is not None and info.role == Role.TRAINER and device_id not in self.busy
        index = bisect_left(self.idle, device_id)
        is_listed = index < len(self.idle) and self.idle[index] == device_id
        if is_listed and not is_idle:
            del self.idle[index]
        elif is_idle and not is_listed:
            insort(self.idle, device_id)
