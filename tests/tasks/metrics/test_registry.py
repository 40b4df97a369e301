"""The contract of every metric, and what names lead to one."""

import math
from functools import reduce
from itertools import permutations

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.metrics import TYPES, add_sums, compute_sums
from edgefl.tasks.metrics.registry import BUILT_IN, list_metric_names, make_metric

NAMES = (*BUILT_IN, "top-2", "f1:1", "iou:0", "pinball:0.1", "pinball:0.1+0.5+0.9", "error-quantile:0.8")
OF_VALUES = {"error-quantile:0.8", "mae", "pinball:0.1", "r2", "rmse"}
HALVES = """
import numpy as np
from edgefl import Metric
class Bias(Metric):
    direction = "min"
    def partial(self, outputs, targets, weights=None):
        return {"sum": np.asarray((outputs - targets).sum()), "count": np.asarray(len(targets), np.int64)}
    def combine(self, sums):
        return float(sums["sum"] / sums["count"]) if sums["count"] else float("nan")
class Aimless(Bias):
    direction = "up"
class Small(Bias):
    def partial(self, outputs, targets, weights=None):
        return {"sum": np.zeros(1, np.float32)}
class Plain:
    direction = "min"
"""


def make_examples(name, count, seed):
    """Outputs of three and targets that fit the metric."""
    rng = np.random.default_rng(seed)
    outputs = 3.0 * rng.normal(size=(count, 3))
    return outputs, (rng.normal(size=(count, 3)) if name in OF_VALUES else rng.integers(0, 3, count))


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_merging_does_not_matter_and_nothing_is_neutral(name):
    metric = make_metric(name)
    parts = [metric.partial(*make_examples(name, count, count)) for count in (0, 1, 5, 40)]
    merged = [reduce(add_sums, order) for order in permutations(parts)]
    nested = add_sums(add_sums(parts[0], parts[1]), add_sums(parts[2], parts[3]))
    for other in (*merged[1:], nested):
        assert {key: value.tobytes() for key, value in other.items()} == {
            key: value.tobytes() for key, value in merged[0].items()
        }
    assert all(not value.any() for value in parts[0].values())
    assert {key: value.shape for key, value in parts[0].items()} == {k: v.shape for k, v in parts[3].items()}
    assert all(value.dtype.str in TYPES for value in merged[0].values())
    assert math.isfinite(metric.combine(merged[0]))
    assert math.isnan(metric.combine(parts[0]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e300, -1e-320])
def test_outputs_that_are_no_numbers_end_in_nan_and_huge_ones_in_a_number_or_nan(name, wrong):
    metric = make_metric(name)
    outputs, targets = make_examples(name, 6, 1)
    outputs[2, 1] = wrong
    value = metric.combine(add_sums(metric.partial(outputs, targets), metric.partial(*make_examples(name, 9, 2))))
    assert math.isfinite(value) or math.isnan(value)
    if np.isnan(wrong):
        assert math.isnan(value)


@pytest.mark.parametrize("name", NAMES)
def test_weights_count_examples_as_often_as_they_say(name):
    metric = make_metric(name)
    outputs, targets = make_examples(name, 30, 3)
    often = np.random.default_rng(4).integers(0, 4, 30)
    weighted = metric.combine(metric.partial(outputs, targets, often))
    repeated = metric.combine(metric.partial(np.repeat(outputs, often, axis=0), np.repeat(targets, often, axis=0)))
    assert weighted == pytest.approx(repeated, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_that_gets_better_moves_in_its_direction(name):
    metric = make_metric(name)
    outputs, targets = make_examples(name, 200, 6)
    right = targets if name in OF_VALUES else 3.0 * np.eye(3)[targets]
    worse, better = (
        metric.combine(metric.partial(share * right + (1 - share) * outputs, targets)) for share in (0.1, 0.9)
    )
    assert (better < worse) == (metric.direction == "min")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("acuracy", "unknown metric 'acuracy' (did you mean accuracy?)"),
        ("top-0", "top-K needs a whole number from 1 to 1000"),
        ("top-x", "top-K needs"),
        ("f1:-1", "the class must be a number from 0 to 9999"),
        ("pinball:1", "the quantile must lie between 0 and 1"),
        ("pinball:0.1+", "must lie between 0 and 1, such as pinball:0.9 or pinball:0.1+0.9"),
        ("pinball:" + "+".join(["0.5"] * 101), "at most 100 quantiles, got 101"),
        ("error-quantile:95", "must lie between 0 and 1, such as error-quantile:0.95"),
        ("pinball:0.0", "the quantile must lie between 0 and 1"),
        ("os:path", "is of Python's own library"),
        ("strangers:Metric", "the module strangers is not allowed here"),
    ],
)
def test_a_name_that_is_no_metric_is_refused_in_one_line(name, said):
    with pytest.raises(ConfigError) as refused:
        make_metric(name)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_class_may_be_named_where_the_task_names_its_classes():
    assert make_metric("f1:cat", ("dog", "cat")) == make_metric("f1:1")
    with pytest.raises(ConfigError, match="the class must be a number from 0 to 1, or one of dog, cat"):
        make_metric("f1:2", ("dog", "cat"))


def test_a_package_and_an_allowed_module_bring_metrics_of_their_own(installed):
    installed({"halves": HALVES}, {"edgefl.metrics": {"bias": "halves:Bias"}})
    assert "bias" in list_metric_names()
    for name in ("bias", "halves:Bias"):
        metric = make_metric(name)
        sums = compute_sums({name: metric}, [(np.ones(3), np.zeros(3), None), (np.zeros(1), np.zeros(1), None)])
        assert metric.combine(sums[name]) == 0.75
        assert metric.direction == "min"
    with pytest.raises(ConfigError, match="direction must be 'min' or 'max', got 'up'"):
        make_metric("halves:Aimless")
    with pytest.raises(ConfigError, match=r"must be a class of halves that inherits from edgefl\.Metric"):
        make_metric("halves:Plain")
    with pytest.raises(TaskError, match="sum of its sums must be an array of int64 or float64, got float32"):
        compute_sums({"small": make_metric("halves:Small")}, [(np.ones(3), np.zeros(3), None)])


def test_sums_of_models_with_other_outputs_are_not_added():
    metric = make_metric("f1-macro")
    sums = [metric.partial(np.zeros((1, count)), np.zeros(1, int)) for count in (2, 3)]
    with pytest.raises(TaskError, match="must have one layout to be added"):
        add_sums(*sums)
