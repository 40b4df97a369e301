"""Metrics of the order of scores: areas under curves, from histograms of the scores.

Scores in one bin count as equal. So `auroc` is wrong by at most half of the share of the pairs of a positive and a
negative example that lie in one bin. `auprc`, the average precision, lies within bounds that follow from the bins
too: a positive is counted with a precision between that with all negatives of its bin above it and that with none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgefl.core.metrics import Direction, Metric, Sums
from edgefl.core.types import Array
from edgefl.tasks.metrics.predictions import MIN_CLASSES, ClassScores, read_class_scores

NUM_BINS = 512
"""Bins of log-odds x, equal in x / (1 + |x|): finest about 0, 0.004 wide, and endless at both ends."""
_MAX_LOG_ODDS = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramMetric(Metric):
    """Mean over the classes, each against the others, of an area that `compute` finds from two histograms.

    `compute` gets positives and negatives by bin, highest scores first. Of two classes, class 1 alone counts; of
    several, those that have positives and negatives.
    """

    compute: Callable[[Array, Array], float]
    direction: Direction = "max"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        scores = read_class_scores(outputs, targets, weights)
        num_classes, is_target = scores.num_classes, scores.is_target
        bins = _find_bins(scores.logits if scores.is_multi_label else compute_log_odds(scores.logits))
        if num_classes == MIN_CLASSES and not scores.is_multi_label:
            is_counted = np.broadcast_to(np.array([False, True]), is_target.shape)
        else:
            is_counted = np.ones_like(is_target)
        return {
            "positives": _count(bins, scores, is_target & is_counted),
            "negatives": _count(bins, scores, ~is_target & is_counted),
            "invalid": np.asarray(scores.num_invalid, np.int64),
        }

    def combine(self, sums: Sums) -> float:
        areas = [
            self.compute(positives[::-1], negatives[::-1])
            for positives, negatives in zip(sums["positives"], sums["negatives"], strict=True)
            if positives.sum() > 0 and negatives.sum() > 0
        ]
        return float(np.mean(areas)) if areas and not sums["invalid"] else float("nan")


def compute_log_odds(logits: Array) -> Array:
    """Returns log(p / (1 - p)) of the softmax probabilities, [n, classes], without the rounding of 1 - p."""
    with np.errstate(divide="ignore", invalid="ignore"):
        shifted = logits - logits.max(axis=1, keepdims=True)
        shares = np.exp(shifted)
        others = shares.sum(axis=1, keepdims=True) - shares
        # Beside the largest, the others are summed by themselves: in the difference they would vanish.
        rows, largest = np.arange(len(logits)), logits.argmax(axis=1)
        shares[rows, largest] = 0.0
        others[rows, largest] = shares.sum(axis=1)
        odds: Array = shifted - np.log(others)
    return odds


def compute_roc_area(positives: Array, negatives: Array) -> float:
    """Returns the share of the pairs in which the positive has the higher score; half of those in one bin."""
    below = negatives.sum() - np.cumsum(negatives) + 0.5 * negatives
    return float((positives @ below) / (positives.sum() * negatives.sum()))


def compute_average_precision(positives: Array, negatives: Array) -> float:
    """Returns the mean over the positives of the precision at the score of their bin."""
    found, total = np.cumsum(positives), np.cumsum(positives + negatives)
    precision = np.divide(found, total, out=np.zeros_like(found), where=total > 0)
    return float((positives @ precision) / positives.sum())


def _find_bins(odds: Array) -> Array:
    bounded = np.clip(np.nan_to_num(odds, posinf=_MAX_LOG_ODDS, neginf=-_MAX_LOG_ODDS), -_MAX_LOG_ODDS, _MAX_LOG_ODDS)
    place = 0.5 + 0.5 * bounded / (1.0 + np.abs(bounded))
    return np.asarray(np.minimum((place * NUM_BINS).astype(np.int64), NUM_BINS - 1))


def _count(bins: Array, scores: ClassScores, chosen: Array) -> Array:
    """Returns the weights by class and bin, [classes, NUM_BINS]."""
    places = (bins + NUM_BINS * np.arange(scores.num_classes))[chosen]
    weights = np.broadcast_to(scores.weights[:, None], chosen.shape)[chosen]
    counts = np.bincount(places, weights, minlength=NUM_BINS * scores.num_classes)
    return counts.astype(np.float64).reshape(scores.num_classes, NUM_BINS)
