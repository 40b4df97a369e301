"""What ten boards add up to is what scikit-learn says of all of their examples together."""

import math
import warnings
from functools import reduce
from itertools import pairwise

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from edgefl.core.errors import TaskError
from edgefl.core.metrics import add_sums
from edgefl.tasks.metrics.registry import make_metric

EXACT = 1e-9
SIZES = (1, 0, 7, 130, 2, 55, 13, 300, 4, 88)
"""Examples of ten boards, one of which has none."""
NUM_EXAMPLES = sum(SIZES)


def softmax(logits):
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def over_boards(name, outputs, targets, weights=None):
    """The metric of sums that each board computes in two batches, and that are then added in another order."""
    metric, stops = make_metric(name), np.cumsum(SIZES)
    edges = [0, *(edge for stop, size in zip(stops, SIZES, strict=True) for edge in (stop - size // 2, stop))]
    sums = [
        metric.partial(outputs[start:stop], targets[start:stop], None if weights is None else weights[start:stop])
        for start, stop in pairwise(edges)
    ]
    return metric.combine(reduce(add_sums, [*sums[1::2], *reversed(sums[::2])]))


@pytest.fixture(scope="module")
def classes():
    rng = np.random.default_rng(31)
    targets = rng.choice(4, NUM_EXAMPLES, p=(0.55, 0.3, 0.1, 0.05))
    logits = rng.normal(size=(NUM_EXAMPLES, 4)) + 1.5 * np.eye(4)[targets]
    return logits.astype(np.float32), targets


@pytest.fixture(scope="module")
def labels():
    rng = np.random.default_rng(7)
    targets = (rng.random((NUM_EXAMPLES, 3)) < (0.5, 0.2, 0.05)).astype(np.int64)
    return rng.normal(size=targets.shape) + 2.0 * targets - 1.0, targets


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(5)
    targets = rng.normal(size=NUM_EXAMPLES)
    return targets + 0.3 * rng.normal(size=NUM_EXAMPLES), targets


OF_CLASSES = {
    "accuracy": lambda y, z: sklearn_metrics.accuracy_score(y, z.argmax(1)),
    "top-2": lambda y, z: sklearn_metrics.top_k_accuracy_score(y, z, k=2),
    "balanced-accuracy": lambda y, z: sklearn_metrics.balanced_accuracy_score(y, z.argmax(1)),
    "f1-macro": lambda y, z: sklearn_metrics.f1_score(y, z.argmax(1), average="macro"),
    "f1-micro": lambda y, z: sklearn_metrics.f1_score(y, z.argmax(1), average="micro"),
    "f1:2": lambda y, z: sklearn_metrics.f1_score(y, z.argmax(1), average=None)[2],
    "iou": lambda y, z: sklearn_metrics.jaccard_score(y, z.argmax(1), average="macro"),
    "iou:1": lambda y, z: sklearn_metrics.jaccard_score(y, z.argmax(1), average=None)[1],
    "log-loss": lambda y, z: sklearn_metrics.log_loss(y, softmax(z.astype(float))),
    "perplexity": lambda y, z: math.exp(sklearn_metrics.log_loss(y, softmax(z.astype(float)))),
    "brier": lambda y, z: sklearn_metrics.brier_score_loss(y, softmax(z.astype(float))),
}
OF_LABELS = {
    "accuracy": lambda y, z: sklearn_metrics.accuracy_score(y, z > 0),
    "f1-macro": lambda y, z: sklearn_metrics.f1_score(y, z > 0, average="macro"),
    "f1-micro": lambda y, z: sklearn_metrics.f1_score(y, z > 0, average="micro"),
    "f1:1": lambda y, z: sklearn_metrics.f1_score(y, z > 0, average=None)[1],
    "iou": lambda y, z: sklearn_metrics.jaccard_score(y, z > 0, average="macro"),
}
OF_VALUES = {
    "rmse": sklearn_metrics.root_mean_squared_error,
    "mae": sklearn_metrics.mean_absolute_error,
    "r2": sklearn_metrics.r2_score,
    "pinball:0.9": lambda y, p, **more: sklearn_metrics.mean_pinball_loss(y, p, alpha=0.9, **more),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_a_metric_of_classes_over_boards_is_that_of_the_pooled_data(name, classes):
    logits, targets = classes
    assert over_boards(name, logits, targets) == pytest.approx(OF_CLASSES[name](targets, logits), abs=EXACT)


@pytest.mark.parametrize("name", OF_LABELS)
def test_a_metric_of_several_labels_over_boards_is_that_of_the_pooled_data(name, labels):
    logits, targets = labels
    assert over_boards(name, logits, targets) == pytest.approx(OF_LABELS[name](targets, logits), abs=EXACT)


@pytest.mark.parametrize("name", OF_VALUES)
def test_a_metric_of_values_over_boards_is_that_of_the_pooled_data(name, values):
    outputs, targets = values
    weights = np.random.default_rng(1).random(NUM_EXAMPLES)
    assert over_boards(name, outputs, targets) == pytest.approx(OF_VALUES[name](targets, outputs), abs=EXACT)
    weighted = OF_VALUES[name](targets, outputs, sample_weight=weights)
    assert over_boards(name, outputs[:, None], targets, weights) == pytest.approx(weighted, abs=EXACT)


def test_quantiles_of_one_target_over_boards_are_those_of_the_pooled_data(values):
    levels = (0.1, 0.5, 0.9)
    outputs, targets = values[0][:, None] + (0.4, 0.0, -0.4), values[1]  # crossing: the interval is still theirs
    losses = [
        sklearn_metrics.mean_pinball_loss(targets, outputs[:, at], alpha=level) for at, level in enumerate(levels)
    ]
    assert over_boards("pinball:0.1+0.5+0.9", outputs, targets) == pytest.approx(np.mean(losses), abs=EXACT)
    inside = np.mean(np.abs(targets - values[0]) <= 0.4)
    for column in (targets, targets[:, None]):
        assert over_boards("coverage", outputs, column) == pytest.approx(inside, abs=EXACT)
    assert 0.5 < inside < 0.95


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_quantile_of_errors_over_boards_is_at_most_a_bin_above_that_of_the_pooled_data(values, level, scale):
    outputs = scale * np.stack([values[0], values[0] + 1.0], axis=1)
    targets = scale * np.stack([values[1], values[1]], axis=1)
    errors = np.sqrt(np.mean((outputs - targets) ** 2, axis=1))
    exact = np.quantile(errors, level, method="inverted_cdf")
    found = over_boards(f"error-quantile:{level}", outputs, targets)
    assert exact < found <= 1.0222 * exact


def test_errors_of_nothing_and_without_a_limit_are_in_the_first_and_in_the_last_bin():
    metric = make_metric("error-quantile:0.5")
    for error, edge in ((0.0, 2.0 ** (-32 + 1 / 32)), (1e300, 2.0**32)):
        assert metric.combine(metric.partial(np.full(3, error), np.zeros(3))) == edge


@pytest.mark.parametrize(
    ("name", "outputs", "targets"),
    [
        ("coverage", np.zeros((2, 3)), np.zeros((2, 3))),
        ("coverage", np.zeros((2, 1)), np.zeros(2)),
        ("pinball:0.1+0.9", np.zeros((2, 3)), np.zeros(2)),
    ],
)
def test_quantiles_are_of_one_target_each(name, outputs, targets):
    with pytest.raises(TaskError, match=r"a metric of quantiles needs outputs \[n, 2( or more)?\] and targets \[n\]"):
        make_metric(name).partial(outputs, targets)


@pytest.mark.parametrize("name", OF_VALUES)
def test_several_outputs_have_a_metric_each_and_the_mean_of_them_counts(name, values):
    outputs, targets = (np.stack([each, 100 * each[::-1], each**2], axis=1) for each in values)
    assert over_boards(name, outputs, targets) == pytest.approx(OF_VALUES[name](targets, outputs), abs=EXACT)


@pytest.mark.parametrize(
    ("name", "of_binary"),
    [
        ("f1:1", lambda y, z: sklearn_metrics.f1_score(y, z > 0)),
        ("accuracy", lambda y, z: sklearn_metrics.accuracy_score(y, z > 0)),
        ("log-loss", lambda y, z: sklearn_metrics.log_loss(y, 1 / (1 + np.exp(-z)))),
        ("brier", lambda y, z: sklearn_metrics.brier_score_loss(y, 1 / (1 + np.exp(-z)))),
    ],
)
def test_one_output_is_the_logit_of_class_1(name, of_binary, labels):
    logits, targets = labels[0][:, 0], labels[1][:, 0]
    for outputs in (logits, logits[:, None], np.stack([np.zeros_like(logits), logits], axis=1)):
        assert over_boards(name, outputs, targets) == pytest.approx(of_binary(targets, logits), abs=EXACT)


def test_the_calibration_error_is_the_mean_gap_of_confidence_and_accuracy_in_15_bins(classes):
    logits, targets = classes
    probabilities = softmax(logits.astype(float))
    confidence, right = probabilities.max(1), probabilities.argmax(1) == targets
    gaps = 0.0
    for low in range(15):
        chosen = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        gaps += abs(confidence[chosen].sum() - right[chosen].sum())
    assert over_boards("calibration-error", logits, targets) == pytest.approx(gaps / len(targets), abs=EXACT)


def test_a_confidence_at_the_edge_of_two_bins_belongs_to_the_lower():
    logits = np.array([[0.0, 800.0], [0.0, np.log(19.0)]])  # a confidence of 1, which is wrong, and one of 0.95
    assert over("calibration-error", logits, np.array([0, 1])) == pytest.approx(0.475)


def bounds_of_areas(positives, negatives):
    """How far the area under the ROC curve may be off, and between what the average precision lies."""
    roc = 0.5 * (positives @ negatives) / (positives.sum() * negatives.sum())
    found, wrong, least, most = 0.0, 0.0, 0.0, 0.0
    for here, false in zip(positives[::-1], negatives[::-1], strict=True):
        steps = found + np.arange(1, here + 1)
        least += (steps / (steps + wrong + false)).sum()
        most += here * (found + here) / max(1.0, found + here + wrong)
        found, wrong = found + here, wrong + false
    return roc, least / found, most / found


@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
def test_areas_under_curves_lie_within_the_bound_that_their_bins_promise(classes, labels, scale):
    cases = [
        (classes[0][:, :1], (classes[1] == 0).astype(int), classes[0][:, 0]),
        (labels[0], labels[1], labels[0]),
        (classes[0], classes[1], None),
    ]
    for unscaled, targets, own_scores in cases:
        outputs = unscaled * scale
        scores = softmax(outputs.astype(float)) if own_scores is None else own_scores
        ones = np.eye(outputs.shape[1])[targets] if scores.shape == outputs.shape != targets.shape else targets
        sums = make_metric("auroc").partial(outputs, targets)
        chosen = [i for i, row in enumerate(sums["positives"]) if row.sum()]
        bounds = np.mean([bounds_of_areas(sums["positives"][i], sums["negatives"][i]) for i in chosen], axis=0)
        roc = sklearn_metrics.roc_auc_score(ones, scores)
        assert abs(over_boards("auroc", outputs, targets) - roc) <= bounds[0] + EXACT
        for area in (over_boards("auprc", outputs, targets), sklearn_metrics.average_precision_score(ones, scores)):
            assert bounds[1] - EXACT <= area <= bounds[2] + EXACT
        if scale == 1:  # of usual logits the bounds are narrow
            assert bounds[0] < 0.005
            assert bounds[2] - bounds[1] < 0.02


@pytest.mark.parametrize("offset", [1e6, 1e9, 1e12])
def test_an_offset_of_the_targets_costs_the_explained_variance_no_digit(values, offset):
    outputs, targets = values[0] + offset, values[1] + offset
    errors, centred = outputs - targets, targets - offset  # the same rounded values, brought back without an error
    expected = 1 - (errors @ errors) / np.square(centred - centred.mean()).sum()
    assert over_boards("r2", outputs, targets) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(
    ("targets", "outputs"), [([3.0, 3.0, 3.0], [3.0, 3.0, 3.0]), ([3.0, 3.0, 3.0], [3.0, 2.0, 3.0])]
)
def test_equal_targets_are_explained_wholly_or_not_at_all(targets, outputs):
    metric = make_metric("r2")
    assert metric.combine(metric.partial(np.array(outputs), np.array(targets))) == sklearn_metrics.r2_score(
        targets, outputs
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert math.isnan(metric.combine(metric.partial(np.ones(1), np.ones(1))))


def test_a_class_that_occurs_nowhere_counts_in_no_mean_and_one_without_targets_has_no_area():
    logits, targets = np.eye(4)[[0, 1, 1, 3]] * 4.0, np.array([0, 1, 0, 0])
    assert over("f1-macro", logits, targets) == pytest.approx(np.mean([0.5, 2 / 3, 0.0]))
    assert over("balanced-accuracy", logits, targets) == pytest.approx(np.mean([1 / 3, 1.0]))
    assert math.isnan(over("f1:2", logits, targets))
    assert over("auroc", logits, targets) == pytest.approx(np.mean([2 / 3, 5 / 6]))
    assert math.isnan(over("auroc", logits, np.zeros(4, int)))


def over(name, outputs, targets):
    metric = make_metric(name)
    return metric.combine(metric.partial(outputs, targets))


def test_positions_of_an_example_count_singly_and_ignored_ones_not_at_all():
    logits = np.moveaxis(np.eye(3)[np.array([[0, 1], [2, 2]])], -1, 1) * 9.0  # [2, 3 classes, 2 positions]
    assert over("iou", logits, np.array([[0, 1], [2, 1]])) == pytest.approx(np.mean([1.0, 0.5, 0.5]))
    assert over("accuracy", logits, np.array([[0, 1], [2, -100]])) == 1.0
    assert over("perplexity", logits, np.array([[0, 1], [2, -100]])) == pytest.approx(1 + 2 * math.exp(-9))


def test_equal_logits_rank_as_the_first_class_does():
    logits = np.zeros((4, 4))
    assert over("top-2", logits, np.arange(4)) == 0.5
    assert over("accuracy", logits, np.arange(4)) == 0.25


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "said"),
    [
        ("accuracy", np.zeros((2, 3)), np.array([0, 3]), "a target is 3.0, it must be a whole number from 0 to 2"),
        ("accuracy", np.zeros((2, 3)), np.array([0.5, 1]), "a target is 0.5"),
        ("accuracy", np.zeros((2, 3)), np.zeros(3, int), "must be a class for each row"),
        ("f1:5", np.zeros((2, 3)), np.zeros(2, int), "of class 5, the model has classes 0 to 2"),
        ("log-loss", np.zeros((2, 3)), np.zeros((2, 3)), "log-loss is for one class an example"),
        ("top-2", np.zeros((2, 3)), np.zeros((2, 3)), "top-2 is for one class an example"),
        ("rmse", np.zeros((2, 3)), np.zeros(2), "must have the shape of its outputs [2, 3], got [2]"),
        ("rmse", np.array(["a"]), np.zeros(1), "needs arrays of numbers"),
    ],
)
def test_what_does_not_fit_the_metric_is_said_in_one_line(name, outputs, targets, said):
    with pytest.raises(TaskError) as refused:
        make_metric(name).partial(outputs, targets)
    assert said.replace("3.0", "3") in str(refused.value).replace("3.0", "3")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("weights", [np.array([1.0]), np.array([1.0, -1.0]), np.array([1.0, np.nan])])
def test_weights_that_are_none_are_refused(weights):
    with pytest.raises(TaskError, match="weights must be 2 numbers of at least 0"):
        make_metric("rmse").partial(np.zeros(2), np.zeros(2), weights)
