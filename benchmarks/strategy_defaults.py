"""Every built-in strategy by its name alone, against `fedavg` at equal local gradient work, on a simulated fleet.

    python benchmarks/strategy_defaults.py [--data-sets digits mnist motionsense] [--data DIR]
        [--partitions iid dirichlet] [--devices 3 10 50] [--seeds 7 8 9] [--strategies NAME ...] [--jobs 2]
        [--examples N] [--model mlp] [--accelerator cuda]

A run file has nothing but the strategy's name, the task, and when to end; i.i.d. shards of `redundant` hold each
block twice. Equal work is the number of local iterations of all boards that `fedavg` takes in its 10 rounds with the
same data, partition, boards and seed; one on fewer examples than a mini-batch, as the blocks of `redundant` may have,
counts as that part of one. A run whose iterations are not these, because boards of different shards take
turns, is repeated with another length. `local` trains one board as often as
`fedavg` trains each, and is only for comparison.

Every cell is a line of the `--out` file, written when it is done, and those that are there are not run again; with
`--known` no others are either. `benchmarks/harness/strategy_defaults.jsonl` has those that were run since
2026-11-30; one whose defaults have changed since has to be taken out by hand. The table has the accuracy on the
coordinator's test data less that of `fedavg`, in points, the mean over the seeds, whose number follows in brackets.
It is the mean of the last three tenths of a run's evaluations: single ones of three boards fall by ten points at
times. MNIST and MotionSense need `--data DIR` or EDGEFL_DATA, with a folder of each. With `--examples N` the boards
share N of the training examples, and the coordinator tests on as many of the test data at most; both are drawn with
the seed before the cut, the same for every strategy. `--model` names the task's model, in place of its default: the
MLPs train in NumPy, some fifty times as fast as the CNNs of MNIST and MotionSense in torch.
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
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from harness import options

from edgefl.strategies.registry import BUILT_IN_STRATEGIES

BASELINE, REFERENCE_LINE = "fedavg", "local"
DATA_SETS = ("digits", "mnist", "motionsense")
ROUNDS = 10
SCHEMES = {"iid": "iid", "dirichlet": "dirichlet:0.5"}
SCHEMES_OF = {"redundant": {"iid": "redundant:2", "dirichlet": "dirichlet:0.5"}}
MOST_BELOW = 0.02
TEST_NAME = "test.npz"
NUM_EVALUATIONS = 20
MOST_OFF = 0.04
"""A run whose work differs by more from that of `fedavg` is repeated with another length."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run; `examples` are those of all boards, None for all; `model` is of the task, None for its default one."""

    data_set: str
    partition: str
    devices: int
    seed: int
    strategy: str
    rounds: int
    examples: int | None = None
    model: str | None = None

    @property
    def task_options(self) -> dict[str, str]:
        return {} if self.model is None else {"model": self.model}

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values() if value is not None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one cell gave; `iterations` are those of all boards, `said` what the run said about its loss."""

    cell: dict[str, Any]
    accuracy: float
    last_accuracy: float
    iterations: int
    wall_s: float
    said: list[str]
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    accuracies: list[float]
    iterations: int
    length: int
    said: list[str]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What cells are run with: the folder of the data sets, and what trains."""

    data: Path | None
    accelerator: str

    def find_folder(self, data_set: str) -> str | None:
        return None if self.data is None or data_set == "digits" else str(self.data / data_set)


def simulate_cell(cell: Cell, setup: Setup, *, length: int, counts_updates: bool) -> Run:
    """Runs a strategy for so many rounds, or updates."""
    from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 in the worker process, behind OMP_NUM_THREADS
    from edgefl.storage.queries.history import read_history  # noqa: PLC0415 likewise
    from edgefl.storage.store import Store  # noqa: PLC0415 likewise

    batch_size = make_strategy(cell).plan.batch_size
    rounds = math.ceil(length / cell.devices) if counts_updates else length
    with tempfile.TemporaryDirectory() as folder:
        shards = None if cell.examples is None else write_shards(cell, setup, Path(folder))
        done = simulate(
            {
                "run": {
                    "task": cell.data_set,
                    "seed": cell.seed,
                    "evaluate_on": "coordinator",
                    "evaluate_every": max(1, rounds // NUM_EVALUATIONS),
                    "updates" if counts_updates else "rounds": length,
                },
                "task": cell.task_options,
                "strategy": {"name": cell.strategy},
                "simulation": {
                    "devices": cell.devices,
                    "scheme": choose_scheme(cell),
                    "workers": 0,
                    "accelerator": setup.accelerator,
                    **({} if (path := setup.find_folder(cell.data_set)) is None else {"data": path}),
                    **({} if shards is None else {"test": str(Path(folder) / TEST_NAME)}),
                },
            },
            devices=shards,
            root=folder,
        )
        with Store.open(Path(folder) / "edgefl.db") as store:
            events = read_history(store, "events", run=done.run_id)
    return Run(
        accuracies=[row["accuracy"] for row in done.rounds if row["accuracy"] is not None],
        iterations=round(sum(count_work(row, batch_size) for row in done.updates if row["outcome"] == "used")),
        length=length,
        said=[row["message"] for row in events if row["kind"] == "run-diverging"],
    )


def count_work(update: Mapping[str, Any], batch_size: int) -> float:
    """Returns an update's iterations, each as the part of a mini-batch that it had."""
    return (update["iterations"] or 0) * min(1.0, (update["num_examples"] or 0) / batch_size)


def choose_scheme(cell: Cell) -> str:
    return SCHEMES_OF.get(cell.strategy, SCHEMES)[cell.partition]


def write_shards(cell: Cell, setup: Setup, folder: Path) -> list[Path]:
    """Writes the boards' shards of a part of the data set, and the test data; returns the shards' paths."""
    from edgefl.core.types import Dataset, derive_rng  # noqa: PLC0415 in the worker process
    from edgefl.tasks.datasets.central import load_central_data  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.partitioning import parse_scheme, partition_rows  # noqa: PLC0415 likewise
    from edgefl.tasks.datasets.shards import ShardMetadata, write_shard  # noqa: PLC0415 likewise

    def draw(data: Dataset, name: str) -> Dataset:
        rows = derive_rng(cell.seed, name, cell.data_set).permutation(len(data))[: cell.examples]
        return data.take(np.sort(rows))

    path = setup.find_folder(cell.data_set)
    central = load_central_data(cell.data_set, None if path is None else Path(path))
    train, test = draw(central.train, "part"), draw(central.test, "test part")
    scheme, rng = choose_scheme(cell), derive_rng(cell.seed, "shards", cell.data_set, choose_scheme(cell))
    cut = partition_rows(parse_scheme(scheme), labels=train.targets, num_devices=cell.devices, rng=rng)
    card = ShardMetadata(task=cell.data_set, scheme=scheme, source=f"{cell.examples} of {central.source}")
    paths = [folder / f"device-{number:03}.npz" for number in range(1, cell.devices + 1)]
    for number, (shard, rows) in enumerate(zip(paths, cut.rows, strict=True)):
        write_shard(shard, train.take(rows), replace(card, blocks=cut.blocks[number] if cut.blocks else {}))
    write_shard(folder / TEST_NAME, test, card)
    return paths


def run_cell(cell: Cell, setup: Setup, work: int | None) -> Outcome:
    """Runs one cell with `work` iterations of all boards, None for the baseline itself."""
    began = time.perf_counter()
    try:
        done = run_baseline(cell, setup) if work is None else run_equal_work(cell, setup, work)
    except Exception as error:  # noqa: BLE001 a strategy that fails is a line of the table
        failure = f"{type(error).__name__}: {error}"
        return Outcome(
            cell=asdict(cell),
            accuracy=math.nan,
            last_accuracy=math.nan,
            iterations=0,
            wall_s=round(time.perf_counter() - began, 1),
            said=[],
            error=failure,
        )
    num_last = max(1, round(0.3 * len(done.accuracies)))
    return Outcome(
        cell=asdict(cell),
        accuracy=statistics.fmean(done.accuracies[-num_last:]),
        last_accuracy=done.accuracies[-1],
        iterations=done.iterations,
        wall_s=round(time.perf_counter() - began, 1),
        said=done.said,
    )


def run_baseline(cell: Cell, setup: Setup) -> Run:
    return simulate_cell(cell, setup, length=cell.rounds, counts_updates=False)


def run_equal_work(cell: Cell, setup: Setup, work: int) -> Run:
    if cell.strategy == REFERENCE_LINE:
        return run_baseline(cell, setup)
    counts_updates = is_asynchronous(cell)
    length = estimate_length(cell, work)
    for _ in range(3):
        done = simulate_cell(cell, setup, length=length, counts_updates=counts_updates)
        if abs(done.iterations / work - 1) <= MOST_OFF:
            return done
        length = max(1, round(length * work / done.iterations))
        if length == done.length:
            break
    return done


def is_asynchronous(cell: Cell) -> bool:
    return "asynchronous" in BUILT_IN_STRATEGIES[cell.strategy].split(":")[0].split(".")


def estimate_length(cell: Cell, work: int) -> int:
    """Returns rounds, or updates, by what the strategy's plan says."""
    strategy = make_strategy(cell)
    is_redundant = choose_scheme(cell).startswith("redundant")
    num_slots = math.comb(cell.devices, 2) if is_redundant else cell.devices  # a block for each pair of boards
    per_round = num_slots * getattr(getattr(strategy, "config", None), "exchanges_per_round", 1)
    iterations = strategy.plan.iterations
    if iterations is None:  # epochs, as those of the baseline
        return cell.rounds * (cell.devices if is_asynchronous(cell) else 1)
    length = work / iterations if is_asynchronous(cell) else work / (iterations * per_round)
    return max(1, round(length))


def make_strategy(cell: Cell) -> Any:
    from edgefl.core.config import parse_run  # noqa: PLC0415 in the worker process
    from edgefl.engine.assembly.build import build_run  # noqa: PLC0415 likewise

    run = {
        "run": {"task": cell.data_set, "rounds": 1},
        "task": cell.task_options,
        "strategy": {"name": cell.strategy},
    }
    return build_run(parse_run(run), "plan").strategy


def run_all(cells: list[Cell], args: argparse.Namespace) -> dict[Cell, Outcome]:
    """Runs the cells, `--jobs` at a time; those that are in the `--out` file already are read from there."""
    outcomes = read_outcomes(args.out)
    known = {cell: outcomes[cell] for cell in cells if cell in outcomes}
    if args.known:
        return known
    setup = Setup(data=args.data, accelerator=args.accelerator)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for is_baseline in (True, False):
            missing = [cell for cell in cells if cell not in known and (cell.strategy == BASELINE) == is_baseline]
            running = {
                pool.submit(run_cell, cell, setup, None if is_baseline else known[baseline_of(cell)].iterations): cell
                for cell in missing
            }
            for number, future in enumerate(as_completed(running), 1):
                cell, outcome = running[future], future.result()
                known[cell] = outcome
                with args.out.open("a") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
                told = outcome.error or f"{outcome.accuracy:.4f}, {outcome.iterations} iterations"
                print(
                    f"[{number}/{len(missing)}] {cell.name}: {told} ({outcome.wall_s:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )
    return known


def read_outcomes(path: Path) -> dict[Cell, Outcome]:
    """Returns the outcomes of a file by cell, the newest of each, and takes a last line that was cut short off it."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    outcomes = [Outcome(**json.loads(line)) for line in whole.splitlines()]
    return {Cell(**outcome.cell): outcome for outcome in outcomes}


def baseline_of(cell: Cell) -> Cell:
    return Cell(**{**asdict(cell), "strategy": BASELINE})


def make_cells(args: argparse.Namespace) -> list[Cell]:
    """Returns all cells, those of one setting together, with the baseline's first."""
    strategies = [BASELINE, *(name for name in args.strategies if name != BASELINE)]
    return [
        Cell(
            data_set=data_set,
            partition=partition,
            devices=devices,
            seed=seed,
            strategy=strategy,
            rounds=args.rounds,
            examples=args.examples,
            model=args.model,
        )
        for data_set in args.data_sets
        for seed in args.seeds
        for devices in args.devices
        for partition in args.partitions
        for strategy in strategies
    ]


def format_table(known: dict[Cell, Outcome]) -> str:
    """Returns a Markdown table, a row for each strategy and a column for each setting."""
    settings = sorted({(cell.data_set, cell.partition, cell.devices) for cell in known})
    strategies = [BASELINE, *sorted({cell.strategy for cell in known} - {BASELINE})]
    lines = [
        "| strategy | "
        + " | ".join(f"{data}, {partition}, {devices}" for data, partition, devices in settings)
        + " |",
        "|---|" + "---|" * len(settings),
    ]
    for strategy in strategies:
        entries = [
            format_entry(
                strategy,
                [cell for cell in known if (cell.data_set, cell.partition, cell.devices) == setting],
                known,
            )
            for setting in settings
        ]
        lines.append(f"| `{strategy}` | " + " | ".join(entries) + " |")
    return "\n".join(lines)


def format_entry(strategy: str, cells: Iterable[Cell], known: dict[Cell, Outcome]) -> str:
    chosen = [
        cell for cell in cells if cell.strategy == strategy and not known[cell].error and baseline_of(cell) in known
    ]
    if not chosen:
        return ""
    if strategy == BASELINE:
        return f"{statistics.fmean(known[cell].accuracy for cell in chosen):.3f} ({len(chosen)})"
    points = statistics.fmean(known[cell].accuracy - known[baseline_of(cell)].accuracy for cell in chosen)
    said = sum(bool(known[cell].said) for cell in chosen)
    value = f"{100 * points:+.1f}".replace("-", "−")  # noqa: RUF001 the sign that the docs have
    return f"{value} ({len(chosen)})" + (f", {said} said to diverge" if said else "")


def list_misses(known: dict[Cell, Outcome]) -> list[str]:
    """Returns the cells more than two points below `fedavg`, and those that failed."""
    lines = []
    for cell, outcome in known.items():
        if outcome.error:
            lines.append(f"{cell.name}: {outcome.error}")
        elif cell.strategy != REFERENCE_LINE and baseline_of(cell) in known:
            below = known[baseline_of(cell)].accuracy - outcome.accuracy
            if below > MOST_BELOW:
                lines.append(f"{cell.name}: {100 * below:.1f} points below")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds mnist/, motionsense/")
    parser.add_argument("--data-sets", nargs="+", choices=DATA_SETS, default=["digits"])
    parser.add_argument("--partitions", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument("--devices", nargs="+", type=int, default=[3, 10, 50])
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 8, 9])
    names = sorted(BUILT_IN_STRATEGIES)
    parser.add_argument("--strategies", nargs="+", choices=names, default=names)
    parser.add_argument("--examples", type=int, help="of the training data, of all boards together [all]")
    parser.add_argument("--model", help="of the task, such as mlp [its default]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of fedavg")
    parser.add_argument("--known", action="store_true", help="run nothing: the table of what the file has")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--accelerator", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("strategy-defaults.jsonl"))
    parser.add_argument("--json", action="store_true", help="all outcomes, in place of the table")
    args = options.parse(
        parser, rounds=2, devices=[3], seeds=[7], partitions=["iid"], strategies=["asgd", "fedbuff", "dsgd"]
    )
    if args.examples is not None and args.examples < 1:
        parser.error(f"--examples must be at least 1, got {args.examples}")
    args.data = None if args.data is None else Path(args.data).resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    known = run_all(make_cells(args), args)
    if args.json:
        print(json.dumps([asdict(outcome) for outcome in known.values()]))
        return
    print(format_table(known))
    for line in list_misses(known):
        print(line)


if __name__ == "__main__":
    main()
