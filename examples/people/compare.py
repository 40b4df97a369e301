"""Trains on a coordinator and three devices that are processes of this machine, and looks at walks that none has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import edgefl
from edgefl.core.config import load_run
from edgefl.engine.run_summary import RunResult
from edgefl.simulation.simulated_run import make_reference
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.metrics.evaluation import evaluate, make_task_metrics
from edgefl.tasks.registry import make_task

CONFIG = load_run("run.toml")
TASK = make_task("table", CONFIG.task)
YEARS, CM = map(float, CONFIG.task["target_scale"].split(","))


def measure(result: RunResult, name: str) -> tuple[float, dict[str, float]]:
    """Returns the loss of a model on a file, and its metrics by target."""
    learner, metrics = TASK.learner(), make_task_metrics(TASK)
    learner.load(load_model_file(result.model))
    found = evaluate(learner, TASK.read(f"data/{name}.csv"), metrics)
    return found.loss, metrics.combine([found.sums])


def show(title: str, values: dict[str, float]) -> None:
    years, cm = YEARS * values["age/mae"], CM * values["height/mae"]
    print(f"{title}: sex right in {values['sex/accuracy']:.3f}, age to {years:.2f} years, height to {cm:.2f} cm")


def main() -> None:
    together = edgefl.run(CONFIG, devices=3, data="data/walks.csv", scheme="natural", root="fleet")
    iterations = 3 * CONFIG.strategy.options["iterations"]  # as many windows as three devices see
    options = {**CONFIG.strategy.options, "iterations": iterations}
    reference = make_reference(replace(CONFIG, strategy=replace(CONFIG.strategy, options=options)))
    alone = edgefl.simulate(reference, root="history")
    of_known = edgefl.simulate(CONFIG, data="data/known.csv", root="history")
    (loss, of_fleet), (central_loss, of_one) = measure(together, "later"), measure(alone, "later")
    show("three devices, later walks", of_fleet)
    show("one with all data, later walks", of_one)
    print(f"the fleet's loss is {loss / central_loss:.3f} of that of all data at one place")
    show("three devices, people whom none has seen", measure(of_known, "strangers")[1])
    there = TASK.read("data/strangers.csv").targets
    share = there["sex"].mean()
    spreads = {name: float(np.abs(there[name] - np.median(there[name])).mean()) for name in ("age", "height")}
    best = {"sex/accuracy": max(share, 1 - share), **{f"{name}/mae": spread for name, spread in spreads.items()}}
    show("the same people, if each answer is one for all at its best", best)


if __name__ == "__main__":
    main()
