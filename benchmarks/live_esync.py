"""ESync on device processes of unequal speed: how long they wait, when they are good, and whether that is predicted.

    python benchmarks/live_esync.py [--base 0.1] [--accuracy 0.85] [--epsilon 0] [--out DIR] [--json]

Four device processes take 1, 2, 4 and 8 times `--base` seconds longer for every iteration. A short run probes them:
seconds per iteration and per exchange go into a profile file. Then `ssgd` and `esync`, with budgets, live and with
queries, train the digits on them, and the simulator runs the same with those profiles. The accuracy is reached when
the mean of the last five evaluations is. All figures come from the store's rows. Waiting: from an update's arrival to
the closing of its round, as a share of all devices' time, from the third round on (before, nobody knows who is fast).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import options
from harness.round_report import machine
from harness.throttled_task import NAME

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import EdgeflError
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, partition_devices
from edgefl.simulation.simulated_run import simulate

FACTORS = (1, 2, 4, 8)
HARNESS = Path(__file__).parent / "harness"
KNOWN_FROM = 3
HELD = 5
PROBE_ROUNDS = 6
FREE_BYTES_PER_S = 1e12
"""Loopback: what a message takes is its latency."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: the share of device time spent waiting, the median round, and when it was good."""

    waiting: float
    round_s: float
    to_accuracy_s: float | None
    rounds: int
    iterations: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the short run says of one device."""

    seconds_per_iteration: float
    exchange_s: float


def main() -> int:
    arguments = _parse()
    root = Path(arguments.out or tempfile.mkdtemp(prefix="edgefl-live-esync-"))
    esync = {"name": "esync", "epsilon": arguments.epsilon}
    runs = {
        "ssgd": {"name": "ssgd"},
        "esync, budget": {**esync, "mode": "budget"},
        "esync, live": {**esync, "mode": "live"},
        "esync, query": {**esync, "mode": "query"},
    }
    try:
        live, probed = _measure(root, runs, arguments)
        profiles = _write_profiles(root / "profiles.toml", probed)
        predicted = {name: _simulate(root, profiles, strategy, arguments) for name, strategy in runs.items()}
    except EdgeflError as error:
        _say(f"not measured: {error}")
        return 1
    facts = {**machine(), "base_s": arguments.base, "factors": list(FACTORS), "accuracy": arguments.accuracy}
    if arguments.json:
        sides = {"live": live, "predicted": predicted}
        found = {side: {name: asdict(outcome) for name, outcome in of.items()} for side, of in sides.items()}
        print(json.dumps({"v": 1, "facts": facts, "probed": {k: asdict(p) for k, p in probed.items()}, **found}))
    else:
        print(_table(live, predicted, probed, facts))
        print(f"history: edgefl history rounds --dir {root}/fleet/coordinator; profiles: {profiles}")
    return 0


def _measure(
    root: Path, runs: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace
) -> tuple[dict[str, Outcome], dict[str, Probed]]:
    partitions, test_shards = partition_devices("digits", "iid", len(FACTORS), root / "shards", None, arguments.seed)
    devices = []
    for device, factor in zip(partitions, FACTORS, strict=True):
        shard = device.shards["digits"]
        Path(shard).with_suffix(".delay").write_text(str(factor * arguments.base))
        devices.append(LocalDeviceSpec(name=device.name, shards={NAME: shard}))
    paths = [str(HARNESS), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with LocalFleet(
        root=root / "fleet",
        devices=devices,
        test_shards={NAME: test_shards["digits"]},
        environment={
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "EDGEFL_ALLOW_MODULES": NAME.partition(":")[0],
        },
    ) as fleet:
        _say(f"probing: {PROBE_ROUNDS} rounds")
        probe = _config(NAME, {"name": "ssgd"}, arguments, rounds=PROBE_ROUNDS)
        probed = _probed(_rows(fleet, "updates", fleet.wait_for_run(fleet.submit(probe))))
        live = {}
        for name, strategy in runs.items():
            _say(f"{name} on four processes")
            run = fleet.wait_for_run(fleet.submit(_config(NAME, strategy, arguments)))
            rows = {kind: _rows(fleet, kind, run) for kind in ("rounds", "updates", "evaluations")}
            live[name] = _outcome(rows, arguments.accuracy)
    return live, probed


def _simulate(root: Path, profiles: Path, strategy: Mapping[str, Any], arguments: argparse.Namespace) -> Outcome:
    _say(f"{strategy['name']} {strategy.get('mode', '')} in the simulator")
    run = simulate(
        _config("digits", strategy, arguments),
        devices=len(FACTORS),
        profiles=[str(profiles)],
        scheme="iid",
        root=root / "simulations",
    )
    rows = {"rounds": run.rounds, "updates": run.updates, "evaluations": run.evaluations}
    return _outcome(rows, arguments.accuracy)


def _config(
    task: str, strategy: Mapping[str, Any], arguments: argparse.Namespace, rounds: int | None = None
) -> RunConfig:
    usual = arguments.ssgd_rounds if strategy["name"] == "ssgd" else arguments.esync_rounds
    num_rounds = usual if rounds is None else rounds
    return parse_run(
        {
            "run": {"task": task, "rounds": num_rounds, "seed": arguments.seed, "evaluate_on": "coordinator"},
            "strategy": {"learning_rate": arguments.learning_rate, "batch_size": 16, **strategy},
            "devices": {"min": len(FACTORS)},
            "simulation": {"jitter": 0.0},
        }
    )


def _rows(fleet: LocalFleet, kind: str, run: Row) -> Sequence[Row]:
    return fleet.list_history(kind, run=run["run_id"])


def _probed(updates: Sequence[Row]) -> dict[str, Probed]:
    by_device = defaultdict(list)
    for row in updates:
        if row["outcome"] == "used" and row["round"] > 1:  # the first one warms caches
            by_device[row["device_id"]].append(row)
    return {
        name: Probed(
            seconds_per_iteration=statistics.median(row["compute_s"] / row["iterations"] for row in rows),
            exchange_s=statistics.median(row["send_s"] for row in rows),
        )
        for name, rows in sorted(by_device.items())
    }


def _write_profiles(path: Path, probed: Mapping[str, Probed]) -> Path:
    """Writes one profile for each process; half of an exchange is the way there, half the way back."""
    tables = [
        "\n".join(
            [
                f"[profile.{name}]",
                'model = "a process of this machine"',
                f"iterations = {{ digits = {found.seconds_per_iteration!r} }}",
                f"latency_s = {found.exchange_s / 2!r}",
                f"up_bytes_per_s = {FREE_BYTES_PER_S}",
                f"down_bytes_per_s = {FREE_BYTES_PER_S}",
                "",
            ]
        )
        for name, found in probed.items()
    ]
    path.write_text("\n".join(tables))
    return path


def _outcome(rows: Mapping[str, Sequence[Row]], accuracy: float) -> Outcome:
    closed = [row for row in rows["rounds"] if row["closed_at"] is not None]
    used = [row for row in rows["updates"] if row["outcome"] == "used" and row["round"] >= KNOWN_FROM]
    lasted_s = {row["round"]: row["closed_at"] - row["started_at"] for row in closed if row["round"] >= KNOWN_FROM}
    # The last round is closed by what was recalled, not by the strategy.
    lasted_s.pop(max(lasted_s), None)
    used = [row for row in used if row["round"] in lasted_s]
    began = min(row["started_at"] for row in closed)
    good_at = _holds_from(sorted(rows["evaluations"], key=lambda row: row["version"]), accuracy)
    by_device = defaultdict(list)
    for row in used:
        by_device[row["device_id"]].append(row["iterations"])
    return Outcome(
        waiting=sum(row["wait_s"] for row in used) / (len(FACTORS) * sum(lasted_s.values())),
        round_s=statistics.median(lasted_s.values()),
        to_accuracy_s=None if good_at is None else good_at - began,
        rounds=len(closed),
        iterations={name: statistics.mean(counts) for name, counts in sorted(by_device.items())},
    )


def _holds_from(evaluations: Sequence[Row], accuracy: float) -> float | None:
    """Returns when the mean of the last evaluations reached the accuracy; a single one may be luck."""
    for last in range(HELD, len(evaluations) + 1):
        if statistics.mean(row["accuracy"] for row in evaluations[last - HELD : last]) >= accuracy:
            at: float = evaluations[last - 1]["at"]
            return at
    return None


def _table(
    live: Mapping[str, Outcome],
    predicted: Mapping[str, Outcome],
    probed: Mapping[str, Probed],
    facts: Mapping[str, Any],
) -> str:
    iteration_s = ", ".join(f"{found.seconds_per_iteration:.3f}" for found in probed.values())
    exchange_s = ", ".join(f"{found.exchange_s:.3f}" for found in probed.values())
    title = f"{len(FACTORS)} processes, {iteration_s} s per iteration, {exchange_s} s per exchange"
    heads = ("waiting", "round", "predicted", "to accuracy", "predicted", "rounds")
    widths = (9, 9, 11, 13, 11, 8)
    head = "".join(f"{text:>{width}}" for text, width in zip(heads, widths, strict=True))
    lines = [f"{title}; digits, accuracy {facts['accuracy']:g}", f"{'':16}{head}  iterations"]
    for name, found in live.items():
        expected = predicted[name]
        iterations = ", ".join(f"{count:.1f}" for count in found.iterations.values())
        lines.append(
            f"{name:16}{found.waiting:9.1%}{found.round_s:8.3f}s{_off(expected.round_s, found.round_s):>11}"
            f"{_seconds(found.to_accuracy_s):>13}{_off(expected.to_accuracy_s, found.to_accuracy_s):>11}"
            f"{found.rounds:8}  {iterations}"
        )
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f}s"


def _off(expected: float | None, found: float | None) -> str:
    return "-" if expected is None or not found else f"{expected / found - 1:+.1%}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", type=float, default=0.1, help="added delay of the fastest, seconds [%(default)s]")
    parser.add_argument("--accuracy", type=float, default=0.85, help="when a run is good [%(default)s]")
    parser.add_argument("--learning-rate", type=float, default=0.2, help="[%(default)s]")
    # The factors are multiples of each other: without a tolerance everybody's last iteration just does not fit.
    parser.add_argument("--epsilon", type=float, default=0.0, help="of esync [%(default)s]")
    parser.add_argument("--ssgd-rounds", type=int, default=100, help="[%(default)s]")
    parser.add_argument("--esync-rounds", type=int, default=35, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=7, help="[%(default)s]")
    parser.add_argument("--out", help="folder for the fleet, the profiles and the simulations [a temporary one]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return options.parse(parser, base=0.02, accuracy=0.5, ssgd_rounds=20, esync_rounds=5)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
