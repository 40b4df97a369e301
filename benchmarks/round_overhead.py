"""What a round costs besides training: edgefl and stock Flower in turn, the same no-op app, the same machine.

    python benchmarks/round_overhead.py [--rounds N] [--devices 2] [--turns 3] [--json]

Both send a float32 model to every device, get it (edgefl: a displacement of the same size) back, and average. A
round counts from one closing to the next. edgefl runs as it is delivered: TLS, node authentication, MQTT, journal
with fsync, SQLite. Stock Flower runs without TLS and authentication and keeps its state in memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.process_trees import Meter, adopt_orphans, end_descendants
from harness.round_report import Turn, as_json, as_table, machine
from harness.stock_flower import StockFleet, StockFlowerError

from edgefl.config import parse_run
from edgefl.errors import EdgeflError
from edgefl.local_fleet import LocalDevice, LocalFleet

MODEL_BYTES = 1_000_000
ROUNDS = 100
STOCK_ROUNDS = 4
STOCK_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one turn runs."""

    num_devices: int
    num_rounds: int
    size_bytes: int
    broker: str


def main() -> int:
    plan, arguments = _parse()
    num_stock_rounds = arguments.stock_rounds
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    turns: dict[str, list[Turn]] = {"edgefl": [], "stock Flower": []}
    before = machine()
    try:
        for number in range(1, arguments.turns + 1):
            _say(f"turn {number} of {arguments.turns}: edgefl, {plan.num_rounds} rounds")
            turns["edgefl"].append(measure_edgefl(plan))
            _say(f"turn {number} of {arguments.turns}: stock Flower, {num_stock_rounds} rounds")
            turns["stock Flower"].append(measure_stock(plan, num_stock_rounds))
    except (EdgeflError, StockFlowerError, ValueError) as error:
        _say(f"not measured: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    finally:
        end_descendants()
    facts = {**before, **asdict(plan), "num_stock_rounds": num_stock_rounds, "num_turns": arguments.turns}
    print(json.dumps(as_json(turns, facts)) if arguments.json else as_table(turns, facts))
    return 0


def measure_edgefl(plan: Plan) -> Turn:
    """Returns what one run of the task `noop` took.

    Raises:
        EdgeflError: the fleet did not start or the run failed.
    """
    names = [f"device-{number}" for number in range(1, plan.num_devices + 1)]
    config = parse_run(
        {
            "run": {"task": "noop", "rounds": plan.num_rounds, "evaluate_on": "none"},
            "task": {"size_bytes": plan.size_bytes},
            "devices": {"min": plan.num_devices},
        }
    )
    with _scratch() as root:
        shard = root / "no-data"
        shard.mkdir()
        devices = [LocalDevice(name=name, shards={"noop": str(shard)}) for name in names]
        with LocalFleet(root=root / "fleet", devices=devices, broker=plan.broker) as fleet:
            with Meter({name: process.pid for name, process in fleet.processes.items()}) as meter:
                run_id = fleet.submit(config)
                fleet.wait_run(run_id)
            rounds, waits = _history(fleet.database, run_id, plan.num_devices)
    started_at, closed_at = rounds[0][0], [closed for _, closed in rounds]
    broker = "Mosquitto" if "mosquitto" in meter.commands else "embedded"
    return _turn(started_at, closed_at, meter, {"broker": broker, **waits})


def measure_stock(plan: Plan, num_rounds: int) -> Turn:
    """Returns what one `flwr run` of the no-op app took; raises `StockFlowerError`."""
    with _scratch() as root, StockFleet(root=root / "fleet", num_devices=plan.num_devices) as fleet:
        with Meter({name: process.pid for name, process in fleet.processes.items()}) as meter:
            measured = fleet.run(num_rounds=num_rounds, size_bytes=plan.size_bytes, timeout_s=STOCK_TIMEOUT_S)
        if measured["num_updates"] != [plan.num_devices] * num_rounds:
            raise StockFlowerError(f"not every device answered in every round: {measured['num_updates']} updates")
    return _turn(measured["started_at"], measured["closed_at"], meter, {})


def _turn(started_at: float, closed_at: Sequence[float], meter: Meter, extra: Mapping[str, str | float]) -> Turn:
    """Leaves the first round out of everything but `first_round_s`: it warms caches and waits for processes."""
    begin_s, end_s = closed_at[0], closed_at[-1]
    costs = {label: meter.cost(label, begin_s, end_s) for label in meter.samples}
    devices = [cost for label, cost in costs.items() if label != "coordinator"]
    mean_s = (end_s - begin_s) / (len(closed_at) - 1)
    coordinator = costs["coordinator"]
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
        extra=extra,
    )


def _history(database: Path, run_id: str, num_devices: int) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Returns when each round began and closed, and the medians of what an update took, from the store."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as store:
        rounds = store.execute(
            "SELECT started_at, closed_at, num_updates FROM rounds WHERE run_id = ? ORDER BY round", (run_id,)
        ).fetchall()
        updates = store.execute(
            "SELECT compute_s, received_at - dispatched_at, bytes_up, bytes_down FROM updates WHERE run_id = ?",
            (run_id,),
        ).fetchall()
    store.close()
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


def _parse() -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rounds", type=_at_least(3), default=ROUNDS, help="rounds of edgefl in a turn [%(default)s]"
    )
    parser.add_argument(
        "--stock-rounds", type=_at_least(3), default=STOCK_ROUNDS, help="of stock Flower [%(default)s]"
    )
    parser.add_argument("--devices", type=_at_least(1), default=2, help="device processes [%(default)s]")
    parser.add_argument("--turns", type=_at_least(1), default=3, help="how often both are measured [%(default)s]")
    parser.add_argument("--model-bytes", type=_at_least(4), default=MODEL_BYTES, help="float32 model [%(default)s]")
    parser.add_argument("--broker", choices=("auto", "mosquitto", "embedded"), default="auto", help="of edgefl")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    plan = Plan(
        num_devices=arguments.devices,
        num_rounds=arguments.rounds,
        size_bytes=arguments.model_bytes,
        broker=arguments.broker,
    )
    return plan, arguments


class _at_least:  # noqa: N801 reads as a type of argparse, and its repr names the rule
    def __init__(self, least: int) -> None:
        self._least = least

    def __call__(self, text: str) -> int:
        if not text.isdecimal() or int(text) < self._least:
            raise argparse.ArgumentTypeError(f"must be a whole number of {self._least} or more, got {text!r}")
        return int(text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
