"""How many bytes AdaComp and its rivals send until MNIST's CNN holds an accuracy, each at its own best learning rate.

    python benchmarks/adacomp_claim.py --data DIR [--devices 100] [--seeds 5] [--jobs 2] [--out adacomp-claim]

DIR holds `mnist/`. Every variant is first tried at every learning rate, with and without decay, for `--tune-updates`
updates of one seed; the `--finalists` that are best at the end of it are tried for `--longer` times as many, and the
best of them then runs to the target with every seed. Cells in the `--out` folder are not run again, so a run that was
stopped goes on where it was; `--known` runs nothing and prints what is there. What counts is the bytes on the wire
until the mean of the last five evaluations (every 1,000 updates, on all 10,000 test images) is at the target. The
figure shows the first seed's accuracy over updates and over bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness import options

RATES = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
DECAYS = ("constant", "inverse-sqrt")
UPDATES_PER_ROUND = 1000
HELD_OVER = 5


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table: a strategy, its codecs, and whether its learning rate is tuned on the full grid."""

    strategy: dict[str, Any]
    up: str = "dense"
    down: str = "dense"
    rates: tuple[float, ...] = RATES
    decays: tuple[str, ...] = DECAYS
    is_round: bool = False


PAPER = {"name": "adacomp", "step_scale": 1.0, "improved": False}
ADACOMP = {**PAPER, "compression": 0.01}
FEDAVG = {"name": "fedavg", "epochs": 5.0}
FEDAVG_RATES = (0.1, 0.05, 0.02)
VARIANTS = {
    "dense ASGD": Variant(strategy={"name": "asgd", "step_scale": 1.0}),
    "dense ASGD, fp16 and zstd": Variant(
        strategy={"name": "asgd", "step_scale": 1.0}, up="dense|fp16|zstd", down="dense|fp16"
    ),
    "compression only": Variant(strategy={**ADACOMP, "staleness": "none"}),
    "compression, staleness of the update": Variant(strategy={**ADACOMP, "staleness": "update"}),
    "staleness-aware dense": Variant(strategy={**PAPER, "compression": 1.0, "staleness": "update"}),
    "AdaComp 1 %": Variant(strategy=ADACOMP, up="topk:0.01|rice"),
    "AdaComp 1 %, sparse downlink": Variant(strategy=ADACOMP, up="topk:0.01|rice", down="delta"),
    "AdaComp 1 %, int8, fp16 downlink": Variant(strategy=ADACOMP, up="topk:0.01|int8|rice", down="delta|fp16"),
    "AdaComp improved": Variant(strategy={**ADACOMP, "improved": True}, down="delta|fp16"),
    "top-k 1 % with error feedback": Variant(
        strategy={"name": "asgd", "step_scale": 1.0}, up="ef|topk:0.01|int8|rice"
    ),
    "QSGD 4 bits": Variant(strategy={"name": "asgd", "step_scale": 1.0}, up="dense|qsgd:4"),
    "FedAvg": Variant(strategy=FEDAVG, rates=FEDAVG_RATES, decays=("constant",), is_round=True),
    "FedAvg, fp16": Variant(
        strategy=FEDAVG, up="dense|fp16", down="dense|fp16", rates=FEDAVG_RATES, decays=("constant",), is_round=True
    ),
    "FedAvg, top-k 1 % with error feedback": Variant(
        strategy=FEDAVG,
        up="ef|topk:0.01|int8|rice",
        down="dense|fp16",
        rates=FEDAVG_RATES,
        decays=("constant",),
        is_round=True,
    ),
}
SAME_RATE = {
    "AdaComp 1 %, sparse downlink": "AdaComp 1 %",
    "AdaComp 1 %, int8, fp16 downlink": "AdaComp 1 %",
    "dense ASGD, fp16 and zstd": "dense ASGD",
    "FedAvg, fp16": "FedAvg",
}
"""Those that differ on the wire alone, by nothing or by a rounding, are tuned once for both."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One simulated run."""

    variant: str
    devices: int
    rate: float
    decay: str
    seed: int
    max_updates: int
    target: float
    init: str

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:20]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell gave; `held_at` is the number of updates at which the target was held, None for never."""

    cell: dict[str, Any]
    accuracies: list[float] = field(default_factory=list)
    held_at: int | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    updates: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    failure: str = ""

    @property
    def score(self) -> float:
        """The last accuracy: what tells learning rates apart before the target is near."""
        return self.accuracies[-1] if self.accuracies and not self.failure else 0.0


def run_file(cell: Cell, data: Path) -> dict[str, Any]:
    variant = VARIANTS[cell.variant]
    run: dict[str, Any] = {
        "task": "mnist",
        "seed": cell.seed,
        "accuracy": cell.target,
        "accuracy_window": HELD_OVER,
        "updates": cell.max_updates,
        "local_test_fraction": 0.0,
        "evaluate_on": "coordinator",
    }
    devices: dict[str, Any] = {}
    if variant.is_round:
        devices["fraction"] = 0.1
    else:
        run["updates_per_round"] = UPDATES_PER_ROUND
    return {
        "run": run,
        "task": {"init": cell.init},
        "strategy": {**variant.strategy, "learning_rate": cell.rate, "schedule": cell.decay, "batch_size": 10},
        "compression": {"up": variant.up, "down": variant.down},
        "devices": devices,
        "simulation": {
            "devices": cell.devices,
            "profiles": ["pi-4"],
            "scheme": "iid",
            "data": str(data / "mnist"),
            "workers": 0,
            "iteration_s": 0.02,
        },
    }


def run_cell(cell: Cell, data: Path) -> Outcome:
    """Simulates one cell; a run that fails has diverged, and its text says so."""
    from edgefl.core.errors import EdgeflError  # noqa: PLC0415 in the worker process, behind OMP_NUM_THREADS
    from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 likewise

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = simulate(run_file(cell, data), root=folder)
        except EdgeflError as error:
            return Outcome(cell=asdict(cell), failure=str(error)[:200], wall_s=time.perf_counter() - began)
    closed = [row for row in done.rounds if row["closed_at"] is not None]
    accuracies = [row["accuracy"] for row in closed if row["accuracy"] is not None]
    return Outcome(
        cell=asdict(cell),
        accuracies=[round(accuracy, 4) for accuracy in accuracies],
        **_until_held(closed, cell.target),
        updates=sum(row["num_updates"] for row in closed),
        virtual_s=float(done.metrics["seconds"] or 0.0),
        wall_s=round(time.perf_counter() - began, 1),
    )


def _until_held(rounds: list[dict[str, Any]], target: float) -> dict[str, Any]:
    """Sums what had travelled when the mean of the last five evaluations was at the target for the first time."""
    recent: list[float] = []
    up = down = updates = 0
    for row in rounds:
        up, down, updates = up + row["bytes_up"], down + row["bytes_down"], updates + row["num_updates"]
        recent = [*recent, row["accuracy"] or 0.0][-HELD_OVER:]
        if len(recent) == HELD_OVER and statistics.fmean(recent) >= target:
            return {"held_at": updates, "bytes_up": up, "bytes_down": down}
    return {"bytes_up": up, "bytes_down": down}


class Results:
    """Outcomes on disk, one JSON line each; a cell is never run twice."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "cells.jsonl"
        self._known: dict[str, Outcome] = {}
        if self._file.exists():
            for line in self._file.read_text().splitlines():
                outcome = Outcome(**json.loads(line))
                self._known[Cell(**outcome.cell).key] = outcome

    def get(self, cell: Cell) -> Outcome | None:
        return self._known.get(cell.key)

    def add(self, outcome: Outcome) -> None:
        self._known[Cell(**outcome.cell).key] = outcome
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def run_all(cells: list[Cell], results: Results, args: argparse.Namespace) -> list[Outcome]:
    """Runs what is not known yet, `--jobs` at a time, and returns the outcomes in the order of the cells."""
    missing = [] if args.known else [cell for cell in dict.fromkeys(cells) if results.get(cell) is None]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_cell, cell, args.data): cell for cell in missing}
        for number, future in enumerate(as_completed(running), 1):
            outcome = future.result()
            results.add(outcome)
            cell = running[future]
            print(
                f"[{number}/{len(missing)}] {cell.variant}, lr {cell.rate:g} {cell.decay}, seed {cell.seed}: "
                f"{outcome.failure or outcome.accuracies[-5:]} ({outcome.updates} updates, {outcome.wall_s:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    found = [results.get(cell) for cell in cells]
    return [outcome for outcome in found if outcome is not None]


def tune(names: list[str], results: Results, args: argparse.Namespace) -> dict[str, tuple[float, str]]:
    """Returns each variant's best learning rate and decay, by runs of the first seed."""
    grids = {name: _grid(VARIANTS[name], args) for name in names}
    short = _best_of(grids, args.tune_updates, args.finalists, results, args)
    longer = _best_of(short, args.tune_updates * args.longer, 1, results, args)
    return {name: ranked[0] for name, ranked in longer.items() if ranked}


def _grid(variant: Variant, args: argparse.Namespace) -> list[tuple[float, str]]:
    return [
        (rate, decay)
        for rate in variant.rates
        for decay in variant.decays
        if rate in (args.rates or [rate]) and decay in (args.decays or [decay])
    ]


def _best_of(
    grids: dict[str, list[tuple[float, str]]],
    max_updates: int,
    num_kept: int,
    results: Results,
    args: argparse.Namespace,
) -> dict[str, list[tuple[float, str]]]:
    """Runs every point of the grids for so many updates, and returns the best of each; rounds are not run again."""
    limits = {
        name: _round_updates(args.tune_rounds, args) if VARIANTS[name].is_round else max_updates for name in grids
    }
    cells = {name: [_cell(name, *point, 1, limits[name], args) for point in grid] for name, grid in grids.items()}
    run_all([cell for column in cells.values() for cell in column], results, args)
    kept = {}
    for name, column in cells.items():
        known = [(cell, outcome) for cell in column if (outcome := results.get(cell)) is not None]
        known.sort(key=lambda pair: -pair[1].score)
        kept[name] = [(cell.rate, cell.decay) for cell, _ in known[:num_kept]]
    return kept


def _round_updates(num_rounds: int, args: argparse.Namespace) -> int:
    return int(num_rounds * max(1, args.devices // 10))


def _limit(name: str, args: argparse.Namespace) -> int:
    return _round_updates(args.max_rounds, args) if VARIANTS[name].is_round else int(args.max_updates)


def _cell(name: str, rate: float, decay: str, seed: int, max_updates: int, args: argparse.Namespace) -> Cell:
    return Cell(
        variant=name,
        devices=args.devices,
        rate=rate,
        decay=decay,
        seed=seed,
        max_updates=max_updates,
        target=args.target,
        init=args.init,
    )


def report(best: dict[str, tuple[float, str]], results: Results, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every seed at the best learning rate and returns the rows of the table."""
    tuned = {name: best[SAME_RATE.get(name, name)] for name in args.variants if SAME_RATE.get(name, name) in best}
    cells = {
        name: [_cell(name, *point, seed, _limit(name, args), args) for seed in range(1, args.seeds + 1)]
        for name, point in tuned.items()
    }
    run_all(sorted((c for column in cells.values() for c in column), key=lambda cell: cell.seed), results, args)
    rows = []
    for name, column in cells.items():
        outcomes = [outcome for cell in column if (outcome := results.get(cell)) is not None]
        if not outcomes:
            continue
        held = [outcome for outcome in outcomes if outcome.held_at is not None]
        rows.append(
            {
                "variant": name,
                "learning_rate": column[0].rate,
                "decay": column[0].decay,
                "held": f"{len(held)}/{len(outcomes)}",
                "updates": _mean([outcome.held_at or 0 for outcome in held]),
                "bytes_up": _mean([outcome.bytes_up for outcome in held]),
                "bytes_up_interval": _interval([outcome.bytes_up for outcome in held]),
                "bytes_both": _mean([outcome.bytes_up + outcome.bytes_down for outcome in held]),
                "last_accuracy": _mean([outcome.score for outcome in outcomes]) or 0.0,
            }
        )
    shown = {
        name: (_step(name, args), outcome) for name, (cell, *_) in cells.items() if (outcome := results.get(cell))
    }
    print(f"figure: {_draw(shown, args)}", file=sys.stderr)
    return rows


def _step(name: str, args: argparse.Namespace) -> int:
    return _round_updates(1, args) if VARIANTS[name].is_round else UPDATES_PER_ROUND


def _draw(shown: dict[str, tuple[int, Outcome]], args: argparse.Namespace) -> Path:
    from harness.adacomp_figure import draw  # noqa: PLC0415 matplotlib is of the development extra alone

    return draw(shown, args.target, args.out / f"accuracy-{args.devices}.png")


def _mean(values: list[Any]) -> float | None:
    return statistics.fmean(values) if values else None


def _interval(values: list[Any]) -> float | None:
    """Half the 95 % interval of the mean, by Student's t for up to five seeds."""
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
    if len(values) < 2:
        return None
    return float(student.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values)))


def print_table(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    dense = [row for row in rows if row["variant"] in {"dense ASGD", "staleness-aware dense"} and row["bytes_up"]]
    better = min(dense, key=lambda row: row["bytes_up"]) if dense else None
    print(
        f"\nMNIST CNN (421,642 parameters, {args.init} initialisation), {args.devices} devices, batch 10, IID; "
        f"bytes until {args.target:.0%} is held (mean of {HELD_OVER} evaluations), {args.seeds} seeds"
    )
    if better:
        print(f"ratios to the better dense baseline in fp32: {better['variant']}")
    columns = ("variant", "lr", "decay", "held", "updates", "up", "up x", "both", "both x")
    form = "{:37} {:>6} {:>12} {:>5} {:>8} {:>20} {:>7} {:>10} {:>7}"
    print(form.format(*columns))
    for row in rows:
        print(form.format(*_printed(row, better)))


def _printed(row: dict[str, Any], better: dict[str, Any] | None) -> list[str]:
    up, both, margin = row["bytes_up"], row["bytes_both"], row["bytes_up_interval"]
    start = [row["variant"], f"{row['learning_rate']:g}", row["decay"], row["held"]]
    if up is None:
        return [*start, "-", f"accuracy {row['last_accuracy']:.3f}", "-", "-", "-"]
    sent = f"{up / 1e6:.4g} MB" + (f" ± {margin / 1e6:.2g}" if margin else "")
    ratios = [f"{better['bytes_up'] / up:.1f}", f"{better['bytes_both'] / both:.1f}"] if better else ["-", "-"]
    return [*start, f"{row['updates']:.0f}", sent, ratios[0], f"{both / 1e6:.4g} MB", ratios[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="folder that holds mnist/")
    parser.add_argument("--devices", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.97)
    parser.add_argument("--init", choices=("torch", "adacomp"), default="torch")
    parser.add_argument("--tune-updates", type=int, default=2000)
    parser.add_argument("--tune-rounds", type=int, default=3, help="likewise, of FedAvg")
    parser.add_argument("--finalists", type=int, default=3)
    parser.add_argument("--longer", type=int, default=4)
    parser.add_argument("--max-updates", type=int, default=60_000)
    parser.add_argument("--max-rounds", type=int, default=60, help="likewise, of FedAvg")
    parser.add_argument("--rates", type=float, nargs="+", help="try these of the learning rates alone")
    parser.add_argument("--decays", choices=DECAYS, nargs="+", help="try these of the decays alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("adacomp-claim"))
    parser.add_argument("--known", action="store_true", help="run nothing, print what is known")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = options.parse(
        parser,
        devices=4,
        seeds=1,
        tune_updates=20,
        tune_rounds=1,
        finalists=1,
        longer=1,
        max_updates=8,
        max_rounds=2,
        rates=[0.1],
        decays=["constant"],
        variants=["AdaComp 1 %"],
    )
    if args.data is None:
        parser.error("say where the data is: --data DIR, or EDGEFL_DATA")
    args.data = Path(args.data).resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = Results(args.out)
    best = tune(list(dict.fromkeys(SAME_RATE.get(name, name) for name in args.variants)), results, args)
    rows = report(best, results, args)
    (args.out / f"table-{args.devices}.json").write_text(json.dumps(rows, indent=1))
    print_table(rows, args)


if __name__ == "__main__":
    main()
