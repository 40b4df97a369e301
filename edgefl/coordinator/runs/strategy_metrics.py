"""Metrics that a strategy computes from its state, such as the distance between devices' models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgefl.core.types import Strategy

ComputeMetrics = Callable[[Any], Mapping[str, float]]
"""A strategy's state -> metrics of its newest version, by name."""


def find_metrics_hook(strategy: Strategy[Any]) -> ComputeMetrics:
    """Returns the metrics function of a strategy; `compute_no_metrics` if it has none."""
    hook: ComputeMetrics | None = getattr(strategy, "facts", None)
    return compute_no_metrics if hook is None else hook


def compute_no_metrics(_state: object) -> Mapping[str, float]:
    """Returns no metrics, whatever the state."""
    return {}
