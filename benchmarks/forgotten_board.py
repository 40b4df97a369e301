"""What is left of a board in a model, before and after it is forgotten: digits, of which one board has all nines.

    python benchmarks/forgotten_board.py [--seeds 3] [--rounds 10] [--more 30] [--json]

Five simulated boards with `fedavg`; the fifth has all nines, and 200 other digits. Four train `--rounds` rounds:
that is the model from before the fifth came. From there: `--more` rounds of all five, which is the model that has the
board; as many of the four, as `edgefl run forget` makes them; and the four with all rounds from nothing. Of the
test digits: the share of nines that are told, and of the others. Means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from harness import options

import edgefl
from edgefl.core.types import Dataset
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.datasets.central import load_central_data
from edgefl.tasks.registry import make_task

NUM_BOARDS, NUM_OTHERS, DIGIT = 5, 200, 9
COLUMNS = ("before the board", "with the board", "forgotten", "from nothing")


def write_shards(data: Dataset, rng: np.random.Generator, folder: Path) -> list[Path]:
    """Returns the boards' shards."""
    rows = rng.permutation(len(data))
    is_alone = data.targets[rows] == DIGIT
    others = rows[~is_alone]
    parts = [
        *np.array_split(others[NUM_OTHERS:], NUM_BOARDS - 1),
        np.concatenate([rows[is_alone], others[:NUM_OTHERS]]),
    ]
    shards = [folder / f"board-{number}" for number in range(1, NUM_BOARDS + 1)]
    for shard, part in zip(shards, parts, strict=True):
        shard.mkdir()
        np.savez(shard / "digits.npz", inputs=data.inputs[part], labels=data.targets[part])
    return shards


def train(shards: list[Path], rounds: int, seed: int, start: Path | None = None) -> Path:
    """Returns the file of the model after some rounds."""
    run: dict[str, Any] = {"task": "digits", "rounds": rounds, "seed": seed, "evaluate_on": "none"}
    if start is not None:
        run["init"] = str(start)
    config = {"run": run, "strategy": {"name": "fedavg", "iterations": 10}}
    result = edgefl.simulate(config, devices=shards, root=tempfile.mkdtemp(dir=shards[0].parent))
    assert result.model is not None
    return result.model


def score(path: Path, test: Dataset) -> tuple[float, float]:
    """Returns the accuracy on the digit that one board had, and on the others."""
    learner: Any = make_task("digits").learner()
    learner.load(load_model_file(path))
    is_right = learner.logits(test.inputs).argmax(axis=1) == test.targets
    is_alone = test.targets == DIGIT
    return float(is_right[is_alone].mean()), float(is_right[~is_alone].mean())


def compare(seed: int, rounds: int, more: int) -> list[tuple[float, float]]:
    """Returns the scores of `COLUMNS`."""
    with tempfile.TemporaryDirectory() as folder:
        data = load_central_data("digits")
        shards = write_shards(data.train, np.random.default_rng(seed), Path(folder))
        before = train(shards[:-1], rounds, seed)
        models = [
            before,
            train(shards, more, seed, before),
            train(shards[:-1], more, seed, before),
            train(shards[:-1], rounds + more, seed),
        ]
        return [score(path, data.test) for path in models]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many [%(default)s]")
    parser.add_argument("--rounds", type=int, default=10, help="before the board comes [%(default)s]")
    parser.add_argument("--more", type=int, default=30, help="since then [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = options.parse(parser, seeds=1, rounds=2, more=2)
    found = [compare(seed, args.rounds, args.more) for seed in range(1, args.seeds + 1)]
    means = {
        name: [fmean(scores[place][part] for scores in found) for part in range(2)]
        for place, name in enumerate(COLUMNS)
    }
    if args.json:
        sys.stdout.write(json.dumps({"v": 1, "accuracy": means}) + "\n")
        return
    sys.stdout.write("| model | nines | other digits |\n|---|---|---|\n")
    for name, (alone, others) in means.items():
        sys.stdout.write(f"| {name} | {alone:.3f} | {others:.3f} |\n")


if __name__ == "__main__":
    main()
