"""Grows trees on a coordinator and three devices that are processes of this machine, and compares them."""

from __future__ import annotations

import json

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier

import edgefl
from edgefl.core.config import load_run
from edgefl.core.types import Dataset
from edgefl.engine.run_summary import RunResult
from edgefl.tasks.analyses.trees.ensemble import predict
from edgefl.tasks.registry import make_task


def measure_accuracy(result: RunResult, test: Dataset) -> float:
    """Returns the accuracy of the trees that a run has grown."""
    shares = predict(json.loads(result.result.read_text()), test.inputs)
    return float(np.mean((shares > 0.5) == test.targets))


def main() -> None:
    task = make_task("table", load_run("run.toml").task)
    samples, test = (task.read(f"data/{name}.csv") for name in ("samples", "test"))
    together = measure_accuracy(edgefl.run("run.toml", devices=3, data="data/samples.csv", root="fleet"), test)
    alone = measure_accuracy(edgefl.simulate("run.toml", devices=1, root="history"), test)
    library = HistGradientBoostingClassifier(max_iter=15, max_depth=2, learning_rate=0.3, min_samples_leaf=5)
    central = library.fit(samples.inputs, samples.targets).score(test.inputs, test.targets)
    print(f"accuracy of the fleet's trees: {together:.3f}")
    print(f"of those of one device: {alone:.3f}, the fleet's {together - alone:+.3f}")
    print(f"of those of scikit-learn: {central:.3f}, the fleet's {together - central:+.3f}")


if __name__ == "__main__":
    main()
