"""Whether anything grows in a fleet that runs for long: an hour of real processes, and a week in virtual time.

    python benchmarks/soak.py [--minutes 60] [--devices 3] [--part hour|week|all] [--out DIR]

The hour: a coordinator with its evaluator, a Mosquitto unit and device processes train the digits, synchronously and
asynchronously in turn. Every minute a device leaves, is killed, or is frozen until its connection is given up, or the
broker is; a page is open, others come and go, /metrics is scraped and the history is asked. Memory, open files and
threads of every process are looked at every five seconds. After the warm-up (a third of the time) memory may grow
by 2 % at the most, open files and threads not at all, and the database as its rows say. Devices whose agents are
restarted are shown and not judged.

The week: the simulator with boards that fail and come back, synchronous and asynchronous; and the parts of a
coordinator that hear heartbeats, with a clock that runs ahead. It ends with 1 when something grew.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from harness import options, soak_hour, soak_week
from harness.round_report import machine

PARTS = {"hour": soak_hour.soak, "week": soak_week.soak}


def main() -> int:
    arguments = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that all processes end
    facts = machine()
    loads = ", ".join(str(load) for load in facts["load_before"])
    print(f"{facts['date']}; {facts['cpu']}, {facts['cores']} cores, load before {loads}; Python {facts['python']}, "
          f"Mosquitto {facts['mosquitto']}")  # fmt: skip
    problems = []
    with tempfile.TemporaryDirectory(prefix="edgefl-soak-", ignore_cleanup_errors=True) as scratch:
        root = arguments.out or Path(scratch)
        for name, soak in PARTS.items():
            if arguments.part in {name, "all"}:
                began_s = time.monotonic()
                (root / name).mkdir(parents=True, exist_ok=True)
                problems += soak(root / name, arguments)
                print(f"the {name} took {(time.monotonic() - began_s) / 60:.1f} minutes\n", flush=True)
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print(f"{len(problems)} problems" if problems else "nothing grew")
    return 1 if problems and not arguments.quick else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all", help="what is done [%(default)s]")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long the hour is [%(default)g]")
    parser.add_argument("--devices", type=int, default=3, help="that stay; two more come and go [%(default)s]")
    parser.add_argument("--days", type=float, default=7.0, help="how long the week is [%(default)g]")
    parser.add_argument("--boards", type=int, default=10, help="of the week's fleets [%(default)s]")
    parser.add_argument("--out", type=Path, help="a folder for all state, logs, CSV files and figures; kept")
    return options.parse(parser, part="all", minutes=1.5, days=0.01, boards=3)


if __name__ == "__main__":
    raise SystemExit(main())
