"""A stock SuperNode of Flower in a fleet: a Flower app runs on two boards and on it, over TLS, by its key."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from flower_apps import compute_model, read_model, submit, write_app

from edgefl.flower.app_folder import AppFolder, read_app
from edgefl.flower.app_job import get_job_name
from edgefl.flower.app_pack import write_app_wheel
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet, find_free_port
from edgefl.system.processes import exit_with_parent

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]

BOARDS = ("board-1", "board-2")
NODE = "node-1"
CONFIG = {"num-nodes": 3}
PROGRAMS = Path(os.environ.get("EDGEFL_TEST_SUPERNODE", Path(sys.executable).parent))
"""Folder of the `flower-supernode` that is tried, of another release where a person says so."""


class StockNode:
    """A SuperNode as Flower ships it, with a key, and the third part of the data."""

    def __init__(self, root: Path, fleet: LocalFleet) -> None:
        self.root, self.fleet, self.data = root, fleet, root / "data"
        self.data.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        key = ec.generate_private_key(ec.SECP384R1())
        self.key, self.public_key = root / "node", root / "node.pub"
        self.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        self.public_key.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))

    def start(self) -> None:
        paths = f'data-path="{self.data}" dataset-path="{self.data}"'
        home = self.root / "home"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FLWR_"))}
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    PROGRAMS / "flower-supernode", "--superlink", f"127.0.0.1:{self.fleet.port}",
                    "--root-certificates", self.fleet.directory / "ca.pem",
                    "--auth-supernode-private-key", self.key, "--port", str(find_free_port()),
                    "--node-config", f"partition-id=2 num-partitions=3 {paths}",
                ],
                stdout=log, stderr=subprocess.STDOUT, cwd=self.root, start_new_session=True,
                preexec_fn=exit_with_parent,  # noqa: PLW1509 one system call, no locks
                env={
                    **environment, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0",
                    "FLWR_DISABLE_UPDATE_CHECK": "1", "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
                },
            )  # fmt: skip

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def read_log(self) -> str:
        return (self.root / "log").read_text(errors="replace")

    def is_at_gate(self, number: int) -> bool:
        return (self.root / f"arrived-{number}").exists()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> AppFolder:
    return read_app(write_app(tmp_path_factory.mktemp("app")))


@pytest.fixture(scope="module")
def running(app: AppFolder, tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root = tmp_path_factory.mktemp("stock")
    with zipfile.ZipFile(write_app_wheel(app, root / "dist")) as archive:
        archive.extractall(root / "site")
    for name in BOARDS:
        (root / name).mkdir()
    devices = [LocalDeviceSpec(name=name, shards={get_job_name(app.name): str(root / name)}) for name in BOARDS]
    with tools.fleet(
        root / "fleet",
        devices,
        environment={"EDGEFL_CONFINE": "auto"},
        also_importable=[root / "site"],
        kind=LocalFleet,
    ) as fleet:
        yield fleet


@pytest.fixture
def node(running: LocalFleet, app: AppFolder, tools: Any, tmp_path: Path) -> Iterator[StockNode]:
    node = StockNode(tmp_path / "node", running)
    added = tools.as_operator(running, "flower", "add-node", NODE, node.public_key, "--app", app.name)
    assert added.code == 0, added.err
    node.start()
    try:
        tools.eventually(lambda: running.get_presence().get(NODE) == "online", 60, "the SuperNode online")
        running.wait_for_devices(3)
        yield node
    finally:
        node.kill()
        assert tools.as_operator(running, "devices", "remove", NODE, "--yes").code == 0


def list_logs(fleet: LocalFleet, run_id: str, device: str) -> list[str]:
    rows = fleet.list_history("events", run=run_id)
    return [row["message"] for row in rows if row["kind"] == "job-log" and row["device_id"] == device]


def test_a_stock_supernode_trains_in_the_same_run_as_boards(
    running: LocalFleet, app: AppFolder, node: StockNode, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = submit(running, app, tools, "--run-config", "num-nodes=3")
    assert running.wait_for_run(run_id)["status"] == "finished", node.read_log()
    expected = compute_model(app, tmp_path, monkeypatch, **CONFIG)
    np.testing.assert_allclose(read_model(running, tools, run_id, tmp_path / "result"), expected, rtol=1e-12)
    lines = list_logs(running, run_id, NODE)
    assert len(lines) == 6
    assert "evaluate in round 3: num-examples 30, " in lines[-1]


def test_a_killed_supernode_is_dropped_and_named_and_the_app_gets_flowers_error(
    running: LocalFleet, app: AppFolder, node: StockNode, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = node.data / "closed-2"
    gate.touch()
    run_id = submit(running, app, tools, "--run-config", "num-nodes=3")
    tools.eventually(lambda: node.is_at_gate(2), 120, "the SuperNode in round 2")
    node.kill()
    tools.eventually(lambda: running.get_presence()[NODE] == "gone", 90, "the SuperNode gone")
    gate.unlink()
    # FedAvg waits for three nodes.
    node.start()
    assert running.wait_for_run(run_id)["status"] == "finished", node.read_log()
    failures = [row for row in running.list_history("events", run=run_id) if row["kind"] == "assignment-failed"]
    assert [(row["device_id"], "device gone: silent for" in row["message"]) for row in failures] == [(NODE, True)]

    def is_away(number: int, kind: str, round_number: int) -> bool:
        return (number, round_number, kind) == (2, 2, "train under way")

    expected = compute_model(app, tmp_path, monkeypatch, is_away, **CONFIG)
    np.testing.assert_allclose(read_model(running, tools, run_id, tmp_path / "result"), expected, rtol=1e-12)


def test_a_killed_coordinator_goes_on_with_the_supernode_that_was_at_work(
    running: LocalFleet, app: AppFolder, node: StockNode, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = node.data / "closed-2"
    gate.touch()
    run_id = submit(running, app, tools, "--run-config", "num-nodes=3")
    tools.eventually(lambda: node.is_at_gate(2), 120, "the SuperNode in round 2")
    running.kill("coordinator")
    running.start_coordinator()
    gate.unlink()
    ended = running.wait_for_run(run_id)
    assert ended["status"] == "finished", node.read_log()
    expected = compute_model(app, tmp_path, monkeypatch, **CONFIG)
    np.testing.assert_allclose(read_model(running, tools, run_id, tmp_path / "result"), expected, rtol=1e-12)
    assert [row["num_updates"] for row in running.list_history("rounds", run=run_id)] == [6, 6, 6]


def test_a_supernode_whose_key_was_not_added_is_refused_and_told_of(
    running: LocalFleet, tools: Any, tmp_path: Path
) -> None:
    stranger = StockNode(tmp_path / "stranger", running)
    stranger.start()
    assert stranger.process is not None
    stranger.process.wait(90)
    tools.eventually(
        lambda: any("activate-node: its key" in row["message"] for row in running.list_history("events")),
        30,
        "the refusal in the history",
    )
