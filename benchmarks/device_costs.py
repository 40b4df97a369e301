"""What a device process takes of its board: memory while it works, with and without torch, and the time to its start.

    python benchmarks/device_costs.py [--data DIR] [--parts memory start] [--only TEXT] [--turns 5] [--json]

memory: one real device process of a real fleet (TLS, Mosquitto). PSS of its whole process tree, looked at every 50
ms while it trains, and its highest RSS, which is what it takes where nobody shares libraries with it. Then the same
with the device in a control group that kills it above so many MB, page cache included, as on a board of 512 MB
whose system takes the rest. Beside it, in the same run, the RSS of what it cannot do without: `import flwr`
(Flower's messages are its), and, for the CNN, a bare torch loop over as many of the images.

start: from `edgefl device start` to the first heartbeat that the coordinator has in its store, and to its first
assignment of a run that is asked for then; beside it the time of `import flwr`. Likewise `edgefl --help`, and a
Python that does nothing. `--data` holds `mnist/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import options
from harness.memory_limit import NoLimitError, limited
from harness.process_trees import PROC, Meter, adopt_orphans, children_by_parent, end_descendants, tree
from harness.round_report import machine

from edgefl.core.config import parse_run
from edgefl.core.errors import EdgeflError
from edgefl.simulation.local_fleet import EDGEFL_COMMAND, LocalDeviceSpec, LocalFleet, partition_devices

WAIT_S = 60.0
LOOK_S = 0.05
SHARDS = 10
FLWR = "import flwr"
TORCH_LOOP = """
import sys
from pathlib import Path
import torch
from edgefl.tasks.datasets.array_files import read_image_set
from edgefl.tasks.learners.image_layers import ImageFormat
from edgefl.tasks.learners.image_networks import make_cnn
from edgefl.tasks.learners.networks import build_chain
torch.set_num_threads(1)
images = read_image_set(Path(sys.argv[1]), "mnist", "train")
rows = torch.randperm(len(images.targets))[:6000].numpy()
pixels, labels = images.inputs[rows].copy(), torch.tensor(images.targets[rows]).long()
del images
network = build_chain(make_cnn(ImageFormat(1, 28)))
steps = torch.optim.SGD(network.parameters(), lr=0.05)
for first in range(0, 1000, 10):
    batch = torch.tensor(pixels[first : first + 10]).float().div(255).reshape(10, 1, 28, 28)
    steps.zero_grad()
    torch.nn.functional.cross_entropy(network(batch), labels[first : first + 10]).backward()
    steps.step()
"""
TELL = """
from pathlib import Path
for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
    if line.startswith("Rss:"):
        print(int(line.split()[1]) * 1024)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the device trains in a row of the table; `limit_mb` is what it must get along with."""

    title: str
    tables: Mapping[str, Mapping[str, Any]]
    limit_mb: int

    @property
    def task(self) -> str:
        return str(self.tables["run"]["task"])


def _work(
    title: str,
    name: str,
    rounds: int,
    limit_mb: int,
    *,
    backend: str = "auto",
    micro_batch_size: int | None = None,
    **tables: Mapping[str, Any],
) -> Work:
    run = {"task": name, "rounds": rounds, "evaluate_on": "none", "backend": backend}
    if micro_batch_size is not None:
        tables["strategy"] = {**tables["strategy"], "micro_batch_size": micro_batch_size}
    return Work(title=title, tables={"run": run, "devices": {"min": 1}, **tables}, limit_mb=limit_mb)


STEPS = {"learning_rate": 0.05, "batch_size": 10, "iterations": 20}
WORKS = (
    _work("nothing, a model of 1 MB", "noop", 60, 100, task={"size_bytes": 1_000_000}),
    _work("digits, NumPy", "digits", 60, 100),
    _work("MNIST 2NN, NumPy", "mnist", 40, 130, task={"model": "2nn"}, strategy={"name": "fedavg", **STEPS}),
    *(
        _work(
            f"MNIST CNN, compiled, batch {size}", "mnist", 20, limit_mb, backend="onnx", task={"model": "cnn"},
            strategy={"name": "fedavg", **STEPS, "batch_size": size},
        )
        for size, limit_mb in ((10, 100), (32, 120))
    ),
    *(
        _work(
            f"the same, {size} in parts of {part}", "mnist", 20, limit_mb, backend="onnx", micro_batch_size=part,
            task={"model": "cnn"}, strategy={"name": "fedavg", **STEPS, "batch_size": size},
        )
        for size, part, limit_mb in ((10, 5, 100), (32, 8, 120), (32, 2, 120))
    ),
    _work("MNIST CNN, torch", "mnist", 20, 330, task={"model": "cnn"}, strategy={"name": "fedavg", **STEPS}),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a device's process tree, `rss_bytes` at most; `fits` is None where no limit can be set."""

    title: str
    idle_bytes: int
    median_bytes: int
    peak_bytes: int
    rss_bytes: int
    limit_mb: int
    fits: bool | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EDGEFL_DATA"), help="holds mnist/")
    parser.add_argument("--parts", nargs="+", choices=("memory", "start"), default=("memory", "start"))
    parser.add_argument("--only", default="", help="rows of memory whose title has this text [all]")
    parser.add_argument("--turns", type=int, default=5, help="starts of a device [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = options.parse(parser, turns=1, data=None)
    adopt_orphans()
    found: dict[str, Any] = {"v": 1, **machine()}
    try:
        if "memory" in args.parts:
            found |= memory(None if args.data is None else Path(args.data) / "mnist", args.only)
        if "start" in args.parts:
            found |= start(args.turns)
    except EdgeflError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    finally:
        end_descendants()
    print(json.dumps(found) if args.json else as_tables(found))
    return 0


def memory(mnist: Path | None, only: str = "") -> dict[str, Any]:
    works = [work for work in WORKS if (work.task != "mnist" or mnist is not None) and only in work.title]
    rows = []
    for work in works:
        _say(work.title)
        free = measured(work, mnist)
        rows.append(replace(free, fits=lives_within(work, mnist)))
    peers = {FLWR: rss_of("import flwr")}
    if mnist is not None:
        peers["import torch"] = rss_of("import torch")
        peers["MNIST CNN, a bare torch loop"] = rss_of(TORCH_LOOP, str(mnist))
    return {"memory": [asdict(row) for row in rows], "memory_of_peers": peers}


def measured(work: Work, mnist: Path | None, prefix: Sequence[str] = ()) -> Memory:
    """Runs the work on a device of a fleet; raises `EdgeflError` if that fails."""
    with tempfile.TemporaryDirectory(prefix="edgefl-device-costs-") as folder:
        device = replace(_device(work, mnist, Path(folder)), program=(*prefix, *EDGEFL_COMMAND))
        with (
            LocalFleet(root=Path(folder) / "fleet", devices=[device]) as fleet,
            Meter({device.name: fleet.processes[device.name].pid}, interval_s=LOOK_S) as meter,
        ):
            time.sleep(1.0)  # of looks at a device that waits
            began_at = time.time()
            fleet.wait_for_run(fleet.submit(parse_run({key: dict(table) for key, table in work.tables.items()})))
            ended_at = time.time()
            rss_bytes = peak_rss_bytes(fleet.processes[device.name].pid)
    idle = meter.cost(device.name, 0.0, began_at)
    busy = meter.cost(device.name, began_at, ended_at)
    return Memory(
        title=work.title, idle_bytes=idle.median_bytes, median_bytes=busy.median_bytes, peak_bytes=busy.peak_bytes,
        rss_bytes=rss_bytes, limit_mb=work.limit_mb,
    )  # fmt: skip


def peak_rss_bytes(pid: int) -> int:
    """Returns what a process and its children took at most, each for itself, pages that others share included."""
    sizes = []
    for each in tree(pid, children_by_parent()):
        lines = (line.split() for line in (PROC / str(each) / "status").read_text().splitlines())
        sizes.append(next(int(line[1]) * 1024 for line in lines if line[0] == "VmHWM:"))
    return sum(sizes)


def lives_within(work: Work, mnist: Path | None) -> bool | None:
    """Returns whether the same work ends well in a control group of the limit; None where there are none."""
    try:
        with limited(work.limit_mb * 1_000_000) as group:
            try:
                measured(work, mnist, group.prefix)
            except EdgeflError as error:
                _say(f"{work.title}, {work.limit_mb} MB: {error}")
                return False
            return group.num_kills == 0
    except NoLimitError as error:
        _say(f"no limits here: {error}")
        return None


def _device(work: Work, mnist: Path | None, folder: Path) -> LocalDeviceSpec:
    if work.task == "noop":
        (folder / "no-data").mkdir()
        return LocalDeviceSpec(name="device-1", shards={"noop": str(folder / "no-data")})
    return partition_devices(work.task, "iid", SHARDS, folder / "shards", mnist, 7)[0][0]


def rss_of(program: str, *arguments: str) -> int:
    """Returns what a Python process takes that has run the program, at its end."""
    command = [sys.executable, "-c", program + "\n" + TELL, *arguments]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def start(num_turns: int) -> dict[str, Any]:
    """Starts and ends a device again and again."""
    beats, readies, imports, helps, nothings = [], [], [], [], []
    with tempfile.TemporaryDirectory(prefix="edgefl-device-costs-") as folder:
        device = _device(WORKS[0], None, Path(folder))
        with LocalFleet(root=Path(folder) / "fleet", devices=[device]) as fleet:
            for number in range(1, num_turns + 1):
                _say(f"start {number} of {num_turns}")
                fleet.terminate(device.name)
                imports.append(_seconds_of(sys.executable, "-c", FLWR))
                helps.append(_seconds_of(*EDGEFL_COMMAND, "--help"))
                nothings.append(_seconds_of(sys.executable, "-c", "pass"))
                began_at = time.time()
                fleet.start_device(device.name)
                beats.append(_first_heartbeat(fleet.database, began_at) - began_at)
                run_id = fleet.submit(parse_run({key: dict(table) for key, table in ONE_ROUND.items()}))
                fleet.wait_for_run(run_id)
                readies.append(_first_dispatch(fleet.database, run_id) - began_at)
    return {
        "first_heartbeat_s": beats, "first_assignment_s": readies, "import_flwr_s": imports, "help_s": helps,
        "nothing_s": nothings,
    }  # fmt: skip


def _seconds_of(*command: str) -> float:
    """Returns how long a command takes, by the clock."""
    began_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began_s


ONE_ROUND = {**WORKS[0].tables, "run": {**WORKS[0].tables["run"], "rounds": 1}}


def _first_heartbeat(database: Path, since_at: float) -> float:
    """Returns when the first heartbeat after a time arrived, by the coordinator's clock, which is this machine's."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        (at,) = _ask(database, "SELECT min(at) FROM heartbeats WHERE at > ?", since_at)
        if at is not None:
            return float(at)
        time.sleep(0.05)
    raise EdgeflError(f"no heartbeat within {WAIT_S:g} s of the device's start")


def _first_dispatch(database: Path, run_id: str) -> float:
    (at,) = _ask(database, "SELECT min(dispatched_at) FROM updates WHERE run_id = ?", run_id)
    return float(at)


def _ask(database: Path, query: str, value: object) -> tuple[Any, ...]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as store:
        return tuple(store.execute(query, (value,)).fetchone())


def as_tables(found: Mapping[str, Any]) -> str:
    lines = []
    if "memory" in found:
        lines.append(f"{'MB of PSS':32}{'waiting':>9}{'training':>10}{'peak':>8}{'RSS':>8}   lives within")
        for row in found["memory"]:
            said = {None: "no limits here", True: "yes", False: "NO"}[row["fits"]]
            sizes = "".join(
                f"{row[key] / 1e6:{width}.1f}"
                for key, width in (("idle_bytes", 9), ("median_bytes", 10), ("peak_bytes", 8), ("rss_bytes", 8))
            )
            lines.append(f"{row['title']:32}{sizes}   {row['limit_mb']} MB: {said}")
        lines += [f"{name:59}{size / 1e6:8.1f}" for name, size in found["memory_of_peers"].items()]
    if "first_heartbeat_s" in found:
        lines.append(f"\n{'seconds':44}{'median':>8}{'worst':>8}")
        for key, title in (
            ("first_heartbeat_s", "from the start to the first heartbeat"),
            ("first_assignment_s", "to the first assignment, a run being there"),
            ("import_flwr_s", "import flwr, nothing else"),
            ("help_s", "edgefl --help"),
            ("nothing_s", "Python, nothing else"),
        ):
            lines.append(f"{title:44}{statistics.median(found[key]):8.2f}{max(found[key]):8.2f}")
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
