"""The sums of a task's metrics on the wire: of one length, one type and bounded, or refused."""

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.metrics import MAX_SUM, Metric, MetricSet, compute_sums, make_metric_set
from edgefl.tasks.metrics.registry import make_metric


def make_set(*names, num_outputs=3, has_classes=True):
    targets = np.zeros(0, np.int64) if has_classes else np.zeros((0, num_outputs), np.float32)
    return make_metric_set({name: make_metric(name) for name in names}, num_outputs, targets)


def body_of(metrics, seed, count=20):
    rng = np.random.default_rng(seed)
    examples = rng.normal(size=(count, 3)), rng.integers(0, 3, count)
    return metrics.encode(compute_sums(metrics.metrics, [(*examples, None)])), examples


def test_bodies_of_boards_are_combined_to_the_metrics_of_all_their_examples():
    metrics = make_set("f1-macro", "log-loss", "auroc")
    bodies, examples = zip(*[body_of(metrics, seed, count=20 + 9 * seed) for seed in range(4)], strict=True)
    assert {len(body) for body in bodies} == {metrics.num_bytes}
    pooled = [np.concatenate(each) for each in zip(*examples, strict=True)]
    expected = {name: metric.combine(metric.partial(*pooled)) for name, metric in metrics.metrics.items()}
    assert metrics.combine(bodies) == expected == metrics.combine(bodies[::-1])
    assert metrics.combine([]) == {}


def test_a_metric_without_a_value_is_left_out_and_no_metrics_need_no_bytes():
    metrics = make_set("f1:2", "accuracy")
    sums = compute_sums(metrics.metrics, [(np.eye(3)[[0, 1]], np.array([0, 1]), None)])
    assert metrics.combine([metrics.encode(sums)]) == {"accuracy": 1.0}
    assert MetricSet().combine([b"", b""]) == {}
    assert (MetricSet().num_bytes, bool(MetricSet()), bool(metrics)) == (0, False, True)


@pytest.mark.parametrize("change", [lambda body: body[:-1], lambda body: body + b"\0", lambda _: b""])
def test_sums_of_another_length_are_refused(change):
    metrics = make_set("f1-macro")
    with pytest.raises(ValueError, match=f"{metrics.num_bytes} were asked for"):
        metrics.decode(change(body_of(metrics, 1)[0]))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 2 * MAX_SUM, -2 * MAX_SUM])
def test_sums_that_no_device_can_have_are_refused(wrong):
    metrics = make_set("f1-macro")
    body = bytearray(body_of(metrics, 1)[0])
    body[:8] = np.float64(wrong).tobytes()
    with pytest.raises(ValueError, match="sums of metric f1-macro hold a number beyond"):
        metrics.decode(bytes(body))
    body[:8] = np.float64(MAX_SUM).tobytes()
    assert metrics.decode(bytes(body))


@pytest.mark.parametrize("wrong", [-(2**63), 2**62])
def test_whole_numbers_that_would_overflow_when_added_are_refused(wrong):
    metrics = make_set("rmse", num_outputs=1, has_classes=False)
    body = metrics.encode(compute_sums(metrics.metrics, [(np.zeros((2, 1)), np.ones((2, 1)), None)]))
    assert metrics.combine([body] * 3) == {"rmse": 1.0}
    with pytest.raises(ValueError, match="sums of metric rmse"):
        metrics.decode(np.int64(wrong).tobytes() + body[8:])


class InverseMean(Metric):
    direction = "min"

    def partial(self, outputs, targets, weights=None):
        return {"total": np.asarray(float(np.sum(targets)))}

    def combine(self, sums):
        return 1.0 / float(sums["total"])


def test_a_metric_that_fails_on_what_a_device_sent_is_left_out(caplog):
    metrics = MetricSet({"inverse": InverseMean()}, (("inverse", "total", "<f8", ()),))
    assert metrics.combine([np.float64(4.0).tobytes()]) == {"inverse": 0.25}
    assert metrics.combine([np.float64(0.0).tobytes()]) == {}
    assert "metric inverse has no value: ZeroDivisionError" in caplog.text


def test_a_model_with_other_outputs_than_the_task_says_is_told_so():
    metrics = make_set("f1-macro", num_outputs=4)
    with pytest.raises(TaskError, match="num_outputs of the task must be the number of the model's outputs"):
        body_of(metrics, 1)


def test_sums_of_more_than_a_megabyte_are_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match="sums of at most 1048576 bytes, got 1 with 8192008"):
        make_set("auroc", num_outputs=1000)
