"""The run that is disturbed: the digits on five devices, with a pause at every iteration."""

from __future__ import annotations

from pathlib import Path

from edgefl.core.config import RunConfig, parse_run
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.registry import make_task

TASK = "paced_task:PacedDigits"
PYTHON_PATH = (Path(__file__).parent / "on_path",)
"""Where that task lies."""
NUM_DEVICES = 5
NAMES = tuple(f"device-{number:02}" for number in range(1, NUM_DEVICES + 1))
ITERATIONS = 3
LEARNING_RATES = {"ssgd": 0.5, "asgd": 0.1}
"""By strategy; one that applies each update at once takes five steps for one of the other."""


def config(strategy: str, rounds: int, *, pace: Path, seed: int = 7) -> RunConfig:
    """Returns a run with fixed iterations on all devices, each as many seconds longer as the file `pace` says."""
    return parse_run(
        {
            "run": {"task": TASK, "rounds": rounds, "seed": seed, "evaluate_on": "none"},
            "task": {"pace": str(pace)},
            "strategy": {"name": strategy, "iterations": ITERATIONS, "learning_rate": LEARNING_RATES[strategy]},
            "devices": {"min": NUM_DEVICES},
        }
    )


def accuracy(model: Path, test_shard: Path) -> float:
    """Returns the share of test digits that a model file gets right."""
    task = make_task("digits")
    learner = task.learner()
    learner.load(load_model_file(model))
    return float(learner.evaluate(task.read(str(test_shard)))[1])
