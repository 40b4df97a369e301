"""Real protocol clients without training, as many as are wanted, and what they cost one coordinator.

    python benchmarks/load_generator.py [--rounds 3] [--beat-s 60] [--profile] [--json]
    python benchmarks/load_generator.py --devices 250 500 1000 2000 4000 --rounds-up-to 1000 --ramp-s 20 --pin
    python benchmarks/load_generator.py --devices 50 5000 --round-devices 50 --rounds 10 --beat-s 60 --pin

The coordinator is `edgefl coordinator start` with its own Mosquitto. Devices are stand-ins (`harness/stand_in.py`):
each has joined with a key of its own, holds its TLS connections to broker and Fleet API, sends real heartbeats every
5 s, asks for work every 30 s, and answers in rounds with an update as large as the model. They train nothing, so as
many as are let (`--at-a-time`) send at once, and never fewer, which is the worst that a coordinator can meet. First
nothing but heartbeats is measured, then a run. With several sizes the fleet grows from one to the next. With
`--round-devices` a run has so many of them, and its rounds are compared with those of the smallest fleet.

With `--ramp-s` the last fleet then beats twice as often, and twice again, each time for so long, until heartbeats are
late or lost, or the stand-ins do not keep up themselves. With `--pin` coordinator and broker have the first core, and
the stand-ins the others.

Whether all was right is checked: every heartbeat that was sent lies in the store, and the model is what the strategy
makes of exactly the updates that were sent.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from harness import options
from harness.crowd_costs import Watch
from harness.crowd_process import Crowd, coordinator, profiled, server_pids
from harness.heartbeat_lag import Lag, lag_of
from harness.process_trees import end_descendants
from safetensors.numpy import load_file

from edgefl.core.config import parse_run
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import HEARTBEAT_JITTER, HEARTBEAT_S
from edgefl.core.types import Json
from edgefl.simulation.local_fleet import COORDINATOR, TERMINAL_STATUSES, LocalFleet
from edgefl.system.processes import raise_file_limit
from edgefl.tasks.noop import NoopTask

SEED = 7
FLUSHED_AFTER_S = 2.0
"""The coordinator writes heartbeats twice a second; one that takes longer than this besides counts as lost."""
PHASES = ("joining", "connecting", "heartbeats", "rounds")
MOST_IN_PROFILE = 15
LATE_S = 1.0
"""Heartbeats begin to lag where one of a hundred takes longer than this from its device to the coordinator."""
OTHER_FILES = 300


def main() -> int:
    arguments = _parse()
    _check_files(arguments)
    root = Path(tempfile.mkdtemp(prefix="edgefl-load-", dir=arguments.dir))
    cores = sorted(os.sched_getaffinity(0))
    servers, others = (str(cores[0]), ",".join(map(str, cores[1:]))) if arguments.pin else ("", "")
    crowd = Crowd(
        root,
        num_processes=arguments.processes,
        num_workers=arguments.at_a_time,
        model_bytes=arguments.model_bytes,
        cores=others,
    )
    try:
        with coordinator(root, broker=arguments.broker, is_profiled=arguments.profile, cores=servers) as fleet, crowd:
            found = _grown(fleet, crowd, arguments)
    finally:
        end_descendants()
        if not arguments.keep:
            shutil.rmtree(root, ignore_errors=True)
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0 if all(each["is_right"] for each in found) else 1


def _check_files(arguments: argparse.Namespace) -> None:
    """Says so where this system lets a process have too few files: a device is one to each server, two to a crowd."""
    most, number = raise_file_limit(), max(arguments.devices)
    needed = max(number + arguments.at_a_time, 2 * number // arguments.processes) + OTHER_FILES
    if most < needed:
        raise SystemExit(f"{number} devices need {needed} files in a process, {most} are allowed; see ulimit -Hn")
    if arguments.pin and len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("--pin needs two cores at least, there is one")


def _grown(fleet: LocalFleet, crowd: Crowd, arguments: argparse.Namespace) -> list[Json]:
    found = []
    for number in sorted(arguments.devices):
        found.append(_measured(fleet, crowd, number, arguments))
        print(as_text(found[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.round_devices and len(found) > 1 and found[0]["rounds"] and found[-1]["rounds"]:
        found[-1]["round_ratio"] = _round_ratio(found[0], found[-1])
        text = f"  a round is {found[-1]['round_ratio']:.2f} x one of {found[0]['devices']} devices (medians)"
        print(text, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.ramp_s:
        found[-1]["ramp"] = _ramp(fleet, crowd, arguments)
        print(_ramp_text(found[-1]["ramp"]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    return found


def _round_ratio(small: Json, large: Json) -> float:
    """Returns how much longer a round of a large fleet is; the first round of each warms connections up."""
    medians = [statistics.median(found["round_s"][1:] or found["round_s"]) for found in (small, large)]
    return medians[1] / medians[0]


def _measured(fleet: LocalFleet, crowd: Crowd, number: int, arguments: argparse.Namespace) -> Json:
    """Returns what a fleet of so many costs its coordinator, and whether all was right."""
    token = fleet.make_client().post("/edgefl/v1/tokens", {"uses": number - crowd.num_devices})["token"]
    pids = {**server_pids(fleet), **crowd.pids()}
    num_used = min(arguments.round_devices or number, number)
    has_rounds = arguments.rounds > 0 and number <= (arguments.rounds_up_to or number)
    found: Json = {
        "devices": number,
        "round_devices": num_used,
        "model_bytes": arguments.model_bytes,
        "rounds": arguments.rounds * has_rounds,
    }
    found["most_files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with Watch(pids) as watch:
        watch.begin("joining")
        found["join_s"] = max(told["seconds"] for told in crowd.grow(token, number))
        watch.begin("connecting")
        told = crowd.ask("go")
        found["connect_s"] = max(each["seconds"] for each in told)
        fleet.wait_for_devices(crowd.num_devices)
        crowd.ask("tell")  # how late they are is told anew from here on
        begun_at = time.time()
        with profiled(fleet, is_wanted=arguments.profile) as profile:
            watch.begin("heartbeats")
            time.sleep(arguments.beat_s)
            watch.begin("rounds" if has_rounds else "over")
        ended_at = time.time()
        found["late_s"] = max(each["late_s"] for each in crowd.ask("tell"))
        found["profile_of_heartbeats"] = profile
        run_id = None
        if has_rounds:
            with profiled(fleet, is_wanted=arguments.profile) as profile:
                run_id, found["slowest_answer_s"] = _run(fleet, num_used, arguments)
                watch.begin("over")
            found["profile_of_rounds"] = profile
        told = crowd.ask("tell")
        phases = [phase for phase in PHASES if has_rounds or phase != "rounds"]
        found["costs"] = {label: {phase: watch.cost(label, phase).as_json() for phase in phases} for label in pids}
        found["peak_rss_bytes"] = {label: watch.peak_rss_bytes(label) for label in pids}
    found["lag"] = _lag(fleet, told, begun_at, ended_at).as_json()
    found |= _counted(fleet, crowd, told)
    found["was_gone"] = sum(row["kind"] == "device-gone" for row in fleet.list_history("events"))
    found["is_right"] = found["heartbeats_sent"] == found["heartbeats_stored"] and not found["num_errors"]
    if run_id is not None:
        found |= _rounds(fleet, run_id)
        found["model_error"] = _model_error(fleet, crowd, run_id, arguments.model_bytes, num_used)
        found["is_right"] &= found["updates_used"] == num_used * arguments.rounds and found["model_error"] < 1e-5
    return found


def _ramp(fleet: LocalFleet, crowd: Crowd, arguments: argparse.Namespace) -> list[Json]:
    """Returns what it was like at ever more heartbeats a second, the last time with too many."""
    pids, rows, factor = server_pids(fleet), [], 1
    while factor < arguments.ramp_to:
        time_s = (1 + HEARTBEAT_JITTER) * HEARTBEAT_S / factor
        factor *= 2
        crowd.ask(f"every {HEARTBEAT_S / factor}")
        time.sleep(time_s)  # what was due before comes at its time
        crowd.ask("tell")
        with Watch(pids) as watch:
            watch.begin("ramp")
            begun_at = time.time()
            time.sleep(arguments.ramp_s)
            ended_at = time.time()
            watch.begin("over")
        told = crowd.ask("tell")
        lag = _lag(fleet, told, begun_at, ended_at)
        late_s = max(each["late_s"] for each in told)
        cores = {label: watch.cost(label, "ramp").cores for label in pids}
        is_kept = lag.num_lost == 0 and lag.p99_s <= LATE_S
        has_kept_up = late_s <= LATE_S
        rows.append(
            {
                "as_devices": crowd.num_devices * factor, "beats_per_s": lag.num_sent / (ended_at - begun_at),
                "cores": cores, "late_s": late_s, "is_kept": is_kept, "has_kept_up": has_kept_up, **lag.as_json(),
            }
        )  # fmt: skip
        if not is_kept or not has_kept_up:
            break
    crowd.ask(f"every {HEARTBEAT_S}")
    return rows


def _run(fleet: LocalFleet, num_devices: int, arguments: argparse.Namespace) -> tuple[str, float]:
    """Returns the run when it is over, and the longest that an operator had to wait for an answer meanwhile."""
    names = sorted(row["device_id"] for row in fleet.list_history("devices"))[:num_devices]
    config = {
        "run": {"task": "noop", "rounds": arguments.rounds, "seed": SEED, "evaluate_on": "none"},
        "task": {"size_bytes": arguments.model_bytes},
        "devices": {"names": names, "min": num_devices, "ready_s": 600},
    }
    run_id, slowest_s = fleet.submit(parse_run(config)), 0.0
    while True:
        asked_s, run = time.monotonic(), {"status": "?"}
        with suppress(NetworkError):  # it has too much to do: that is what is measured
            run = fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")
        slowest_s = max(slowest_s, time.monotonic() - asked_s)
        if run["status"] == "finished":
            return run_id, slowest_s
        if run["status"] in TERMINAL_STATUSES:
            raise SystemExit(f"the run {run['status']}: {run['reason']}")
        if fleet.processes[COORDINATOR].poll() is not None:
            raise SystemExit(f"the coordinator ended: {fleet.read_log_tail(COORDINATOR)}")
        time.sleep(0.5)


def _beats(told: Sequence[Json]) -> dict[str, list[float]]:
    """Returns when each stand-in's heartbeats left, in Unix seconds, by their numbers from 1 on."""
    return {name: at for each in told for name, at in json.loads(Path(each["beats"]).read_text()).items()}


def _lag(fleet: LocalFleet, told: Sequence[Json], begun_at: float, ended_at: float) -> Lag:
    """Returns how long heartbeats that left in a span were on their way, as the coordinator noted them."""
    time.sleep(FLUSHED_AFTER_S)
    with sqlite3.connect(f"file:{fleet.database}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT device_id, seq, at FROM heartbeats WHERE at >= ?", (begun_at - 1.0,)).fetchall()
    store.close()
    return lag_of(_beats(told), {(name, seq): at for name, seq, at in rows}, begun_at, ended_at)


def _counted(fleet: LocalFleet, crowd: Crowd, told: Sequence[Json]) -> Json:
    """Returns what was sent, by the stand-ins' own account, and what of it lies in the store."""
    sent = {name: len(at) for name, at in _beats(told).items()}
    with sqlite3.connect(f"file:{fleet.database}?mode=ro", uri=True) as store:
        rows = store.execute("SELECT DISTINCT device_id, seq FROM heartbeats").fetchall()
    store.close()
    stored = dict.fromkeys(sent, 0)
    for name, seq in rows:  # what came after they were asked is not counted
        stored[name] += seq <= sent[name]
    return {
        "heartbeats_sent": sum(sent.values()),
        "heartbeats_stored": sum(stored.values()),
        "devices_whose_heartbeats_differ": sum(stored[name] != count for name, count in sent.items()),
        "updates_sent": sum(each["updates"] for each in told),
        "lost_sessions": sum(each["lost_sessions"] for each in told),
        "num_tries": sum(each["num_tries"] for each in told),
        "tries": [text for each in told for text in each["tries"]][:5],
        "num_errors": sum(each["num_errors"] for each in told),
        "errors": [error for each in told for error in each["errors"]][:5],
        "versions": sorted({version for each in told for version in each["versions"]}),
        "num_joined": crowd.num_devices,
    }


def _rounds(fleet: LocalFleet, run_id: str) -> Json:
    """Returns how the rounds of a run went, by the store."""
    with sqlite3.connect(f"file:{fleet.database}?mode=ro", uri=True) as store:
        rounds = store.execute(
            "SELECT started_at, closed_at, num_updates FROM rounds WHERE run_id = ? ORDER BY round", (run_id,)
        ).fetchall()
        outcomes = dict(
            store.execute("SELECT outcome, count(*) FROM updates WHERE run_id = ? GROUP BY outcome", (run_id,))
        )
        (submitted_at,) = store.execute("SELECT submitted_at FROM runs WHERE run_id = ?", (run_id,)).fetchone()
    store.close()
    return {
        "updates_used": outcomes.pop("used", 0),
        "other_outcomes": outcomes,
        "ready_s": rounds[0][0] - submitted_at if rounds else None,
        "round_s": [closed - started for started, closed, _ in rounds],
    }


def _model_error(fleet: LocalFleet, crowd: Crowd, run_id: str, model_bytes: int, num_devices: int) -> float:
    """Returns by how much a number of the model is off, at worst, from what the updates that were sent make of it."""
    (expected,) = NoopTask(size_bytes=model_bytes).init(SEED).values()
    model = expected.astype(np.float64)
    for path in crowd.root.glob(f"sum-{run_id}-*.npy"):
        model += np.load(path) / num_devices
    sha256 = fleet.make_client().get(f"/edgefl/v1/runs/{run_id}")["model"]
    (found,) = load_file(fleet.get_model_path(sha256)).values()
    return float(np.abs(found - model).max())


def as_text(found: Json) -> str:
    """Returns the figures of one size of fleet as lines."""
    number, costs, lag = found["devices"], found["costs"], found["lag"]
    beats = costs["coordinator"]["heartbeats"]
    beat_rate = max(1, lag["num_sent"]) / beats["seconds"]
    ms_a_beat = 1000 * beats["cores"] / beat_rate
    stand_in_cores = sum(by["heartbeats"]["cores"] for label, by in costs.items() if label.startswith("stand-ins"))
    lines = [
        f"{number} devices: {'all is right' if found['is_right'] else 'NOT ALL IS RIGHT'}",
        f"  joined in {found['join_s']:.1f} s, connected in {found['connect_s']:.1f} s",
        (
            f"  heartbeats: {found['heartbeats_stored']} stored of {found['heartbeats_sent']} sent, "
            f"{beat_rate:.0f} a second, on the way {_lag_text(lag)}; "
            f"the stand-ins were {found['late_s']:.2f} s late themselves"
        ),
        (
            f"  coordinator: {beats['cores']:.2f} cores, {ms_a_beat:.2f} ms of CPU a heartbeat, polls included: one "
            f"core would be full at {1000 * HEARTBEAT_S / ms_a_beat:.0f} devices; the stand-ins took "
            f"{stand_in_cores:.2f} cores"
        ),
        *_round_lines(found),
        f"  lost sessions {found['lost_sessions']}, called gone {found['was_gone']}",
        (
            f"  errors {found['num_errors']} {found['errors'] or ''}, tried again {found['num_tries']} "
            f"{found['tries'] or ''}"
        ),
        f"  files: {found['most_files']} allowed in a process",
    ]
    for label, by_phase in costs.items():
        lines.append(f"  {label} (at most {found['peak_rss_bytes'][label] / 2**20:.0f} MiB resident so far)")
        lines += [
            f"    {phase} {cost['seconds']:.0f} s: {cost['cores']:.2f} cores, "
            f"PSS {cost['median_pss_bytes'] / 2**20:.0f} to {cost['peak_pss_bytes'] / 2**20:.0f} MiB, "
            f"{cost['num_threads']} threads, {cost['num_files']} files"
            for phase, cost in by_phase.items()
        ]
    for phase in ("heartbeats", "rounds"):
        lines += _profile_lines(phase, found.get(f"profile_of_{phase}", {}))
    return "\n".join(lines)


def _lag_text(lag: Json) -> str:
    return (
        f"{1000 * lag['median_s']:.0f} ms (median), {1000 * lag['p99_s']:.0f} ms (99 of 100), "
        f"{1000 * lag['max_s']:.0f} ms (all)"
    )


def _round_lines(found: Json) -> list[str]:
    if not found["rounds"]:
        return []
    work, beats = found["costs"]["coordinator"]["rounds"], found["costs"]["coordinator"]["heartbeats"]
    ms_an_update = 1000 * (work["cpu_s"] - beats["cores"] * work["seconds"]) / max(1, found["updates_used"])
    rounds = ", ".join(f"{seconds:.1f}" for seconds in found["round_s"])
    each = ", ".join(f"{1000 * seconds / found['round_devices']:.1f}" for seconds in found["round_s"])
    return [
        (
            f"  rounds of {found['model_bytes'] / 1e6:g} MB with {found['round_devices']} devices: {rounds} s "
            f"after {found['ready_s']:.1f} s of making ready, {each} ms an update"
        ),
        (
            f"  {found['updates_used']} updates used {found['other_outcomes'] or ''}, "
            f"model off by {found['model_error']:.1g}; {ms_an_update:.1f} ms of the coordinator's CPU an update"
        ),
        f"  the operator waited {found['slowest_answer_s']:.1f} s for an answer at worst",
    ]


def _ramp_text(rows: Sequence[Json]) -> str:
    """Returns the steps of a ramp, and what ended it."""
    lines = [
        f"  {row['beats_per_s']:.0f} heartbeats a second, as of {row['as_devices']} devices: "
        f"{row['num_lost']} lost of {row['num_sent']}, on the way {_lag_text(row)}; cores "
        f"{', '.join(f'{label} {cores:.2f}' for label, cores in row['cores'].items())}; "
        f"stand-ins {row['late_s']:.2f} s late"
        for row in rows
    ]
    last = rows[-1]
    why = "nothing gave way" if last["is_kept"] else "they lag or are lost"
    return "\n".join([*lines, f"  {why if last['has_kept_up'] else 'the stand-ins could not keep up'}"])


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
    parser.add_argument("--devices", type=int, nargs="+", default=[1000], help="one size or several")
    parser.add_argument("--rounds", type=int, default=3, help="0 for heartbeats alone [%(default)s]")
    parser.add_argument("--round-devices", type=int, help="devices in a run [all]")
    parser.add_argument("--rounds-up-to", type=int, help="larger fleets only beat [all have rounds]")
    parser.add_argument("--ramp-s", type=float, default=0.0, help="for so long at each rate; 0 for no ramp")
    parser.add_argument("--ramp-to", type=int, default=64, help="times the usual rate at most [%(default)s]")
    parser.add_argument("--pin", action="store_true", help="coordinator and broker on one core, stand-ins elsewhere")
    parser.add_argument("--beat-s", type=float, default=60.0, help="of heartbeats alone [%(default)s]")
    parser.add_argument("--model-bytes", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=4, help="full of stand-ins [%(default)s]")
    parser.add_argument("--at-a-time", type=int, default=200, help="stand-ins that fetch or send [%(default)s]")
    parser.add_argument("--broker", default="mosquitto", help="as of edgefl coordinator start [%(default)s]")
    parser.add_argument("--profile", action="store_true", help="say where the coordinator's CPU time goes")
    parser.add_argument("--dir", type=Path, help="where to put a folder for all of it [a temporary one]")
    parser.add_argument("--keep", action="store_true", help="leave that folder")
    parser.add_argument("--json", action="store_true")
    return options.parse(parser, devices=[10], rounds=1, beat_s=3.0, processes=1, broker="embedded")


if __name__ == "__main__":
    raise SystemExit(main())
