"""Real agents train a task that is not built in, confined: over rounds, after a kill, and as neighbours over TLS."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.core.config import parse_run
from edgefl.device.training.process_link import MODULE
from edgefl.simulation.local_fleet import LocalFleet, find_free_port

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]
NAMES = ("device-01", "device-02")


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("confined") / "fleet"
    devices = tools.devices(2, tools.gated)
    with tools.fleet(root, devices, environment={"EDGEFL_CONFINE": "auto"}) as running:
        yield running


def find_confined(fleet: LocalFleet, device: str) -> int:
    """Returns the process that trains for a device's agent, 0 without one."""
    agent = fleet.processes[device].pid
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if MODULE.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0


def test_a_fleet_trains_confined_and_goes_on_after_its_processes_were_killed(fleet: LocalFleet, tools: Any) -> None:
    def get_facts() -> Any:
        return fleet.make_client().get(f"/edgefl/v1/devices/{NAMES[0]}")["capabilities"].get("confinement")

    assert tools.eventually(get_facts) == {"policy": "auto", "gaps": []}
    run_id = fleet.submit(tools.gated_run(pace_s=0.05, iterations=2, rounds=12, min=2))
    tools.wait_rounds(fleet, run_id, 2)
    agents = {name: fleet.processes[name].pid for name in NAMES}
    process = find_confined(fleet, NAMES[0])
    assert process
    os.kill(process, signal.SIGKILL)
    ended = fleet.wait_for_run(run_id)
    assert ended["status"] == "finished"
    assert {row["device_id"] for row in tools.used(fleet, run_id)} == set(NAMES)
    assert {name: fleet.processes[name].pid for name in NAMES} == agents
    assert find_confined(fleet, NAMES[0]) not in {0, process}


def test_confined_nodes_exchange_models_over_the_connections_of_their_agents(
    fleet: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    hosts = [{"name": name, "addr": "127.0.0.1", "port": find_free_port()} for name in NAMES]
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": hosts}))
    strategy = {
        "name": "k-gt", "graph": "complete", "carrier": "direct", "hosts": str(tmp_path / "hosts.json"),
        "learning_rate": 0.1, "exchanges_per_round": 5,
    }  # fmt: skip
    run = {"task": tools.gated, "rounds": 3, "evaluate_on": "none"}
    run_id = fleet.submit(parse_run({"run": run, "strategy": strategy, "devices": {"min": 2}}))
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    rounds = fleet.list_history("rounds", run=run_id)
    assert sum(row["facts"]["messages"] for row in rounds) >= 2 * 15
    assert all(find_confined(fleet, name) for name in NAMES)
