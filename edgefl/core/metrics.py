"""Metrics: what is measured on a part of the examples adds up to what is measured on all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgefl.core.errors import TaskError

Array = NDArray[Any]
Sums = Mapping[str, Array]
"""A metric's sufficient statistic: int64 and float64 arrays by name, which are added entry by entry."""
Direction = Literal["min", "max"]
"""Whether less or more of a metric is better."""
TYPES = ("<i8", "<f8")
"""Types of the arrays of sums, as NumPy writes them: int64 and float64."""


class Metric(ABC):
    """A figure of a model's outputs, from sums over any parts of the examples: batches, devices, rounds.

    Attributes:
        direction: whether less (`min`) or more (`max`) is better.
    """

    direction: Direction

    @abstractmethod
    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        """Returns the sums over some examples, none included.

        Args:
            outputs: [n, outputs, ...] or [n], as the model returns them: logits, or predicted values.
            targets: [n, ...] classes or values.
            weights: [n] non-negative weights of the examples; None for 1 each.

        Returns:
            int64 and float64 arrays, whose names and shapes depend on the number of outputs alone. Those of no
            example are neutral: zeros.

        Raises:
            TaskError: outputs and targets do not fit each other or the metric.
        """

    @abstractmethod
    def combine(self, sums: Sums) -> float:
        """Returns the value on all examples that the sums are of; NaN where there is none, never an infinity."""


def add_sums(first: Sums, second: Sums) -> dict[str, Array]:
    """Returns the sums over the examples of both.

    Raises:
        TaskError: names, shapes or types differ, so they are not of one metric and one model.
    """
    layouts = [{name: (each.dtype.str, each.shape) for name, each in sums.items()} for sums in (first, second)]
    if layouts[0] != layouts[1]:
        raise TaskError(f"sums of a metric must have one layout to be added, got {layouts[0]} and {layouts[1]}")
    return {name: np.asarray(first[name] + second[name]) for name in first}


def compute_sums(
    metrics: Mapping[str, Metric], batches: Iterable[tuple[Array, Array]]
) -> dict[str, dict[str, Array]]:
    """Returns each metric's sums over batches of outputs and targets; `metrics` are by name.

    Raises:
        TaskError: a batch does not fit a metric, or sums are no int64 or float64 arrays of one layout.
    """
    totals: dict[str, dict[str, Array]] = {}
    for outputs, targets in batches:
        for name, metric in metrics.items():
            sums = metric.partial(outputs, targets)
            _check_types(name, sums)
            totals[name] = add_sums(totals[name], sums) if name in totals else sums
    return totals


def _check_types(name: str, sums: Mapping[str, object]) -> None:
    for key, value in sums.items():
        if not isinstance(value, np.ndarray) or value.dtype.str not in TYPES:
            found = getattr(value, "dtype", type(value).__name__)
            raise TaskError(f"metric {name}: {key} of its sums must be an array of int64 or float64, got {found}")
