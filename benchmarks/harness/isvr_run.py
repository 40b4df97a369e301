"""Runs a cell of the ISVR benchmark: eight nodes, or one with all images."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.core.errors import EdgeflError
from edgefl.core.types import Array, Dataset, Learner, Task, derive_rng
from edgefl.tasks.datasets.central import CentralData, load_central_data
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task
from harness.isvr_cell import ONE_NODE, Cell, Outcome
from harness.isvr_network import Network, never, no_time


def run_cell(cell: Cell, data: Path) -> Outcome:
    """Runs one cell; where numbers overflow the run has diverged, and the outcome says so."""
    began = time.perf_counter()
    images = _load_images(cell.task, data / cell.task)
    tests = images.test.take(np.arange(cell.num_tests or len(images.test)))
    task = make_task(cell.task, {"model": cell.model})
    learner = task.learner(threads=1)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            found = _run(cell, task, learner, images.train, tests)
    except EdgeflError as error:
        found = {"failure": str(error)[:200]}
    return Outcome(cell=asdict(cell), **found, wall_s=round(time.perf_counter() - began, 1))


@functools.cache
def _load_images(task: str, folder: Path) -> CentralData:
    return load_central_data(task, folder)


def _run(cell: Cell, task: Task, learner: Learner, images: Dataset, tests: Dataset) -> dict[str, Any]:
    curve: list[tuple[float, float]] = []
    sent: dict[str, float] = {}
    if cell.method == ONE_NODE:
        curve.extend(learner.evaluate(tests) for _ in _alone(cell, task, learner, images))
        nodes = [curve[-1][1]]
    else:
        network = Network(cell, task, learner, images)
        curve.extend(_evaluated(learner, network.mean_model(), tests) for _ in network.run())
        nodes = [_evaluated(learner, engine.model(), tests)[1] for engine in network.engines.values()]
        sent = {"exchanges_per_edge": network.exchanges_per_edge, "bytes_per_edge": network.bytes_per_edge}
    loss, accuracy = curve[-1]
    is_finite = bool(np.isfinite(loss))
    return {
        "average": accuracy,
        "nodes": nodes,
        "loss": loss if is_finite else None,
        "curve": [round(each, 4) for _, each in curve],
        "failure": "" if is_finite else "the loss is not finite",
        **sent,
    }


def _evaluated(learner: Learner, model: Mapping[str, Array], tests: Dataset) -> tuple[float, float]:
    learner.load(model)
    return learner.evaluate(tests)


def _alone(cell: Cell, task: Task, learner: Learner, images: Dataset) -> Iterator[int]:
    rng = derive_rng(cell.seed, "batches", ONE_NODE)
    learner.load(task.init(cell.seed))
    marks = cell.marks
    for done in range(0, cell.iterations, cell.period):
        plan = cell.plan(done, min(cell.period, cell.iterations - done))
        train(learner, images, plan, rng, clock=no_time, on_iteration=never)
        while marks and marks[0] <= done + cell.period:
            yield marks.pop(0)
