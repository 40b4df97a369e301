"""Boards that die, freeze, come back or come late, while the others go on."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgefl.local_fleet import LocalFleet


@pytest.fixture(scope="module")
def fleet(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("lost")
    with tools.fleet(root, tools.devices(3, tools.gated)) as running:
        yield running
    tools.check_logs(root)


@pytest.fixture
def three(fleet: LocalFleet) -> LocalFleet:
    """The fleet with its first three devices up, whatever the test before did to them."""
    for name in ("device-01", "device-02", "device-03"):
        if fleet.processes[name].poll() is not None:
            fleet.start_device(name)
    fleet.wait_present(3)
    return fleet


def _in_the_middle(fleet: LocalFleet, tools: Any, gate: Any, *names: str) -> None:
    pids = {fleet.processes[name].pid for name in names}
    tools.eventually(lambda: pids <= gate.entered(), what="all devices are in an iteration")


def test_two_devices_train_on_when_the_third_is_killed_and_it_trains_again_when_it_is_back(
    three: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    run_id = three.submit(tools.gated_run(gate, pace_s=0.05, rounds=10_000, min=2))
    _in_the_middle(three, tools, gate, "device-01", "device-02", "device-03")
    three.kill("device-03")
    gate.open()
    tools.eventually(lambda: len(three.history("rounds", run=run_id)) > 3, what="two devices go on")
    lost = [row for row in three.history("updates", run=run_id) if row["outcome"] == "lost"]
    assert [(row["device_id"], row["round"]) for row in lost] == [("device-03", 1)]
    assert "gone" in lost[0]["reason"]
    first = three.history("rounds", run=run_id)[0]
    assert (first["num_updates"], first["num_devices"]) == (2, 3)

    three.start_device("device-03")
    tools.eventually(lambda: tools.used(three, run_id, "device-03"), what="the device that came back trains")
    three.command("run", "stop", run_id)
    assert three.wait_run(run_id)["status"] == "stopped"


def test_a_frozen_device_costs_its_deadline_and_no_more(three: LocalFleet, tools: Any, tmp_path: Path) -> None:
    gate = tools.gate(tmp_path / "gate")
    run_id = three.submit(tools.gated_run(gate, rounds=2, deadline_s=1.5, min=2))
    _in_the_middle(three, tools, gate, "device-01", "device-02", "device-03")
    three.kill("device-03", signal.SIGSTOP)
    gate.open()
    assert three.wait_run(run_id)["status"] == "finished"
    three.kill("device-03", signal.SIGCONT)
    rows = three.history("updates", run=run_id)
    assert [row["device_id"] for row in rows if row["outcome"] == "used"].count("device-01") == 2
    lost = {row["round"]: row for row in rows if row["device_id"] == "device-03"}
    assert lost[1]["outcome"] == "lost"
    assert "not back within 1.5 s" in lost[1]["reason"]

    again = three.submit(tools.gated_run(gate, rounds=1, min=2))
    assert three.wait_run(again)["status"] == "finished"
    assert tools.used(three, again, "device-03"), "the device is itself again"


@contextlib.contextmanager
def _own_shard(three: LocalFleet, tools: Any, folder: Path) -> Iterator[Path]:
    """The third device's shard of the gated task, to be damaged."""
    shard = folder / "broken.npz"
    shard.write_bytes(tools.shards[2].read_bytes())
    shard.with_suffix(".json").write_bytes(tools.shards[2].with_suffix(".json").read_bytes())
    state = str(three.root / "device-03")
    three.command("device", "shard", "add", tools.gated, str(shard), "--state", state)
    try:
        yield shard
    finally:
        three.command("device", "shard", "add", tools.gated, str(tools.shards[2]), "--state", state)
        three.end("device-03")  # else it says only at its next poll that the shard is whole again


def test_a_device_whose_shard_is_damaged_is_left_out_and_ends_no_run(
    three: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    with _own_shard(three, tools, tmp_path) as shard:
        shard.write_bytes(shard.read_bytes()[:1000])
        run_id = three.submit(tools.gated_run(rounds=2, min=2))
        assert three.wait_run(run_id)["status"] == "finished"
    events = [row for row in three.history("events", run=run_id) if row["kind"] == "device-left-out"]
    assert [row["device_id"] for row in events] == ["device-03"]
    assert "damaged" in events[0]["message"]
    assert not three.history("updates", run=run_id, device="device-03")
    assert len(tools.used(three, run_id)) == 2 * 2


def test_a_device_that_fails_in_the_middle_ends_no_run(three: LocalFleet, tools: Any, tmp_path: Path) -> None:
    gate = tools.gate(tmp_path / "gate")
    with _own_shard(three, tools, tmp_path) as shard:
        run_id = three.submit(tools.gated_run(gate, rounds=3, min=3))
        _in_the_middle(three, tools, gate, "device-01", "device-02", "device-03")
        shard.write_bytes(shard.read_bytes()[:1000])
        gate.open()
        assert three.wait_run(run_id)["status"] == "finished"
    rows = three.history("updates", run=run_id, device="device-03")
    assert [row["outcome"] for row in rows] == ["used", "failed", "failed"]
    assert "damaged" in rows[1]["reason"]
    assert len(tools.used(three, run_id)) == 3 + 2 + 2


def test_a_device_that_comes_late_trains_only_where_the_run_says_so(
    three: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    closed = three.submit(tools.gated_run(gate, pace_s=0.05, rounds=10_000, join="start"))
    _in_the_middle(three, tools, gate, "device-01", "device-02", "device-03")
    (late,) = tools.devices(1, tools.gated, start=4)
    three.add_device(late)
    three.wait_present(4)
    gate.open()
    tools.eventually(lambda: len(three.history("rounds", run=closed)) > 5, what="the run goes on without it")
    assert not three.history("updates", run=closed, device="device-04")
    three.command("run", "stop", closed)
    three.wait_run(closed)

    gate.close()
    three.kill("device-04")
    tools.eventually(lambda: three.presence()["device-04"] == "gone", what="the killed device is gone")
    anytime = three.submit(tools.gated_run(gate, pace_s=0.05, rounds=10_000, join="anytime"))
    _in_the_middle(three, tools, gate, "device-01", "device-02", "device-03")
    three.start_device("device-04")
    three.wait_present(4)
    gate.open()
    first = tools.eventually(lambda: tools.used(three, anytime, "device-04"), what="the late device trains")[0]
    assert first["round"] > 1
    three.command("run", "stop", anytime)
    three.wait_run(anytime)
    assert three.end("device-04") == 0


def test_a_device_that_is_told_to_stop_between_two_iterations_leaves_at_once(
    three: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    gate.open()
    run_id = three.submit(tools.gated_run(gate, pace_s=0.02, iterations=100_000, rounds=1, min=2))
    _in_the_middle(three, tools, gate, "device-03")
    assert three.end("device-03", timeout_s=4.0) == 0
    assert three.presence()["device-03"] == "offline"
    assert "has left the fleet" in three.log_tail("device-03")
    three.command("run", "stop", run_id)
    assert three.wait_run(run_id)["status"] == "stopped"
    assert three.history("updates", run=run_id, device="device-03")[0]["outcome"] == "lost"
    assert len(tools.used(three, run_id)) == 2, "what the recalled devices had learnt counts"


def test_a_device_that_is_told_to_stop_within_a_long_iteration_leaves_in_seconds(
    three: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    gate = tools.gate(tmp_path / "gate")
    run_id = three.submit(tools.gated_run(gate, rounds=1, min=2))
    _in_the_middle(three, tools, gate, "device-03")
    assert three.end("device-03", timeout_s=9.0) == 0
    tools.eventually(lambda: three.presence()["device-03"] == "offline")
    gate.open()
    assert three.wait_run(run_id)["status"] == "finished"
    assert len(tools.used(three, run_id)) == 2
