"""Trains on a coordinator and three devices that are processes of this machine, then looks for malignant samples."""

from __future__ import annotations

import numpy as np

import edgefl
from edgefl.core.config import load_run
from edgefl.engine.run_summary import RunResult
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.registry import make_task

THRESHOLD = "error-quantile:0.95"


def find_shares(result: RunResult) -> list[float]:
    """Returns the shares of the malignant samples, and of new benign ones, that lie above a run's threshold."""
    task = make_task("table", load_run("run.toml").task)
    learner, shares = task.learner(), []
    learner.load(load_model_file(result.model))
    for name in ("malignant", "new"):
        rows = task.read(f"data/{name}.csv").inputs
        errors = np.sqrt(np.square(learner.logits(rows) - learner.prepare(rows)).mean(axis=1))
        shares.append(float(np.mean(errors > result.metrics[THRESHOLD])))
    return shares


def main() -> None:
    together = edgefl.run("run.toml", devices=3, data="data/benign.csv", root="fleet")
    alone = edgefl.simulate("run.toml", devices=1, root="history")
    found, false = find_shares(together)
    found_alone, false_alone = find_shares(alone)
    print(together)
    print(f"above the fleet's threshold of {together.metrics[THRESHOLD]:.3f}: {false:.3f} of new benign samples")
    print(f"malignant found: {found:.3f}, {found - found_alone:+.3f} to all data at one place")
    print(f"there, above the threshold of {alone.metrics[THRESHOLD]:.3f}: {false_alone:.3f} of new benign samples")


if __name__ == "__main__":
    main()
