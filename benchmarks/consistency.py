"""Examples without a label: trained on by consistency (FixMatch) against left out, at the same few labels.

    python benchmarks/consistency.py --data DIR [--seeds 3] [--shares 0.01,0.05] [--images 6000] [--steps 600]

DIR holds `fashion-mnist/`. Of `images` training images a share, as many of each class, has a label. The task's
small convolutional network is trained for as many steps of 32 labelled images either way; with consistency 32 images
without one are in each step, too. The accuracy is on the 10,000 test images. Central training by one process: what is
compared is what one board learns from its own shard.
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

from edgefl.core.types import Dataset, TrainConfig
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

TASK, MODEL = "fashion-mnist", {"model": "cnn-small"}
WAYS = {"labelled alone": None, "consistency": 1.0}


def cut(pool: Dataset, share: float, args: argparse.Namespace, seed: int) -> tuple[Dataset, Dataset]:
    """Returns the labelled images, and all of them, those without a label as a shard has them."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(len(pool), args.images, replace=False)
    data = Dataset(inputs=np.asarray(pool.inputs[rows]), targets=pool.targets[rows])
    num = round(share * len(rows) / len(np.unique(data.targets)))
    labelled = np.concatenate([np.flatnonzero(data.targets == one)[:num] for one in np.unique(data.targets)])
    is_labelled = np.isin(np.arange(len(rows)), labelled)
    whole = Dataset(
        inputs=data.inputs, targets=np.where(is_labelled, data.targets, 0), weak=~is_labelled,
        weights=is_labelled.astype(np.float32),
    )  # fmt: skip
    return data.take(labelled), whole


def measure(data: Dataset, test: Dataset, weight: float | None, args: argparse.Namespace, seed: int) -> float:
    """Returns the test accuracy after training."""
    task = make_task(TASK, MODEL)
    learner: Any = task.learner(threads=1)
    learner.load(task.init(seed))
    plan = TrainConfig(
        iterations=args.steps, batch_size=32, learning_rate=0.02, momentum=0.9, consistency_weight=weight,
        consistency_threshold=None if weight is None else 0.95,
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    train(learner, data, plan, rng, clock=lambda: 0.0, on_iteration=lambda *_: False)
    return float(learner.evaluate(test)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds fashion-mnist/")
    parser.add_argument("--seeds", type=int, default=3, help="how many [%(default)s]")
    parser.add_argument("--shares", default="0.01,0.05", help="of images that have a label [%(default)s]")
    parser.add_argument("--images", type=int, default=6000, help="of the shard [%(default)s]")
    parser.add_argument("--steps", type=int, default=600, help="of training [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = options.parse(parser, seeds=1, shares="0.1", images=200, steps=2)
    if args.data is None:
        parser.error("--data DIR: say where fashion-mnist/ lies")
    data, found = load_central_data(TASK, Path(args.data) / TASK), dict[str, dict[str, list[float]]]()
    for share in map(float, args.shares.split(",")):
        row = found.setdefault(f"{share:.0%} of {args.images:,}", {name: [] for name in WAYS})
        for seed in range(1, args.seeds + 1):
            labelled, whole = cut(data.train, share, args, seed)
            for name, weight in WAYS.items():
                shard = labelled if weight is None else whole
                row[name].append(measure(shard, data.test, weight, args, seed))
    print(json.dumps(found) if args.json else render(found))


def render(found: dict[str, dict[str, list[float]]]) -> str:
    """Returns a table with a row for each share."""
    lines = [f"| labels | {' | '.join(WAYS)} |", "|---" * (len(WAYS) + 1) + "|"]
    for share, row in found.items():
        cells = [f"{statistics.mean(one):.4f} ({min(one):.4f} to {max(one):.4f})" for one in row.values()]
        lines.append(f"| {share} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
