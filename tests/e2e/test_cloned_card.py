"""The card of a board at work is copied, and both are switched on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.config import parse_run
from edgefl.local_fleet import LocalDevice, LocalFleet, free_port

COPY = "device-01-copy"


@pytest.fixture
def fleet(tools: Any, tmp_path: Path) -> Iterator[LocalFleet]:
    with tools.fleet(tmp_path / "fleet", tools.devices(2, "digits", tools.gated)) as running:
        yield running


@pytest.fixture
def fleet_without_broker(tools: Any, tmp_path: Path) -> Iterator[LocalFleet]:
    """Its broker is somewhere where nobody listens, for the coordinator as for the devices."""
    broker = f"mqtts://127.0.0.1:{free_port()}"
    with tools.fleet(tmp_path / "fleet", tools.devices(2, "digits", tools.gated), broker=broker) as running:
        yield running


def _events(fleet: LocalFleet, kind: str) -> list[Any]:
    return [row for row in fleet.history("events", device="device-01") if row["kind"] == kind]


def _starts(fleet: LocalFleet, name: str) -> int:
    """Starts the agent of a copied state directory and returns its exit code, which must come soon."""
    fleet.start_device(name)
    return fleet.processes[name].wait(60)


def test_the_copy_of_a_card_is_refused_while_the_board_trains_on_and_gets_a_name_of_its_own(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    fleet.wait_present(2)
    run = fleet.submit(tools.gated_run(gate, rounds=1, min=2))
    tools.eventually(lambda: len(gate.entered()) == 2, what="both are in the middle of an iteration")
    shutil.copytree(fleet.root / "device-01", fleet.root / COPY)

    assert _starts(fleet, COPY) == 39
    assert "copy" in fleet.log_tail(COPY, 1)
    tools.eventually(lambda: _events(fleet, "device-cloned"))
    [event] = _events(fleet, "device-cloned")
    assert event["message"].startswith("refused the later of two agents (boot ")
    assert "at 127.0.0.1" in event["message"]
    assert "cloned" in fleet.command("devices", "list")
    row = fleet.operator().get("/edgefl/v1/devices/device-01")
    assert row["cloned"] == event["message"]

    # Whoever starts it again, it stays away; the board itself may restart as it likes.
    assert _starts(fleet, COPY) == 39
    del fleet.processes[COPY]
    gate.open()
    assert fleet.wait_run(run)["status"] == "finished"
    assert {row["device_id"] for row in tools.used(fleet, run)} == {"device-01", "device-02"}
    assert len(gate.entered()) <= 2 + 2, "a copy may begin what its board has, until the board is heard again"
    fleet.kill("device-01")
    fleet.start_device("device-01")
    tools.eventually(lambda: fleet.presence()["device-01"] == "online")
    assert len(_events(fleet, "device-cloned")) == 1

    fleet.add_device(LocalDevice(name=COPY, shards=tools.devices(1)[0].shards))
    fleet.wait_present(3)
    run = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 2}, "devices": {"min": 3}}))
    assert fleet.wait_run(run)["status"] == "finished"
    assert {row["device_id"] for row in tools.used(fleet, run)} == {"device-01", "device-02", COPY}
    tools.check_logs(fleet.root)


def test_a_copy_is_refused_over_https_alone_and_the_run_goes_on(
    fleet_without_broker: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    fleet, gate = fleet_without_broker, tools.gate(tmp_path / "gate")
    run = fleet.submit(tools.gated_run(gate, rounds=4, min=2))
    tools.eventually(lambda: len(gate.entered()) == 2, what="both are in the middle of an iteration")
    shutil.copytree(fleet.root / "device-01", fleet.root / COPY)
    fleet.start_device(COPY)
    tools.eventually(lambda: "connected to the coordinator" in fleet.log_tail(COPY, 50))
    gate.open()

    assert fleet.wait_run(run)["status"] == "finished"
    assert fleet.processes[COPY].wait(60) == 39
    assert "copy" in fleet.log_tail(COPY, 1)
    tools.eventually(lambda: _events(fleet, "device-cloned"))
    [event] = _events(fleet, "device-cloned")
    assert event["message"].startswith("refused the later of two agents (boot ")
    used = [(row["round"], row["device_id"]) for row in tools.used(fleet, run)]
    assert sorted(used) == [(number, name) for number in range(1, 5) for name in ("device-01", "device-02")]
    del fleet.processes[COPY]
    tools.check_logs(fleet.root)
