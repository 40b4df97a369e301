"""Accuracy against bytes for every codec: Fashion-MNIST, eight simulated devices, FedAvg.

    python benchmarks/codec_convergence.py --data DIR [--rounds 40] [--seeds 1] [--target 0.8] [--jobs 2] [--out DIR]

DIR holds `fashion-mnist/`. Every codec trains the same network (`--model cnn-small`) from the same start on the same
shards (Dirichlet 0.5): 20 iterations of 32 images a round on each device. Codecs that are biased have error feedback,
and the unbiased ones have none. ATOMO's budgets are chosen so that the first update takes as many bytes as with
TernGrad and with QSGD. Runs that are in the `--out` folder are not run again. Printed are bytes, sizes and accuracies
(the mean of the last three evaluations); the figure shows accuracy over the bytes that all devices sent up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness import options

DEVICES, SCHEME = 8, "dirichlet:0.5"
ITERATIONS, BATCH_SIZE, LEARNING_RATE = 20, 32, 0.05
EVALUATE_EVERY = 2
LAST = 3
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "dense": ("dense", "dense|fp16", "dense|bf16", "dense|fp16|zstd"),
    "int8": ("int8", "int8:channel", "ef|int8:channel"),
    "QSGD": ("qsgd:1", "qsgd:2", "qsgd:4"),
    "TernGrad": ("terngrad",),
    "natural": ("natural",),
    "one bit": ("ef|sign", "ef|onebit"),
    "top-k": ("ef|topk:0.1|int8", "ef|topk:0.01|int8", "ef|topk:0.001|int8", "topk:0.01|int8"),
    "rand-k": ("randk:0.1",),
    "LSS": ("ef|lss:2", "ef|lss:3"),
    "PowerSGD": ("ef|powersgd:1", "ef|powersgd:2", "ef|powersgd:4"),
    "ATOMO": (),
    "ATOMO, spectral": (),
}
"""Codecs by family, in the order of the table; ATOMO's are found by size."""
EQUAL_TO = ("terngrad", "qsgd:1", "qsgd:2", "qsgd:4")
"""ATOMO is given as many bytes as these take."""
BUDGETED = {"ATOMO": "atomo:{:.5g}", "ATOMO, spectral": "atomo-auto:{:.5g}"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One simulated run."""

    family: str
    spec: str
    rounds: int
    seed: int
    model: str
    equal_to: str = ""

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell gave: `curve` is (bytes up so far, accuracy)."""

    cell: dict[str, Any]
    curve: list[list[float]] = field(default_factory=list)
    bytes_per_update: float = 0.0
    failure: str = ""
    wall_s: float = 0.0

    @property
    def accuracy(self) -> float:
        return statistics.fmean(accuracy for _, accuracy in self.curve[-LAST:]) if self.curve else 0.0

    def bytes_to(self, target: float) -> float | None:
        return next((num_bytes for num_bytes, accuracy in self.curve if accuracy >= target), None)


def run_cell(cell: Cell, data: Path) -> Outcome:
    from edgefl.core.errors import EdgeflError  # noqa: PLC0415 in the worker process, behind OMP_NUM_THREADS
    from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 likewise

    began = time.perf_counter()
    config = {
        "run": {
            "task": "fashion-mnist",
            "rounds": cell.rounds,
            "seed": cell.seed,
            "local_test_fraction": 0.0,
            "evaluate_every": EVALUATE_EVERY,
            "evaluate_on": "coordinator",
        },
        "task": {"model": cell.model},
        "strategy": {
            "name": "fedavg",
            "learning_rate": LEARNING_RATE,
            "batch_size": BATCH_SIZE,
            "iterations": ITERATIONS,
        },
        "compression": {"up": cell.spec},
        "simulation": {
            "devices": DEVICES,
            "profiles": ["pi-4"],
            "scheme": SCHEME,
            "data": str(data / "fashion-mnist"),
            "workers": 0,
            "iteration_s": 0.02,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = simulate(config, root=folder)
        except EdgeflError as error:
            return Outcome(cell=asdict(cell), failure=str(error)[:200], wall_s=time.perf_counter() - began)
    rounds = [row for row in done.rounds if row["closed_at"] is not None]
    sent, curve = 0, []
    for row in rounds:
        sent += row["bytes_up"]
        if row["accuracy"] is not None:
            curve.append([sent, row["accuracy"]])
    return Outcome(
        cell=asdict(cell),
        curve=curve,
        bytes_per_update=sent / sum(row["num_updates"] for row in rounds),
        wall_s=round(time.perf_counter() - began, 1),
    )


def budgets(data: Path, model: str, seed: int) -> list[tuple[str, str, str]]:
    """Returns (family, spec, the codec it is as large as): ATOMO's budgets for the bytes of its rivals."""
    import numpy as np  # noqa: PLC0415 likewise

    from edgefl.compression.codec import make_codec  # noqa: PLC0415 likewise

    shapes, update = _first_update(data, model, seed)

    def size_of(form: str, budget: float = 0.0) -> int:
        return len(make_codec(form.format(budget), shapes).encode(update, np.random.default_rng(seed)))

    found = []
    for rival in EQUAL_TO:
        wanted = size_of(rival)
        for family, form in BUDGETED.items():
            highest = 0.999 if family == "ATOMO" else 400.0
            budget = _bisected(partial(size_of, form), wanted, highest)
            found.append((family, form.format(budget), rival))
    return found


def _bisected(size_of: Callable[[float], int], wanted: int, highest: float) -> float:
    """Returns the largest budget whose body is no longer than `wanted`, to half a percent of it."""
    low, high = highest * 1e-4, highest
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if size_of(middle) <= wanted else (low, middle)
    return low


def _first_update(data: Path, model: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Returns the task's shapes and the displacement of a device's first round."""
    import numpy as np  # noqa: PLC0415 likewise

    from edgefl.core.types import TrainConfig  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.central import load_central_data  # noqa: PLC0415 likewise
    from edgefl.tasks.local_algorithms.local_training import train  # noqa: PLC0415 likewise
    from edgefl.tasks.registry import make_task  # noqa: PLC0415 likewise

    task = make_task("fashion-mnist", {"model": model})
    learner = task.learner(threads=1)
    learner.load(task.init(seed))
    plan = TrainConfig(iterations=ITERATIONS, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE)
    result = train(
        learner,
        load_central_data("fashion-mnist", data / "fashion-mnist").train,
        plan,
        np.random.default_rng(seed),
        clock=time.monotonic,
        on_iteration=lambda _iteration, _seconds: False,
    )
    return task.shapes(), dict(result.displacement)


def run_all(cells: list[Cell], args: argparse.Namespace) -> list[Outcome]:
    """Runs what is not on disk yet, `--jobs` at a time."""
    args.out.mkdir(parents=True, exist_ok=True)
    file, known = args.out / "cells.jsonl", {}
    if file.exists():
        for line in file.read_text().splitlines():
            outcome = Outcome(**json.loads(line))
            known[Cell(**outcome.cell).key] = outcome
    missing = [cell for cell in cells if cell.key not in known]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_cell, cell, args.data): cell for cell in missing}
        for number, future in enumerate(as_completed(running), 1):
            cell, outcome = running[future], future.result()
            known[cell.key] = outcome
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
            what = outcome.failure or f"{outcome.accuracy:.4f}, {outcome.bytes_per_update:,.0f} bytes an update"
            print(
                f"[{number}/{len(missing)}] {cell.spec}: {what} ({outcome.wall_s:.0f} s)", file=sys.stderr, flush=True
            )
    return [known[cell.key] for cell in cells]


def print_table(outcomes: list[Outcome], target: float) -> None:
    dense = next(outcome for outcome in outcomes if outcome.cell["spec"] == "dense")
    print(
        f"Fashion-MNIST, {dense.cell['model']}, {DEVICES} devices, {SCHEME}, {dense.cell['rounds']} rounds of "
        f"{ITERATIONS} iterations; accuracy is the mean of the last {LAST} evaluations"
    )
    form = "{:28} {:>10} {:>12} {:>8} {:>9} {:>14}  {}"
    print(form.format("codec", "seed", "bytes/update", "ratio", "accuracy", f"MB to {target:g}", "as large as"))
    for o in outcomes:
        sent = o.bytes_to(target)
        to_target = "-" if sent is None else f"{sent / 1e6:.3f}"
        ratio = f"{dense.bytes_per_update / o.bytes_per_update:.1f}" if o.bytes_per_update else "-"
        size, what = f"{o.bytes_per_update:,.0f}", o.failure or o.cell["equal_to"]
        print(form.format(o.cell["spec"], o.cell["seed"], size, ratio, f"{o.accuracy:.4f}", to_target, what))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds fashion-mnist/")
    parser.add_argument("--model", default="cnn-small")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.8, help="the table has the bytes until it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--codecs", nargs="+", help="try these alone, without ATOMO [all, and ATOMO]")
    parser.add_argument("--out", type=Path, default=Path("codec-convergence"))
    args = options.parse(parser, rounds=2, target=0.1, codecs=["dense", "ef|topk:0.01|int8", "qsgd:4"])
    if args.data is None:
        parser.error("say where the data is: --data DIR, or EDGEFL_DATA")
    args.data = Path(args.data).resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    named = [(family, spec, "") for family, specs in FAMILIES.items() for spec in specs]
    named = [each for each in named if args.codecs is None or each[1] in args.codecs]
    if args.codecs is None:
        named += budgets(args.data, args.model, seed=1)
    cells = [
        Cell(family=family, spec=spec, rounds=args.rounds, seed=seed, model=args.model, equal_to=equal_to)
        for seed in range(1, args.seeds + 1)
        for family, spec, equal_to in named
    ]
    outcomes = run_all(cells, args)
    print_table(outcomes, args.target)
    from harness.codec_figure import draw  # noqa: PLC0415 matplotlib is of the development extra alone

    print(f"figure: {draw([o for o in outcomes if o.cell['seed'] == 1], args.out / 'accuracy-over-bytes.png')}")


if __name__ == "__main__":
    main()
