"""A fleet whose broker is somewhere where nobody listens: it works over HTTPS alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.core.protocol import POLL_S
from edgefl.simulation.local_fleet import LocalFleet, find_free_port

pytestmark = pytest.mark.extended

NAMES = ("device-01", "device-02")
COPY = "device-01-copy"


@contextmanager
def make_fleet(tools: Any, root: Path) -> Iterator[LocalFleet]:
    broker = f"mqtts://127.0.0.1:{find_free_port()}"
    with tools.fleet(root, tools.devices(2, "digits", tools.gated), broker=broker) as running:
        yield running


def test_all_devices_take_part_and_rounds_do_not_wait_for_a_poll_each(fleet: LocalFleet) -> None:
    run = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 5}, "devices": {"min": 2}}))
    assert fleet.wait_for_run(run)["status"] == "finished"
    rounds = fleet.list_history("rounds", run=run)
    assert [row["num_updates"] for row in rounds] == [2] * 5
    assert rounds[-1]["closed_at"] - rounds[0]["started_at"] < POLL_S


def test_a_device_that_is_killed_at_work_and_comes_back_at_once_is_sent_its_work_again(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    run = fleet.submit(tools.gated_run(gate, rounds=2, min=2))
    tools.in_the_middle(fleet, gate, *NAMES)
    fleet.kill("device-02")
    fleet.start_device("device-02")
    gate.open()
    tools.eventually(lambda: tools.status(fleet, run) == "finished", what="the run ends")
    assert [row["num_updates"] for row in fleet.list_history("rounds", run=run)] == [2, 2]


def test_a_copy_is_refused_over_https_alone_and_the_run_goes_on(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    run = fleet.submit(tools.gated_run(gate, rounds=4, min=2))
    tools.in_the_middle(fleet, gate, *NAMES)
    shutil.copytree(fleet.root / "device-01", fleet.root / COPY)
    fleet.start_device(COPY)
    tools.eventually(lambda: "connected to the coordinator" in fleet.read_log_tail(COPY, 50))
    gate.open()
    assert fleet.wait_for_run(run)["status"] == "finished"
    assert fleet.processes.pop(COPY).wait(60) == 39
    assert "copy" in fleet.read_log_tail(COPY, 1)
    (event,) = tools.eventually(lambda: tools.events(fleet, "device-cloned", device="device-01"))
    assert event["message"].startswith("refused the later of two agents (boot ")
    used = [(row["round"], row["device_id"]) for row in tools.used(fleet, run)]
    assert sorted(used) == [(number, name) for number in range(1, 5) for name in NAMES]
