"""One simulated device: its profile, its work, and the durations of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.random import Generator

from edgefl.core.protocol import ANSWER_TIMEOUT_S
from edgefl.core.types import DeviceInfo, HealthMetrics, TrainConfig, TrainInstruction, derive_rng
from edgefl.simulation.backends.trainer import TrainingJob, TrainingResult
from edgefl.simulation.conditions import SimulatedConditions
from edgefl.simulation.profiles import DeviceProfile, IterationTimes, SlowdownTrace, value_at

MAX_JITTER_SAMPLES = 4096
"""Number of iterations after which an instruction's jitter repeats, so that a budget of millions costs no memory."""
REPORT_INTERVAL_S = 0.1
"""Minimum seconds between progress reports of a device."""


@dataclass(slots=True, kw_only=True, eq=False)
class InFlightWork:
    """One instruction in flight.

    Attributes:
        instruction: the instruction.
        device: its device.
        boot_count: of the device at dispatch; after a reboot no update comes.
        job: the training behind it.
        dispatched_s: when it was dispatched.
        max_iterations: limit of its iterations.
        iteration_times: nominal seconds by iteration, once sampled.
        started_s, due_s: start and end of computing.
        download_bytes: size of the model's download.
        base_bytes: of it, those of the base.
        received_s, finished_s: end of the download, start of the upload.
        reported_s: time of the last progress report.
        result: its result, during the upload.
        is_finishing_early: it was told to finish early.
        is_completed: it was answered or abandoned.
        query_s: wait for the answers to its queries, per iteration, which includes it; 0 where it asks none.
        is_answered: its queries are answered before it waits no more.
        queried_iterations, answered_s: of its last query, and when its answer is there; -1 before.
        earlier_iterations, earlier_compute_s: of a collective's trainings before the present one.
        extra: further metrics of its update.
    """

    instruction: TrainInstruction
    device: SimulatedDevice
    boot_count: int
    job: TrainingJob
    dispatched_s: float
    download_bytes: int = 0
    base_bytes: int = 0
    max_iterations: int | None = None
    iteration_times: IterationTimes | None = None
    started_s: float = 0.0
    due_s: float = -1.0
    received_s: float = 0.0
    finished_s: float = 0.0
    reported_s: float = 0.0
    query_s: float = 0.0
    is_answered: bool = False
    queried_iterations: int = 0
    answered_s: float = -1.0
    result: TrainingResult | None = None
    is_finishing_early: bool = False
    is_completed: bool = False
    earlier_iterations: int = 0
    earlier_compute_s: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_orphaned(self) -> bool:
        """Whether the device has rebooted since the dispatch."""
        return self.boot_count != self.device.boot_count

    @property
    def is_open_ended(self) -> bool:
        """Whether the number of iterations is open until the device is told to finish."""
        return self.instruction.plan.report_progress and not self.is_finishing_early

    def compute_end_s(self, iterations: int) -> float:
        """Returns the time at which `iterations` are done."""
        assert self.iteration_times is not None
        return self.device.compute_end_s(self.started_s, self.iteration_times.compute_work_s(iterations))

    def count_iterations(self, now_s: float) -> int:
        """Returns the number of finished iterations, at most `max_iterations`."""
        assert self.iteration_times is not None
        iterations = self.iteration_times.count_iterations(self.device.compute_work_s(self.started_s, now_s))
        return iterations if self.max_iterations is None else min(iterations, self.max_iterations)


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedDevice:
    """A simulated device.

    Attributes:
        info: its entry in the fleet view.
        profile: its profile, with its faults applied.
        iteration_s: batch size -> seconds of one iteration of this run's task, before jitter and throttling.
        num_examples: its training examples.
        block_sizes: examples by block of a redundant shard.
        jitter: deviation of the logarithm of an iteration's time.
        seed: of its own times.
        boot_count: number of reboots; work started before the last one is void.
        is_up: it is running; `is_present`: the coordinator sees it as present.
        queue, current: queued work, and the work being computed.
        downlink_free_s, uplink_free_s: end of the transfers queued on its own link.
        model_version: of the model last received; None when it holds none.
        conditions: when it may work; None for always.
        next_check_s: when it looks at them again, while it is idle.
    """

    info: DeviceInfo
    profile: DeviceProfile
    iteration_s: Callable[[int], float]
    num_examples: int
    jitter: float = 0.0
    seed: int = 0
    block_sizes: Mapping[int, int] = field(default_factory=dict)
    boot_count: int = 0
    is_up: bool = True
    is_present: bool = True
    queue: deque[InFlightWork] = field(default_factory=deque)
    current: InFlightWork | None = None
    downlink_free_s: float = 0.0
    uplink_free_s: float = 0.0
    model_version: int | None = None
    compute_slowdown: SlowdownTrace | None = None
    link_slowdown: SlowdownTrace | None = None
    conditions: SimulatedConditions | None = None
    next_check_s: float = 0.0
    _rng: Generator | None = None

    def __post_init__(self) -> None:
        self.compute_slowdown = SlowdownTrace.from_steps(self.profile.throttling)
        self.link_slowdown = SlowdownTrace.from_steps(self.profile.congestion)

    @property
    def device_id(self) -> str:
        return self.info.device_id

    @property
    def reported_info(self) -> DeviceInfo:
        """Its entry in the fleet view, with what its hours and budgets allow now."""
        allowance = self.conditions.find_allowance() if self.conditions is not None else None
        return self.info if allowance is None else replace(self.info, allowance=allowance)

    @property
    def rng(self) -> Generator:
        """The device's own stream of random times; created on first use, as most devices need none."""
        if self._rng is None:
            self._rng = derive_rng(self.seed, "board", self.device_id)
        return self._rng

    def compute_end_s(self, start_s: float, work_s: float) -> float:
        return (
            start_s + work_s
            if self.compute_slowdown is None
            else self.compute_slowdown.compute_end_s(start_s, work_s)
        )

    def compute_work_s(self, start_s: float, now_s: float) -> float:
        return (
            now_s - start_s if self.compute_slowdown is None else self.compute_slowdown.compute_work_s(start_s, now_s)
        )

    def compute_transfer_end_s(self, start_s: float, transfer_s: float) -> float:
        """Returns when a transfer of this duration ends on an otherwise free link."""
        return (
            start_s + transfer_s
            if self.link_slowdown is None
            else self.link_slowdown.compute_end_s(start_s, transfer_s)
        )

    def compute_latency_s(self, now_s: float) -> float:
        """Returns the latency of a message, independent of its size."""
        usual_s, delays = self.profile.latency_s, self.profile.delays
        return usual_s + (value_at(delays, now_s) or 0.0) if delays else usual_s

    def count_examples(self, block: int | None) -> int:
        return self.num_examples if block is None else self.block_sizes.get(block, 0)

    def schedule_work(self, work: InFlightWork) -> None:
        """Samples iteration times and sets the iteration limit; None where seconds decide."""
        plan = work.instruction.plan
        work.max_iterations = plan.count_iterations(max(1, self.count_examples(work.instruction.block)))
        if plan.fallback_iterations is not None:
            self._schedule_queries(work, plan.fallback_iterations)
        work.iteration_times = self._draw_iteration_times(plan, work.max_iterations, work.query_s)

    def _schedule_queries(self, work: InFlightWork, fallback_iterations: int) -> None:
        iteration_s = self.iteration_s(work.instruction.plan.batch_size)
        round_trip_s = 2 * self.profile.latency_s
        work.is_answered = round_trip_s <= ANSWER_TIMEOUT_S
        if work.is_answered:
            work.query_s = round_trip_s * min(1.0, iteration_s / REPORT_INTERVAL_S)
        else:  # its one wait is spread over its iterations
            work.max_iterations = min(work.max_iterations or fallback_iterations, fallback_iterations)
            work.query_s = ANSWER_TIMEOUT_S / work.max_iterations

    def start_work(self, work: InFlightWork, now_s: float) -> None:
        """Starts computing now; sets the due time unless it is told to finish early."""
        self.current = work
        work.started_s = work.reported_s = now_s
        if work.max_iterations is None:
            work.max_iterations = max(1, self._count_fitting_iterations(work, work.instruction.plan))
        work.job.iterations = min(1, work.max_iterations) if work.is_finishing_early else work.max_iterations
        work.due_s = work.compute_end_s(work.job.iterations)

    def compute_health(self, now_s: float) -> HealthMetrics | None:
        """Returns the health metrics of its heartbeats; None where its profile has none."""
        profile = self.profile
        if not (profile.temperature_c or profile.battery or profile.metered or self.compute_slowdown):
            return None
        is_metered = value_at(profile.metered, now_s)
        return HealthMetrics(
            temperature_c=value_at(profile.temperature_c, now_s),
            is_throttled=self.compute_slowdown is not None and self.compute_slowdown.factor_at(now_s) > 1.0,
            battery_fraction=value_at(profile.battery, now_s),
            is_metered=None if is_metered is None else is_metered > 0,
        )

    def summarise_health(self, start_s: float, end_s: float) -> dict[str, Any]:
        """Returns an update's health metrics, from those at its start and end."""
        samples = [health for at_s in (start_s, end_s) if (health := self.compute_health(at_s)) is not None]
        temperatures = [health.temperature_c for health in samples if health.temperature_c is not None]
        if not samples:
            return {}
        is_throttled = any(health.is_throttled for health in samples)
        return {
            "max_temperature_c": max(temperatures, default=None),
            "throttled": ("throttled" if is_throttled else "ok") if self.compute_slowdown is not None else None,
        }

    def _draw_iteration_times(
        self, config: TrainConfig, max_iterations: int | None, query_s: float
    ) -> IterationTimes:
        iteration_s = self.iteration_s(config.batch_size) + query_s
        if not self.jitter:
            return IterationTimes.from_constant(iteration_s)
        num_samples = (
            MAX_JITTER_SAMPLES if max_iterations is None else min(max(1, max_iterations), MAX_JITTER_SAMPLES)
        )
        # A mean of 1: jitter makes a device uneven, not slower.
        factors = self.rng.lognormal(-0.5 * self.jitter**2, self.jitter, num_samples)
        return IterationTimes.from_factors(iteration_s, factors)

    def _count_fitting_iterations(self, work: InFlightWork, config: TrainConfig) -> int:
        """Returns how many iterations start within the plan's seconds."""
        assert work.iteration_times is not None
        work_s = self.compute_work_s(work.started_s, work.started_s + (config.seconds or 0.0))
        iterations = work.iteration_times.count_iterations(work_s)
        return (
            iterations
            if np.isclose(work.iteration_times.compute_work_s(iterations), work_s, rtol=1e-12)
            else iterations + 1
        )
