"""ESync's claim: six devices, four at 0.03 s and two at 3.5 s per iteration, virtual time to an accuracy of 0.80.

    python benchmarks/esync_claim.py --data DIR [--model 2nn] [--schemes iid sorted] [--links free "5 s"]
        [--learning-rates 0.032 ...] [--jobs 2] [--out esync-claim]

DIR holds `fashion-mnist/`. Every strategy trains the same network with batches of 64 at a learning rate of 0.032:
the paper's settings, on mean gradients. With several learning rates each strategy is shown at that with which it is
at the target soonest. The data is IID or cut by class (`sorted`: the two slow devices alone own classes 7, 8 and 9);
links cost nothing, or an exchange takes 5 s (2.5 s of latency each way, and the coordinator's own link, 12.5 MB/s in
each direction, is shared). `drop the slow` is SSGD on the four fast devices, `one with all data` a fast device alone.
Time counts to the first of three evaluations in a row whose mean is at the target. The five figures of ESync's README
are drawn from the store of each run: accuracy IID and by class, throughput, traffic, and the share of time that
devices compute.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness import options

FAST, SLOW = 4, 2
FAST_S, SLOW_S = 0.03, 3.5
EXCHANGE_S = 5.0
SERVER_BYTES_PER_S = 12.5e6
HELD_OVER = 3
LEARNING_RATE, BATCH_SIZE = 0.032, 64
ALONE = "one with all data"
STRATEGIES: dict[str, dict[str, Any]] = {
    "ssgd": {"name": "ssgd"},
    "esync budget": {"name": "esync", "epsilon_s": 0.5},
    "esync live": {"name": "esync", "mode": "live", "epsilon_s": 0.5},
    "esync nova": {"name": "esync", "aggregation": "nova", "epsilon_s": 0.5},
    "asgd": {"name": "asgd", "step_scale": 1.0},
    "dc-asgd constant": {"name": "dc-asgd", "step_scale": 1.0, "variant": "constant"},
    "dc-asgd adaptive": {"name": "dc-asgd", "step_scale": 1.0, "variant": "adaptive"},
    "fedbuff": {"name": "fedbuff", "buffer_size": 3, "iterations": 20},
    "local sgd K=20": {"name": "fedavg", "iterations": 20},
    "drop the slow": {"name": "ssgd"},
    ALONE: {"name": "local", "iterations": 20},
}
SCHEMES = ("iid", "sorted")
LINKS = ("free", "5 s")
SECONDS = {
    ("free", "ssgd"): 7200.0,
    ("free", "local sgd K=20"): 1800.0,
    ("free", "drop the slow"): 210.0,
    ("free", None): 105.0,
    ("5 s", "esync budget"): 425.0,
    ("5 s", "esync live"): 425.0,
    ("5 s", "esync nova"): 425.0,
    ("5 s", "ssgd"): 21_600.0,
    ("5 s", "drop the slow"): 14_400.0,
    ("5 s", "fedbuff"): 1_500.0,
    ("5 s", None): 7200.0,
}
"""Virtual seconds: longer where a strategy needs long and computes little meanwhile."""
LONGER = {("sorted", "esync budget"): 12.0, ("sorted", "esync live"): 12.0}
"""So many times longer, to see how far it gets with classes that the slow devices alone have."""
EARLY_S = {"free": 105.0, "5 s": 425.0}
"""When all are compared: 30 rounds of ESync with free links, 50 where an exchange takes 5 s."""
EVALUATE_EVERY = {
    "ssgd": 10,
    "drop the slow": 20,
    "asgd": 20,
    "dc-asgd constant": 20,
    "dc-asgd adaptive": 20,
    "fedbuff": 4,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    strategy: str
    scheme: str
    links: str
    model: str
    learning_rate: float = LEARNING_RATE
    seed: int = 7
    seconds_at_most: float = math.inf

    @property
    def folder(self) -> str:
        name = f"{self.strategy}-{self.scheme}-{self.links}-{self.model}-{self.learning_rate:g}"
        return name.replace(" ", "_").replace("=", "")

    @property
    def seconds(self) -> float:
        seconds = SECONDS.get((self.links, self.strategy)) or SECONDS[(self.links, None)]
        return min(seconds * LONGER.get((self.scheme, self.strategy), 1.0), self.seconds_at_most)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run gave; curves are (virtual second, accuracy), fractions and rates over the whole run."""

    cell: dict[str, Any]
    to_target_s: float | None
    early_accuracy: float
    last_accuracy: float
    best_accuracy: float
    samples_per_s: float
    bytes_per_s: float
    bytes_to_target: int | None
    computing: dict[str, float]
    rounds: int
    iterations_per_update: dict[str, float]
    curve: list[list[float]] = field(default_factory=list)
    wall_s: float = 0.0


def write_profiles(path: Path, *, links: str, model: str) -> None:
    """Two kinds of device; with free links nothing takes time but iterations."""
    latency_s = EXCHANGE_S / 2 if links == "5 s" else 0.0
    profile = (
        "[profile.{name}]\njitter = 0.05\nlatency_s = {latency_s}\nup_bytes_per_s = 1e12\ndown_bytes_per_s = 1e12\n"
        'iterations = {{ "fashion-mnist/{model}" = {seconds} }}\n'
        'source = {{ iterations = "vendor: Li et al., section 5", latency_s = "estimated", jitter = "estimated" }}\n'
    )
    kinds = {"fast": FAST_S, "slow": SLOW_S}
    path.write_text(
        "\n".join(
            profile.format(name=name, seconds=seconds, model=model, latency_s=latency_s)
            for name, seconds in kinds.items()
        )
    )


def run_file(cell: Cell, data: Path, profiles: Path) -> dict[str, Any]:
    settings = {"learning_rate": cell.learning_rate, "batch_size": BATCH_SIZE, **STRATEGIES[cell.strategy]}
    run: dict[str, Any] = {
        "task": "fashion-mnist",
        "seconds": cell.seconds,
        "seed": cell.seed,
        "local_test_fraction": 0.0,
        "evaluate_on": "coordinator",
        "evaluate_every": EVALUATE_EVERY.get(cell.strategy, 1),
    }
    names = [f"device-{number:02}" for number in range(1, FAST + 1)] if cell.strategy == "drop the slow" else []
    simulation: dict[str, Any] = {
        "devices": 1 if cell.strategy == ALONE else FAST + SLOW,
        "profiles": ["fast"] if cell.strategy == ALONE else [f"fast:{FAST}", f"slow:{SLOW}"],
        "profile_file": str(profiles),
        "scheme": cell.scheme,
        "data": str(data / "fashion-mnist"),
        "workers": 0,
    }
    if cell.links == "5 s":
        simulation |= {"server_up_bytes_per_s": SERVER_BYTES_PER_S, "server_down_bytes_per_s": SERVER_BYTES_PER_S}
    return {
        "run": run,
        "task": {"model": cell.model},
        "strategy": settings,
        "devices": {"names": names} if names else {},
        "simulation": simulation,
    }


def run_cell(cell: Cell, data: Path, out: Path, target: float) -> Outcome:
    from edgefl.simulation.simulated_run import simulate  # noqa: PLC0415 in the worker process, behind OMP_NUM_THREADS

    began, folder = time.perf_counter(), out / cell.folder
    folder.mkdir(parents=True, exist_ok=True)
    profiles = folder / "profiles.toml"
    write_profiles(profiles, links=cell.links, model=cell.model)
    done = simulate(run_file(cell, data, profiles), root=folder)
    rounds = [row for row in done.rounds if row["closed_at"] is not None]
    updates = [row for row in done.updates if row["outcome"] == "used"]
    start = min(row["started_at"] for row in rounds)
    total_s = max(row["closed_at"] for row in rounds) - start
    curve = [[row["closed_at"] - start, row["accuracy"]] for row in rounds if row["accuracy"] is not None]
    held_s = _held_s(curve, target)
    devices = sorted({row["device_id"] for row in updates})
    return Outcome(
        cell=asdict(cell),
        to_target_s=held_s,
        early_accuracy=max((point for point in curve if point[0] <= EARLY_S[cell.links]), default=curve[0])[1],
        last_accuracy=statistics.fmean(accuracy for _, accuracy in curve[-HELD_OVER:]),
        best_accuracy=max(accuracy for _, accuracy in curve),
        samples_per_s=sum(row["iterations"] for row in updates) * BATCH_SIZE / total_s,
        bytes_per_s=sum(row["bytes_up"] + row["bytes_down"] for row in rounds) / total_s,
        bytes_to_target=None
        if held_s is None
        else sum(row["bytes_up"] + row["bytes_down"] for row in rounds if row["closed_at"] - start <= held_s),
        computing={
            device: sum(row["compute_s"] for row in updates if row["device_id"] == device) / total_s
            for device in devices
        },
        iterations_per_update={
            device: statistics.fmean(row["iterations"] for row in updates if row["device_id"] == device)
            for device in devices
        },
        rounds=len(rounds),
        curve=curve,
        wall_s=round(time.perf_counter() - began, 1),
    )


def _held_s(curve: list[list[float]], target: float) -> float | None:
    for place in range(HELD_OVER, len(curve) + 1):
        if statistics.fmean(accuracy for _, accuracy in curve[place - HELD_OVER : place]) >= target:
            return curve[place - HELD_OVER][0]
    return None


def run_all(cells: list[Cell], args: argparse.Namespace) -> dict[Cell, Outcome]:
    """Runs the cells, `--jobs` at a time; those that are in the `--out` folder already are read from there."""
    known: dict[Cell, Outcome] = {}
    for cell in cells:
        kept = args.out / cell.folder / "outcome.json"
        if kept.exists():
            known[cell] = Outcome(**json.loads(kept.read_text()))
    missing = [cell for cell in cells if cell not in known]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_cell, cell, args.data, args.out, args.target): cell for cell in missing}
        for number, future in enumerate(as_completed(running), 1):
            cell, outcome = running[future], future.result()
            known[cell] = outcome
            (args.out / cell.folder / "outcome.json").write_text(json.dumps(asdict(outcome)))
            what = f"{cell.strategy}, {cell.scheme}, links {cell.links}, learning rate {cell.learning_rate:g}"
            told = f"{what}: to {args.target:g} in {outcome.to_target_s} s"
            end = f"at the end {outcome.last_accuracy:.4f} ({outcome.wall_s:.0f} s)"
            print(f"[{number}/{len(missing)}] {told}, {end}", file=sys.stderr, flush=True)
    return known


def find_best(known: dict[Cell, Outcome], strategy: str, scheme: str, links: str) -> Outcome:
    """Returns the outcome at the target soonest, or else the one with the highest accuracy at the end."""
    outcomes = [
        outcome
        for cell, outcome in known.items()
        if (cell.strategy, cell.scheme, cell.links) == (strategy, scheme, links)
    ]
    return min(outcomes, key=lambda outcome: (outcome.to_target_s or math.inf, -outcome.last_accuracy))


def print_table(known: dict[Cell, Outcome], args: argparse.Namespace) -> None:
    form = "{:18} {:>6} {:>10} {:>7} {:>8} {:>9} {:>12} {:>9} {:>11} {:>9} {:>10}"
    for scheme in args.schemes:
        for links in args.links:
            base = find_best(known, "ssgd", scheme, links).to_target_s if "ssgd" in args.strategies else None
            print(f"\nFashion-MNIST, {args.model}, {scheme}, links {links}; virtual seconds to {args.target:g}")
            print(
                form.format(
                    "strategy",
                    "rate",
                    "seconds",
                    "x ssgd",
                    "MB",
                    f"at {EARLY_S[links]:.0f} s",
                    "at the end",
                    "of s",
                    "samples/s",
                    "kB/s",
                    "computing",
                )
            )
            for strategy in args.strategies:
                outcome = find_best(known, strategy, scheme, links)
                reached, num_bytes = outcome.to_target_s, outcome.bytes_to_target
                print(
                    form.format(
                        strategy,
                        f"{outcome.cell['learning_rate']:g}",
                        "-" if reached is None else f"{reached:.1f}",
                        "-" if reached is None or base is None else f"{base / reached:.1f}",
                        "-" if num_bytes is None else f"{num_bytes / 1e6:.0f}",
                        f"{outcome.early_accuracy:.4f}",
                        f"{outcome.last_accuracy:.4f}",
                        f"{outcome.curve[-1][0]:.0f}",
                        f"{outcome.samples_per_s:.0f}",
                        f"{outcome.bytes_per_s / 1e3:.0f}",
                        f"{min(outcome.computing.values()):.2f}-{max(outcome.computing.values()):.2f}",
                    )
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds fashion-mnist/")
    parser.add_argument("--model", default="2nn", choices=("lenet", "cnn-small", "cnn", "2nn"))
    parser.add_argument("--target", type=float, default=0.8)
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[LEARNING_RATE])
    parser.add_argument("--seconds-at-most", type=float, default=math.inf, help="virtual, of each run [as published]")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("esync-claim"))
    args = options.parse(parser, target=0.3, strategies=["esync budget", "local sgd K=20"], seconds_at_most=20.0)
    if args.data is None:
        parser.error("say where the data is: --data DIR, or EDGEFL_DATA")
    args.data, args.out = Path(args.data).resolve(), args.out.resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    cells = [
        Cell(
            strategy=strategy,
            scheme=scheme,
            links=links,
            model=args.model,
            learning_rate=rate,
            seconds_at_most=args.seconds_at_most,
        )
        for scheme in args.schemes
        for links in args.links
        for strategy in args.strategies
        for rate in args.learning_rates
    ]
    known = run_all(cells, args)
    print_table(known, args)
    if set(args.schemes) == set(SCHEMES) and "free" in args.links:
        from harness.esync_figures import draw  # noqa: PLC0415 matplotlib is slow to import

        shown = [find_best(known, strategy, scheme, "free") for scheme in SCHEMES for strategy in args.strategies]
        alone = ALONE if ALONE in args.strategies else None
        print("figures:", *draw(shown, args.out, model=args.model, alone=alone), sep="\n  ")


if __name__ == "__main__":
    main()
