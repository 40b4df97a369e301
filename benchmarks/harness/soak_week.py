"""A week in minutes: what is simulated, and a coordinator that hears heartbeats while its clock runs ahead.

Each part is a process of its own, `python -m harness.soak_week PART DIR DAYS BOARDS`, and looks at itself as time
goes by; the one that starts them judges what it wrote.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from edgefl.simulation.simulated_run import simulate
from harness import store_growth
from harness.hurried_coordinator import HurriedFleet
from harness.soak_samples import look_at
from harness.soak_verdict import MAX_OFF, Look, judge, table
from harness.store_growth import Stock

BENCHMARKS = Path(__file__).parents[1]
DAY_S = 86_400.0
WARM_UP = 2 / 7
"""Of the whole time: two days of a week. Heartbeats are kept for one of them."""
LOOKS = 400
DATABASE = "edgefl.db"
STRATEGIES = {"synchronous": "ssgd", "asynchronous": "asgd"}
ITERATION_S = 6.0
PROFILES = """
[profile.indoors]
speed = 0.25
mtbf_s = 86_400
mttr_s = 1_800
up_bytes_per_s = 35e6
down_bytes_per_s = 35e6
[profile.outdoors]
speed = 0.1
mtbf_s = 14_400
mttr_s = 3_600
up_bytes_per_s = 3.5e6
down_bytes_per_s = 3.5e6
jitter = 0.2
"""


def soak(root: Path, arguments: argparse.Namespace) -> list[str]:
    """Returns what grew, or went wrong, in each part; prints what was measured."""
    problems = []
    for part in (*STRATEGIES, "coordinator"):
        folder = root / part
        folder.mkdir(parents=True, exist_ok=True)
        began_s = time.monotonic()
        words = [
            sys.executable,
            "-m",
            "harness.soak_week",
            part,
            str(folder),
            str(arguments.days),
            str(arguments.boards),
        ]
        path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        done = subprocess.run(words, env={**os.environ, **own}, check=False)
        print(f"\n{part}, {arguments.days:g} days of {arguments.boards} boards: {time.monotonic() - began_s:.0f} s")
        if done.returncode != 0:
            problems.append(f"{part}: it ended with {done.returncode}")
            continue
        problems += _judge(part, folder, arguments.days * DAY_S)
    return problems


def _judge(part: str, folder: Path, total_s: float) -> list[str]:
    lines = (folder / "looks.jsonl").read_text().splitlines()
    looks = [Look(**json.loads(line)) for line in lines]
    verdict = judge(part, [look for look in looks if look.at_s >= WARM_UP * total_s])
    found = json.loads((folder / "found.json").read_text())
    before, after = (Stock(**found[moment]) for moment in ("before", "after"))
    ratio = store_growth.ratio(before, after)
    print(f"{table([verdict])}\n{store_growth.table(before, after)}")
    print(
        f"the store grew by {(after.used_bytes - before.used_bytes) / 1e6:.2f} MB, {ratio:.3f} of what is computed; "
        f"its file from {before.file_bytes / 1e6:.2f} to {after.file_bytes / 1e6:.2f} MB"
    )
    problems = verdict.problems
    for what, (expected, is_there) in found["rows"].items():
        print(f"{what}: {is_there}, computed {expected}")
        if expected != is_there:
            problems.append(f"{part}: {what}: {is_there}, not {expected}")
    if abs(ratio - 1) > MAX_OFF:
        problems.append(f"{part}: the store grew by {ratio:.3f} of what its rows come to")
    return problems


class _Notes:
    """Writes looks at this process, evenly over the time, and what the store held when it was warm."""

    def __init__(self, folder: Path, total_s: float, file: TextIO) -> None:
        self.database = folder / DATABASE
        self.before: Stock | None = None
        self.after: Stock | None = None
        self._total_s, self._file, self._next_s, self._seen_s = total_s, file, 0.0, -1.0

    def look(self, at_s: float) -> None:
        """Is told how late it is, as often as one likes."""
        if self.before is None and at_s >= WARM_UP * self._total_s:
            self.before = store_growth.stock(self.database)
        if at_s >= self._next_s and at_s > self._seen_s and (look := look_at(os.getpid(), at_s)) is not None:
            self._next_s, self._seen_s = self._next_s + self._total_s / LOOKS, at_s
            self._file.write(json.dumps(asdict(look)) + "\n")


def simulated(
    strategy: str, folder: Path, notes: _Notes, total_s: float, num_boards: int
) -> dict[str, tuple[int, int]]:
    """Trains for so long on boards that fail and come back; returns rows: how many, and how many there are."""
    profiles = folder / "profiles.toml"
    profiles.write_text(PROFILES)
    config = {
        "run": {"task": "digits", "seconds": total_s, "evaluate_every": 10},
        "strategy": {"name": strategy, "iterations": 3, "learning_rate": 0.1},
        "simulation": {"iteration_s": ITERATION_S, "workers": 0, "profile_file": str(profiles)},
    }
    shown: dict[str, Any] = {}

    def on_change(run: dict[str, Any]) -> None:
        shown.update(run)
        if run["status"] == "running":
            notes.look(_virtual_s(notes.database))

    simulate(config, devices=num_boards, profiles=("indoors", "outdoors"), root=folder, on_change=on_change)
    with closing(sqlite3.connect(notes.database)) as store:

        def one(query: str) -> int:
            return int(store.execute(query).fetchone()[0])

        return {
            "rounds closed": (shown["rounds"], one("SELECT count(*) FROM rounds WHERE closed_at IS NOT NULL")),
            "assignments": (one("SELECT sum(num_assignments) FROM run_totals"), one("SELECT count(*) FROM updates")),
        }


def _virtual_s(database: Path) -> float:
    """Returns how far the rows in the store have come."""
    query = "SELECT started_at - (SELECT min(started_at) FROM runs) FROM rounds ORDER BY id DESC LIMIT 1"
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as store:
        row = store.execute(query).fetchone()
    return float(row[0]) if row else 0.0


def heard(folder: Path, notes: _Notes, total_s: float, num_boards: int) -> dict[str, tuple[int, int]]:
    """Has the parts of a coordinator hear so many boards; returns rows: how many, and how many there are."""
    with HurriedFleet(folder, num_boards) as fleet:
        while fleet.now_s < total_s:
            fleet.go_on()
            notes.look(fleet.now_s)
        notes.after = store_growth.stock(notes.database)
        fleet.close_the_day()
        now = store_growth.stock(notes.database).rows
        return {
            "heartbeats of the last day": (fleet.num_raw(), now["heartbeats"]),
            "five-minute rows": (fleet.num_five_minutes(), now["heartbeats_5min"]),
        }


def main() -> None:
    # A virtual fleet loses thousands of assignments: they are rows.
    logging.getLogger("edgefl.coordinator.runs.history_recorder").setLevel(logging.ERROR)
    part, folder, total_s, num_boards = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]) * DAY_S, int(sys.argv[4])
    with (folder / "looks.jsonl").open("w", buffering=1) as file:
        notes = _Notes(folder, total_s, file)
        run: Callable[[], dict[str, tuple[int, int]]] = (
            (lambda: heard(folder, notes, total_s, num_boards))
            if part == "coordinator"
            else (lambda: simulated(STRATEGIES[part], folder, notes, total_s, num_boards))
        )
        rows = run()
    assert notes.before is not None
    after = notes.after or store_growth.stock(notes.database)
    found = {"before": asdict(notes.before), "after": asdict(after), "rows": rows}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
