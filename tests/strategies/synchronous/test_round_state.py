"""The deadline of an open round: one rescue, then the end."""

import pytest

from edgefl.core.types import Update, UpdateMetrics
from edgefl.strategies.strategy_config import RoundRules
from edgefl.strategies.synchronous.round_state import (
    DeadlineAction,
    OpenRound,
    check_round_deadline,
    compute_alarm_s,
    make_timeout_error,
)


def waiting(*, since_s=10.0, answered=False):
    opened = OpenRound(since_s=since_s)
    opened.add_assignment("v0-a1-a", "a")
    if answered:
        update = Update(assignment_id="v0-a1-a", device_id="a", base_version=0, tensors={}, metrics=UpdateMetrics())
        opened.fold.add_update("v0-a1-a", update)
    return opened


def steps(opened, rules, *times):
    return [check_round_deadline(opened, rules, now_s) for now_s in times]


def test_going_on_closes_late_when_somebody_has_answered_after_the_recall():
    rules = RoundRules(round_timeout_s=5.0, on_timeout="aggregate")
    assert steps(waiting(answered=True), rules, 15.0, 20.0) == [DeadlineAction.RECOVER, DeadlineAction.CLOSE]
    assert steps(waiting(), rules, 15.0, 20.0) == [DeadlineAction.RECOVER, DeadlineAction.FAIL]


def test_the_alarm_rings_when_there_is_something_to_do():
    opened, rules = waiting(), RoundRules(round_timeout_s=5.0, on_timeout="none")
    assert compute_alarm_s(opened, rules) == 15.0
    assert check_round_deadline(opened, rules, compute_alarm_s(opened, rules)) is DeadlineAction.RECOVER
    assert compute_alarm_s(opened, rules) == 20.0
    assert check_round_deadline(opened, rules, compute_alarm_s(opened, rules)) is DeadlineAction.FAIL


@pytest.mark.parametrize("start", [0.1, 7.3, 1234567.89])
def test_rounding_does_not_make_the_alarm_ring_too_early(start):
    opened, rules = waiting(since_s=start), RoundRules(round_timeout_s=0.3, on_timeout="none")
    now_s = start + (compute_alarm_s(opened, rules) - start)  # as a fleet adds up what it was told to wait
    assert check_round_deadline(opened, rules, now_s) is DeadlineAction.RECOVER


def test_the_failure_names_each_device_once():
    error = make_timeout_error(
        waiting(), RoundRules(round_timeout_s=5.0), number=4, now_s=20.0, missing=["a", "b", "a"]
    )
    assert str(error).startswith("round 4 waited 10 s for a, b: round_timeout_s = 5 passed twice")
