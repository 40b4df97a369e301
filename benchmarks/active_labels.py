"""Which pictures a person labels: the least certain first against a random choice, at the same number of labels.

    python benchmarks/active_labels.py --data DIR [--seeds 5] [--turns 15] [--step 200] [--json]

DIR holds `fashion-mnist/`. Of its 60,000 training images none has a label at first, and at the end 5 % have one. The
first turn labels `step` images at random. Each later one trains the NumPy network of 128 hidden units from its start
on all labels so far, orders 2,000 unlabelled images as `edgefl device label --model` does, and labels the first of
them. The accuracy is on the 10,000 test images, and the estimate that of the labels sampled at random on the way, as
the page shows it. Central training by one process: what is compared is the choice of labels, not the fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from harness import options

from edgefl.core.types import Array, Dataset, TrainConfig
from edgefl.device.collect.label_guesses import RANDOM_SHARE, order_examples
from edgefl.device.collect.label_queue import MAX_GUESSED
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.losses.class_losses import softmax
from edgefl.tasks.registry import make_task

TASK, MODEL = "fashion-mnist", {"model": "mlp"}
WAYS = {"random": 1.0, "least certain, a quarter at random": RANDOM_SHARE, "least certain alone": 0.0}
PLAN = TrainConfig(epochs=30, batch_size=32, learning_rate=0.02, momentum=0.9)


def fit(data: Dataset, seed: int) -> Any:
    """Returns a learner that was trained on the examples from the start of the seed."""
    task = make_task(TASK, MODEL)
    learner = task.learner()
    learner.load(task.init(seed))
    train(learner, data, PLAN, np.random.default_rng(seed), clock=lambda: 0.0, on_iteration=lambda *_: False)
    return learner


def select(data: Dataset, places: Array) -> Dataset:
    return Dataset(inputs=data.inputs[places], targets=data.targets[places])


def measure(pool: Dataset, test: Dataset, share: float, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Returns the accuracy after each turn, and how far the page's estimate was from it at the end."""
    rng = np.random.default_rng(seed)
    labelled = rng.choice(len(pool), args.step, replace=False)
    accuracies, checks = [], []
    for turn in range(args.turns):
        learner = fit(select(pool, labelled), seed)
        accuracies.append(learner.evaluate(test)[1])
        if turn == args.turns - 1:
            break
        rest = np.setdiff1d(np.arange(len(pool)), labelled)
        listed = rng.choice(rest, min(MAX_GUESSED, len(rest)), replace=False)
        logits = learner.logits(pool.inputs[listed])
        ordered = np.sort(softmax(logits), axis=1)
        margins, num_sampled = ordered[:, -1] - ordered[:, -2], round(share * len(listed))
        order, sampled = order_examples(
            list(margins), num_sampled, lambda num, some: rng.permutation(num)[:some].tolist()
        )
        taken = order[: args.step]
        checks.append([logits[place].argmax() == pool.targets[listed[place]] for place in taken if place in sampled])
        labelled = np.concatenate([labelled, listed[taken]])
    return {"accuracies": accuracies, "checks": [(len(turn), float(np.mean(turn or [0.0]))) for turn in checks]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds fashion-mnist/")
    parser.add_argument("--seeds", type=int, default=5, help="how many [%(default)s]")
    parser.add_argument("--turns", type=int, default=15, help="of labelling [%(default)s]")
    parser.add_argument("--step", type=int, default=200, help="labels of a turn [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = options.parse(parser, seeds=1, turns=2, step=50)
    if args.data is None:
        parser.error("--data DIR: say where fashion-mnist/ lies")
    data = load_central_data(TASK, Path(args.data) / TASK)
    found = {
        name: [measure(data.train, data.test, share, args, seed) for seed in range(1, args.seeds + 1)]
        for name, share in WAYS.items()
    }
    print(json.dumps(found) if args.json else render(found, args.step))


def render(found: dict[str, list[dict[str, Any]]], step: int) -> str:
    """Returns a table with a row for each second turn, and the estimates of the page."""
    lines = [f"| labels | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    turns = len(next(iter(found.values()))[0]["accuracies"])
    for turn in sorted({*range(0, turns, 2), turns - 1}):
        cells = []
        for runs in found.values():
            values = [run["accuracies"][turn] for run in runs]
            cells.append(f"{statistics.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        lines.append(f"| {(turn + 1) * step} | {' | '.join(cells)} |")
    for name, runs in found.items():
        gaps = [
            right - run["accuracies"][turn] for run in runs for turn, (num, right) in enumerate(run["checks"]) if num
        ]
        if gaps:
            mean, worst = statistics.mean(gaps), max(map(abs, gaps))
            lines.append(f"\n{name}: estimate of a turn less accuracy: mean {mean:+.4f}, largest {worst:.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
