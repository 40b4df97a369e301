"""Edge schedules: which edges of a node fire, after how many local iterations.

Each side of an edge has a schedule of its own, so that no node waits for a slow board. Source: Niwa et al., ICML
2021, whose asynchronous setting exchanges about once in K updates at random (`poisson`) or at fixed slots (`slots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from numpy.random import Generator

from edgefl.core.types import PeerLinkConfig


class EdgeScheduleKind(StrEnum):
    """Kind of edge schedule."""

    SYNC = "sync"
    SLOTS = "slots"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextExchange:
    """Number of local iterations (at least one), and the neighbours whose edges fire after them."""

    iterations: int
    neighbours: tuple[str, ...]


class EdgeSchedule(Protocol):
    def next_exchange(self, iteration: int, neighbours: Sequence[str]) -> NextExchange:
        """Returns the next exchange of a node after `iteration` local iterations, among these neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicSchedule:
    """Schedule that fires all edges after every `period` iterations."""

    period: int

    def next_exchange(self, iteration: int, neighbours: Sequence[str]) -> NextExchange:
        return NextExchange(iterations=self.period - iteration % self.period, neighbours=tuple(neighbours))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlotSchedule:
    """Schedule that fires an edge when the iterations done, modulo `period`, reach its slot."""

    slots: Mapping[str, int] = field(default_factory=dict)
    period: int

    def next_exchange(self, iteration: int, neighbours: Sequence[str]) -> NextExchange:
        iterations_until = {
            neighbour: (self.slots.get(neighbour, 0) - iteration - 1) % self.period + 1 for neighbour in neighbours
        }
        iterations = min(iterations_until.values(), default=self.period)
        return NextExchange(
            iterations=iterations,
            neighbours=tuple(neighbour for neighbour in neighbours if iterations_until[neighbour] == iterations),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonSchedule:
    """Schedule that fires each edge with probability 1 / `period` after every iteration, by the node's `rng`."""

    period: int
    rng: Generator

    def next_exchange(self, iteration: int, neighbours: Sequence[str]) -> NextExchange:  # noqa: ARG002 it is memoryless
        # The first of n edges fires after a geometric number of iterations; conditioned on that, any of them may
        # fire.
        if not neighbours or self.period == 1:
            return NextExchange(iterations=self.period, neighbours=tuple(neighbours))
        none_fires_probability = (1 - 1 / self.period) ** len(neighbours)
        iterations = int(self.rng.geometric(1 - none_fires_probability))
        fires_mask = self.rng.random(len(neighbours)) < 1 / self.period
        while not fires_mask.any():
            fires_mask = self.rng.random(len(neighbours)) < 1 / self.period
        return NextExchange(
            iterations=iterations,
            neighbours=tuple(
                neighbour for neighbour, is_firing in zip(neighbours, fires_mask, strict=True) if is_firing
            ),
        )


def make_edge_schedule(
    schedule: str, *, edges: Sequence[PeerLinkConfig], period: int, rng: Generator
) -> EdgeSchedule:
    """Returns a node's schedule.

    Args:
        schedule: one of `EdgeScheduleKind`.
        edges: of the node, with their slots.
        period: K, local iterations between two exchanges of an edge.
        rng: the node's own stream, for `poisson`.
    """
    match EdgeScheduleKind(schedule):
        case EdgeScheduleKind.SYNC:
            return PeriodicSchedule(period=period)
        case EdgeScheduleKind.SLOTS:
            return TimeSlotSchedule(slots={edge.neighbour: edge.slot for edge in edges}, period=period)
        case _:
            return PoissonSchedule(period=period, rng=rng)
