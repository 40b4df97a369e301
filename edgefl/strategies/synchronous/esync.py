"""ESync: while the slowest device does one mini-batch, the others do as many as fit.

Source: Li, Zhou, Yu, Xu, ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data Centers, IEEE TSC
2020. The model moves by the mean displacement, uniform over devices as in the paper, by examples, or normalised as in
FedNova (unequal steps on unequal data otherwise pull the mean towards the fast devices' optimum).

`budget` gives every device its number of iterations with the assignment. `query` is the paper's state server: devices
report their progress and wait for the answer, to go on or, by a `FinishEarlyInstruction` (READY), to end; where none
comes they end after their budget. `live` is the paper's non-blocking query with a delayed acknowledgement: a device
goes on until it is told to finish early.

Differs from the paper: durations in place of clocks, smoothed measurements, the time of the exchange counts, ε is a
fraction of an iteration unless `epsilon_s` is set (0.5 in the paper), devices may come, go and slow down at any time.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, FleetView, Instruction, TrainConfig, Update
from edgefl.strategies.strategy_config import (
    TICK_S,
    RoundRules,
    SingleStepConfig,
)
from edgefl.strategies.synchronous.fedavg import check_normalisable, make_normaliser
from edgefl.strategies.synchronous.round_state import OpenRound, RoundState
from edgefl.strategies.synchronous.strategy import (
    SynchronousStrategy,
    make_finish_early_instructions,
    weight_by_examples,
    weight_uniformly,
)

MIN_DEADLINE_S = 60.0
CHECK_INTERVAL_S_PER_DEVICE = 1e-5
"""Minimum interval of scans of all devices, per device, however many reports arrive."""

MEDIAN_WINDOW = 3
EWMA_WEIGHT = 0.5
"""Weight of the newest measurement in the moving average."""
_ROUNDING = 1e-9
"""0.3 / 0.1 is less than 3 in floating point, and three iterations fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ESyncConfig(SingleStepConfig):
    """Settings of a run with `esync`; budgets follow from speeds, not from `iterations` or `epochs`.

    Attributes:
        mode: where iterations are counted.
        aggregation: of the displacements; `nova` normalises them by their steps.
        epsilon: ε as a fraction of a device's iteration. From 0 on no device is planned to return after the slowest.
            Below 0 one may return that much later: where speeds are multiples of each other, as within one family of
            boards, a measured whole iteration otherwise often does not quite fit, and a device that could do two
            does one. -0.2 lets it.
        epsilon_s: ε in seconds, in place of it.
        global_learning_rate: the mean displacement is multiplied by it.
        min_iterations, max_iterations: bounds of a budget; live work ends at the upper one in any case.
        smoothing: of measured seconds.
        patience: multiple of a round's planned seconds after which its devices finish early.
        give_up: multiple of the planned seconds, and at least a minute, after which a device is given up.
    """

    mode: Literal["budget", "live", "query"] = "budget"
    aggregation: Literal["uniform", "samples", "nova"] = "uniform"
    epsilon: float = field(default=0.0, metadata={"at_least": -1})
    epsilon_s: float | None = field(default=None, metadata={"at_least": 0})
    global_learning_rate: float = field(default=1.0, metadata={"above": 0})
    min_iterations: int = 1
    max_iterations: int = 10_000
    smoothing: Literal["median", "ewma", "last"] = "median"
    patience: float = field(default=1.5, metadata={"at_least": 1})
    give_up: float = field(default=10.0, metadata={"at_least": 1})

    def build(self, rules: RoundRules) -> SynchronousStrategy[ESyncState]:
        self._check()
        plan, is_nova = self.plan(), self.aggregation == "nova"
        if is_nova:
            check_normalisable(plan, "esync with aggregation nova")
        server = replace(rules.server, learning_rate=rules.server.learning_rate * self.global_learning_rate)
        return self.make(
            ESync,
            replace(rules, server=server),
            compute_weight=weight_uniformly if self.aggregation == "uniform" else weight_by_examples,
            compute_norm=make_normaliser(plan, self.make_schedule()) if is_nova else weight_uniformly,
            config=self,
        )

    def _check(self) -> None:
        if self.seconds is not None or self.iterations != 1:
            name = "iterations" if self.seconds is None else "seconds"
            raise ConfigError(f"strategy.{name}: esync finds out itself how much each device does; leave it out")
        if not (1 <= self.min_iterations <= self.max_iterations):
            raise ConfigError(
                "strategy.min_iterations must be at least 1 and at most max_iterations, "
                f"got {self.min_iterations} and {self.max_iterations}"
            )


@dataclass(slots=True)
class ESyncMeasurements:
    """Measurements of a device in its last rounds, as `add_measurement` keeps them."""

    seconds_per_iteration: list[float] = field(default_factory=list)
    exchange_s: list[float] = field(default_factory=list)

    def compute_timing(self) -> DeviceTiming:
        return DeviceTiming(
            seconds_per_iteration=compute_estimate(self.seconds_per_iteration),
            exchange_s=compute_estimate(self.exchange_s),
        )


@dataclass(slots=True)
class ESyncState(RoundState):
    """State of ESync: measurements and plans by device.

    Attributes:
        measured: measurements by device.
        paces: timings used in the open round, by device.
        planned_s: planned duration of the open round, None when unknown.
        unbounded: devices that work until they are told to finish, in the modes `live` and `query`.
        looked_s: time of the last scan of all devices, in the same modes.
    """

    measured: dict[str, ESyncMeasurements] = field(default_factory=dict)
    paces: dict[str, DeviceTiming] = field(default_factory=dict)
    planned_s: float | None = None
    unbounded: set[str] = field(default_factory=set)
    looked_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ESync(SynchronousStrategy[ESyncState]):
    """Rounds with an individual budget for every device."""

    config: ESyncConfig

    def make_state(self, model: dict[str, Array]) -> ESyncState:
        return ESyncState(model=model)

    def make_plans(
        self, state: ESyncState, plan: TrainConfig, devices: Sequence[str], view: FleetView
    ) -> Mapping[str, TrainConfig]:
        """Returns one iteration for the slowest and for new devices, and as many as fit for the others."""
        settings, paces = self.config, self._get_timings(state, devices, view)
        state.planned_s = self._plan_round_s(paces) if paces else None
        if self.rules.collective is not None:
            # An all-reduce ends for all members at once, so that it leaves nobody time for more.
            paces = {name: replace(pace, exchange_s=0.0) for name, pace in paces.items()}
        counts = compute_budgets(
            paces, self._slack, min_iterations=settings.min_iterations, max_iterations=settings.max_iterations
        )
        state.looked_s = None
        state.paces |= paces
        plans = {}
        for device_id in devices:
            count = counts.get(device_id, settings.min_iterations)
            is_unbounded = settings.mode != "budget" and count > settings.min_iterations
            (state.unbounded.add if is_unbounded else state.unbounded.discard)(device_id)
            plans[device_id] = replace(
                plan,
                iterations=settings.max_iterations if is_unbounded else count,
                epochs=None,
                seconds=None,
                report_progress=is_unbounded,
                fallback_iterations=count if is_unbounded and settings.mode == "query" else None,
            )
        return plans

    def compute_deadline_s(self, state: ESyncState) -> float | None:
        if self.rules.deadline_s is not None or state.planned_s is None:
            return self.rules.deadline_s
        return max(MIN_DEADLINE_S, self.config.give_up * state.planned_s)

    def on_update(self, state: ESyncState, current_round: OpenRound, update: Update) -> None:  # noqa: ARG002 whatever the round
        """Records the device's measured speed."""
        metrics = update.metrics
        if metrics.iterations <= 0:
            return
        measurements, smoothing = (
            state.measured.setdefault(update.device_id, ESyncMeasurements()),
            self.config.smoothing,
        )
        newest = metrics.compute_s / metrics.iterations
        measurements.seconds_per_iteration = add_measurement(measurements.seconds_per_iteration, newest, smoothing)
        measurements.exchange_s = add_measurement(measurements.exchange_s, metrics.send_s, smoothing)

    def schedule_during_round(
        self, state: ESyncState, current_round: OpenRound, view: FleetView
    ) -> tuple[Instruction, ...]:
        """Recalls devices: without budgets, when the rule says READY; always, when the round takes far too long."""
        now_s = view.now_s
        if current_round.since_s is None or state.planned_s is None:
            return ()
        overrun_s = min(current_round.since_s, now_s) + self.config.patience * state.planned_s
        if now_s + TICK_S >= overrun_s:
            current_round.alarm_s = state.planned_s = None
            return make_finish_early_instructions(current_round, current_round.list_pending(view))
        if self.config.mode == "budget":
            current_round.alarm_s = overrun_s
        elif self._should_check(state, current_round, now_s):
            state.looked_s, current_round.alarm_s = now_s, overrun_s
            return self._check_devices(state, current_round, view)
        return ()

    def _plan_round_s(self, timings: Mapping[str, DeviceTiming]) -> float:
        """Returns the duration of a round of devices with these timings."""
        if self.rules.collective is None:
            return compute_horizon_s(timings)
        reductions = self.rules.collective.reductions
        return max(reductions * pace.seconds_per_iteration + pace.exchange_s for pace in timings.values())

    @property
    def _slack(self) -> Slack:
        return Slack(fraction=self.config.epsilon, seconds=self.config.epsilon_s)

    def _get_timings(self, state: ESyncState, devices: Sequence[str], view: FleetView) -> dict[str, DeviceTiming]:
        """Returns own measurements; before there are any, the fleet's, if complete."""
        if state.measured:
            return {name: state.measured[name].compute_timing() for name in devices if name in state.measured}
        speeds, paces = view.speeds, {}
        for device_id in devices:
            speed = speeds.get(device_id)
            if speed is None or speed.seconds_per_iteration is None:
                return {}
            paces[device_id] = DeviceTiming(seconds_per_iteration=speed.seconds_per_iteration)
        return paces

    def _should_check(self, state: ESyncState, current_round: OpenRound, now_s: float) -> bool:
        if state.looked_s is None or state.looked_s > now_s or current_round.alarm_s is None:
            return True
        next_s = state.looked_s + CHECK_INTERVAL_S_PER_DEVICE * len(current_round.order)
        current_round.alarm_s = min(current_round.alarm_s, max(next_s, now_s))
        return now_s + TICK_S >= current_round.alarm_s

    def _check_devices(self, state: ESyncState, current_round: OpenRound, view: FleetView) -> tuple[Instruction, ...]:
        """Applies the rule to every busy device, and sets the alarm for the next one that gets READY.

        An iteration includes the exchange here, and its age counts from the opening of the round; of the rule's cost
        of one more iteration, the download is already done. The slowest is sought among those in their first
        iteration: one that has slowed down later can end early.
        """
        pending = current_round.list_pending(view)
        progress_by_device = self._get_progress(state, current_round, pending, view)
        first_iteration = {
            name: device_progress
            for name, device_progress in progress_by_device.items()
            if device_progress.iterations == 0
        }
        slowest_id = find_slowest(first_iteration) if first_iteration else None
        slowest, ready_ids = (None if slowest_id is None else first_iteration[slowest_id]), []
        for assignment_id in pending:
            device_id, _ = current_round.assigned[assignment_id]
            device_progress = progress_by_device.get(device_id)
            if (
                device_progress is None
                or assignment_id in current_round.cancelled
                or device_id not in state.unbounded
            ):
                continue
            exchange_s = state.paces[device_id].exchange_s if device_id in state.paces else 0.0
            slack_s = self._slack.to_seconds(device_progress.seconds_per_iteration - exchange_s) - exchange_s / 2
            # An early finish lets the current iteration end: every device does at least one.
            after_iteration = replace(device_progress, iterations=max(1, device_progress.iterations))
            # Just after one more no longer fits: a device that ends an iteration at that moment begins the next.
            if slowest is None or is_ready(
                after_iteration, slowest, slack_s - TICK_S, is_slowest=device_id == slowest_id
            ):
                ready_ids.append(assignment_id)
            elif current_round.alarm_s is not None:
                ends_s = view.now_s + slowest.seconds_per_iteration - slowest.age_s
                current_round.alarm_s = min(
                    current_round.alarm_s, ends_s - device_progress.seconds_per_iteration - slack_s + 2 * TICK_S
                )
        return make_finish_early_instructions(current_round, ready_ids)

    def _get_progress(
        self, state: ESyncState, current_round: OpenRound, pending: Sequence[str], view: FleetView
    ) -> dict[str, DeviceRoundProgress]:
        """Returns the progress of busy devices with known speed."""
        progress, progress_by_device = view.progress, {}
        age_s = 0.0 if current_round.since_s is None else view.now_s - current_round.since_s
        for assignment_id in pending:
            device_id, _ = current_round.assigned[assignment_id]
            report, pace, iterations = progress.get(device_id), state.paces.get(device_id), 0
            if report is not None and report.assignment_id == assignment_id:
                exchange_s = 0.0 if pace is None else pace.exchange_s
                pace = DeviceTiming(seconds_per_iteration=report.seconds_per_iteration, exchange_s=exchange_s)
                iterations = report.iteration
            if pace is not None:
                progress_by_device[device_id] = DeviceRoundProgress(
                    iterations=iterations, seconds_per_iteration=pace.min_round_s, age_s=age_s
                )
        return progress_by_device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTiming:
    """Timing of a device: c seconds per iteration, and u seconds of model download and update upload."""

    seconds_per_iteration: float
    exchange_s: float = 0.0

    @property
    def min_round_s(self) -> float:
        """The duration of a round with one iteration."""
        return self.seconds_per_iteration + self.exchange_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Slack:
    """ε: slack before the slowest device ends, as a `fraction` of an iteration or in `seconds`.

    The paper has 0.5 s, which costs a fast fleet whole iterations; a fraction does not.
    """

    fraction: float = 0.05
    seconds: float | None = None

    def to_seconds(self, seconds_per_iteration: float) -> float:
        return self.fraction * seconds_per_iteration if self.seconds is None else self.seconds


def compute_horizon_s(timings: Mapping[str, DeviceTiming]) -> float:
    """Returns T* = max (c + u): when the slowest device returns with one iteration; 0 without devices."""
    return max((pace.min_round_s for pace in timings.values()), default=0.0)


def compute_budgets(
    timings: Mapping[str, DeviceTiming], slack: Slack, *, min_iterations: int = 1, max_iterations: int | None = None
) -> dict[str, int]:
    """Returns the iterations of each device so that all return when the slowest does.

    n = max(1, ⌊(T* - u - ε) / c⌋); the slowest does one.

    Args:
        timings: by device.
        slack: ε.
        min_iterations: lower bound, also for the slowest.
        max_iterations: upper bound.
    """
    end_s = compute_horizon_s(timings)
    return {
        device_id: _clamp(_count_fitting(pace, end_s, slack), min_iterations, max_iterations)
        for device_id, pace in timings.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRoundProgress:
    """Progress of a device within a round.

    Attributes:
        iterations: k, finished in this round.
        seconds_per_iteration: c, of the last one.
        age_s: time since the last one was finished or, before the first, since the model arrived.
        is_ready: it was told to finish early, or has sent its update.
        has_model: it has this round's model.
    """

    iterations: int
    seconds_per_iteration: float
    age_s: float
    is_ready: bool = False
    has_model: bool = True


def find_slowest(progress: Mapping[str, DeviceRoundProgress]) -> str:
    """Returns the device with the longest iterations, the first of equals."""
    return max(progress, key=lambda device_id: progress[device_id].seconds_per_iteration)


def is_ready(
    device: DeviceRoundProgress, slowest_device: DeviceRoundProgress, slack_s: float, *, is_slowest: bool = False
) -> bool:
    """Returns the answer to a device's query: READY (send what you have) or not (one more iteration).

    Args:
        device: the querying one.
        slowest_device: the slowest.
        slack_s: ε.
        is_slowest: the query is the slowest's own.
    """
    if device.iterations == 0 or not slowest_device.has_model:
        return False
    rest_s = slowest_device.seconds_per_iteration - slowest_device.age_s
    return is_slowest or slowest_device.is_ready or device.seconds_per_iteration + slack_s > rest_s


def add_measurement(history: Sequence[float], newest: float, smoothing: str) -> list[float]:
    """Returns the measurements to keep, for `compute_estimate`."""
    match smoothing:
        case "median":
            return [*history[-MEDIAN_WINDOW + 1 :], newest]
        case "ewma" if history:
            return [(1.0 - EWMA_WEIGHT) * history[-1] + EWMA_WEIGHT * newest]
        case _:
            return [newest]


def compute_estimate(history: Sequence[float]) -> float:
    """Returns the median of the measurements; the lower of two, so that one long outlier does not count."""
    return statistics.median_low(history)


def _count_fitting(timing: DeviceTiming, end_s: float, slack: Slack) -> int:
    # A device without measurements (a task without work) has no speed; the slowest does one by definition.
    if timing.seconds_per_iteration <= 0 or timing.min_round_s >= end_s:
        return 1
    free_s = end_s - timing.exchange_s - slack.to_seconds(timing.seconds_per_iteration)
    return max(1, math.floor(min(free_s / timing.seconds_per_iteration * (1.0 + _ROUNDING), sys.maxsize)))


def _clamp(count: int, minimum: int, maximum: int | None) -> int:
    count = max(minimum, count)
    return count if maximum is None else min(maximum, count)
