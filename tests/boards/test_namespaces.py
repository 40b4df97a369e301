"""Boards in network namespaces join over their wires and train; the wires are slow, lossy and can be pulled."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from boards.namespaces import BoardNetwork, why_not

from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet
from edgefl.tasks.datasets.central import create_shards

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reason() -> str | None:
    return why_not()


@pytest.fixture
def network(reason: str | None) -> Iterator[BoardNetwork]:
    if reason:
        pytest.skip(reason)
    with BoardNetwork(["near", "far"]) as made:
        yield made


@pytest.fixture
def fleet(network: BoardNetwork, tmp_path: Path) -> Iterator[LocalFleet]:
    shards = create_shards("digits", "iid", 2, tmp_path / "shards")
    devices = [
        LocalDeviceSpec(name=name, shards={"digits": str(shard)}, program=network.program(name))
        for name, shard in zip(network.boards, shards, strict=True)
    ]
    network.limit("far", megabits_per_s=4)
    network.lose("far", percent=2)
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    with LocalFleet(
        root=tmp_path / "fleet", devices=devices, hosts=[network.address], environment=environment
    ) as running:
        yield running


def test_a_limited_wire_is_as_slow_as_it_says(network: BoardNetwork) -> None:
    free_s = network.seconds_to_send("near", 500_000)
    network.limit("near", megabits_per_s=4)
    assert free_s < 0.5 < network.seconds_to_send("near", 500_000)  # 4 Mbit in one second, 16 KB of them at once


def test_boards_on_slow_and_lossy_wires_join_and_train(fleet: LocalFleet, network: BoardNetwork) -> None:
    before = {board: network.num_bytes_sent(board) for board in network.boards}
    run = fleet.submit(parse_run({"run": {"task": "digits", "rounds": 3}, "devices": {"min": 2}}))
    assert fleet.wait_for_run(run)["status"] == "finished"
    updates = [row for row in fleet.list_history("updates", run=run) if row["outcome"] == "used"]
    assert sorted(row["device_id"] for row in updates) == ["far"] * 3 + ["near"] * 3
    for board in network.boards:
        told = sum(row["bytes_up"] for row in updates if row["device_id"] == board)
        assert 0 < told < network.num_bytes_sent(board) - before[board]
    deadline_s = time.monotonic() + 60
    while network.num_lost("far") == 0:  # each packet by chance; the run may have been lucky
        assert time.monotonic() < deadline_s
        network.seconds_to_send("far", 100_000)


@pytest.mark.slow
def test_a_board_whose_cable_is_pulled_is_missed_and_comes_back_by_itself(
    fleet: LocalFleet, network: BoardNetwork
) -> None:
    network.cut("far")
    _wait_for(fleet, "far", {"gone", "offline"})
    assert fleet.get_presence()["near"] == "online"
    network.mend("far")
    _wait_for(fleet, "far", {"online"})


def _wait_for(fleet: LocalFleet, board: str, presences: set[str]) -> None:
    fleet._wait_until(lambda: fleet.get_presence()[board] in presences, f"{board} to be {' or '.join(presences)}", 90)
