"""Models on their way to real devices: taken, refused, taken back, and finished after a crash of anybody."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wheel_files import Signer

from edgefl.core.config import parse_run
from edgefl.core.errors import NotAllowedError, UsageError
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet

pytestmark = pytest.mark.extended

FINAL = {"done", "failed", "superseded"}
HERE = Path(__file__).parent


@dataclass
class Models:
    """A fleet of three, a model that has learnt, and one that was made worse on purpose."""

    fleet: LocalFleet
    tools: Any
    good: str
    better: str
    worse: str
    ids: list[str] = field(default_factory=list)

    def deploy(self, run: str, **wish: Any) -> str:
        found = self.fleet.make_client().post("/edgefl/v1/deployments", {"model": run, **wish})
        self.ids.append(found["deployment_id"])
        return self.ids[-1]

    def show(self, deployment: str) -> Any:
        return self.fleet.make_client().get(f"/edgefl/v1/deployments/{deployment}")

    def stages(self, deployment: str) -> dict[str, str]:
        return {row["device_id"]: row["state"] for row in self.show(deployment)["each"]}

    def wait(self, deployment: str) -> Any:
        return self.tools.eventually(
            lambda: (found := self.show(deployment))["status"] in FINAL and found,
            30,
            f"the end of {deployment}: {self.show(deployment)}",
        )

    def runs(self) -> dict[str, str]:
        rows = self.fleet.make_client().get("/edgefl/v1/devices")["rows"]
        return {row["device_id"]: row["model"] for row in rows}

    def model(self, run: str) -> str:
        return str(self.fleet.make_client().get(f"/edgefl/v1/runs/{run}")["model"])

    def until_all_run(self, run: str) -> None:
        model = self.model(run)
        self.tools.eventually(lambda: set(self.runs().values()) == {model}, 30, f"all run {model}: {self.runs()}")

    def note(self, device: str) -> Any:
        return json.loads((self.fleet.root / device / "models" / "current.json").read_text())


def run_file(rounds: int, learning_rate: float = 0.5, **sections: Any) -> Any:
    run = {"task": "digits", "rounds": rounds, "seed": 7, "evaluate_on": "none"}
    return parse_run({"run": run, "strategy": {"learning_rate": learning_rate}, "devices": {"min": 3}, **sections})


@pytest.fixture(scope="module")
def models(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with tools.fleet(tmp_path_factory.mktemp("deployments"), tools.devices(3)) as fleet:
        made = {}
        for name, config in {
            "good": run_file(6),
            "better": run_file(7),
            "worse": run_file(1, learning_rate=1e-9),
        }.items():
            made[name] = fleet.submit(config)
            fleet.wait_for_run(made[name])
        yield Models(fleet, tools, **made)


@pytest.fixture
def settled(models: Models) -> Models:
    """The fleet when all of it runs the good model."""
    if set(models.runs().values()) != {models.model(models.good)}:
        models.wait(models.deploy(models.good, tolerance=1.0))
        models.until_all_run(models.good)
    return models


def test_a_model_goes_to_canaries_first_and_then_to_all(models: Models) -> None:
    found = models.wait(models.deploy(models.good, canary=1, tolerance=1.0))
    assert (found["status"], found["counts"]) == ("done", {"running": 3})
    assert [row["part"] for row in found["each"]].count("canary") == 3  # fewer would not pass it on
    assert all(row["accuracy"] > 0.8 and row["num_examples"] > 20 for row in found["each"])
    models.until_all_run(models.good)
    table = models.tools.as_operator(models.fleet, "devices", "list").out
    assert table.count(models.model(models.good)[:12]) == 3


def test_every_device_refuses_a_model_that_was_made_worse_and_keeps_its_own(settled: Models) -> None:
    found = settled.wait(settled.deploy(settled.worse))
    assert (found["status"], found["counts"]) == ("failed", {"rejected": 3})
    assert "no device took it; device-01: accuracy 0." in found["reason"]
    for row in found["each"]:
        assert row["accuracy"] + 0.4 < row["former_accuracy"]
        assert re.search(r"the model before has [01]\.\d+ there \(tolerance 0\.02\)", row["reason"])
        assert settled.note(row["device_id"])["current"]["model"] == settled.model(settled.good)
    settled.until_all_run(settled.good)
    typed = partial(settled.tools.as_operator, settled.fleet)
    ended = typed("model", "deploy", settled.worse, "--to", "device-01", "--watch")
    told = f"failed: no device took it; device-01: {found['each'][0]['reason']}"
    assert (ended.code, told in ended.out + ended.err) == (41, True)
    settled.ids.append(typed("model", "deployments", "--format", "json").rows[-1]["deployment_id"])
    table = typed("model", "deployments", settled.ids[-1]).out
    assert re.search(r"device-01\s+rest\s+rejected", table)


def test_a_canary_that_refuses_ends_it_and_nobody_keeps_the_model(settled: Models) -> None:
    found = settled.wait(settled.deploy(settled.worse, canary=1))
    assert found["status"] == "failed"
    assert re.match(r"canary device-0[123]: accuracy 0\.", found["reason"])
    assert "running" not in found["counts"]
    settled.until_all_run(settled.good)


@pytest.mark.slow
def test_a_canary_that_says_nothing_takes_the_others_back_and_gives_up_itself_later(settled: Models) -> None:
    silent = settled.fleet.processes["device-02"]
    silent.send_signal(signal.SIGSTOP)
    try:
        found = settled.wait(settled.deploy(settled.better, canary=3, canary_s=12.0, tolerance=1.0))
    finally:
        silent.send_signal(signal.SIGCONT)
    assert (found["status"], found["reason"]) == ("failed", "canary device-02 did not report within 12 s")
    deployment = found["deployment_id"]
    settled.tools.eventually(lambda: set(settled.stages(deployment).values()) == {"reverted"}, 40, "all went back")
    settled.until_all_run(settled.good)


def test_a_device_that_was_away_gets_it_when_it_returns(settled: Models) -> None:
    settled.fleet.terminate("device-03")
    deployment = settled.deploy(settled.better, tolerance=1.0)
    others = {"device-01": "running", "device-02": "running", "device-03": "notified"}
    settled.tools.eventually(lambda: settled.stages(deployment) == others)
    assert settled.show(deployment)["status"] == "rolling"
    settled.fleet.start_device("device-03")
    assert settled.wait(deployment)["counts"] == {"running": 3}
    settled.until_all_run(settled.better)


def test_a_coordinator_that_is_killed_in_the_middle_goes_on_with_it(settled: Models) -> None:
    deployment = settled.deploy(settled.better, canary=1, tolerance=1.0)
    settled.tools.eventually(lambda: settled.show(deployment)["status"] != "preparing")
    settled.fleet.kill("coordinator")
    settled.fleet.start_coordinator()
    assert settled.wait(deployment)["counts"] == {"running": 3}


@pytest.mark.slow
def test_a_newer_deployment_takes_the_place_of_one_that_waits(settled: Models) -> None:
    settled.fleet.terminate("device-03")
    first = settled.deploy(settled.better, tolerance=1.0)
    settled.tools.eventually(lambda: list(settled.stages(first).values()).count("running") == 2)
    second = settled.deploy(settled.good, tolerance=1.0, devices=["device-03"])
    settled.fleet.start_device("device-03")
    assert settled.wait(second)["counts"] == {"running": 1}
    assert settled.wait(first)["counts"] == {"running": 2, "superseded": 1}
    good, better = settled.model(settled.good), settled.model(settled.better)
    expected = {"device-01": better, "device-02": better, "device-03": good}
    settled.tools.eventually(lambda: settled.runs() == expected)


def test_a_server_answers_every_request_while_models_change(settled: Models) -> None:
    state = settled.fleet.root / "device-01"
    arguments = ["device", "serve", "--state", str(state), "--port", "0"]
    process = settled.fleet.start_command(arguments, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    port = int(process.stdout.readline().decode().rsplit(":", 1)[1])
    stopping, seen, failures = threading.Event(), set(), []

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        body = json.dumps({"rows": [[[0] * 8] * 8]})
        while not stopping.is_set():
            connection.request("POST", "/predict", body=body)
            answer = connection.getresponse()
            told = json.loads(answer.read())
            seen.add(told.get("model"))
            if answer.status != 200:
                failures.append(told)
        connection.close()

    client = threading.Thread(target=ask)
    client.start()
    better, good = settled.model(settled.better), settled.model(settled.good)
    settled.wait(settled.deploy(settled.better, tolerance=1.0, devices=["device-01"]))
    settled.tools.eventually(lambda: better in seen)
    stopping.set()
    client.join()
    assert (failures, seen) == ([], {good, better})
    process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()


def test_what_only_devices_may_fetch_is_refused_to_others(settled: Models) -> None:
    for path in ("offer", "model"):
        with pytest.raises(NotAllowedError, match="only a device that has joined"):
            settled.fleet.make_client().get(f"/edgefl/v1/deployments/{settled.ids[-1]}/{path}")


def test_a_run_that_asks_for_it_deploys_its_model_when_it_has_finished(models: Models) -> None:
    run = models.fleet.submit(run_file(4, models={"auto_deploy": True, "canary": 1}))
    models.fleet.wait_for_run(run)
    rows = models.fleet.make_client().get("/edgefl/v1/deployments")["rows"]
    (row,) = [row for row in rows if row["run_id"] == run]
    assert (row["canary"], row["model"]) == (3, models.model(run))
    assert models.wait(row["deployment_id"])["status"] in {"done", "failed"}


@pytest.mark.slow
def test_a_device_that_is_killed_while_it_fetches_goes_on_when_it_starts_again(settled: Models) -> None:
    fleet = settled.fleet
    with settled.tools.led_by(fleet, "device-02") as weather:
        fresh = fleet.submit(run_file(5))  # no board has this model yet
        fleet.wait_for_run(fresh)
        weather.bytes_per_s = 2000  # so the rest of 20 KB after a TLS record of 16 KB takes two seconds
        deployment = settled.deploy(fresh, tolerance=1.0, devices=["device-02"])
        folder = fleet.root / "device-02" / "models"
        settled.tools.eventually(lambda: parts(folder), 30, "a part of the model")
        fleet.kill("device-02")
        report = settled.note("device-02")["report"]
        assert (report["id"], report["state"]) == (deployment, "fetching")
        assert settled.note("device-02")["current"]["model"] == settled.model(settled.good)
        kept = parts(folder)
        assert kept
        weather.bytes_per_s = None
        fleet.start_device("device-02")
        assert settled.wait(deployment)["counts"] == {"running": 1}
    settled.tools.eventually(lambda: settled.runs()["device-02"] == settled.model(fresh))
    assert not list(folder.glob("*.part"))


def parts(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.part") if path.stat().st_size]


def test_a_device_that_is_killed_while_it_checks_decides_when_it_starts_again(settled: Models) -> None:
    """The check is slowed by a device that is stopped as soon as it says that it checks."""
    deployment = settled.deploy(settled.better, tolerance=1.0, devices=["device-01"])
    note = settled.fleet.root / "device-01" / "models" / "current.json"
    settled.tools.eventually(lambda: json.loads(note.read_text())["report"]["id"] == deployment)
    settled.fleet.kill("device-01")
    assert settled.note("device-01")["current"] is not None
    settled.fleet.start_device("device-01")
    assert settled.wait(deployment)["counts"] == {"running": 1}


def test_a_board_with_signers_runs_what_they_have_signed_and_nothing_else(settled: Models, tmp_path: Path) -> None:
    fleet, name, signer = settled.fleet, settled.fleet.devices[-1].name, Signer(tmp_path)
    state, operator = str(fleet.root / name), partial(settled.tools.as_operator, fleet)
    fleet.terminate(name)
    start = ("device", "start", "--state", state, "--signers", str(signer.trusted))
    fleet.processes[name] = fleet.start_command(start, stdout=subprocess.DEVNULL)
    path = f"/edgefl/v1/devices/{name}"
    settled.tools.eventually(lambda: fleet.make_client().get(path)["capabilities"].get("signed_models"))
    with pytest.raises(UsageError, match=f"{name} run only signed models"):
        settled.deploy(settled.better, devices=[name])
    rows = str(fleet.devices[-1].shards["digits"])
    infer = ("device", "infer", "--state", state, "--input", rows, "--format", "json", "--signers")
    assert operator(*infer, tmp_path / "none").code == 0
    unsigned = operator(*infer, signer.trusted)
    assert (unsigned.code, "it is unsigned" in unsigned.line) == (51, True)
    onnx, bundle, model = tmp_path / "better.onnx", tmp_path / "better.bundle", f"{settled.better}:latest"
    for words in (
        ("model", "export", model, "--out", onnx),
        ("coordinator", "sign", onnx, "--kind", "model", "--out", bundle, "--keys", signer.folder),
        ("model", "deploy", model, "--bundle", bundle, "--to", name, "--tolerance", 1, "--watch"),
        (*infer, signer.trusted),
    ):
        ended = operator(*words)
        assert ended.code == 0, ended
    assert settled.runs()[name] == settled.model(settled.better)
    fleet.terminate(name)
    fleet.start_device(name)


@pytest.mark.slow
def test_a_device_that_joins_later_gets_the_model_of_the_fleet(settled: Models) -> None:
    late = LocalDeviceSpec(name="late", shards={"digits": str(settled.tools.shards[0])})
    settled.fleet.add_device(late)
    good = settled.model(settled.good)
    settled.tools.eventually(lambda: settled.runs().get("late") == good)
    settled.fleet.terminate("late")


def without_torch(tools: Any, shards: Path) -> LocalDeviceSpec:
    blocked = f"{HERE / 'without_torch'}{os.pathsep}{tools.environment['PYTHONPATH']}"
    program = ("env", f"PYTHONPATH={blocked}", sys.executable, "-m", "edgefl.cli.main")
    return LocalDeviceSpec(name="small", shards={"mnist": str(shards)}, program=program)


@pytest.mark.slow
def test_boards_without_torch_say_so_and_get_no_training_of_a_task_that_needs_it(tools: Any, tmp_path: Path) -> None:
    shards = tmp_path / "images"
    write_images(shards)
    with tools.fleet(tmp_path / "fleet", [without_torch(tools, shards)], kind=LocalFleet) as fleet:
        facts = fleet.make_client().get("/edgefl/v1/devices/small")["capabilities"]
        assert (facts["trains"], facts["backends"]) == (True, ["numpy", "onnx"])
        (tmp_path / "cnn.toml").write_text('[run]\ntask = "mnist"\nrounds = 1\nbackend = "torch"\n')
        ended = tools.as_operator(fleet, "run", "submit", tmp_path / "cnn.toml")
        assert (ended.code, "no device can train task mnist: small have no torch" in ended.line) == (5, True)
        config = {"run": {"task": "mnist", "rounds": 1, "evaluate_on": "none"}, "task": {"model": "logistic"}}
        run = fleet.submit(parse_run(config))  # what needs no torch it trains
        assert fleet.wait_for_run(run)["rounds"] == 1


@pytest.mark.slow
def test_a_board_without_torch_judges_and_runs_a_model_that_needed_torch(tools: Any, tmp_path: Path) -> None:
    shards = tmp_path / "images"
    write_images(shards)
    large = LocalDeviceSpec(name="large", shards={"mnist": str(shards)})
    with tools.fleet(tmp_path / "fleet", [without_torch(tools, shards), large], kind=LocalFleet) as fleet:
        asked = {"run": {"task": "mnist", "rounds": 2, "backend": "torch"}, "task": {"model": "cnn-small"}}
        run = fleet.submit(parse_run(asked))
        fleet.wait_for_run(run)
        assert {row["device_id"] for row in fleet.list_history("updates", run=run)} == {"large"}
        assert {row["device_id"] for row in fleet.list_history("evaluations", run=run)} == {"large"}
        fleet.run_command("model", "deploy", run, "--watch")
        state = str(tmp_path / "fleet" / "small")
        infer = ("device", "infer", "--state", state, "--input", str(shards), "--format", "json")
        assert '"class"' in fleet.run_command(*infer)


def write_images(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(7)
    inputs, labels = rng.integers(0, 256, (60, 28, 28), dtype=np.uint8), rng.integers(0, 10, 60)
    np.savez(folder / "monday.npz", inputs=inputs, labels=labels)
