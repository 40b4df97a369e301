"""A run of the ISVR benchmark, as it is asked for and as it ended."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from edgefl.core.types import TrainConfig
from edgefl.strategies.strategy_config import parse_schedule
from harness.class_shards import NUM_NODES

ONE_NODE = "one node"
"""Instead of a method: all images lie on one node, which trains as many iterations as each node else does."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of eight nodes.

    Attributes:
        method: one of `METHODS`, or `ONE_NODE`.
        iterations: local ones of each node.
        period: K of them between two exchanges of an edge.
        rounds: steps of the learning rate's decay, spread evenly over the iterations.
        k_eta: of ISVR's second step size; None for K.
        decay: `constant`, `linear` (to zero) or `inverse-sqrt`.
        codec: along edges; empty for none.
        lost: fraction of the messages that never arrive.
        points: of the curve.
        task: whose images the nodes have, one of ten classes.
        num_tests: test images that accuracies are of, the first ones; None for all.
    """

    method: str
    graph: str
    exchange: str
    period: int
    iterations: int
    rounds: int
    rate: float
    decay: str
    seed: int
    cut: str = "3 of 10"
    model: str = "logistic"
    batch_size: int = 100
    weight_decay: float = 0.001
    codec: str = ""
    lost: float = 0.0
    points: int = 24
    k_eta: float | None = None
    task: str = "fashion-mnist"
    num_tests: int | None = None

    def plan(self, done: int, iterations: int) -> TrainConfig:
        """Returns what to do in a burst after so many iterations, at the learning rate of its first one."""
        factor = parse_schedule(f"linear:{self.rounds}" if self.decay == "linear" else self.decay)
        return TrainConfig(
            iterations=iterations,
            batch_size=self.batch_size,
            learning_rate=self.rate * factor(done * self.rounds // self.iterations),
            weight_decay=self.weight_decay,
        )

    @property
    def marks(self) -> list[int]:
        """Iterations after which the mean model is evaluated."""
        return [self.iterations * point // self.points for point in range(1, self.points + 1)]

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:20]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell gave: accuracies on the test images.

    Attributes:
        average: of the mean of the nodes' models.
        nodes: of the nodes' own.
        loss: cross-entropy of the mean model.
        exchanges_per_edge: one is a message each way.
        curve: accuracy of the mean model, evenly spaced over the run.
    """

    cell: dict[str, Any]
    average: float = 0.1
    nodes: list[float] = field(default_factory=lambda: [0.1] * NUM_NODES)
    loss: float | None = None
    exchanges_per_edge: float = 0.0
    bytes_per_edge: float = 0.0
    curve: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    failure: str = ""


def of_nodes(outcome: Outcome) -> float:
    """Returns the mean accuracy of the nodes' own models, which is what devices are left with."""
    return statistics.fmean(outcome.nodes)


def of_average(outcome: Outcome) -> float:
    return outcome.average


def of_worst(outcome: Outcome) -> float:
    return min(outcome.nodes)


SCORES = {"nodes": of_nodes, "average": of_average, "worst": of_worst}


def interval(values: Sequence[float]) -> float | None:
    """Half the 95 % interval of the mean, by Student's t for up to five seeds."""
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
    if len(values) < 2:
        return None
    return float(student.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values)))
