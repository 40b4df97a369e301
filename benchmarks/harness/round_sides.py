"""One turn of the round benchmark on either side: a fleet is started, runs the no-op app, and is looked at."""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgefl.core.config import RunConfig, parse_run
from edgefl.simulation.local_fleet import COORDINATOR, TERMINAL_STATUSES, LocalDeviceSpec, LocalFleet
from harness.links import Link, LinkedFleet, device_host, linked_fleet
from harness.long_noop import NAME as LONG_NOOP
from harness.process_trees import INTERVAL_S, Meter
from harness.request_log import program, read_requests
from harness.round_report import Turn
from harness.stock_flower import StockFleet, StockFlowerError

HARNESS = Path(__file__).parent
POLL_S = 0.2
STOCK_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one turn runs; `num_rounds` counts the first, which is left out of the figures.

    Attributes:
        link: what each device is behind; None for plain loopback.
        train_s: how long every device trains in every round.
        is_awake: stock Flower's two polls of 3 s take 10 ms (`awake/sitecustomize.py`).
    """

    num_devices: int
    num_rounds: int
    size_bytes: int
    broker: str = "auto"
    link: Link | None = None
    train_s: float = 0.0
    is_awake: bool = False


def measure_edgefl(plan: Plan) -> Turn:
    """Returns what one run of the task `noop` took.

    Raises:
        EdgeflError: the fleet did not start or the run failed.
        StockFlowerError: some device did not answer in some round.
    """
    with _scratch() as root, _edgefl_fleet(plan, root) as fleet:
        with _meter(fleet.processes) as meter:
            run_id = fleet.submit(_run_config(plan))
            _wait_closed(fleet, run_id)
        rounds, waits = _history(fleet.database, run_id, plan.num_devices)
        started_at, closed_at = rounds[0][0], [closed for _, closed in rounds]
        broker = "Mosquitto" if "mosquitto" in meter.commands else "embedded"
        requests = read_requests(root / "requests", closed_at[0], closed_at[-1])
        return _turn(plan, started_at, closed_at, meter, requests, {"broker": broker, **waits})


def measure_stock(plan: Plan) -> Turn:
    """Returns what one `flwr run` of the no-op app took; raises `StockFlowerError`."""
    with _scratch() as root:
        log = root / "requests"
        fleet = StockFleet(
            root=root / "fleet",
            num_devices=plan.num_devices,
            is_awake=plan.is_awake,
            link=plan.link,
            superlink=program(log, "flower-superlink"),
        )
        with fleet, _meter(fleet.processes) as meter:
            measured = fleet.run(
                num_rounds=plan.num_rounds,
                size_bytes=plan.size_bytes,
                train_s=plan.train_s,
                timeout_s=STOCK_TIMEOUT_S + plan.num_rounds * plan.train_s,
            )
        closed_at = measured["closed_at"]
        requests = read_requests(log, closed_at[0], closed_at[-1])
    if measured["num_updates"] != [plan.num_devices] * plan.num_rounds:
        raise StockFlowerError(f"not every device answered in every round: {measured['num_updates']} updates")
    return _turn(plan, measured["started_at"], closed_at, meter, requests, {})


@contextmanager
def _edgefl_fleet(plan: Plan, root: Path) -> Iterator[LocalFleet]:
    shard = root / "no-data"
    shard.mkdir()
    task = LONG_NOOP if plan.train_s else "noop"
    devices = [
        LocalDeviceSpec(
            name=f"device-{number}", shards={task: str(shard)}, host=device_host(number) if plan.link else ""
        )
        for number in range(1, plan.num_devices + 1)
    ]
    paths = [str(HARNESS), str(HARNESS.parent), os.environ.get("PYTHONPATH", "")]
    fleet = LinkedFleet(
        root=root / "fleet",
        devices=devices,
        hosts=[device.host for device in devices] if plan.link else [],
        broker=plan.broker,
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "EDGEFL_ALLOW_MODULES": LONG_NOOP.partition(":")[0],
        },
        program=program(root / "requests", "edgefl"),
    )
    with fleet if plan.link is None else linked_fleet(fleet, plan.link) as entered:
        yield entered


def _run_config(plan: Plan) -> RunConfig:
    task, options = ("noop", {}) if not plan.train_s else (LONG_NOOP, {"train_s": plan.train_s})
    return parse_run(
        {
            "run": {"task": task, "rounds": plan.num_rounds, "evaluate_on": "none"},
            "task": {"size_bytes": plan.size_bytes, **options},
            "devices": {"min": plan.num_devices},
        }
    )


def _wait_closed(fleet: LocalFleet, run_id: str) -> None:
    """Waits for the end of a run by the store: to ask the coordinator would cost it a connection each time."""
    while True:
        with closing(sqlite3.connect(f"file:{fleet.database}?mode=ro", uri=True)) as store:
            (status,) = store.execute("SELECT status FROM runs WHERE run_id = ?", (run_id,)).fetchone()
        if status in TERMINAL_STATUSES or fleet.processes[COORDINATOR].poll() is not None:
            fleet.wait_for_run(run_id)
            return
        time.sleep(POLL_S)


def _meter(processes: Mapping[str, subprocess.Popen[bytes]]) -> Meter:
    # The memory of many processes takes a while to look at, and holds them up meanwhile.
    roots = {name: process.pid for name, process in processes.items()}
    return Meter(roots, interval_s=INTERVAL_S * max(1.0, len(roots) / 3))


def _turn(
    plan: Plan,
    started_at: float,
    closed_at: Sequence[float],
    meter: Meter,
    requests: Counter[str],
    extra: Mapping[str, str | float],
) -> Turn:
    """Leaves the first round out of everything but `first_round_s`: it warms caches and waits for processes."""
    begin_s, end_s = closed_at[0], closed_at[-1]
    num_rounds = len(closed_at) - 1
    costs = {label: meter.cost(label, begin_s, end_s) for label in meter.samples}
    devices = [cost for label, cost in costs.items() if label != COORDINATOR]
    mean_s = (end_s - begin_s) / num_rounds
    coordinator = costs[COORDINATOR]
    return Turn(
        round_s=tuple(later - earlier for earlier, later in itertools.pairwise(closed_at)),
        first_round_s=closed_at[0] - started_at,
        mean_round_s=mean_s,
        device_peak_bytes=statistics.mean(cost.peak_bytes for cost in devices),
        device_median_bytes=statistics.mean(cost.median_bytes for cost in devices),
        coordinator_peak_bytes=coordinator.peak_bytes,
        device_cpu_s=statistics.mean(cost.cores for cost in devices) * mean_s,
        coordinator_cpu_s=coordinator.cores * mean_s,
        other_cores=meter.other_cores(begin_s, end_s),
        num_devices=plan.num_devices,
        requests={path: number / num_rounds / plan.num_devices for path, number in sorted(requests.items())},
        extra=extra,
    )


def _history(database: Path, run_id: str, num_devices: int) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Returns when each round began and closed, and the medians of what an update took, from the store."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as store:
        rounds = store.execute(
            "SELECT started_at, closed_at, num_updates FROM rounds WHERE run_id = ? ORDER BY round", (run_id,)
        ).fetchall()
        updates = store.execute(
            "SELECT compute_s, received_at - dispatched_at, bytes_up, bytes_down FROM updates WHERE run_id = ?",
            (run_id,),
        ).fetchall()
    if any(closed is None or num_updates != num_devices for _, closed, num_updates in rounds):
        raise StockFlowerError("not every device answered in every round; the figures would not compare")
    names = ("update_compute_s", "update_there_and_back_s", "update_bytes_up", "update_bytes_down")
    medians = {name: statistics.median(row[index] for row in updates) for index, name in enumerate(names)}
    return [(started, closed) for started, closed, _ in rounds], medians


@contextmanager
def _scratch() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="edgefl-round-overhead-"))
    try:
        yield root
    finally:
        # A process that is being ended may still write its last line.
        with suppress(OSError):
            shutil.rmtree(root)
