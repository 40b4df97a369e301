"""An hour of a real fleet, looked at from outside."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from edgefl.simulation.local_fleet import COORDINATOR
from harness import store_growth
from harness.soak_figure import draw
from harness.soak_fleet import BEAT_S, BROKER, Life, Names, SoakFleet, make_fleet
from harness.soak_samples import Sampler
from harness.soak_verdict import LEAST, MAX_OFF, judge, table
from harness.store_growth import Stock

WARM_UP = 1 / 3
"""Of the whole time; the rest counts."""
MAX_BEATS_OFF = 0.05
KIN = {COORDINATOR: "evaluator", BROKER: "mosquitto"}


def soak(root: Path, arguments: argparse.Namespace) -> list[str]:
    """Returns what grew, or went wrong, in so many minutes; prints what was measured."""
    fleet, names = make_fleet(root, arguments.devices)
    total_s = 60.0 * arguments.minutes
    with fleet, _sampler(fleet, names) as sampler:

        def say(line: str) -> None:
            print(f"[{sampler.now_s / 60:5.1f} min] {line}", flush=True)

        with Life(fleet, names, say) as life:
            _wait(sampler, WARM_UP * total_s)
            from_s, begin_s, before = sampler.now_s, time.monotonic(), store_growth.stock(fleet.database)
            say(f"warm, {before.used_bytes / 1e6:.2f} MB in the store; what grows from now on counts")
            _wait(sampler, total_s)
            after, until_s, end_s = store_growth.stock(fleet.database), sampler.now_s, time.monotonic()
    sampler.write(root)
    draw(root, sampler, from_s)
    problems = [*life.problems, *_judge_processes(sampler, names, from_s), *_judge_store(before, after)]
    there_s = (len(fleet.devices) + 1) * (end_s - begin_s) - life.silent_s(begin_s, end_s)
    problems += _judge_heartbeats(before, after, there_s)
    print(f"{len(life.runs)} runs; devices left {life.num_away} times, {life.num_frozen} freezes, "
          f"{life.num_reads} questions to the history\n{_busy(sampler, from_s, until_s)}")  # fmt: skip
    print(_places(sampler, from_s))
    return problems


def _sampler(fleet: SoakFleet, names: Names) -> Sampler:
    directory, devices = fleet.directory, (*names.staying, *names.visitors)
    return Sampler(
        lambda: {name: process.pid for name, process in fleet.processes.items()},
        kin=KIN,
        places={
            "database": [fleet.database],
            "its WAL": [Path(f"{fleet.database}-wal")],
            "runs": [directory / "runs"],
            "models": [directory / "models"],
            "logs": [fleet.root / "coordinator.log", directory / "evaluator.log", directory / "broker"],
            "devices": [fleet.root / name for name in devices],
        },
    )


def _wait(sampler: Sampler, until_s: float) -> None:
    while sampler.now_s < until_s:
        time.sleep(min(5.0, max(0.0, until_s - sampler.now_s)))


def _judge_processes(sampler: Sampler, names: Names, from_s: float) -> list[str]:
    """Prints all, and returns what grew of those that are the same processes from beginning to end."""
    looks = sampler.since(from_s)
    # In a short hour a visitor may hardly have been there.
    shown = [name for name in sorted(looks) if name not in names.visitors or len(looks[name]) >= LEAST]
    verdicts = [judge(name, looks[name]) for name in shown]
    print(f"\n{table(verdicts)}")
    return [problem for verdict in verdicts if verdict.name not in names.visitors for problem in verdict.problems]


def _judge_store(before: Stock, after: Stock) -> list[str]:
    ratio = store_growth.ratio(before, after)
    print(f"\n{store_growth.table(before, after)}")
    print(f"the store grew by {(after.used_bytes - before.used_bytes) / 1e3:.1f} kB, {ratio:.3f} of what is computed")
    if abs(ratio - 1) > MAX_OFF:
        return [
            f"store: it grew by {ratio:.3f} of what its rows come to, {1 - MAX_OFF:g} to {1 + MAX_OFF:g} is right"
        ]
    return []


def _judge_heartbeats(before: Stock, after: Stock, there_s: float) -> list[str]:
    """Compares heartbeats with the time for which devices were there, the evaluator among them."""
    gained, expected = after.rows["heartbeats"] - before.rows["heartbeats"], there_s / BEAT_S
    print(f"{gained} heartbeats, {gained / expected:.3f} of what devices that were there send in that time")
    if abs(gained / expected - 1) > MAX_BEATS_OFF:
        return [f"heartbeats: {gained}, computed {expected:.0f}"]
    return []


def _busy(sampler: Sampler, from_s: float, until_s: float) -> str:
    """Returns how busy the machine was, and with how much of that the fleet."""
    busy = [(at_s, busy_s) for at_s, busy_s in sampler.busy if from_s <= at_s <= until_s]
    cores = (busy[-1][1] - busy[0][1]) / (busy[-1][0] - busy[0][0])
    return f"meanwhile {cores:.2f} cores of this machine were busy, other programs among them"


def _places(sampler: Sampler, from_s: float) -> str:
    lines = [f"{'place':22}{'warm kB':>10}{'end kB':>10}{'most kB':>10}"]
    for name, sizes in sampler.sizes.items():
        seen = [size / 1e3 for at_s, size in sizes if at_s >= from_s]
        lines.append(f"{name:22}{seen[0]:10.1f}{seen[-1]:10.1f}{max(seen):10.1f}")
    return "\n".join(lines)
