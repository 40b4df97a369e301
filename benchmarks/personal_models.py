"""What stays on the boards: accuracy of the shared model and of personal ones, on each board's own kind of data.

    python benchmarks/personal_models.py [--seeds 3] [--rounds 20] [--json]

Digits on 8 simulated boards, cut by Dirichlet 0.1, one epoch a round at a learning rate of 0.1. Each model is
evaluated on its board's own test examples, which nobody trains on: a tenth of its shard. The accuracy is over all
boards' examples after the last round, the worst is that of the board with the lowest. What is fine-tuned after is the
shared model, in one more round of 5 epochs. With IFCA each board takes one of 4 models that travel.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import options

from edgefl.simulation.simulated_run import simulate

DEVICES, SCHEME, RATE = 8, "dirichlet:0.1", 0.1
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "shared": {},
    "FedPer": {"adapt": {"local": ["fc2.*"]}},
    "FedRep": {"adapt": {"local": ["fc2.*"]}, "strategy": {"head_epochs": 2}},
    "Ditto": {"strategy": {"personal_lambda": 1.0}},
    "APFL": {"strategy": {"personal_mixture": 0.5}},
    "IFCA, 4 clusters": {"strategy": {"name": "ifca", "clusters": 4}},
    "fine-tuned after": {"after": {"personal_lambda": 0.0, "epochs": 5}},
}


def measure(changes: dict[str, dict[str, Any]], *, rounds: int, seed: int) -> dict[str, float]:
    """Returns the accuracy over all boards' test examples, and that of the worst board."""
    config = {
        "run": {"task": "digits", "rounds": rounds, "seed": seed, "evaluate_on": "devices"},
        "strategy": {"name": "fedavg", "epochs": 1, "learning_rate": RATE, **changes.get("strategy", {})},
        "adapt": changes.get("adapt", {}),
        "simulation": {"workers": 0, "scheme": SCHEME},
    }
    with tempfile.TemporaryDirectory() as folder:
        result = simulate(config, devices=DEVICES, root=Path(folder) / "run")
        if "after" in changes:
            config["run"] |= {"rounds": 1, "init": str(result.model)}
            config["strategy"] |= changes["after"]
            result = simulate(config, devices=DEVICES, root=Path(folder) / "after")
    newest = max(row["round"] for row in result.evaluations)
    last = [row for row in result.evaluations if row["round"] == newest]
    if "personal-accuracy" in result.metrics:
        accuracies = [row["metrics"]["personal-accuracy"] for row in last]
        return {"accuracy": float(result.metrics["personal-accuracy"]), "worst": min(accuracies)}
    return {"accuracy": float(result.metrics["accuracy"]), "worst": min(row["accuracy"] for row in last)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many, of which the mean [%(default)s]")
    parser.add_argument("--rounds", type=int, default=20, help="of a run [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = options.parse(parser, seeds=1, rounds=1)
    rows = {}
    for name, changes in METHODS.items():
        found = [measure(changes, rounds=args.rounds, seed=seed) for seed in range(1, args.seeds + 1)]
        rows[name] = {key: [one[key] for one in found] for key in found[0]}
    if args.json:
        json.dump({"devices": DEVICES, "scheme": SCHEME, "rounds": args.rounds, "methods": rows}, sys.stdout)
        return
    print("| model | accuracy | from | to | worst board |\n|---|---|---|---|---|")
    for name, row in rows.items():
        cells = [statistics.mean(row["accuracy"]), min(row["accuracy"]), max(row["accuracy"])]
        print(f"| {name} | {' | '.join(f'{cell:.3f}' for cell in cells)} | {statistics.mean(row['worst']):.3f} |")


if __name__ == "__main__":
    main()
