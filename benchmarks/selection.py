"""Selection by utility against uniform selection: virtual time to an accuracy, with rounds and without.

    python benchmarks/selection.py [--strategies fedavg] [--fleets mixed] [--boards 40] [--count 6] [--accuracy 0.9]
        [--rounds 300] [--seeds 3] [--iteration-s 1] [--json]

Each strategy trains digits in the simulator, on each fleet, by each rule: of the boards a round asks some, or without
rounds so many are at work together. A run ends when the mean of its last three evaluations on the coordinator's test
data has the accuracy, or after so many rounds. The fleets:

- `mixed`: Pi Zero 2 W, 3 B+, 4 and 5 in turn, shards of unequal classes (`dirichlet:0.3`); `skewed` has them more
  unequal (`dirichlet:0.1`), and with `iid` all are alike.
- `equal`: a Pi 4 each, `dirichlet:0.3`: there is no time to gain.
- `slow-classes`: three quarters are a Pi 4; the others, Pi Zero 2 W, have nearly all examples of the last classes.

The table has the mean over the seeds, the least and the most. `gain` is the mean of the ratios of uniform selection's
time to the rule's with the same seed, and `sooner` in how many seeds the rule was. `fewest` and `most` are how often
a board was asked, as parts of the mean. A run that does not come to the accuracy, `missed`, counts with its whole
time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness import options

import edgefl
from edgefl.engine.run_summary import RunResult

MIXED = ("pi-zero-2w", "pi-3b-plus", "pi-4", "pi-5")
FLEETS = {
    "mixed": (MIXED, "dirichlet:0.3"),
    "skewed": (MIXED, "dirichlet:0.1"),
    "iid": (MIXED, "iid"),
    "equal": (("pi-4",), "dirichlet:0.3"),
    "slow-classes": (("pi-4", "pi-4", "pi-4", "pi-zero-2w"), "disorder:0.1"),
}
"""Profiles and scheme; the boards have the former in turn, but in `slow-classes` one after the other."""
UNIFORM = "uniform"
RULES: dict[str, dict[str, Any]] = {
    UNIFORM: {},
    "utility": {"rule": "utility"},
    "utility, fairness 0.5": {"rule": "utility", "fairness": 0.5},
}
TIMES = ("seconds", "least_s", "most_s", "rounds")
PARTS = ("gain", "fewest", "most")
HEADINGS = (
    "strategy",
    "fleet",
    "rule",
    "virtual s",
    "from",
    "to",
    "rounds",
    "gain",
    "fewest",
    "most",
    "sooner",
    "missed",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["fedavg"], help="by name [%(default)s]")
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=["mixed"], help="[%(default)s]")
    parser.add_argument("--boards", type=int, default=40, help="of the fleet [%(default)s]")
    parser.add_argument("--count", type=int, default=6, help="boards that a round asks, or at work [%(default)s]")
    parser.add_argument("--accuracy", type=float, default=0.9, help="at which a run ends [%(default)s]")
    parser.add_argument("--rounds", type=int, default=300, help="after which it ends in any case [%(default)s]")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each rule [%(default)s]")
    parser.add_argument("--iteration-s", type=float, default=1.0, help="on the reference board [%(default)s]")
    parser.add_argument("--json", action="store_true")
    args = options.parse(
        parser, strategies=["fedavg", "fedbuff"], fleets=list(FLEETS), boards=8, count=2, rounds=4, seeds=1
    )
    rows = []
    if not args.json:
        sys.stdout.write(f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|\n")
    for strategy, fleet in itertools.product(args.strategies, args.fleets):
        uniform_s: list[float] = []
        for rule in RULES:
            runs = [simulate(strategy, fleet, rule, seed, args) for seed in range(7, 7 + args.seeds)]
            uniform_s = uniform_s or [run.metrics["seconds"] or 0.0 for run in runs]
            rows.append(
                {"strategy": strategy, "fleet": fleet, "rule": rule, **summarise(runs, uniform_s, args.boards)}
            )
            if not args.json:
                sys.stdout.write(f"| {' | '.join(format_cells(rows[-1]))} |\n")
                sys.stdout.flush()
    if args.json:
        sys.stdout.write(json.dumps({"v": 1, "rows": rows}) + "\n")
    return 0


def simulate(strategy: str, fleet: str, rule: str, seed: int, args: argparse.Namespace) -> RunResult:
    profiles, scheme = FLEETS[fleet]
    turns = itertools.cycle(profiles)
    boards = [next(turns) for _ in range(args.boards)]
    config = {
        "run": {"task": "digits", "seed": seed, "rounds": args.rounds, "accuracy": args.accuracy,
                "accuracy_window": 3, "evaluate_on": "coordinator"},
        "strategy": {"name": strategy},
        "devices": {"count": args.count},
        "selection": RULES[rule],
        "simulation": {"profiles": sorted(boards) if fleet == "slow-classes" else boards,
                       "iteration_s": args.iteration_s, "workers": 0},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        return edgefl.simulate(config, devices=args.boards, scheme=scheme, root=root)


def summarise(runs: Sequence[RunResult], uniform_s: Sequence[float], num_boards: int) -> dict[str, float]:
    """Returns the figures of a rule over the seeds; `uniform_s` are the times without one."""
    seconds = [run.metrics["seconds"] or 0.0 for run in runs]
    asked = Counter(row["device_id"] for run in runs for row in run.updates)
    mean = asked.total() / num_boards
    return {
        "seconds": statistics.mean(seconds), "least_s": min(seconds), "most_s": max(seconds),
        "rounds": statistics.mean(sum(row["closed_at"] is not None for row in run.rounds) for run in runs),
        "gain": statistics.mean(uniform / one for uniform, one in zip(uniform_s, seconds, strict=True)),
        "sooner": sum(one < uniform for uniform, one in zip(uniform_s, seconds, strict=True)),
        "missed": sum("accuracy" not in run.reason for run in runs),
        "fewest": (min(asked.values()) if len(asked) == num_boards else 0) / mean,
        "most": max(asked.values()) / mean,
    }  # fmt: skip


def format_cells(row: Mapping[str, Any]) -> list[str]:
    texts = [row["strategy"], row["fleet"], row["rule"], *(f"{row[name]:.1f}" for name in TIMES)]
    return [*texts, *(f"{row[name]:.2f}" for name in PARTS), str(row["sooner"]), str(row["missed"])]


if __name__ == "__main__":
    sys.exit(main())
