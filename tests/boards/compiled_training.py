"""Trains a compiled task for a few steps, as a board does: `compiled_training.py TASK MODEL COMPILED SHARD RESULT`.

The same file is run by this machine's Python and by an emulated board's, so that their results can be compared.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import time
from pathlib import Path

import numpy as np

from edgefl.core.types import TrainConfig, derive_rng
from edgefl.tasks.compiled.board.graph_task import load_graph_task
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

PLAN = TrainConfig(iterations=12, batch_size=8, learning_rate=0.05, momentum=0.9)


def main() -> None:
    name, model, compiled, shard, result = sys.argv[1:]
    options = {"model": model}
    task = load_graph_task(make_task(name, options), Path(compiled), name=name, options=options)
    learner = task.learner(threads=1)
    with np.load(compiled + ".npz") as weights:
        learner.load(dict(weights))
    data = task.read(shard)
    trained = train(
        learner, data, PLAN, derive_rng(5, "board"), clock=time.perf_counter, on_iteration=lambda *_: False
    )
    facts = {"loss": trained.loss, "evaluated": np.array(learner.evaluate(data))}
    np.savez(result, **learner.read(), **{f"facts.{key}": value for key, value in facts.items()})
    has_torch = importlib.util.find_spec("torch") is not None
    sys.stdout.write(f"{platform.machine()} {'with' if has_torch else 'without'} torch\n")


if __name__ == "__main__":
    main()
