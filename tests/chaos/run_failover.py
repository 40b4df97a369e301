"""Kills of the active of two hosts, over one run of two devices, and how long the other took to go on with it.

    PYTHONPATH=tests python tests/chaos/run_failover.py --kills 50

It ends with 1 when an update was lost or counted twice, when the model differs from that of the undisturbed run, or
when a take-over took longer than `TAKE_OVER_S`. The store is a PostgreSQL of its own; the models are in a folder.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from chaos.hosts import TwoHostFleet
from chaos.runs import LEARNING_RATES, PYTHON_PATH, TASK
from postgres_server import running_postgres

from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec
from edgefl.tasks.datasets.central import create_shards

TAKE_OVER_S = 15.0
NUM_DEVICES = 2
STANDBY_S = 60.0


def main() -> None:
    """Plays it and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how many [50]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--until-s", type=float, default=3600.0, help="no kill begins later than this [3600]")
    parser.add_argument("--pace-s", type=float, default=0.1, help="pause of a device at every iteration [0.1]")
    parser.add_argument("--root", type=Path, help="where all state and logs lie; kept [a temporary folder]")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    root = options.root or Path(tempfile.mkdtemp(prefix="edgefl-failover-"))
    with running_postgres() as server:
        (root / "shared").mkdir(parents=True)
        shards = create_shards("digits", "dirichlet:0.5", NUM_DEVICES, root / "shards")
        names = [f"device-{number:02}" for number in range(1, NUM_DEVICES + 1)]
        path = os.pathsep.join([str(Path(__file__).parents[2]), *map(str, PYTHON_PATH)])
        fleet = TwoHostFleet(
            root=root / "fleet",
            devices=[
                LocalDeviceSpec(name=name, shards={TASK: str(shard.resolve())})
                for name, shard in zip(names, shards, strict=False)
            ],
            environment={"PYTHONPATH": path, "EDGEFL_ALLOW_MODULES": "paced_task"},
            store=server.url(server.new_database()),
            models=(root / "shared").as_uri(),
        )
        with fleet:
            problems = _play(fleet, options, root / "pace", names)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    sys.exit(1 if problems else 0)


def _config(rounds: int, pace: Path) -> RunConfig:
    return parse_run(
        {
            "run": {"task": TASK, "rounds": rounds, "seed": 7, "evaluate_on": "none"},
            "task": {"pace": str(pace)},
            "strategy": {"name": "ssgd", "iterations": 3, "learning_rate": LEARNING_RATES["ssgd"]},
            "devices": {"min": NUM_DEVICES},
        }
    )


def _play(fleet: TwoHostFleet, options: argparse.Namespace, pace: Path, names: list[str]) -> list[str]:
    """Returns what was not as it should be."""
    rng, rounds, started_s = random.Random(options.seed), 400 + 20 * options.kills, time.monotonic()
    pace.write_text(str(options.pace_s))
    run_id = fleet.submit(_config(rounds, pace))
    fleet.wait_until(lambda: fleet.get_run(run_id)["rounds"] >= 3, 60, "three rounds")
    for number in range(1, options.kills + 1):
        if time.monotonic() - started_s > options.until_s:
            break
        time.sleep(rng.uniform(0.0, 1.0))
        former = fleet.active
        fleet.fail_over()
        print(
            f"[{time.monotonic() - started_s:6.1f} s] kill {number}: host {fleet.active} goes on after "
            f"{fleet.take_over_s[-1]:.1f} s, round {fleet.get_run(run_id)['rounds']}",
            flush=True,
        )
        fleet.start_host(former)
        fleet.wait_until(lambda: _stands_by(fleet, 1 - fleet.active), STANDBY_S, "the other to stand by")
    pace.write_text("0")
    run = fleet.wait_for_end(run_id, 60 + rounds)
    undisturbed = fleet.run_to_end(_config(rounds, pace), 60 + rounds)
    used, expected = fleet.list_used(run_id), [(r, name) for r in range(1, rounds + 1) for name in names]
    lost, doubled = len(set(expected) - set(used)), len(used) - len(set(used))
    times = fleet.take_over_s
    is_equal = run["model"] == undisturbed["model"]
    print(
        f"{len(times)} kills; take-over {statistics.median(times):.1f} s (median), {max(times):.1f} s at most\n"
        f"{lost} updates lost, {doubled} doubled; run {run['status']}; "
        f"{'the same' if is_equal else 'another'} model"
    )
    problems = [f"{lost} updates were lost"] * bool(lost)
    problems += [f"{doubled} updates were counted twice"] * bool(doubled)
    problems += ["the model differs from that of the undisturbed run"] * (not is_equal)
    return problems + [f"a take-over took {max(times):.1f} s"] * (max(times) > TAKE_OVER_S)


def _stands_by(fleet: TwoHostFleet, host: int) -> bool:
    lines = fleet.read_log_tail(f"host-{host}", 1)
    assert fleet.processes[f"host-{host}"].poll() is None, lines
    return "standing by" in lines


if __name__ == "__main__":
    main()
