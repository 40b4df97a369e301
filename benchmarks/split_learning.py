"""Split learning beside `fedavg`: accuracy, a board's memory, and its bytes.

    python benchmarks/split_learning.py [--data DIR] [--parts accuracy boards] [--rounds 5] [--epochs 1] [--seeds 3]
        [--trained central fedavg cut cut-int8] [--json]

accuracy: MNIST over boards in the simulator: one device on all of the data, `fedavg`, and the network cut after
`--after`, with whole numbers and with the codec `int8`, each with as many epochs.

boards: real device processes (TLS, broker) on a part of MNIST each: the highest RSS of a board's process tree, above
what it takes with torch loaded and nothing trained, and its bytes up and down in a round, beside `fedavg`. `--data`
holds `mnist/`. Memory and bytes do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from device_costs import peak_rss_bytes, rss_of
from harness import options
from harness.process_trees import adopt_orphans, end_descendants
from harness.round_report import machine

from edgefl.core.config import parse_run
from edgefl.core.errors import EdgeflError
from edgefl.simulation.local_fleet import LocalFleet, partition_devices
from edgefl.simulation.simulated_run import make_reference, simulate

BASE = "import flwr, torch, edgefl.device.agent, edgefl.tasks.images"
TRAINED = ("central", "fedavg", "cut", "cut-int8")
PART_OF_DATA = 120
"""A board of the second part has one of so many parts of the data: 500 examples."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds mnist/")
    parser.add_argument("--parts", nargs="+", choices=("accuracy", "boards"), default=("accuracy", "boards"))
    parser.add_argument("--boards", type=int, default=4, help="[%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="of the accuracy [%(default)s]")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the accuracy [%(default)s]")
    parser.add_argument("--epochs", type=float, default=1.0, help="of a round of the accuracy [%(default)s]")
    parser.add_argument("--trained", nargs="+", choices=TRAINED, default=TRAINED, help="of the accuracy [all]")
    parser.add_argument("--after", default="pool2", help="cut of the CNN [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = options.parse(parser, rounds=1, seeds=1, boards=2, parts=("boards",))
    if args.data is None:
        print("not measured: --data must name the folder that holds mnist/", file=sys.stderr)
        return 1
    adopt_orphans()
    found: dict[str, Any] = {"v": 1, **machine()}
    try:
        if "accuracy" in args.parts:
            found["accuracy"] = measure_accuracy(args)
        if "boards" in args.parts:
            found["base_bytes"] = rss_of(BASE)
            found["boards"] = measure_boards(args)
    except EdgeflError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    finally:
        end_descendants()
    print(json.dumps(found) if args.json else as_tables(found))
    return 0


def measure_accuracy(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the accuracies after the last round, one for each seed."""
    splits: Mapping[str, tuple[str, Mapping[str, str]]] = {
        "central": ("one device on all data", {}),
        "fedavg": ("fedavg", {}),
        "cut": (f"cut after {args.after}", {"after": args.after}),
        "cut-int8": (f"cut after {args.after}, int8", {"after": args.after, "up": "int8", "down": "int8"}),
    }
    rows = []
    for trained in args.trained:
        (title, split), accuracies = splits[trained], list[float]()
        for seed in range(1, args.seeds + 1):
            tables = {
                "run": {"task": "mnist", "rounds": args.rounds, "seed": seed, "evaluate_every": args.rounds},
                "task": {"model": "cnn-small"},
                "strategy": {"epochs": args.epochs},
                "split": dict(split),
                "simulation": {"devices": args.boards, "data": str(Path(args.data) / "mnist"), "iteration_s": 0.01},
            }
            config = parse_run(tables)
            with tempfile.TemporaryDirectory(prefix="edgefl-split-") as folder:
                run = simulate(make_reference(config) if trained == "central" else config, root=folder)
                accuracies.append(run.evaluations[-1]["accuracy"])
            _say(f"{title}, seed {seed}: {accuracies[-1]:.4f}")
        rows.append({"title": title, "accuracies": accuracies})
    return rows


def measure_boards(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns memory and bytes of the board that took most, for networks whole and cut."""
    works = [
        ("cnn-small", "fedavg", {}, 32),
        ("cnn-small", "cut after pool1", {"after": "pool1"}, 32),
        ("cnn-small", "cut after pool2", {"after": "pool2"}, 32),
        ("cnn-small", "cut after pool2, int8", {"after": "pool2", "up": "int8", "down": "int8"}, 32),
    ]
    if not args.quick:
        works += [
            ("resnet18-gn", "fedavg", {}, 8),
            ("resnet18-gn", "cut after stage1_block2", {"after": "stage1_block2"}, 8),
            ("resnet18-gn", "the same, int8", {"after": "stage1_block2", "up": "int8", "down": "int8"}, 8),
        ]
    return [_measure_board(args, *work) for work in works]


def _measure_board(
    args: argparse.Namespace, model: str, title: str, split: Mapping[str, str], batch_size: int
) -> dict[str, Any]:
    _say(f"{model}, {title}")
    tables = {
        "run": {"task": "mnist", "rounds": 2, "evaluate_on": "none", "local_test_fraction": 0.0},
        "task": {"model": model},
        "strategy": {"iterations": 10, "batch_size": batch_size, "learning_rate": 0.01},
        "devices": {"require": args.boards, "ready_s": 300},
        "split": dict(split),
    }
    with tempfile.TemporaryDirectory(prefix="edgefl-split-") as folder:
        root = Path(folder)
        devices = partition_devices("mnist", "iid", PART_OF_DATA, root / "shards", Path(args.data) / "mnist", 7)[0]
        with LocalFleet(root=root / "fleet", devices=devices[: args.boards]) as fleet:
            run_id = fleet.submit(parse_run(tables))
            fleet.wait_for_run(run_id)
            peak = max(peak_rss_bytes(fleet.processes[device.name].pid) for device in fleet.devices)
            rows = [row for row in fleet.list_history("updates", run=run_id) if row["outcome"] == "used"]
    return {
        "model": model, "title": title, "peak_bytes": peak,
        "bytes_up": max(row["bytes_up"] for row in rows), "bytes_down": max(row["bytes_down"] for row in rows),
    }  # fmt: skip


def as_tables(found: Mapping[str, Any]) -> str:
    lines: list[str] = []
    if "accuracy" in found:
        lines.append(f"{'accuracy, %':44}{'mean':>8}{'least':>8}{'most':>8}")
        lines += [_format_accuracy(row["title"], row["accuracies"]) for row in found["accuracy"]]
        lines.append("")
    if "boards" in found:
        base = found["base_bytes"]
        lines.append(f"{'a board, MB':44}{'peak':>8}{'above':>8}{'up':>8}{'down':>8}")
        for row in found["boards"]:
            sizes = (row["peak_bytes"], row["peak_bytes"] - base, row["bytes_up"], row["bytes_down"])
            numbers = "".join(f"{size / 1e6:8.1f}" for size in sizes)
            lines.append(f"{row['model'] + ', ' + row['title']:44}{numbers}")
        lines.append(f"{'torch and the agent loaded, nothing trained':44}{base / 1e6:8.1f}")
    return "\n".join(lines)


def _format_accuracy(title: str, accuracies: Sequence[float]) -> str:
    numbers = (statistics.fmean(accuracies), min(accuracies), max(accuracies))
    return f"{title:44}{''.join(f'{100 * number:8.2f}' for number in numbers)}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
