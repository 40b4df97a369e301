"""A fleet whose broker is somewhere where nobody listens: it works over HTTPS alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.local_fleet import LocalFleet, free_port
from edgefl.protocol import POLL_S

ROUNDS = 5


@pytest.fixture
def fleet(tools: Any, tmp_path: Path) -> Iterator[LocalFleet]:
    broker = f"mqtts://127.0.0.1:{free_port()}"
    with tools.fleet(tmp_path / "fleet", tools.devices(2), broker=broker) as running:
        yield running
    tools.check_logs(tmp_path)


def test_all_devices_take_part_and_rounds_do_not_wait_for_a_poll_each(fleet: LocalFleet) -> None:
    run = fleet.submit(parse_run({"run": {"task": "digits", "rounds": ROUNDS}, "devices": {"min": 2}}))
    assert fleet.wait_run(run)["status"] == "finished"
    rounds = fleet.history("rounds", run=run)
    assert [row["num_updates"] for row in rounds] == [2] * ROUNDS
    assert rounds[-1]["closed_at"] - rounds[0]["started_at"] < POLL_S


def test_a_device_that_is_killed_at_work_and_comes_back_at_once_is_sent_its_work_again(
    tools: Any, tmp_path: Path
) -> None:
    broker = f"mqtts://127.0.0.1:{free_port()}"
    with tools.fleet(tmp_path / "fleet", tools.devices(2, tools.gated), broker=broker) as fleet:
        gate = tools.gate(tmp_path / "gate")
        run = fleet.submit(tools.gated_run(gate, rounds=2, min=2))
        working = {fleet.processes[name].pid for name in ("device-01", "device-02")}
        tools.eventually(lambda: working <= gate.entered(), what="both train")
        fleet.kill("device-02")
        fleet.start_device("device-02")
        gate.open()
        tools.eventually(lambda: tools.status(fleet, run) == "finished", what="the run ends")
        assert [row["num_updates"] for row in fleet.history("rounds", run=run)] == [2, 2]
    tools.check_logs(tmp_path)
