"""Selection by utility against uniform selection: virtual time to an accuracy, on boards of mixed speeds.

    python benchmarks/selection.py [--boards 40] [--count 6] [--accuracy 0.9] [--rounds 300] [--seeds 3]
        [--iteration-s 1] [--json]

FedAvg on digits in the simulator: of the boards, which are Pi Zero 2 W, 3 B+, 4 and 5 in turn and have shards of
unequal classes, a round asks some. A run ends when the mean of its last three evaluations on the coordinator's test
data has the accuracy, or after so many rounds. The table has the mean over the seeds, the least and the most;
`fewest` and `most` are how often a board was asked, as parts of the mean. A run that does not come to the accuracy
counts with its whole time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from typing import Any

from harness import options

import edgefl

PROFILES = ["pi-zero-2w", "pi-3b-plus", "pi-4", "pi-5"]
RULES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "utility": {"rule": "utility"},
    "utility, fairness 0.5": {"rule": "utility", "fairness": 0.5},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, default=40, help="of the fleet [%(default)s]")
    parser.add_argument("--count", type=int, default=6, help="boards that a round asks [%(default)s]")
    parser.add_argument("--accuracy", type=float, default=0.9, help="at which a run ends [%(default)s]")
    parser.add_argument("--rounds", type=int, default=300, help="after which it ends in any case [%(default)s]")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each rule [%(default)s]")
    parser.add_argument("--scheme", default="dirichlet:0.3", help="how the data is cut [%(default)s]")
    parser.add_argument("--iteration-s", type=float, default=1.0, help="on the reference board [%(default)s]")
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, boards=8, count=2, rounds=4, seeds=1)
    rows = [{"rule": name, **measure(name, args)} for name in RULES]
    if args.json:
        sys.stdout.write(json.dumps({"v": 1, "rows": rows}) + "\n")
        return 0
    sys.stdout.write("| rule | virtual s | from | to | rounds | not reached | fewest | most |\n" + "|---" * 8 + "|\n")
    for row in rows:
        cells = [*(f"{row[name]:.1f}" for name in ("seconds", "least_s", "most_s", "rounds")), str(row["missed"])]
        cells += [f"{row[name]:.2f}" for name in ("fewest", "most")]
        sys.stdout.write(f"| {' | '.join([row['rule'], *cells])} |\n")
    return 0


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Returns the figures of a rule over the seeds."""
    seconds, rounds, missed, asked = list[float](), list[int](), 0, Counter[str]()
    for seed in range(7, 7 + args.seeds):
        config = {
            "run": {"task": "digits", "seed": seed, "rounds": args.rounds, "accuracy": args.accuracy,
                    "accuracy_window": 3, "evaluate_on": "coordinator"},
            "strategy": {"name": "fedavg"},
            "devices": {"count": args.count},
            "selection": RULES[name],
            "simulation": {"profiles": PROFILES, "iteration_s": args.iteration_s, "workers": 0},
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as root:
            result = edgefl.simulate(config, devices=args.boards, scheme=args.scheme, root=root)
        seconds.append(result.metrics["seconds"] or 0.0)
        rounds.append(len(result.rounds))
        missed += len(result.rounds) >= args.rounds
        asked.update(row["device_id"] for row in result.updates)
    mean = asked.total() / args.boards
    return {
        "seconds": statistics.mean(seconds), "least_s": min(seconds), "most_s": max(seconds),
        "rounds": statistics.mean(rounds), "missed": missed,
        "fewest": (min(asked.values()) if len(asked) == args.boards else 0) / mean,
        "most": max(asked.values()) / mean,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
