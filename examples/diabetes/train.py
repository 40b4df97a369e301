"""Trains on a coordinator and three devices that are processes of this machine, and on one machine with all data."""

from __future__ import annotations

import time
from pathlib import Path

from diabetes import SPREAD, Diabetes

import edgefl
from edgefl.core.types import Dataset, TrainConfig, derive_rng
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.local_algorithms.local_training import train


def main() -> None:
    task, clinics = Diabetes(), sorted(Path("data/clinics").iterdir())
    result = edgefl.run("run.toml", devices=clinics, root="fleet", allow_modules=["diabetes"])
    learner, test = task.learner(), task.read("data/test")
    learner.load(load_model_file(result.model))
    together = learner.evaluate(test)[0]

    learner.load(task.init(7))
    plan = TrainConfig(learning_rate=0.05, batch_size=16, epochs=2.0 * len(result.rounds))
    pooled = Dataset.concatenate([task.read(str(clinic)) for clinic in clinics])
    train(learner, pooled, plan, derive_rng(7), clock=time.perf_counter, on_iteration=lambda *_: False)
    alone = learner.evaluate(test)[0]
    print(result)
    ratio = together / alone
    print(f"loss {together:.4f} on other patients, {alone:.4f} with all data on one machine, {ratio:.3f} of it")
    missed = abs(learner.logits(test.inputs)[:, 0] - test.targets).mean() * SPREAD
    print(f"explained of all clinics' own tests: {result.rounds[-1]['metrics']['r2']:.2f}")
    print(f"a progression of 25 to 346 is missed by {missed:.0f}")


if __name__ == "__main__":
    main()
