"""The long form, `make chaos`: random kills over one run of five devices, the ledger, and how long recoveries took.

    python tests/chaos/run_chaos.py --kills 200 --seed 1

It ends with 1 when anything was not as it should be.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from chaos.play import Play, table
from chaos.processes import Site
from chaos.runs import NAMES, NUM_DEVICES, PYTHON_PATH, TASK, accuracy, config
from chaos.schedule import EVERYTHING, each_once, random_kills, render_fault_script

from edgefl.simulation.faults import Fault, load_faults
from edgefl.tasks.datasets.central import create_shards

TOLERANCE = 0.03
"""So much worse a model may be that differs from the undisturbed one, since a device was dropped from a round."""


def main() -> None:
    """Plays it and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many [200]")
    parser.add_argument("--every-kind", action="store_true", help="one fault of every kind in place of kills")
    parser.add_argument("--script", type=Path, help="a fault script in place of both")
    parser.add_argument("--save-script", type=Path, help="write down what is played")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--strategy", default="ssgd")
    parser.add_argument("--rounds", type=int, default=2500, help="it has to outlast the faults [2500]")
    parser.add_argument("--pace-s", type=float, default=0.1, help="pause of a device at every iteration [0.1]")
    parser.add_argument("--root", type=Path, help="where all state and logs lie; kept [a temporary folder]")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that processes, networks and mounts go
    root = options.root or Path(tempfile.mkdtemp(prefix="edgefl-chaos-"))
    faults = _faults(options)
    if options.save_script:
        options.save_script.write_text(render_fault_script(faults))
    print(f"seed {options.seed}: {len(faults)} faults; everything lies in {root}")
    sys.exit(1 if _play(options, root, faults) else 0)


def _faults(options: argparse.Namespace) -> tuple[Fault, ...]:
    if options.script:
        return load_faults(options.script)
    if options.every_kind:
        return each_once(options.seed, EVERYTHING, NAMES)
    return random_kills(options.seed, options.kills, NAMES)


def _play(options: argparse.Namespace, root: Path, faults: tuple[Fault, ...]) -> list[str]:
    """Returns what was not as it should be."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began_s:7.1f} s] {line}", flush=True)

    shards = [path.resolve() for path in create_shards("digits", "dirichlet:0.5", NUM_DEVICES, root / "shards")]
    with Site(root=root / "site", shards=shards, task=TASK, python_path=PYTHON_PATH) as site:
        for what, reason in site.lacks.items():
            say(f"{what}: {reason}")
        play = Play(site, options.seed, say)
        pace = root / "pace"
        pace.write_text(str(options.pace_s))
        play.submit(config(options.strategy, options.rounds, pace=pace))
        play.disturb(faults)
        pace.write_text("0")
        run = play.finish(600 + 2.0 * options.rounds)
        found = play.audit()
        say("and once more, undisturbed")
        undisturbed = site.fleet.wait_for_run(site.fleet.submit(config(options.strategy, options.rounds, pace=pace)))
        test = root / "shards" / "test.npz"
        reached, without = (accuracy(site.fleet.get_model_path(each["model"]), test) for each in (run, undisturbed))
        problems = [*play.problems, *found.problems]
        if play.num_interventions:
            problems.append(f"{play.num_interventions} times somebody had to resume the run")
        is_equal = run["model"] == undisturbed["model"]
        if not is_equal and found.num_dropped == 0 and options.strategy == "ssgd":
            problems.append("no device was dropped, and the model differs from that of the undisturbed run")
        if reached < without - TOLERANCE:
            problems.append(f"accuracy {reached:.4f}, undisturbed {without:.4f}")
        if problems:  # its disk goes with the site
            shutil.copytree(site.fleet.directory, root / "coordinator")
    print(
        f"\n{table(play.recoveries)}\n\n{len(play.recoveries)} faults played, {len(play.left_out)} left out, "
        f"{play.num_interventions} interventions; run {run['status']}: {run['reason']}\n"
        f"{found.num_versions} versions of {found.num_aggregated} updates: {len(found.lost)} lost, "
        f"{len(found.doubled)} doubled, {len(found.foreign)} foreign; {found.num_dropped} assignments dropped\n"
        f"accuracy {reached:.4f}, undisturbed {without:.4f}, {'the same' if is_equal else 'another'} model"
    )
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return problems


if __name__ == "__main__":
    main()
