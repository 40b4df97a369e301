"""What evaluations amount to, worked out by hand."""

from dataclasses import replace

import pytest

from edgefl.core.types import EvaluateInstruction, EvaluateResult, InstructionFailed, UpdateStatus
from edgefl.engine.evaluations import (
    DeviceAccuracy,
    DeviceEvaluationTracker,
    EvaluationTracker,
    compute_mean_accuracy,
    compute_trusted_metrics,
    compute_trusted_scores,
)
from edgefl.engine.progress import MetricGoal, StoppingCriteria


def order(device, subject, version=1):
    key = f"e{version}-{device}:{subject}"
    return EvaluateInstruction(assignment_id=key, device_id=device, version=version, round=version, subject=subject)


def result(device, subject, accuracy, *, version=1, source="evaluator", num_examples=10):
    return EvaluateResult(
        assignment_id=f"e{version}-{device}:{subject}", device_id=device, version=version, round=version,
        source=source, num_examples=num_examples, loss=1.0, accuracy=accuracy, subject=subject,
    )  # fmt: skip


def lost(device, subject, version=1):
    key = f"e{version}-{device}:{subject}"
    return InstructionFailed(device_id=device, assignment_id=key, outcome=UpdateStatus.LOST, reason="gone")


def test_every_node_counts_alike_however_many_examples_it_was_tested_on():
    scores = DeviceEvaluationTracker()
    scores.record_dispatch([order("a", "a"), order("b", "b")])
    assert scores.record_event(result("a", "a", 0.9, source="device", num_examples=1000)) is None
    assert scores.record_event(result("b", "b", 0.5, source="device", num_examples=1)) == DeviceAccuracy(
        round=1, mean=pytest.approx(0.7), worst=0.5
    )
    assert (scores.outstanding, scores.results) == ({}, {})


def test_several_evaluators_of_one_node_count_by_their_examples():
    scores = DeviceEvaluationTracker()
    scores.record_dispatch([order(judge, node) for node in "ab" for judge in "xy"])
    scores.record_event(result("x", "a", 1.0, num_examples=30))
    scores.record_event(result("y", "a", 0.0, num_examples=10))
    scores.record_event(result("x", "b", 0.5))
    assert scores.record_event(result("y", "b", 0.5)) == DeviceAccuracy(round=1, mean=0.625, worst=0.5)


def test_a_node_whose_evaluation_was_lost_is_left_out_and_one_without_any_result_says_nothing():
    scores = DeviceEvaluationTracker()
    scores.record_dispatch([order("x", "a"), order("x", "b"), order("x", "a", version=2)])
    scores.record_event(result("x", "a", 0.75))
    assert scores.record_event(lost("x", "b")) == DeviceAccuracy(round=1, mean=0.75, worst=0.75)
    assert scores.record_event(lost("x", "a", version=2)) is None
    assert scores.outstanding == {}


def test_versions_are_told_apart_and_may_come_in_any_order():
    scores = DeviceEvaluationTracker()
    scores.record_dispatch([order("x", "a"), order("x", "a", version=2)])
    assert scores.record_event(result("x", "a", 0.5, version=2)) == DeviceAccuracy(round=2, mean=0.5, worst=0.5)
    assert scores.record_event(result("x", "a", 0.25)) == DeviceAccuracy(round=1, mean=0.25, worst=0.25)


def test_at_the_end_what_came_counts_and_nobody_is_waited_for():
    scores = DeviceEvaluationTracker()
    scores.record_dispatch([order("x", "a"), order("x", "b"), order("x", "a", version=2)])
    scores.record_event(result("x", "a", 0.5))
    assert scores.complete_pending() == [DeviceAccuracy(round=1, mean=0.5, worst=0.5)]
    assert (scores.outstanding, scores.complete_pending()) == ({}, [])
    assert scores.record_event(result("x", "b", 0.1)) is None


def test_the_global_model_is_not_one_of_the_nodes():
    scores = DeviceEvaluationTracker()
    scores.record_dispatch([order("x", "")])
    assert scores.outstanding == {}
    assert scores.record_event(result("x", "", 0.9)) is None


def test_devices_own_splits_count_only_where_there_is_no_evaluator():
    own = [result("a", "", 0.2, source="device"), result("b", "", 0.4, source="device", num_examples=30)]
    assert compute_mean_accuracy(own) == pytest.approx(0.35)
    assert compute_mean_accuracy([*own, result("x", "", 0.9)]) == 0.9
    assert compute_mean_accuracy([]) is None


def test_an_evaluation_of_values_has_a_trusted_loss_and_no_accuracy():
    results = [result(f"d{number}", "", None) for number in range(3)]
    assert compute_mean_accuracy(results) is None
    assert compute_trusted_scores(results) == (None, 1.0)
    assert compute_mean_accuracy([*results, result("x", "", 0.9)]) == 0.9


def test_the_coordinators_own_evaluation_is_trusted_and_else_the_median_of_three_or_more():
    def trusted(*pairs):
        return compute_trusted_scores(
            [result(f"d{number}", "", accuracy, source=source) for number, (source, accuracy) in enumerate(pairs)]
        )[0]

    assert trusted(("evaluator", 1.0), ("evaluator", 1.0)) is None
    assert trusted(("evaluator", 0.4), ("evaluator", 0.5), ("evaluator", 1.0)) == 0.5
    assert trusted(("evaluator", 1.0), ("evaluator", 1.0), ("coordinator", 0.3)) == 0.3
    assert trusted(("device", 0.2), ("device", 0.3), ("device", 1.0), ("evaluator", 1.0)) == 0.3
    assert trusted(("evaluator", 0.4), ("evaluator", 0.5), ("evaluator", None)) == 0.4, "silence is no veto"
    assert trusted(("evaluator", 0.4), ("evaluator", None), ("evaluator", None)) is None
    twice = [result("rogue", "", 1.0, version=1)] * 3
    assert compute_trusted_scores(twice) == (None, None)


def measured(device, value, *, version=1, source="device"):
    metrics = {} if value is None else {"rmse": value}
    return replace(result(device, "", None, version=version, source=source), metrics=metrics)


def test_a_metric_is_trusted_from_the_coordinator_or_as_the_median_of_three():
    boards = [measured("a", 1.0), measured("b", 2.0), measured("c", 1e9)]
    assert compute_trusted_metrics(boards) == {"rmse": 2.0}
    assert compute_trusted_metrics(boards[:2]) == {}
    assert compute_trusted_metrics([boards[0]] * 3) == {}
    assert compute_trusted_metrics(boards[:1], trusts_single=True) == {"rmse": 1.0}
    assert compute_trusted_metrics([*boards, measured("coordinator", 3.0, source="coordinator")]) == {"rmse": 3.0}
    assert compute_trusted_metrics([*boards[:2], measured("c", None)]) == {}, "two have a value"


@pytest.mark.parametrize(
    ("goal", "reached_at"),
    [
        (MetricGoal(name="rmse", limit=2.0, is_max=False), 3),
        (MetricGoal(name="rmse", limit=4.0, is_max=True), 1),
        (MetricGoal(name="rmse", limit=0.5, is_max=False), None),
        (MetricGoal(name="mae", limit=9.0, is_max=False), None),
    ],
)
def test_a_goal_of_a_metric_is_met_from_the_side_that_its_direction_says(goal, reached_at):
    tracker, criteria, found = EvaluationTracker(), StoppingCriteria(until=goal), []
    for version, value in ((1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0)):
        tracker.record_dispatch([order("x", "", version)])
        tracker.record_event(measured("x", value, version=version, source="coordinator"))
        found.append(criteria.is_quality_reached(tracker))
    assert (found.index(True) + 1 if True in found else None) == reached_at
    mean = StoppingCriteria(until=MetricGoal(name="rmse", limit=2.0, is_max=False), accuracy_window=3)
    assert mean.is_metric_reached(tracker), "the mean of 3, 2 and 1"


def test_an_older_version_that_is_measured_late_does_not_count():
    tracker = EvaluationTracker()
    tracker.record_dispatch([order("x", "", 1), order("x", "", 2)])
    for version, value in ((2, 3.0), (1, 1.0)):
        tracker.record_event(measured("x", value, version=version, source="coordinator"))
    assert tracker.recent_metrics == {"rmse": [3.0]}
