"""One virtual board: what it is, what it is doing, and how long that takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator

from edgefl.simulation.profiles import Profile
from edgefl.simulation.traces import Pace, Throttle, value_at
from edgefl.simulation.training import Job, Trained
from edgefl.types import Assignment, DeviceInfo, LocalPlan, Speed, Vitals, derived_rng

DRAWN_AHEAD = 4096
"""An assignment's jitter repeats after so many iterations, so that a budget of millions costs no memory."""
SMOOTHING = 0.3
"""Weight of the newest measurement in a board's speed, as in the live fleet."""
REPORT_EVERY_S = 0.1
"""A board reports progress no more often than this."""


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """One assignment on its way.

    Attributes:
        order: what was asked.
        board: of whom.
        life: the board's life in which it was asked; one that has died since brings nothing.
        job: the training behind it.
        given_s: when it was asked.
        limit: iterations it may take.
        pace: nominal seconds by iteration, once drawn.
        started_s, due_s: when computing began, and ends.
        sent_bytes: what the model took on its way down.
        received_s, finished_s: when the board had got it all, and when it began to send.
        reported_s: when it last reported progress.
        trained: what came of it, while that is on its way.
        is_recalled: it was asked to finish now.
        is_settled: it was answered, or nobody waits for it any more.
    """

    order: Assignment
    board: Board
    life: int
    job: Job
    given_s: float
    sent_bytes: int = 0
    limit: int | None = None
    pace: Pace | None = None
    started_s: float = 0.0
    due_s: float = -1.0
    received_s: float = 0.0
    finished_s: float = 0.0
    reported_s: float = 0.0
    trained: Trained | None = None
    is_recalled: bool = False
    is_settled: bool = False

    @property
    def is_void(self) -> bool:
        """Says that the board has died since it was asked."""
        return self.life != self.board.life

    @property
    def is_open_ended(self) -> bool:
        """Says whether the number of iterations is known only when somebody says that it is enough."""
        return self.order.plan.report_progress and not self.is_recalled

    def end_s(self, iterations: int) -> float:
        """Returns when so many iterations are done."""
        assert self.pace is not None
        return self.board.end_s(self.started_s, self.pace.work_s(iterations))

    def done(self, now_s: float) -> int:
        """Returns how many iterations are done, no more than it may take."""
        assert self.pace is not None
        done = self.pace.done(self.board.work_s(self.started_s, now_s))
        return done if self.limit is None else min(done, self.limit)


@dataclass(slots=True, kw_only=True, eq=False)
class Board:
    """A virtual device.

    Attributes:
        info: what the fleet's view says of it.
        index: its place in the fleet's order.
        profile: what it can do, with the faults that hit it.
        iteration_s: batch size -> seconds of one iteration of this run's task, before jitter and throttling.
        num_examples: its training examples.
        block_sizes: examples by block of a redundant shard.
        jitter: deviation of the logarithm of an iteration's time.
        seed: of its own times.
        life: counts how often it died; what was begun in an earlier life is void.
        is_up: it is running; `is_present`: the coordinator believes so.
        outstanding: ids of assignments, oldest first.
        queue, current: what waits to be computed, and what is.
        down_free_s, up_free_s: when its own link is through with what it has been given.
        held_version: of the model that it got last; None when it holds none.
        speed: as the coordinator has measured it.
    """

    info: DeviceInfo
    index: int
    profile: Profile
    iteration_s: Callable[[int], float]
    num_examples: int
    jitter: float = 0.0
    seed: int = 0
    block_sizes: Mapping[int, int] = field(default_factory=dict)
    life: int = 0
    is_up: bool = True
    is_present: bool = True
    outstanding: list[str] = field(default_factory=list)
    queue: deque[Work] = field(default_factory=deque)
    current: Work | None = None
    down_free_s: float = 0.0
    up_free_s: float = 0.0
    held_version: int | None = None
    speed: Speed = field(default_factory=Speed)
    throttle: Throttle | None = None
    congestion: Throttle | None = None
    _rng: Generator | None = None

    def __post_init__(self) -> None:
        self.throttle = Throttle.of(self.profile.throttling)
        self.congestion = Throttle.of(self.profile.congestion)

    @property
    def device_id(self) -> str:
        return self.info.device_id

    @property
    def rng(self) -> Generator:
        """The board's own stream of times; made when first asked for, since most boards never are."""
        if self._rng is None:
            self._rng = derived_rng(self.seed, "board", self.device_id)
        return self._rng

    def end_s(self, start_s: float, work_s: float) -> float:
        return start_s + work_s if self.throttle is None else self.throttle.end_s(start_s, work_s)

    def work_s(self, start_s: float, now_s: float) -> float:
        return now_s - start_s if self.throttle is None else self.throttle.work_s(start_s, now_s)

    def sent_s(self, start_s: float, transfer_s: float) -> float:
        """Returns when a transfer is through that takes so long on a link that is free of others."""
        return start_s + transfer_s if self.congestion is None else self.congestion.end_s(start_s, transfer_s)

    def latency_s(self, now_s: float) -> float:
        """Returns what a message takes besides its bytes."""
        usual_s, delays = self.profile.latency_s, self.profile.delays
        return usual_s + (value_at(delays, now_s) or 0.0) if delays else usual_s

    def examples_of(self, block: int | None) -> int:
        return self.num_examples if block is None else self.block_sizes.get(block, 0)

    def plan_work(self, work: Work) -> None:
        """Draws the pace of an assignment and sets how many iterations it may take; None where seconds decide."""
        plan = work.order.plan
        work.limit = planned_iterations(plan, max(1, self.examples_of(work.order.block)))
        work.pace = self._pace(plan, work.limit)

    def begin(self, work: Work, now_s: float) -> None:
        """Computes from now on; sets when it is done if nobody recalls it."""
        self.current = work
        work.started_s = work.reported_s = now_s
        if work.limit is None:
            work.limit = max(1, self._fitting(work, work.order.plan))
        work.job.iterations = min(1, work.limit) if work.is_recalled else work.limit
        work.due_s = work.end_s(work.job.iterations)

    def note_speed(self, *, iteration_s: float | None, up: float, down: float) -> None:
        """Takes a measurement: seconds of an iteration, None where there was none, and bytes a second both ways."""
        before = self.speed
        known = before.seconds_per_iteration
        self.speed = Speed(
            seconds_per_iteration=known if iteration_s is None else _smoothed(known, iteration_s),
            up_bytes_per_s=_smoothed(before.up_bytes_per_s, up),
            down_bytes_per_s=_smoothed(before.down_bytes_per_s, down),
        )

    def vitals(self, now_s: float) -> Vitals | None:
        """Returns what its heartbeats say; None for a board whose profile says nothing about it."""
        profile = self.profile
        if not (profile.temperature_c or profile.battery or self.throttle):
            return None
        return Vitals(
            temperature_c=value_at(profile.temperature_c, now_s),
            is_throttled=self.throttle is not None and self.throttle.factor_at(now_s) > 1.0,
            battery_fraction=value_at(profile.battery, now_s),
        )

    def felt(self, from_s: float, to_s: float) -> dict[str, Any]:
        """Returns the metrics of an update that say how the board was, by how it was at the beginning and the end."""
        seen = [vitals for at_s in (from_s, to_s) if (vitals := self.vitals(at_s)) is not None]
        heat = [vitals.temperature_c for vitals in seen if vitals.temperature_c is not None]
        if not seen:
            return {}
        is_throttled = any(vitals.is_throttled for vitals in seen)
        return {
            "max_temperature_c": max(heat, default=None),
            "throttled": ("throttled" if is_throttled else "ok") if self.throttle is not None else None,
        }

    def _pace(self, plan: LocalPlan, limit: int | None) -> Pace:
        iteration_s = self.iteration_s(plan.batch_size)
        if not self.jitter:
            return Pace.steady(iteration_s)
        drawn = DRAWN_AHEAD if limit is None else min(max(1, limit), DRAWN_AHEAD)
        # A mean of 1: jitter makes a board uneven, not slower.
        factors = self.rng.lognormal(-0.5 * self.jitter**2, self.jitter, drawn)
        return Pace.drawn(iteration_s, factors)

    def _fitting(self, work: Work, plan: LocalPlan) -> int:
        """Returns how many iterations begin before the plan's seconds are over."""
        assert work.pace is not None
        work_s = self.work_s(work.started_s, work.started_s + (plan.seconds or 0.0))
        done = work.pace.done(work_s)
        return done if np.isclose(work.pace.work_s(done), work_s, rtol=1e-12) else done + 1


def planned_iterations(plan: LocalPlan, num_examples: int) -> int | None:
    """Returns how many iterations a device takes for a plan if nobody stops it; None where seconds decide."""
    if plan.epochs is not None:
        return max(1, round(plan.epochs * math.ceil(num_examples / plan.batch_size)))
    return plan.iterations


def _smoothed(before: float | None, newest: float) -> float:
    return newest if before is None else before + SMOOTHING * (newest - before)
