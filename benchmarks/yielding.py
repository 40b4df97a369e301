"""Whether training yields: the slowdown of a process that wants all cores beside a device that trains.

    python benchmarks/yielding.py [--turns 5] [--seconds 4] [--json]

A real device of a real fleet trains digits in one long assignment: in the agent itself, and confined. Its owner's
conditions say `yields = true`. Beside it a process for each core counts. Turns alternate: beside training as it is,
and beside training whose threads were set back to nice 0, as if it did not yield (as root only). Before and after
each the counters are alone, while the device is stopped (SIGSTOP): what else the machine does meanwhile falls out.
Then training alone, with both priorities: what yielding costs on an idle board. Medians over turns.

Slowdown is the share of its count that a counter loses to the training; `cores` are processor seconds of the
device's process tree a second. The coordinator has nothing to do meanwhile. Weights of control groups are not part of
this.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from harness import options
from harness.process_trees import PROC, children_by_parent, cpu_s, tree

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalFleet, partition_devices
from edgefl.system.processes import LOWEST_NICE

COUNTER = """
import sys, time
until, number = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < until:
    for _ in range(1000):
        number += 1
print(number)
"""
BAR = 0.05
START_S = 60.0
RUN = {
    "run": {"task": "digits", "rounds": 1, "evaluate_on": "none"},
    "task": {"model": "mlp"},
    "strategy": {"iterations": 1_000_000_000},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians: `slowdown` of the counters as a share; processor seconds of the device a second."""

    where: str
    yields: bool
    slowdown: float
    cores_beside: float
    cores_alone: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="of each kind [%(default)s]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one turn [%(default)s]")
    parser.add_argument("--json", action="store_true")
    args = options.parse(parser, turns=1, seconds=1.0)
    rows = [row for policy in ("never", "always") for row in measure(policy, args.turns, args.seconds)]
    if args.json:
        sys.stdout.write(json.dumps({"v": 1, "rows": [asdict(row) for row in rows]}) + "\n")
    for row in [] if args.json else rows:
        sys.stdout.write(
            f"{row.where:10} {'yields' if row.yields else 'at nice 0':10} slowdown {row.slowdown:6.1%}, device "
            f"{row.cores_beside:.3f} cores beside, {row.cores_alone:.3f} alone\n"
        )
    is_slow = any(row.yields and row.slowdown > BAR for row in rows)
    return int(is_slow and not args.quick)


def measure(policy: str, num_turns: int, seconds: float) -> Iterator[Row]:
    """Yields rows of a device that trains in its agent (`never` confined), or in a confined process (`always`)."""
    with tempfile.TemporaryDirectory(prefix="edgefl-yielding-") as folder:
        devices, _ = partition_devices("digits", "iid", 1, Path(folder) / "shards", None, 7)
        with LocalFleet(root=Path(folder) / "fleet", devices=devices) as fleet:
            name = devices[0].name
            conditions = Path(folder) / "conditions.toml"
            conditions.write_text("[conditions]\nyields = true\n")
            words = ("--confine", policy, "--conditions", str(conditions), "--state", str(fleet.root / name))
            fleet.run_command("device", "set", *words)
            fleet.terminate(name)
            fleet.start_device(name)
            fleet.wait_for_devices(1)
            run_id = fleet.submit(parse_run(RUN))
            root = fleet.processes[name].pid
            _wait_for_work(fleet, name)
            slowdowns: dict[bool, list[float]] = {True: [], False: []}
            cores: dict[tuple[bool, bool], list[float]] = {}
            kinds = [True, False] if os.geteuid() == 0 else [True]
            for _ in range(num_turns):
                for yields in kinds:
                    before = _count_alone(root, seconds)
                    with _priority(root, yields=yields):
                        began_s, used_s = time.monotonic(), _tree_cpu_s(root)
                        beside = _count(seconds)
                        cores.setdefault((yields, True), []).append(
                            (_tree_cpu_s(root) - used_s) / (time.monotonic() - began_s)
                        )
                        began_s, used_s = time.monotonic(), _tree_cpu_s(root)
                        time.sleep(seconds)
                        cores.setdefault((yields, False), []).append(
                            (_tree_cpu_s(root) - used_s) / (time.monotonic() - began_s)
                        )
                    alone = (before + _count_alone(root, seconds)) / 2
                    slowdowns[yields].append(1.0 - beside / alone)
            fleet.make_client().post(f"/edgefl/v1/runs/{run_id}/stop")
    for yields in kinds:
        yield Row(
            where="agent" if policy == "never" else "confined",
            yields=yields,
            slowdown=median(slowdowns[yields]),
            cores_beside=median(cores[yields, True]),
            cores_alone=median(cores[yields, False]),
        )


def _count_alone(root: int, seconds: float) -> int:
    with _stopped(root):
        return _count(seconds)


def _count(seconds: float) -> int:
    """Returns how far a counter on each core comes, all together."""
    words = [sys.executable, "-c", COUNTER, str(seconds)]
    cores = len(os.sched_getaffinity(0))
    counters = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(cores)]
    return sum(int(counter.communicate()[0]) for counter in counters)


@contextlib.contextmanager
def _stopped(root: int) -> Iterator[None]:
    processes = tree(root, children_by_parent())
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGCONT)


@contextlib.contextmanager
def _priority(root: int, *, yields: bool) -> Iterator[None]:
    """Sets the threads that yield back to nice 0 for a block, unless they are to yield."""
    lowered = [] if yields else [thread for thread in _list_threads(root) if _get_nice(thread) == LOWEST_NICE]
    for thread in lowered:
        os.setpriority(os.PRIO_PROCESS, thread, 0)
    try:
        yield
    finally:
        for thread in lowered:
            os.setpriority(os.PRIO_PROCESS, thread, LOWEST_NICE)


def _list_threads(root: int) -> list[int]:
    processes = tree(root, children_by_parent())
    return [int(path.name) for process in processes for path in (PROC / str(process) / "task").iterdir()]


def _get_nice(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def _tree_cpu_s(root: int) -> float:
    return sum(map(cpu_s, tree(root, children_by_parent())))


def _wait_for_work(fleet: LocalFleet, name: str) -> None:
    until_s = time.monotonic() + START_S
    while not fleet.make_client().get(f"/edgefl/v1/devices/{name}").get("iteration"):
        if time.monotonic() > until_s:
            raise SystemExit(f"the device does not train after {START_S:g} s")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
