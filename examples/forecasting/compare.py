"""Trains on a coordinator and three devices that are processes of this machine; compares with two naive forecasts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import edgefl
from edgefl.core.config import load_run
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.registry import make_task


def main() -> None:
    options = load_run("run.toml").task
    result = edgefl.run("run.toml", devices=3, data="data/train", scheme="natural", root="fleet")
    task = make_task("series", options)
    learner, test = task.learner(), task.read("data/test")
    learner.load(load_model_file(result.model))
    scale, size = float(options["target_scale"]), (len(test), 3, int(options["horizon"]))
    true = test.targets.reshape(size) * scale

    def measure_rmse(forecast: NDArray[np.float32]) -> float:
        return float(np.sqrt(np.mean(np.square(forecast - true))))

    learned = measure_rmse(learner.logits(test.inputs).reshape(size) * scale)
    stays, mean = measure_rmse(test.inputs[:, :, -1:]), measure_rmse(true.mean(axis=(0, 2), keepdims=True))
    print(result)
    print(f"root of the mean squared error on {len(test)} half seconds of later recordings:")
    print(f"the fleet's model {learned:.3f} g, as the last value {stays:.3f} g, always the mean {mean:.3f} g")
    print(f"the fleet's error is {learned / stays:.2f} of that of the last value")


if __name__ == "__main__":
    main()
