"""Accuracy under differential privacy of devices: DP-FedAvg and DP-FTRL at some budgets, beside a run without.

    python benchmarks/private_accuracy.py --data DIR [--fleets 100:20,1000:100] [--epsilons 2,4,8] [--seeds 3]
        [--rounds 20] [--iterations 5] [--clip 0.5] [--json]

DIR holds `fashion-mnist/`, whose 60,000 training images are dealt to the boards alike. All train logistic regression
by a few steps of 20 images in each round. A fleet is how many boards there are, and how many of them a round has. The
ways are `plain`; `DP-FedAvg`, with a secret Poisson sample of the boards; `DP-FTRL`, with rounds of a board as far
apart as the fleet allows; and `DP-FedAvg, no sample`, which counts each board in every round, as it must where boards
come when they may. Delta is a tenth of one over the number of boards. Accuracies are on the 10,000 test images: mean
over the seeds, least and most. Noise is the system's, so that private figures differ from call to call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import options

from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.backends.partitioned_data import FleetData
from edgefl.simulation.simulated_run import prepare_simulation, simulate_with_data

TASK = "fashion-mnist"


def make_ways(boards: int, count: int, clip: float) -> dict[str, dict[str, Any]]:
    """Returns what `[devices]` and `[privacy]` say of each way, but for the budget."""
    whole = {"unit": "device", "delta": 0.1 / boards, "clip": clip, "boards": boards}
    return {
        "plain": {"devices": {"count": count}},
        "DP-FedAvg": {"privacy": {**whole, "sampling": count / boards}},
        "DP-FTRL": {
            "devices": {"count": count, "min": count},
            "privacy": {**whole, "mechanism": "dp-ftrl", "separation": boards // count},
        },
        "DP-FedAvg, no sample": {"devices": {"count": count}, "privacy": whole},
    }


def make_config(args: argparse.Namespace, boards: int, way: dict[str, Any], seed: int) -> RunConfig:
    return parse_run({
        "run": {
            "task": TASK, "rounds": args.rounds, "seed": seed, "evaluate_on": "coordinator",
            "evaluate_every": args.rounds,
        },
        "task": {"model": "logistic"},
        "strategy": {
            "name": "fedavg", "iterations": args.iterations, "batch_size": 20, "learning_rate": args.learning_rate,
        },
        "guard": {"enabled": False},
        "simulation": {"workers": 0, "devices": boards},
        **way,
    })  # fmt: skip


def measure(config: RunConfig, data: FleetData) -> float:
    """Returns the accuracy of a run's last model."""
    with tempfile.TemporaryDirectory() as root:
        result = simulate_with_data(config, data, Path(root))
    return float(result.evaluations[-1]["accuracy"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds fashion-mnist/")
    parser.add_argument("--fleets", default="100:20,1000:100", help="boards, and those of a round [%(default)s]")
    parser.add_argument("--epsilons", default="2,4,8", help="the budgets [%(default)s]")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each [%(default)s]")
    parser.add_argument("--rounds", type=int, default=20, help="of a run [%(default)s]")
    parser.add_argument("--iterations", type=int, default=5, help="of a board in a round [%(default)s]")
    parser.add_argument("--clip", type=float, default=0.5, help="most norm of an update [%(default)s]")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="on boards [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = options.parse(parser, fleets="10:5", epsilons="8", seeds=1, rounds=2)
    if args.data is None:
        parser.error("--data DIR: say where fashion-mnist/ lies")
    rows = [row for fleet in args.fleets.split(",") for row in measure_fleet(args, *map(int, fleet.split(":")))]
    sys.stdout.write(json.dumps({"v": 1, "rows": rows}) + "\n" if args.json else render(rows))
    return 0


def measure_fleet(args: argparse.Namespace, boards: int, count: int) -> list[dict[str, Any]]:
    """Returns a row for each way and budget."""
    rows, ways = list[dict[str, Any]](), make_ways(boards, count, args.clip)
    _, data = prepare_simulation(
        make_config(args, boards, ways["plain"], 1), devices=boards, data=Path(args.data) / TASK, scheme="iid"
    )
    for name, way in ways.items():
        for epsilon in map(float, args.epsilons.split(",")) if "privacy" in way else [None]:
            made = way if epsilon is None else {**way, "privacy": {**way["privacy"], "epsilon": epsilon}}
            found = [measure(make_config(args, boards, made, seed), data) for seed in range(1, args.seeds + 1)]
            rows.append({"boards": boards, "way": name, "epsilon": epsilon, "accuracies": found})
            sys.stderr.write(f"{rows[-1]}\n")
    return rows


def render(rows: list[dict[str, Any]]) -> str:
    """Returns a table with a row for each fleet and way, and a column for each budget."""
    epsilons = list(dict.fromkeys(row["epsilon"] for row in rows if row["epsilon"] is not None))
    lines = [f"| boards | way | {' | '.join(f'epsilon {one:g}' for one in epsilons)} |"]
    lines.append("|---" * (len(epsilons) + 2) + "|")
    for boards, way in dict.fromkeys((row["boards"], row["way"]) for row in rows):
        found = {row["epsilon"]: row["accuracies"] for row in rows if (row["boards"], row["way"]) == (boards, way)}
        cells = [
            f"{statistics.mean(one):.3f} ({min(one):.3f} to {max(one):.3f})" if one else ""
            for one in (found.get(epsilon, found.get(None)) for epsilon in epsilons)
        ]
        lines.append(f"| {boards:,} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
