"""When the edges of a node fire: how many local iterations until then, and which edges.

Each side of an edge has a schedule of its own, so that a slow board keeps nobody waiting. Source: Niwa et al., ICML
2021, whose asynchronous setting exchanges about once in K updates at random (`poisson`) or at fixed slots (`slots`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from numpy.random import Generator

from edgefl.types import EdgeSide


class Schedule(StrEnum):
    """How edges take turns."""

    SYNC = "sync"
    SLOTS = "slots"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Local iterations to do, at least one, and the neighbours whose edges fire after them."""

    iterations: int
    neighbours: tuple[str, ...]


class Firing(Protocol):
    def next(self, iteration: int, neighbours: Sequence[str]) -> Burst:
        """Returns the next burst of a node that has done `iteration` local ones and has these neighbours now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncFiring:
    """All edges after every `period` iterations."""

    period: int

    def next(self, iteration: int, neighbours: Sequence[str]) -> Burst:
        return Burst(iterations=self.period - iteration % self.period, neighbours=tuple(neighbours))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFiring:
    """The edge to a neighbour when the iterations done, modulo `period`, are at its slot."""

    slots: Mapping[str, int] = field(default_factory=dict)
    period: int

    def next(self, iteration: int, neighbours: Sequence[str]) -> Burst:
        waits = {other: (self.slots.get(other, 0) - iteration - 1) % self.period + 1 for other in neighbours}
        soonest = min(waits.values(), default=self.period)
        return Burst(iterations=soonest, neighbours=tuple(other for other in neighbours if waits[other] == soonest))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonFiring:
    """Each edge with probability 1 / `period` after every iteration, from the node's own random stream."""

    period: int
    rng: Generator

    def next(self, iteration: int, neighbours: Sequence[str]) -> Burst:  # noqa: ARG002 it forgets
        # The first of n edges fires after a geometric number of iterations; given that one did, each may have.
        if not neighbours or self.period == 1:
            return Burst(iterations=self.period, neighbours=tuple(neighbours))
        quiet = (1 - 1 / self.period) ** len(neighbours)
        iterations = int(self.rng.geometric(1 - quiet))
        fires = self.rng.random(len(neighbours)) < 1 / self.period
        while not fires.any():
            fires = self.rng.random(len(neighbours)) < 1 / self.period
        return Burst(
            iterations=iterations,
            neighbours=tuple(other for other, now in zip(neighbours, fires, strict=True) if now),
        )


def make_firing(schedule: str, *, edges: Sequence[EdgeSide], period: int, rng: Generator) -> Firing:
    """Returns a node's schedule.

    Args:
        schedule: one of `Schedule`.
        edges: of the node, with their slots.
        period: K, local iterations between two exchanges of an edge.
        rng: the node's own stream, for `poisson`.
    """
    match Schedule(schedule):
        case Schedule.SYNC:
            return SyncFiring(period=period)
        case Schedule.SLOTS:
            return SlotFiring(slots={side.neighbour: side.slot for side in edges}, period=period)
        case _:
            return PoissonFiring(period=period, rng=rng)
