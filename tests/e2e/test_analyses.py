"""Analyses on real agents, confined: a killed coordinator changes no answer, and boards run what was found."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgefl
from edgefl.core.config import parse_run
from edgefl.simulation.local_fleet import LocalDeviceSpec, LocalFleet
from edgefl.tasks.analyses.trees.ensemble import predict

pytestmark = [pytest.mark.extended, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "diabetes"
TASK = "diabetes:Diabetes"
NAMES = ("device-01", "device-02", "device-03")


@pytest.fixture(scope="module")
def running(tools: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    root, rng, devices = tmp_path_factory.mktemp("analyses"), np.random.default_rng(4), []
    for name in NAMES:
        rows = rng.standard_normal((40, 11))
        rows[:, -1] = 150 + 50 * (rows[:, 2] > 0) + 20 * rows[:, 5] + rows[:, -1]
        (root / name).mkdir()
        np.savetxt(root / name / "patients.csv", rows, delimiter=",")
        devices.append(LocalDeviceSpec(name=name, shards={TASK: str(root / name)}))
    environment = {"EDGEFL_CONFINE": "auto", "EDGEFL_ALLOW_MODULES": "diabetes"}
    with tools.fleet(
        root / "fleet", devices, environment=environment, also_importable=[EXAMPLE], kind=LocalFleet
    ) as fleet:
        yield fleet


def test_trees_over_a_killed_coordinator_are_those_of_the_simulation(
    running: LocalFleet, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = {"name": "boosted-trees", "trees": 8, "depth": 2}
    config = parse_run({"run": {"task": TASK}, "strategy": strategy, "devices": {"min": 3}})
    run_id = running.submit(config)
    tools.wait_rounds(running, run_id, 6)
    running.kill("coordinator")
    running.start_coordinator()
    ended = running.wait_for_run(run_id)
    assert (ended["status"], ended["rounds"]) == ("finished", 2 + 8 * 2)
    path = tmp_path / "result.json"
    assert tools.as_operator(running, "run", "result", run_id, "--out", path).code == 0
    monkeypatch.syspath_prepend(EXAMPLE)
    shards = [next(iter(device.shards.values())) for device in running.devices]
    simulated = edgefl.simulate(config, devices=shards, root=tmp_path / "runs", allow_modules=["diabetes"])
    assert json.loads(path.read_text()) == json.loads(simulated.result.read_text())


@pytest.mark.parametrize(
    ("strategy", "rounds"),
    [
        ({"name": "boosted-trees", "trees": 3, "depth": 2}, None),
        ({"name": "k-means", "clusters": 3, "columns": "0-9"}, 5),
    ],
    ids=["trees", "clusters"],
)
def test_what_was_found_is_deployed_to_boards_and_answers_there(
    running: LocalFleet, tools: Any, tmp_path: Path, strategy: dict[str, Any], rounds: int | None
) -> None:
    run = {"task": TASK, **({} if rounds is None else {"rounds": rounds})}
    run_id = running.submit(parse_run({"run": run, "strategy": strategy, "devices": {"min": 3}}))
    assert running.wait_for_run(run_id)["status"] == "finished"
    path = tmp_path / "result.json"
    assert tools.as_operator(running, "run", "result", run_id, "--out", path).code == 0
    result = json.loads(path.read_text())
    client = running.make_client()
    deployment = client.post("/edgefl/v1/deployments", {"model": run_id})["deployment_id"]
    found = tools.eventually(
        lambda: (now := client.get(f"/edgefl/v1/deployments/{deployment}"))["status"] in {"done", "failed"} and now,
        60,
        "the end of the deployment",
    )
    assert (found["status"], found["counts"]) == ("done", {"running": 3}), found
    assert [row["accuracy"] for row in found["each"]] == [None] * 3

    state, shard = running.root / NAMES[0], Path(next(iter(running.devices[0].shards.values())))
    inputs = np.loadtxt(shard / "patients.csv", delimiter=",")[:, :-1]
    words = ["device", "infer", "--state", str(state), "--input", str(shard), "--format", "json"]
    process = running.start_command(words, stderr=subprocess.PIPE)
    printed, errors = process.communicate(timeout=120)
    assert (process.returncode, b"accuracy" in errors) == (0, False)
    rows = json.loads(printed)["rows"]
    if rounds is None:
        assert [row["values"][0] for row in rows] == pytest.approx(predict(result, inputs), rel=1e-5)
    else:
        distances = ((inputs[:, None] - np.array(result["centres"])) ** 2).sum(axis=2)
        assert [row["index"] for row in rows] == distances.argmin(axis=1).tolist()
        assert "label" not in rows[0]

    process = running.start_command(
        ["device", "serve", "--state", str(state), "--port", "0"], stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().decode().rsplit(":", 1)[1])
    body = json.dumps({"rows": inputs[:5].tolist()}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/predict", body, timeout=60) as answer:
        told = json.loads(answer.read())["rows"]
    same = ("values",) if rounds is None else ("class", "index", "probability")
    assert [[row[name] for name in same] for row in told] == [[row[name] for name in same] for row in rows[:5]]
    process.terminate()
    assert process.wait(60) == 0
    process.stdout.close()
