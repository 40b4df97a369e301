"""Figures that a strategy tells of its state, such as how far the devices' models lie apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgefl.types import Strategy

Facts = Callable[[Any], Mapping[str, float]]
"""A strategy's state -> figures of its newest version, by name."""


def facts_of(strategy: Strategy[Any]) -> Facts:
    """Returns how this strategy tells its figures; one that has none tells nothing."""
    told: Facts | None = getattr(strategy, "facts", None)
    return no_facts if told is None else told


def no_facts(_state: object) -> Mapping[str, float]:
    """Returns no figures, whatever the state."""
    return {}
