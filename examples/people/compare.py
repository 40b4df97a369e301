"""Trains on a coordinator and three devices that are processes of this machine, and looks at walks that none has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import edgefl
from edgefl.core.config import load_run
from edgefl.engine.run_summary import RunResult
from edgefl.simulation.simulated_run import make_reference
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.registry import make_task

CONFIG = load_run("run.toml")


def measure_shares(result: RunResult, name: str) -> np.ndarray:
    """Returns [3] shares of the windows of a file of which a model gets each label right."""
    task = make_task("table", CONFIG.task)
    learner, data = task.learner(), task.read(f"data/{name}.csv")
    learner.load(load_model_file(result.model))
    return np.mean((learner.logits(data.inputs) > 0) == (data.targets > 0.5), axis=0)


def show(title: str, shares: np.ndarray) -> None:
    names = CONFIG.task["target"].split(",")
    labels = ", ".join(f"{name} {share:.3f}" for name, share in zip(names, shares, strict=True))
    print(f"{title}: {shares.mean():.3f} of the labels right; {labels}")


def main() -> None:
    together = edgefl.run(CONFIG, devices=3, data="data/walks.csv", scheme="natural", root="fleet")
    iterations = 3 * CONFIG.strategy.options["iterations"]  # as many windows as three devices see
    options = {**CONFIG.strategy.options, "iterations": iterations}
    reference = make_reference(replace(CONFIG, strategy=replace(CONFIG.strategy, options=options)))
    alone = edgefl.simulate(reference, root="history")
    of_known = edgefl.simulate(CONFIG, data="data/known.csv", root="history")
    shares, central = measure_shares(together, "later"), measure_shares(alone, "later")
    show("three devices, later walks", shares)
    show("one with all data, later walks", central)
    print(f"the fleet's {shares.mean() - central.mean():+.3f} to all data at one place")
    show("three devices, people whom none has seen", measure_shares(of_known, "strangers"))
    is_there = make_task("table", CONFIG.task).read("data/strangers.csv").targets.mean(axis=0)
    show("the same people, if each label is guessed at its best", np.maximum(is_there, 1 - is_there))


if __name__ == "__main__":
    main()
