"""Metrics of predicted probabilities: log-loss, perplexity, Brier score, calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgefl.core.metrics import Direction, Metric, Sums
from edgefl.core.types import Array
from edgefl.tasks.metrics.exact_sums import read_sum, sum_products
from edgefl.tasks.metrics.predictions import MIN_CLASSES, ClassScores, read_class_scores

NUM_CALIBRATION_BINS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanOverExamples(Metric):
    """Mean of a figure of each example, and `finish` of that mean; `name` is for messages."""

    name: str
    compute: Callable[[ClassScores], Array]
    finish: Callable[[float], float] = float
    direction: Direction = "min"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        scores = read_class_scores(outputs, targets, weights)
        scores.check_single_label(self.name)
        values = self.compute(scores)
        return {
            "sum": sum_products(values[:, None], scores.weights[:, None])[0],
            "total": np.asarray(scores.weights.sum()),
            "invalid": np.asarray(scores.num_invalid, np.int64),
        }

    def combine(self, sums: Sums) -> float:
        total, weight = read_sum(sums["sum"]), float(sums["total"])
        if total is None or not weight or sums["invalid"]:
            return float("nan")
        try:
            value = self.finish(float(total) / weight)
        except OverflowError:
            return float("nan")
        return value if math.isfinite(value) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationError(Metric):
    """Expected calibration error of the predicted class: mean distance of confidence and accuracy in 15 bins.

    Source: Guo et al., On Calibration of Modern Neural Networks, ICML 2017, equation 5.
    """

    direction: Direction = "min"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        scores = read_class_scores(outputs, targets, weights)
        scores.check_single_label("calibration-error")
        confidence = scores.probabilities.max(axis=1)
        is_known = np.isfinite(confidence)
        # Bin i is (i / 15, (i + 1) / 15], as in the paper.
        bins = np.clip(np.ceil(np.where(is_known, confidence, 0.0) * NUM_CALIBRATION_BINS) - 1, 0, None)
        is_in = (bins.astype(np.int64)[:, None] == np.arange(NUM_CALIBRATION_BINS)) * scores.weights[:, None]
        return {
            "confidence": sum_products(np.where(is_known, confidence, 0.0)[:, None], is_in),
            "right": (scores.predicted == scores.targets) @ is_in,
            "total": is_in.sum(axis=0),
            "invalid": np.asarray(scores.num_invalid + int((~is_known).sum()), np.int64),
        }

    def combine(self, sums: Sums) -> float:
        total = float(sums["total"].sum())
        confidences = [read_sum(each) for each in sums["confidence"]]
        if not total or sums["invalid"] or None in confidences:
            return float("nan")
        differences = [
            abs(float(confidence) - float(right))
            for confidence, right in zip(confidences, sums["right"], strict=True)
            if confidence is not None
        ]
        return math.fsum(differences) / total


def compute_log_losses(scores: ClassScores) -> Array:
    """Returns the negative logarithm of the probability of the right class, [n]."""
    with np.errstate(invalid="ignore"):
        shifted = scores.logits - scores.logits.max(axis=1, keepdims=True)
        own = shifted[np.arange(len(shifted)), scores.targets]
        losses: Array = np.log(np.exp(shifted).sum(axis=1)) - own
    return losses


def compute_brier_scores(scores: ClassScores) -> Array:
    """Returns the squared distance of the probabilities to 1 and 0s; of two classes, that of class 1 alone, [n]."""
    distances = np.square(scores.probabilities - scores.is_target)
    return np.asarray(distances[:, 1] if scores.num_classes == MIN_CLASSES else distances.sum(axis=1))
