"""Runs side by side on boards of their own, beside the longest of them alone, and what both cost the coordinator.

    python benchmarks/parallel_runs.py [--runs 4] [--boards 2] [--rounds 20] [--delay-s 0.2] [--json]

A coordinator, and a process for each board. Every iteration takes `--delay-s` longer, so that the boards, which share
this machine's cores, have time to spare as boards do that have cores of their own. The first run is trained alone;
then the same run and as many others as make `--runs`, each on `--boards` boards that no other uses.

`total` is the time from the first submission to the end of the last run, by the clock. The coordinator's CPU seconds
and memory are those of its process tree, peaks of its proportional share. The exit code is 2 where the total is more
than 1.1 times the time of the run alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import options
from harness.process_trees import Meter
from harness.throttled_task import NAME

from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import COORDINATOR, LocalDeviceSpec, LocalFleet
from edgefl.tasks.datasets.central import create_shards

LIMIT = 1.1
HERE = Path(__file__).parent / "harness"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--boards", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--delay-s", type=float, default=0.2)
    parser.add_argument("--json", action="store_true")
    asked = options.parse(parser, runs=2, boards=1, rounds=3, delay_s=0.05)
    with tempfile.TemporaryDirectory(prefix="edgefl-") as folder:
        rows = measure(Path(folder), asked)
    ratio = rows["side by side"]["total_s"] / rows["alone"]["total_s"]
    if asked.json:
        print(json.dumps({"v": 1, "rows": rows, "ratio": ratio}))
    else:
        for name, row in rows.items():
            print(
                f"{name:14}{row['total_s']:7.1f} s, CPU {row['cpu_s']:.1f} s, peak {row['peak_bytes'] / 1e6:.0f} MB"
            )
        print(f"total beside the run alone: {ratio:.3f}, at most {LIMIT}")
    return 0 if asked.quick or ratio <= LIMIT else 2


def measure(folder: Path, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Returns the row of the run alone, and of all side by side."""
    num_boards = asked.runs * asked.boards
    shards = create_shards("digits", "iid", num_boards, folder / "shards", None, 7)
    for path in shards:
        path.with_suffix(".delay").write_text(str(asked.delay_s))
    devices = [LocalDeviceSpec(name=f"pi-{n}", shards={NAME: str(path)}) for n, path in enumerate(shards)]
    environment = {"PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment["EDGEFL_ALLOW_MODULES"] = Path(NAME.partition(":")[0]).name
    fleet = LocalFleet(root=folder / "fleet", devices=devices, environment=environment, parallel_runs=asked.runs)
    configs = [
        make_run(asked, [device.name for device in devices[start :: asked.runs]]) for start in range(asked.runs)
    ]
    with fleet:
        time_runs(fleet, [make_run(asked, [devices[0].name], rounds=1)])  # loads what every run needs
        return {"alone": time_runs(fleet, configs[:1]), "side by side": time_runs(fleet, configs)}


def make_run(asked: argparse.Namespace, names: list[str], rounds: int | None = None) -> RunConfig:
    """Returns a run of these boards alone."""
    return parse_run(
        {
            "run": {"task": NAME, "rounds": rounds or asked.rounds, "evaluate_on": "none"},
            "devices": {"names": names, "min": len(names)},
            "strategy": {"iterations": 5},
        }
    )


def time_runs(fleet: LocalFleet, configs: list[RunConfig]) -> dict[str, Any]:
    """Returns what these runs took from their submission to the end of the last."""
    with Meter({COORDINATOR: fleet.processes[COORDINATOR].pid}) as meter:
        time.sleep(0.5)
        start_s = time.time()
        ended = [fleet.wait_for_run(run_id) for run_id in [fleet.submit(config) for config in configs]]
        total_s = time.time() - start_s
        time.sleep(0.5)
    cost = meter.cost(COORDINATOR, start_s - 0.5, start_s + total_s + 0.5)
    return {
        "total_s": total_s,
        "longest_s": max(run["finished_at"] - run["started_at"] for run in ended),
        "cpu_s": cost.cores * total_s,
        "peak_bytes": cost.peak_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
