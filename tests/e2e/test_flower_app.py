"""An unchanged Flower app on real agents, from its pack to its model: a killed board, a killed coordinator."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flower_apps import PRIVATE_APP, compute_model, read_model, submit, write_app

from edgefl.flower.app_folder import AppFolder, read_app
from edgefl.flower.app_job import get_job_name
from edgefl.flower.app_pack import write_app_wheel
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

BOARDS = ("board-1", "board-2", "board-3")
NUM_KILLS = 20


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> AppFolder:
    return read_app(write_app(tmp_path_factory.mktemp("app")))


@pytest.fixture(scope="module")
def private_app(tmp_path_factory: pytest.TempPathFactory) -> AppFolder:
    return read_app(write_app(tmp_path_factory.mktemp("private"), PRIVATE_APP))


@pytest.fixture(scope="module")
def running(
    app: AppFolder, private_app: AppFolder, tools: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalFleet]:
    """Boards and a coordinator on which the apps' packs are installed."""
    root = tmp_path_factory.mktemp("flower")
    for one in (app, private_app):
        with zipfile.ZipFile(write_app_wheel(one, root / "dist")) as archive:
            archive.extractall(root / "site")
    for name in BOARDS:
        (root / name).mkdir()
    jobs = [get_job_name(app.name), get_job_name(private_app.name)]
    devices = [LocalDeviceSpec(name=name, shards=dict.fromkeys(jobs, str(root / name))) for name in BOARDS]
    environment = {"EDGEFL_CONFINE": "auto"}
    with tools.fleet(
        root / "fleet", devices, environment=environment, also_importable=[root / "site"], kind=LocalFleet
    ) as fleet:
        yield fleet


@pytest.fixture
def fleet(running: LocalFleet) -> LocalFleet:
    """The module's fleet with all of its boards up and no gate closed."""
    for name in BOARDS:
        for mark in (running.root.parent / name).iterdir():
            mark.unlink()
        for mark in find_arrivals(running, name):
            mark.unlink()
        if running.processes[name].poll() is not None:
            running.start_device(name)
    running.wait_for_devices(len(BOARDS))
    return running


def find_arrivals(fleet: LocalFleet, name: str, number: str = "*") -> list[Path]:
    return [*(fleet.root / name).glob(f"confined/task-flower-*-app/**/arrived-{number}")]


def list_calls(fleet: LocalFleet, run_id: str) -> dict[tuple[str, str], int]:
    """Returns how many messages a board had had, by its name and the message."""
    found = {}
    for row in fleet.list_history("events", run=run_id):
        if row["kind"] == "job-log":
            label, _, values = row["message"].partition(": ")[2].partition(": ")
            found[row["device_id"], label] = int(values.rpartition("calls ")[2])
    return found


def test_a_killed_board_is_dropped_and_comes_back_with_its_state(
    fleet: LocalFleet, app: AppFolder, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [fleet.root.parent / name / mark for name, mark in (("board-3", "closed-2"), ("board-1", "closed-3"))]
    for gate in gates:
        gate.touch()
    run_id = submit(fleet, app, tools)
    tools.eventually(lambda: find_arrivals(fleet, "board-3", "2"), 90, "the third board in round 2")
    fleet.kill("board-3")
    gates[0].unlink()
    tools.eventually(lambda: find_arrivals(fleet, "board-1", "3"), 90, "the first board in round 3")
    tools.eventually(lambda: len(list_calls(fleet, run_id)) == 3 + 3 + 2 + 2 + 1, 60, "11 replies")
    fleet.start_device("board-3")
    fleet.wait_for_devices(len(BOARDS))
    gates[1].unlink()
    assert fleet.wait_for_run(run_id)["status"] == "finished"

    def is_away(number: int, kind: str, round_number: int) -> bool:
        during = round_number == 2 and kind != "train"
        return number == 2 and (during or (round_number == 3 and kind.startswith("train")))

    expected = compute_model(app, tmp_path, monkeypatch, is_away)
    np.testing.assert_allclose(read_model(fleet, tools, run_id, tmp_path / "result"), expected, rtol=1e-12)
    calls = list_calls(fleet, run_id)
    assert calls["board-1", "evaluate in round 3"] == 6
    # Two messages before the kill, and one after it; what was under way when it was killed left no state.
    assert calls["board-3", "evaluate in round 3"] == 3


def test_boards_send_what_they_changed_in_a_codec_and_the_history_has_its_bytes(
    fleet: LocalFleet, app: AppFolder, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = {"model.size": 20_000}
    run_id = submit(fleet, app, tools, "--run-config", "model.size=20000 num-nodes=3", "--codec", "int8")
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    sent = [row["bytes_up"] for row in fleet.list_history("updates", run=run_id) if row["loss"] is not None]
    assert len(sent) == 9
    assert max(sent) < 0.2 * 8 * size["model.size"]
    expected = compute_model(app, tmp_path, monkeypatch, **size)
    off = np.abs(read_model(fleet, tools, run_id, tmp_path / "result") - expected).max()
    assert 0 < off < 0.05


def test_a_killed_coordinator_goes_on_in_the_same_round_and_asks_no_board_twice(
    fleet: LocalFleet, app: AppFolder, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = fleet.root.parent / "board-2" / "closed-2"
    gate.touch()
    run_id = submit(fleet, app, tools, "--run-config", "num-nodes=3")
    tools.eventually(
        lambda: len(fleet.list_history("updates", run=run_id)) >= 3 + 3 + 2, 90, "two replies of round 2"
    )
    fleet.kill("coordinator")
    fleet.start_coordinator()
    gate.unlink()
    ended = fleet.wait_for_run(run_id)
    assert ended["status"] == "finished", ended
    expected = compute_model(app, tmp_path, monkeypatch)
    np.testing.assert_allclose(read_model(fleet, tools, run_id, tmp_path / "result"), expected, rtol=1e-12)
    calls = list_calls(fleet, run_id)
    assert [calls[name, "evaluate in round 3"] for name in BOARDS] == [6, 6, 6]
    rounds = fleet.list_history("rounds", run=run_id)
    assert [(row["round"], row["num_updates"]) for row in rounds] == [(1, 6), (2, 6), (3, 6)]
    assert all(row["closed_at"] for row in rounds)
    for kind, name in (("train", "train_loss"), ("eval", "loss")):
        losses = [row[name] for row in rounds]
        assert losses == sorted(losses, reverse=True), rounds
        np.testing.assert_allclose(losses, [row["metrics"][f"{kind}_loss"] for row in rounds])


@pytest.mark.timeout(900)
def test_a_coordinator_that_is_killed_twenty_times_loses_no_round(
    fleet: LocalFleet, app: AppFolder, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [fleet.root.parent / "board-2" / f"closed-{number}" for number in range(1, NUM_KILLS + 1)]
    for gate in gates:
        gate.touch()
    run_id = submit(fleet, app, tools, "--run-config", f"num-server-rounds={NUM_KILLS} num-nodes=3")
    for number, gate in enumerate(gates, 1):
        num_before = 6 * (number - 1) + 2
        tools.eventually(
            lambda: len(fleet.list_history("updates", run=run_id)) >= num_before,  # noqa: B023 waited for here
            120,
            f"two replies of round {number}",
        )
        fleet.kill("coordinator")
        fleet.start_coordinator()
        gate.unlink()
    ended = fleet.wait_for_run(run_id)
    assert ended["status"] == "finished", ended
    expected = compute_model(app, tmp_path, monkeypatch, **{"num-server-rounds": NUM_KILLS, "num-nodes": 3})
    np.testing.assert_allclose(read_model(fleet, tools, run_id, tmp_path / "result"), expected, rtol=1e-12)
    calls = list_calls(fleet, run_id)
    assert [calls[name, f"evaluate in round {NUM_KILLS}"] for name in BOARDS] == [2 * NUM_KILLS] * 3


def test_a_stop_ends_an_app_and_a_changed_app_is_refused(
    fleet: LocalFleet, app: AppFolder, tools: Any, tmp_path: Path
) -> None:
    gate = fleet.root.parent / "board-2" / "closed-1"
    gate.touch()
    run_id = submit(fleet, app, tools, "--run-config", "num-server-rounds=1000")
    tools.eventually(lambda: find_arrivals(fleet, "board-2", "1"), 90, "the second board in round 1")
    assert "running" in tools.as_operator(fleet, "run", "list").out
    assert tools.as_operator(fleet, "run", "stop", run_id).code == 0
    tools.eventually(lambda: tools.status(fleet, run_id) == "stopped", 60)
    changed = write_app(tmp_path / "changed", {"mean_app/data.py": ""})
    refused = tools.as_operator(fleet, "run", "flower-app", changed)
    assert "is here with the fingerprint" in refused.err


@pytest.mark.parametrize(
    ("privacy", "expected"), [("secagg", 2.0), ("secagg clipping", 1.0), ("clipping", 1.0), ("local", 1.0)]
)
def test_secure_aggregation_and_differential_privacy_of_flower_run_over_boards(
    fleet: LocalFleet, private_app: AppFolder, tools: Any, tmp_path: Path, privacy: str, expected: float
) -> None:
    run_id = submit(fleet, private_app, tools, "--run-config", f'privacy="{privacy}"')
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    model = read_model(fleet, tools, run_id, tmp_path / "result")
    np.testing.assert_allclose(model, expected, atol=0.02)


def test_secure_aggregation_unmasks_the_sum_of_the_boards_that_are_left(
    fleet: LocalFleet, private_app: AppFolder, tools: Any, tmp_path: Path
) -> None:
    gate = fleet.root.parent / "board-3" / "closed-fit"
    gate.touch()
    run_id = submit(fleet, private_app, tools, "--run-config", 'privacy="secagg" num-server-rounds=1')
    tools.eventually(lambda: find_arrivals(fleet, "board-3", "fit"), 90, "the third board at work")
    fleet.kill("board-3")
    gate.unlink()
    assert fleet.wait_for_run(run_id)["status"] == "finished"
    np.testing.assert_allclose(read_model(fleet, tools, run_id, tmp_path / "result"), 1.5, atol=0.02)
