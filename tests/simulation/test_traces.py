"""Traces: what holds when, and how long work takes that is throttled on its way."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.core.types import Dataset, TrainConfig, derive_rng
from edgefl.simulation.device import compute_planned_iterations
from edgefl.simulation.traces import IterationTimes, SlowdownTrace, merge_absences, multiply_traces, value_at
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

HOT = SlowdownTrace.from_steps([(10.0, 2.0), (20.0, 1.0)])


def test_a_value_holds_from_its_second_until_the_next() -> None:
    steps = ((1.0, 40.0), (5.0, 80.0))
    assert [value_at(steps, now_s) for now_s in (0.5, 1.0, 4.9, 5.0, 99.0)] == [None, 40.0, 40.0, 80.0, 80.0]


def test_throttled_seconds_count_half() -> None:
    assert HOT is not None
    assert HOT.compute_end_s(0.0, 10.0) == 10.0
    assert HOT.compute_end_s(0.0, 12.0) == 14.0, "the last 2 of 12 take 4"
    assert HOT.compute_end_s(0.0, 16.0) == 21.0, "10 + 5 at half speed, and 1 more after it"
    assert HOT.compute_work_s(0.0, 21.0) == pytest.approx(16.0)
    assert HOT.factor_at(15.0) == 2.0


@given(st.floats(0, 40), st.floats(0, 40))
def test_work_and_its_end_belong_together(start_s: float, work_s: float) -> None:
    assert HOT is not None
    assert HOT.compute_work_s(start_s, HOT.compute_end_s(start_s, work_s)) == pytest.approx(work_s, abs=1e-9)


def test_a_board_that_never_slows_down_needs_no_throttle() -> None:
    assert SlowdownTrace.from_steps([]) is None
    assert SlowdownTrace.from_steps([(0.0, 1.0), (5.0, 1.0)]) is None


def test_traces_multiply() -> None:
    assert multiply_traces([((0.0, 2.0),), ((5.0, 3.0), (9.0, 1.0))]) == ((0.0, 2.0), (5.0, 6.0), (9.0, 2.0))


def test_absences_that_overlap_are_one() -> None:
    assert merge_absences([(5.0, 9.0), (0.0, 1.0), (8.0, math.inf)]) == ((0.0, 1.0), (5.0, math.inf))


def test_a_pace_repeats_when_it_is_used_up() -> None:
    pace = IterationTimes.from_factors(1.0, np.array([1.0, 3.0]))
    assert [pace.compute_work_s(n) for n in (0, 1, 2, 3, 4)] == [0.0, 1.0, 4.0, 5.0, 8.0]
    assert [pace.count_iterations(work_s) for work_s in (0.5, 1.0, 3.9, 4.0, 5.0, 7.9)] == [0, 1, 1, 2, 3, 3]


def test_a_steady_pace_counts_iterations() -> None:
    assert IterationTimes.from_constant(0.5).compute_work_s(7) == 3.5
    assert IterationTimes.from_constant(0.5).count_iterations(3.6) == 7


@pytest.mark.parametrize(
    "plan",
    [
        TrainConfig(iterations=3, batch_size=4),
        TrainConfig(epochs=1.0, batch_size=4),
        TrainConfig(epochs=0.01, batch_size=4),
        TrainConfig(epochs=2.6, batch_size=7),
    ],
)
def test_the_simulator_counts_iterations_as_a_board_does(plan: TrainConfig) -> None:
    task = make_task("digits", {"model": "logistic"})
    data = Dataset(inputs=np.zeros((10, 8, 8), np.uint8), labels=np.zeros(10, np.int64))
    learner = task.learner()
    done = train(learner, data, plan, derive_rng(1), clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert compute_planned_iterations(plan, len(data)) == done.iterations


def test_seconds_alone_do_not_say_how_many_iterations() -> None:
    assert compute_planned_iterations(TrainConfig(seconds=3.0), 10) is None
