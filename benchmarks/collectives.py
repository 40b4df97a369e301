"""What a collective saves: time of a round, and bytes through the coordinator, beside `coordinator`.

    python benchmarks/collectives.py [--devices 4 8] [--megabytes 1 20] [--reductions 1 16] [--mbit-per-s 20]

Simulated: every device and the coordinator have a link of that rate, and 5 ms of latency; nothing is trained. The
first round, in which every device gets the model, is left out. Seconds and bytes are for one all-reduce, beside one
round by the coordinator.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from harness import options

import edgefl
from edgefl.engine.run_summary import RunResult

ROUNDS, LATENCY_S = 3, 0.005
COLLECTIVES = ("ring", "butterfly", "binary-blocks", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 20.0])
    parser.add_argument("--reductions", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--mbit-per-s", type=float, default=20.0)
    args = options.parse(parser, devices=[3], megabytes=[0.1], reductions=[2])
    print(
        "| devices | model | collective | reductions | seconds | sooner | through the coordinator | a device sends |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for devices in args.devices:
        for megabytes in args.megabytes:
            usual = run("coordinator", 1, devices, megabytes, args.mbit_per_s)
            print_row(devices, megabytes, "coordinator", 1, usual, usual)
            for collective in COLLECTIVES:
                for reductions in args.reductions:
                    result = run(collective, reductions, devices, megabytes, args.mbit_per_s)
                    print_row(devices, megabytes, collective, reductions, result, usual)


def run(collective: str, reductions: int, devices: int, megabytes: float, mbit_per_s: float) -> RunResult:
    bytes_per_s = mbit_per_s * 1e6 / 8
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "boards.toml"
        rates = f"up_bytes_per_s = {bytes_per_s}\ndown_bytes_per_s = {bytes_per_s}\nlatency_s = {LATENCY_S}\n"
        profile.write_text(f"[profile.board]\n{rates}")
        tables: dict[str, Any] = {
            "run": {"task": "noop", "rounds": ROUNDS, "evaluate_on": "none"},
            "task": {"size_bytes": int(megabytes * 1e6)},
            "aggregation": {"collective": collective, "reductions": reductions},
            "guard": {"enabled": False, "max_weight_ratio": 0},
            "simulation": {
                "profiles": ["board"],
                "profile_file": str(profile),
                "jitter": 0.0,
                "iteration_s": 1e-6,
                "server_up_bytes_per_s": bytes_per_s,
                "server_down_bytes_per_s": bytes_per_s,
            },
        }
        return edgefl.simulate(tables, devices=devices, root=Path(folder) / "runs", bookkeeping_only=True)


def print_row(
    devices: int, megabytes: float, collective: str, reductions: int, result: RunResult, usual: RunResult
) -> None:
    seconds, through, sent = measure(result, reductions)
    usual_seconds, usual_through, _ = measure(usual, 1)
    cells = (
        devices,
        f"{megabytes:g} MB",
        collective,
        reductions,
        f"{seconds:.3g}",
        f"{usual_seconds / seconds:.1f} times",
        f"{100 * through / usual_through:.2f} %",
        f"{sent / (megabytes * 1e6):.3g} models",
    )
    print(f"| {' | '.join(map(str, cells))} |")


def measure(result: RunResult, reductions: int) -> tuple[float, float, float]:
    """Returns seconds, bytes through the coordinator, and most bytes that a device sends, of the last round."""
    last = result.rounds[-1]
    rows = [row for row in result.updates if row["round"] == last["round"]]
    through = sum(row["bytes_up"] + row["bytes_down"] for row in rows)
    sent = max((row["metrics"] or {}).get("peer_bytes_up", row["bytes_up"]) for row in rows)
    return (last["closed_at"] - last["started_at"]) / reductions, through / reductions, sent / reductions


if __name__ == "__main__":
    main()
