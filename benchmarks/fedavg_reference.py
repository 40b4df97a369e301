"""FedAvg as the literature has it, in the simulator: 100 devices on Fashion-MNIST, 24 people's phones on MotionSense.

    python benchmarks/fedavg_reference.py --data DIR [--only fashion|motionsense] [--seed 7] [--jobs 2] [--json]

Fashion-MNIST: `cnn-small`, a tenth of the devices a round, E = 5, B = 10, 20 rounds; learning rate 0.05 on IID data,
0.02 on Dirichlet 0.5 and on two shards per device (McMahan et al., 2017). MotionSense: the 1-D CNN, one person is one
device, E = 1, B = 16, 10 rounds; beside the accuracy on held-out trials that of people who never took part, of each
device alone with the same number of passes, and of the worst tenth of the devices on their own local test split.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness import options

FASHION = {"iid": (0.05, 0.88), "dirichlet:0.5": (0.02, 0.85), "shards:2": (0.02, 0.70)}
"""Scheme -> learning rate, and what the model has to reach."""
PARTS = ("together", "unseen", "alone")
FASHION_ROUNDS, PEOPLE, UNSEEN, MOTION_ROUNDS, MOTION_GOAL = 20, 24, 6, 10, 0.88


def fashion(scheme: str, data: Path, seed: int, rounds: int | None) -> list[dict[str, Any]]:
    from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 in the worker process, behind OMP_NUM_THREADS

    rate, goal = FASHION[scheme]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = simulate(
            {
                "run": {
                    "task": "fashion-mnist",
                    "rounds": rounds or FASHION_ROUNDS,
                    "seed": seed,
                    "local_test_fraction": 0.0,
                },
                "task": {"model": "cnn-small"},
                "strategy": {"name": "fedavg", "learning_rate": rate, "epochs": 5.0, "batch_size": 10},
                "devices": {"fraction": 0.1},
                "simulation": {"devices": 100, "scheme": scheme, "data": str(data / "fashion-mnist"), "workers": 0},
            },
            root=folder,
        )
    accuracies = [row["accuracy"] for row in done.rounds]
    return [
        {
            "what": f"Fashion-MNIST, {scheme}, round {len(accuracies)}",
            "accuracy": accuracies[-1],
            "best": max(accuracies),
            "goal": goal,
            "wall_s": round(time.perf_counter() - began, 1),
        }
    ]


def motionsense(part: str, data: Path, seed: int, rounds: int | None) -> list[dict[str, Any]]:
    from edgefl.tasks.datasets.central import create_shards  # noqa: PLC0415 likewise

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        shards = create_shards("motionsense", "natural", PEOPLE, Path(folder) / "shards", data / "motionsense", seed)
        measure = {"together": _together, "unseen": _unseen, "alone": _alone}[part]
        rows = measure(shards, Path(folder), seed, rounds or MOTION_ROUNDS)
    return [{"goal": None, **row, "wall_s": round(time.perf_counter() - began, 1)} for row in rows]


def _simulated(shards: list[Path], folder: Path, seed: int, rounds: int) -> Any:
    from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 likewise

    config = {
        "run": {"task": "motionsense", "rounds": rounds, "seed": seed, "evaluate_on": "devices"},
        "strategy": {"name": "fedavg"},
        "simulation": {"workers": 0},
    }
    return simulate(config, devices=[str(path) for path in shards], root=folder)


def _together(shards: list[Path], folder: Path, seed: int, rounds: int) -> list[dict[str, Any]]:
    done = _simulated(shards, folder, seed, rounds)
    last = sorted(row["accuracy"] for row in done.evaluations if row["round"] == rounds)
    worst = last[: math.ceil(len(last) / 10)]
    return [
        {
            "what": f"MotionSense, {PEOPLE} people, held-out trials, round {rounds}",
            "accuracy": _accuracy(done.model, [shards[0].parent / "test.npz"]),
            "goal": MOTION_GOAL,
        },
        {"what": "the mean of the devices on their own test split", "accuracy": statistics.fmean(last)},
        {"what": "the worst tenth of the devices on theirs", "accuracy": statistics.fmean(worst)},
    ]


def _unseen(shards: list[Path], folder: Path, seed: int, rounds: int) -> list[dict[str, Any]]:
    done = _simulated(shards[:-UNSEEN], folder, seed, rounds)
    accuracy = _accuracy(done.model, shards[-UNSEEN:])
    return [{"what": f"trained on {PEOPLE - UNSEEN} people, tested on the {UNSEEN} others", "accuracy": accuracy}]


def _alone(shards: list[Path], folder: Path, seed: int, rounds: int) -> list[dict[str, Any]]:
    alone = []
    for number, shard in enumerate(shards):
        done = _simulated([shard], folder / str(number), seed, rounds)
        alone.append(_accuracy(done.model, [shard.parent / "test.npz"]))
    return [
        {"what": "each device alone, on the same held-out trials: mean", "accuracy": statistics.fmean(alone)},
        {"what": "each device alone: the best of them", "accuracy": max(alone)},
    ]


def _accuracy(model: Path | None, shards: list[Path]) -> float:
    """Returns the accuracy of a model file over the examples of all these shards."""
    from edgefl.storage.checkpoints import load_model_file  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    if model is None:
        raise LookupError("the run left no model")
    task = make_task("motionsense")
    learner = task.learner(threads=1)
    learner.load(load_model_file(model))
    correct = total = 0.0
    for shard in shards:
        examples = task.read(str(shard))
        correct += learner.evaluate(examples)[1] * len(examples)
        total += len(examples)
    return correct / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds both data sets")
    parser.add_argument("--only", choices=("fashion", "motionsense"))
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS, help="of motionsense")
    parser.add_argument("--rounds", type=int, help="of each run [as published]")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true", help="one JSON list in place of the table")
    args = options.parse(parser, rounds=1, only="motionsense", parts=["unseen"])
    if args.data is None:
        parser.error("say where the data is: --data DIR, or EDGEFL_DATA")
    data = Path(args.data).resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    work: list[tuple[Any, str]] = []
    if args.only != "motionsense":
        work += [(fashion, scheme) for scheme in FASHION]
    if args.only != "fashion":
        work += [(motionsense, part) for part in args.parts]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(measure, what, data, args.seed, args.rounds) for measure, what in work]
        rows = [row for future in running for row in future.result()]
    if args.json:
        json.dump(rows, sys.stdout, indent=1)
        return
    print(f"{'what':64} {'accuracy':>8} {'goal':>6} {'seconds':>8}")
    for row in rows:
        goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
        print(f"{row['what']:64} {row['accuracy']:8.4f} {goal:>6} {row['wall_s']:8.1f}")


if __name__ == "__main__":
    main()
