"""Metrics of predicted values. Of several outputs each has its own, and the metric is their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from edgefl.core.metrics import Direction, Metric, Sums
from edgefl.core.types import Array
from edgefl.tasks.metrics.exact_sums import read_sum, sum_exactly, sum_products
from edgefl.tasks.metrics.predictions import read_values, repeat_targets

MIN_R2_EXAMPLES = 2
BINS_PER_OCTAVE, MAX_EXPONENT = 32, 32
NUM_BINS = 2 * MAX_EXPONENT * BINS_PER_OCTAVE
"""Of errors from 2^-32 to 2^32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMetric(Metric):
    """Weighted mean of `compute` of the errors (true minus predicted), and `finish` of that mean, by output.

    Attributes:
        compute: [n, outputs] of errors to values [n, outputs], or [n, 1].
        num_quantiles: outputs of one target, such as its quantiles; None where each output has a target of its own,
            0 for any number from 2 on.
    """

    compute: Callable[[Array], Array]
    finish: Callable[[float], float] = float
    direction: Direction = "min"
    num_quantiles: int | None = None

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        if self.num_quantiles is not None:
            targets = repeat_targets(outputs, targets, self.num_quantiles)
        predicted, true, row_weights = read_values(outputs, targets, weights)
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.compute(true - predicted)
        return {
            "sum": sum_products(values, np.broadcast_to(row_weights, values.shape)),
            "total": np.asarray(row_weights.sum()),
        }

    def combine(self, sums: Sums) -> float:
        totals, weight = [read_sum(each) for each in sums["sum"]], float(sums["total"])
        if not weight or not totals:
            return float("nan")
        return _average([None if total is None else self.finish(float(total) / weight) for total in totals])


@dataclass(frozen=True, slots=True, kw_only=True)
class RSquared(Metric):
    """Coefficient of determination: the share of the targets' variance that is explained, at most 1.

    The variance is computed without rounding, so an offset of the targets costs no digit. Of targets that are all
    equal it is 1 where the errors are 0, else 0; of one example it is NaN.
    """

    direction: Direction = "max"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        predicted, true, row_weights = read_values(outputs, targets, weights)
        spread = np.broadcast_to(row_weights, true.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            errors = true - predicted
        return {
            "errors": sum_products(errors, errors, spread),
            "targets": sum_products(true, spread),
            "squares": sum_products(true, true, spread),
            "weights": sum_exactly(row_weights)[0],
            "count": np.asarray((row_weights > 0).sum(), np.int64),
        }

    def combine(self, sums: Sums) -> float:
        weight = read_sum(sums["weights"])
        if not weight or sums["count"] < MIN_R2_EXAMPLES or not len(sums["errors"]):
            return float("nan")
        columns = zip(sums["errors"], sums["targets"], sums["squares"], strict=True)
        return _average(
            [
                _compute_r2(read_sum(errors), read_sum(targets), read_sum(squares), weight)
                for errors, targets, squares in columns
            ]
        )


def _compute_r2(
    errors: Fraction | None, targets: Fraction | None, squares: Fraction | None, weight: Fraction
) -> float | None:
    if errors is None or targets is None or squares is None:
        return None
    variation = squares - targets * targets / weight
    if variation <= 0:
        return float(errors == 0)
    return float(1 - errors / variation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorQuantile(Metric):
    """Quantile of the examples' errors, each the root of the mean squared error of its outputs.

    From a histogram of `NUM_BINS` bins whose edges grow by 2.2 %: the value is the upper edge of the bin in which an
    error of that rank lies, so it is at most 2.2 % above it. An error below 2^-32 counts as that, one from 2^32 on is
    in the last bin.
    """

    quantile: float
    direction: Direction = "min"

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        predicted, true, row_weights = read_values(outputs, targets, weights)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            errors = np.sqrt(np.square(true - predicted).mean(axis=1))
            places = BINS_PER_OCTAVE * (np.log2(errors) + MAX_EXPONENT)
        is_number = ~np.isnan(errors)
        bins = np.clip(places[is_number], 0, NUM_BINS - 1).astype(np.int64)
        return {
            "counts": np.bincount(bins, row_weights[is_number, 0], minlength=NUM_BINS).astype(np.float64),
            "invalid": np.asarray((~is_number).sum(), np.int64),
        }

    def combine(self, sums: Sums) -> float:
        ranks = np.cumsum(sums["counts"])
        if sums["invalid"] or not ranks[-1] > 0:
            return float("nan")
        place = int(np.searchsorted(ranks, self.quantile * ranks[-1]))
        return float(2.0 ** ((place + 1) / BINS_PER_OCTAVE - MAX_EXPONENT))


def make_pinball(quantiles: tuple[float, ...]) -> Callable[[Array], Array]:
    """Returns the pinball loss of errors [n, outputs]: too low costs a quantile of them, too high the rest of 1.

    There is one quantile for each output, or one for all of them.
    """
    levels = np.array(quantiles)
    return lambda errors: np.maximum(levels * errors, (levels - 1.0) * errors)


def compute_coverage(errors: Array) -> Array:
    """Returns 1 where a target lies between its outputs, else 0; [n, 1] of errors [n, outputs]."""
    least, largest = errors.min(axis=1, keepdims=True), errors.max(axis=1, keepdims=True)
    is_covered = (least <= 0.0) & (largest >= 0.0)
    return np.where(np.isfinite(least) & np.isfinite(largest), is_covered, np.nan)


def _average(values: list[float | None]) -> float:
    """Returns the mean, NaN where one is missing or not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(known) / len(known) if len(known) == len(values) else float("nan")
