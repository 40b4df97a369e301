"""One coordinator with a thousand devices, and how many more it could have.

    python benchmarks/thousand_devices.py [--rounds 3] [--beat-s 60] [--profile] [--json]
    python benchmarks/thousand_devices.py --devices 250 500 1000 2000 4000

The coordinator is `edgefl coordinator start` with its own Mosquitto. Devices are stand-ins (`harness/stand_in.py`):
each has joined with a key of its own, holds its TLS connections to broker and Fleet API, sends real heartbeats every
5 s, asks for work every 30 s, and answers in rounds with an update as large as the model. They train nothing, so as
many as are let (`--at-a-time`) send at once, and never fewer, which is the worst that a coordinator can meet. First
nothing but heartbeats is measured, then a run.

Whether all was right is checked: every heartbeat that was sent lies in the store, and the model is what the strategy
makes of exactly the updates that were sent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from harness.crowd_costs import Watch
from harness.crowd_process import Crowd, coordinator, profiled, server_pids
from harness.process_trees import end_descendants
from safetensors.numpy import load_file

from edgefl.config import parse_run
from edgefl.errors import NetworkError
from edgefl.local_fleet import COORDINATOR, FINAL, LocalFleet
from edgefl.protocol import HEARTBEAT_S
from edgefl.tasks.noop import NoopTask
from edgefl.types import Json

SEED = 7
FLUSHED_AFTER_S = 3.0
"""The coordinator writes heartbeats twice a second."""
PHASES = ("joining", "connecting", "heartbeats", "rounds")
MOST_IN_PROFILE = 15


def main() -> int:
    arguments = _parse()
    found = []
    for number in arguments.devices:
        found.append(measure(number, arguments))
        print(as_text(found[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0 if all(each["is_right"] for each in found) else 1


def measure(num_devices: int, arguments: argparse.Namespace) -> Json:
    """Returns what a fleet of so many costs its coordinator, and whether all was right."""
    root = Path(tempfile.mkdtemp(prefix="edgefl-thousand-", dir=arguments.dir))
    crowd = Crowd(
        root,
        num_devices,
        num_processes=arguments.processes,
        num_workers=arguments.at_a_time,
        model_bytes=arguments.model_bytes,
    )
    try:
        with coordinator(root, broker=arguments.broker, is_profiled=arguments.profile) as fleet, crowd:
            return _measured(fleet, crowd, arguments)
    finally:
        end_descendants()
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)


def _measured(fleet: LocalFleet, crowd: Crowd, arguments: argparse.Namespace) -> Json:
    token = fleet.operator().post("/edgefl/v1/tokens", {"uses": crowd.num_devices})["token"]
    pids = {**server_pids(fleet), **crowd.pids()}
    found: Json = {"devices": crowd.num_devices, "model_bytes": arguments.model_bytes}
    with Watch(pids) as watch:
        watch.begin("joining")
        found["join_s"] = max(told["seconds"] for told in crowd.ask(f"join {token}"))
        watch.begin("connecting")
        told = crowd.ask("go")
        found["connect_s"] = max(each["seconds"] for each in told)
        fleet.wait_present(crowd.num_devices)
        with profiled(fleet, is_wanted=arguments.profile) as profile:
            watch.begin("heartbeats")
            time.sleep(arguments.beat_s)
            watch.begin("rounds")
        found["profile_of_heartbeats"] = profile
        with profiled(fleet, is_wanted=arguments.profile) as profile:
            run_id, found["slowest_answer_s"] = _run(fleet, crowd, arguments)
            watch.begin("over")
        found["profile_of_rounds"] = profile
        told = crowd.ask("stop")
        time.sleep(FLUSHED_AFTER_S)
        found["costs"] = {label: {phase: watch.cost(label, phase).as_json() for phase in PHASES} for label in pids}
        found["peak_rss_bytes"] = {label: watch.peak_rss_bytes(label) for label in pids}
    found |= _counted(fleet, crowd, told, run_id)
    found["model_error"] = _model_error(fleet, crowd, run_id, arguments.model_bytes)
    found["was_gone"] = sum(row["kind"] == "device-gone" for row in fleet.history("events"))
    found["is_right"] = (
        found["heartbeats_sent"] == found["heartbeats_stored"]
        and found["updates_used"] == crowd.num_devices * arguments.rounds
        and found["model_error"] < 1e-5
        and not found["num_errors"]
    )
    return found


def _run(fleet: LocalFleet, crowd: Crowd, arguments: argparse.Namespace) -> tuple[str, float]:
    """Returns the run when it is over, and the longest that an operator had to wait for an answer meanwhile."""
    config = {
        "run": {"task": "noop", "rounds": arguments.rounds, "seed": SEED, "evaluate_on": "none"},
        "task": {"size_bytes": arguments.model_bytes},
        "devices": {"min": crowd.num_devices, "ready_s": 600},
    }
    run_id, slowest_s = fleet.submit(parse_run(config)), 0.0
    while True:
        asked_s, status = time.monotonic(), "?"
        with suppress(NetworkError):  # it has too much to do: that is what is measured
            status = fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["status"]
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        if status in FINAL:
            return run_id, slowest_s
        if fleet.processes[COORDINATOR].poll() is not None:
            raise SystemExit(f"the coordinator ended: {fleet.log_tail(COORDINATOR)}")
        time.sleep(0.5)


def _counted(fleet: LocalFleet, crowd: Crowd, told: Sequence[Json], run_id: str) -> Json:
    """Returns what was sent, by the stand-ins' own account, and what lies in the store."""
    sent = {name: count for each in told for name, count in each["beats"].items()}
    with sqlite3.connect(f"file:{fleet.database}?mode=ro", uri=True) as store:
        stored = dict(store.execute("SELECT device_id, count(DISTINCT seq) FROM heartbeats GROUP BY device_id"))
        rounds = store.execute(
            "SELECT started_at, closed_at, num_updates FROM rounds WHERE run_id = ? ORDER BY round", (run_id,)
        ).fetchall()
        outcomes = dict(
            store.execute("SELECT outcome, count(*) FROM updates WHERE run_id = ? GROUP BY outcome", (run_id,))
        )
        (submitted_at,) = store.execute("SELECT submitted_at FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    store.close()
    return {
        "heartbeats_sent": sum(sent.values()),
        "heartbeats_stored": sum(stored.values()),
        "devices_whose_heartbeats_differ": sum(stored.get(name, 0) != count for name, count in sent.items()),
        "updates_sent": sum(each["updates"] for each in told),
        "updates_used": outcomes.pop("used", 0),
        "other_outcomes": outcomes,
        "ready_s": rounds[0][0] - submitted_at if rounds else None,
        "round_s": [closed - started for started, closed, _ in rounds],
        "lost_sessions": sum(each["lost_sessions"] for each in told),
        "num_tries": sum(each["num_tries"] for each in told),
        "tries": [text for each in told for text in each["tries"]][:5],
        "num_errors": sum(each["num_errors"] for each in told),
        "errors": [error for each in told for error in each["errors"]][:5],
        "versions": sorted({version for each in told for version in each["versions"]}),
        "num_joined": crowd.num_devices,
    }


def _model_error(fleet: LocalFleet, crowd: Crowd, run_id: str, model_bytes: int) -> float:
    """Returns by how much a number of the model is off, at worst, from what the updates that were sent make of it."""
    (expected,) = NoopTask(size_bytes=model_bytes).init(SEED).values()
    model = expected.astype(np.float64)
    for path in crowd.root.glob("sum-*.npy"):
        model += np.load(path) / crowd.num_devices
    sha256 = fleet.operator().get(f"/edgefl/v1/runs/{run_id}")["model"]
    (found,) = load_file(fleet.model_file(sha256)).values()
    return float(np.abs(found - model).max())


def as_text(found: Json) -> str:
    """Returns the figures of one size of fleet as lines."""
    number, costs = found["devices"], found["costs"]
    rounds = ", ".join(f"{seconds:.1f}" for seconds in found["round_s"])
    beats, work = costs["coordinator"]["heartbeats"], costs["coordinator"]["rounds"]
    beat_rate = number / HEARTBEAT_S
    ms_a_beat = 1000 * beats["cores"] / beat_rate
    ms_an_update = 1000 * (work["cpu_s"] - beats["cores"] * work["seconds"]) / max(1, found["updates_used"])
    lines = [
        f"{number} devices: {'all is right' if found['is_right'] else 'NOT ALL IS RIGHT'}",
        f"  joined in {found['join_s']:.1f} s, connected in {found['connect_s']:.1f} s",
        (
            f"  heartbeats: {found['heartbeats_stored']} stored of {found['heartbeats_sent']} sent, "
            f"{beat_rate:.0f} a second"
        ),
        f"  rounds of {found['model_bytes'] / 1e6:g} MB: {rounds} s after {found['ready_s']:.1f} s of making ready",
        (
            f"  {found['updates_used']} updates used of {found['updates_sent']} sent "
            f"{found['other_outcomes'] or ''}, "
            f"model off by {found['model_error']:.1g}"
        ),
        (
            f"  coordinator: {ms_a_beat:.2f} ms of CPU a heartbeat and {ms_an_update:.1f} an update; "
            f"one core is full at {1000 * HEARTBEAT_S / ms_a_beat:.0f} devices by heartbeats alone"
        ),
        f"  the operator waited {found['slowest_answer_s']:.1f} s for an answer at worst",
        f"  lost sessions {found['lost_sessions']}, called gone {found['was_gone']}",
        (
            f"  errors {found['num_errors']} {found['errors'] or ''}, tried again {found['num_tries']} "
            f"{found['tries'] or ''}"
        ),
    ]
    for label, by_phase in costs.items():
        lines.append(f"  {label} (at most {found['peak_rss_bytes'][label] / 2**20:.0f} MiB resident)")
        lines += [
            f"    {phase} {cost['seconds']:.0f} s: {cost['cores']:.2f} cores, "
            f"PSS {cost['median_pss_bytes'] / 2**20:.0f} to {cost['peak_pss_bytes'] / 2**20:.0f} MiB, "
            f"{cost['num_threads']} threads, {cost['num_files']} files"
            for phase, cost in by_phase.items()
        ]
    for phase in ("heartbeats", "rounds"):
        lines += _profile_lines(phase, found[f"profile_of_{phase}"])
    return "\n".join(lines)


def _profile_lines(phase: str, profile: dict[str, dict[str, float]]) -> list[str]:
    total_s = sum(profile.get("threads", {}).values())
    lines = []
    for table, places in profile.items():
        lines.append(f"  CPU of {phase} by {table} ({total_s:.1f} s):")
        lines += [
            f"    {seconds / total_s:5.1%} {place}" for place, seconds in list(places.items())[:MOST_IN_PROFILE]
        ]
    return lines


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beat-s", type=float, default=60.0, help="of heartbeats alone [%(default)s]")
    parser.add_argument("--model-bytes", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=4, help="full of stand-ins [%(default)s]")
    parser.add_argument("--at-a-time", type=int, default=200, help="stand-ins that fetch or send [%(default)s]")
    parser.add_argument("--broker", default="mosquitto", help="as of edgefl coordinator start [%(default)s]")
    parser.add_argument("--profile", action="store_true", help="say where the coordinator's CPU time goes")
    parser.add_argument("--dir", type=Path, help="where to put a folder for all of it [a temporary one]")
    parser.add_argument("--keep", action="store_true", help="leave that folder")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
