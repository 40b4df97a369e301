"""Connections without a key, more than there are descriptors for, while a fleet of real processes trains."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cut_requests import make_bearer_headers, make_signed_headers, send_all
from fuzz.api_readers import open_coordinator

from edgefl.core.config import parse_run
from edgefl.core.errors import EdgeflError
from edgefl.simulation.local_fleet import EDGEFL_COMMAND, LocalDeviceSpec, LocalFleet
from edgefl.tasks.datasets.central import create_shards

pytestmark = [pytest.mark.attack, pytest.mark.timeout(1800)]
FILE_LIMIT = 512
NUM_DEVICES = 10
FLOOD_S = 120.0
QUIET_S = 30.0
MAX_OPEN_S = 30.0
LIMITED_COMMAND = ("sh", "-c", f'ulimit -n {FILE_LIMIT} && exec "$@"', "sh", *EDGEFL_COMMAND)
FLOOD = Path(__file__).parents[1] / "connection_flood.py"
KEYS = {"bearer": "an operator's token", "signed": "a device's signature"}
FLOODS = {
    "idle": ("2 x the descriptor limit of idle connections", {"idle": 2 * FILE_LIMIT}),
    "slow": ("2,000 slow headers and bodies", {"slow-header": 1000, "slow-body": 1000}),
    "handshakes": ("hand-shakes for 120 s", {"handshakes": 1}),
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("flooded")
    shards = create_shards("digits", "iid", NUM_DEVICES, root / "shards")
    devices = [
        LocalDeviceSpec(name=f"device-{number:02}", shards={"digits": str(path.resolve())})
        for number, path in enumerate(shards[:NUM_DEVICES], 1)
    ]
    with LocalFleet(root=root / "fleet", devices=devices, broker="embedded", program=LIMITED_COMMAND) as running:
        running.submit(
            parse_run({"run": {"task": "digits", "rounds": 1_000_000, "evaluate_on": "none", "seed": 7},
                       "strategy": {"iterations": 200}, "devices": {"min": NUM_DEVICES}})
        )  # fmt: skip
        _wait_rounds(running, 20)
        yield running
    assert "Traceback" not in (root / "fleet" / "coordinator.log").read_text(errors="replace")


def _count_rounds(fleet: LocalFleet) -> int:
    """Read beside the coordinator: a new connection to it is what the flood is about."""
    with closing(sqlite3.connect(f"file:{fleet.database}?mode=ro", uri=True, timeout=30)) as store:
        return int(store.execute("SELECT count(*) FROM rounds").fetchone()[0])


def _wait_rounds(fleet: LocalFleet, number: int) -> None:
    deadline_s = time.monotonic() + 120
    while _count_rounds(fleet) < number:
        assert time.monotonic() < deadline_s, fleet.read_log_tail("coordinator")
        time.sleep(0.2)


def _measure_rounds_per_s(fleet: LocalFleet, seconds: float) -> float:
    started_s, before = time.monotonic(), _count_rounds(fleet)
    time.sleep(seconds)
    return (_count_rounds(fleet) - before) / (time.monotonic() - started_s)


def _start_floods(fleet: LocalFleet, kinds: dict[str, int], source: str) -> list[subprocess.Popen[bytes]]:
    ca = str(fleet.directory / "ca.pem")
    return [
        subprocess.Popen(
            [sys.executable, str(FLOOD), str(port), ca, kind, str(number), str(FLOOD_S), source],
            stdout=subprocess.PIPE,
        )
        for kind, number in kinds.items()
        for port in ((fleet.port, fleet.broker_port) if kind == "idle" else (fleet.port,))
    ]


@pytest.mark.parametrize("kind", FLOODS)
@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.0.66"], ids=["address-of-the-boards", "other-address"])
def test_a_fleet_goes_on_training_while_strangers_connect(fleet, attack_table, kind, source):
    name, kinds = FLOODS[kind]
    quiet = [_measure_rounds_per_s(fleet, QUIET_S)]
    floods = _start_floods(fleet, kinds, source)
    try:
        time.sleep(1)
        flooded = _measure_rounds_per_s(fleet, FLOOD_S - 5)
        assert fleet.processes["coordinator"].poll() is None
        served = _count_served(fleet)
        results = [json.loads(process.communicate(timeout=60)[0]) for process in floods]
    finally:
        for process in floods:
            process.kill()
            process.communicate()
    time.sleep(2)
    quiet.append(_measure_rounds_per_s(fleet, QUIET_S))
    loss = 1 - flooded / (sum(quiet) / 2)
    opened, longest_s = sum(one["opened"] for one in results), max(one["longest_s"] for one in results)
    attack_table.add(
        f"{name} from {source}",
        f"alive; loses <= 20 %; closed <= {MAX_OPEN_S:.0f} s",
        f"alive; loses {loss:.0%}; {opened} opened, closed in {longest_s:.1f} s; {served} of 5 new clients served",
    )
    assert fleet.processes["coordinator"].poll() is None
    assert set(fleet.get_presence().values()) == {"online"}
    assert longest_s <= MAX_OPEN_S
    assert loss <= 0.2
    log = (fleet.root / "coordinator.log").read_text(errors="replace")
    assert len(re.findall("refused or closed connections", log)) < 60


def _count_served(fleet: LocalFleet) -> int:
    """Returns how many of five new clients with a token, at the address of the boards, got an answer at once."""
    served = 0
    for _ in range(5):
        try:
            fleet.make_client().get("/edgefl/v1/devices")
        except EdgeflError:
            continue
        served += 1
    return served


@pytest.mark.parametrize("kind", KEYS)
def test_bodies_cut_off_at_every_boundary_on_every_route(tmp_path, attack_table, caplog, kind):
    coordinator, token = open_coordinator(tmp_path)
    try:
        headers = make_signed_headers(coordinator) if kind == "signed" else make_bearer_headers(token)
        with caplog.at_level(logging.WARNING):
            num_sent, statuses, faults = send_all(coordinator, headers, tmp_path / "c" / "ca.pem")
    finally:
        coordinator.__exit__(None, None, None)
    tracebacks = [record for record in caplog.records if record.exc_info]
    attack_table.add(
        f"requests cut off at every kind of boundary, every route, {KEYS[kind]}",
        "0 tracebacks, 0 answers 5xx",
        f"{len(tracebacks)} tracebacks, {len(faults)} answers 5xx of {num_sent}; {statuses}",
    )
    assert not tracebacks
    assert not faults
