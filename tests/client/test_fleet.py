"""A fleet as an object: simulated in a folder, and a live one with its coordinator."""

import asyncio
import sys
import time
import types

import numpy as np
import pytest
from safetensors.numpy import load_file

import edgefl
from edgefl.client import fleet as fleet_module
from edgefl.client.fleet import Run, check_finished, follow_run
from edgefl.core.errors import (
    NetworkError,
    NotAllowedError,
    NotFoundError,
    RunFailedError,
    TaskError,
    UsageError,
)
from edgefl.simulation.local_fleet import LocalFleet, partition_devices
from edgefl.tasks.registry import make_task

RUN = {"run": {"task": "digits", "rounds": 3, "name": "first"}, "simulation": {"devices": 3}}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return edgefl.connect(directory=tmp_path_factory.mktemp("history")).simulate(RUN)


def test_a_simulated_run_has_rounds_a_status_and_a_name_in_its_fleet(simulated):
    fleet = edgefl.connect(directory=simulated.fleet.source.directory)
    assert fleet.run("first") == simulated
    assert fleet.run().run_id == fleet.runs[-1]["run_id"] == simulated.run_id
    assert simulated.wait() is simulated
    assert (simulated.status, [row["round"] for row in simulated.rounds]) == ("finished", [1, 2, 3])
    assert simulated.config["run"]["rounds"] == 3
    assert {row["device_id"] for row in fleet.history("traffic", run="latest")} == {
        row["device_id"] for row in fleet.history("updates")
    }
    assert repr(simulated) == f"Run({simulated.run_id}, finished, 3 rounds)"
    assert simulated.run_id in repr(fleet.models[-1])


def test_metrics_are_a_data_frame_by_round(simulated):
    pytest.importorskip("pandas", reason="needs pandas: pip install '.[tables]'")
    metrics = simulated.metrics
    assert metrics.index.tolist() == [1, 2, 3]
    assert metrics["accuracy"].tolist() == [row["accuracy"] for row in simulated.rounds]
    assert metrics["seconds"].is_monotonic_increasing
    assert metrics["bytes_up"].iloc[-1] == sum(row["bytes_up"] for row in simulated.rounds)


def test_a_figure_is_one_of_matplotlib(simulated):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plots]'")
    figure = simulated.plot("accuracy", axis="rounds", title="of the first")
    assert len(figure.axes) == 1


def test_a_model_is_loaded_predicts_and_is_exported(simulated, tmp_path):
    model = simulated.model("latest")
    with simulated.fleet.source.open_model_file(model.sha256) as path:
        expected = load_file(path)
    assert {name: tensor.tolist() for name, tensor in model.load().items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    inputs = np.random.default_rng(7).integers(0, 16, (5, 8, 8)).astype(np.uint8)
    learner = make_task("digits", {}).learner()
    learner.load(expected)
    np.testing.assert_array_equal(model.predict(inputs), learner.logits(inputs))
    with pytest.raises(TaskError, match="a model of task digits is no torch module; use predict, load or to_onnx"):
        model.to_torch()
    pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")
    out = model.to_onnx(tmp_path / "model.onnx")
    import onnxruntime  # noqa: PLC0415 after the check

    session = onnxruntime.InferenceSession(out)
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.astype(np.float32)})
    np.testing.assert_allclose(found, model.predict(inputs), atol=1e-4)


def test_a_directory_is_only_read(simulated):
    for act in (simulated.stop, simulated.resume, lambda: simulated.fleet.submit(RUN)):
        with pytest.raises(UsageError, match="it can only be read"):
            act()


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda fleet: fleet.history("round"), UsageError, "did you mean rounds"),
        (
            lambda fleet: fleet.history("updates", device_id="x"),
            UsageError,
            "did you mean device",
        ),
        (lambda fleet: fleet.run("second"), NotFoundError, "second"),
        (lambda fleet: fleet.run().model(17), NotFoundError, "17"),
        (lambda fleet: fleet.run().plot("ages"), UsageError, "ages"),
    ],
)
def test_what_is_not_there_is_said(simulated, ask, error, words):
    with pytest.raises(error, match=words):
        ask(simulated.fleet)


def test_connecting_needs_an_operator_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(NotAllowedError, match=r"operator\.toml is missing"):
        edgefl.connect("https://127.0.0.1:9")
    with pytest.raises(UsageError, match="give one of them"):
        edgefl.connect("https://127.0.0.1:9", directory=tmp_path)


class Replies:
    """A client whose run answers with these rows and errors, one a question."""

    def __init__(self, *replies):
        self.replies = list(replies)

    def get(self, path):
        assert path == "/edgefl/v1/runs/r"
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return {"run_id": "r", "reason": None, "rounds": 1, **reply}


def follow(*replies, **options):
    return [row["status"] for row in follow_run(Replies(*replies), "r", poll_s=0, **options)]


def test_a_run_is_followed_to_its_end_over_short_absences_of_its_coordinator(monkeypatch):
    away = NetworkError("away")
    assert follow({"status": "running"}, away, away, {"status": "stopping"}, {"status": "stopped"}) == [
        "running", "stopping", "stopped",
    ]  # fmt: skip
    assert follow(away, {"status": "stopped"}, is_known=True) == ["stopped"]
    with pytest.raises(NetworkError, match="away"):
        follow(away, {"status": "stopped"})
    assert follow({"status": "running"}, timeout_s=0.05)[-1] == "running"
    with pytest.raises(NetworkError, match="away"):
        follow(away, is_known=True, timeout_s=0.05)
    monkeypatch.setattr(fleet_module, "MAX_UNREACHABLE_S", -1.0)
    with pytest.raises(NetworkError, match="away"):
        follow({"status": "running"}, away)


def test_a_wait_that_is_cancelled_ends_its_thread(monkeypatch):
    monkeypatch.setattr(fleet_module, "POLL_S", 60.0)
    run = Run(types.SimpleNamespace(source=None, client=Replies({"status": "running"})), "r")
    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(run.wait_async(), 0.1))
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("status", ["failed", "stopped", "interrupted"])
def test_a_run_that_did_not_finish_is_an_error_with_its_reason(status):
    with pytest.raises(RunFailedError, match=f"run r {status}: no room"):
        check_finished({"run_id": "r", "status": status, "reason": "no room"})
    check_finished({"run_id": "r", "status": "finished", "reason": None})


def test_a_notebook_s_progress_is_one_line_that_changes(monkeypatch):
    shown = []
    handle = types.SimpleNamespace(update=shown.append)
    display = types.SimpleNamespace(HTML=str, display=lambda text, display_id: shown.append(text) or handle)
    monkeypatch.setitem(sys.modules, "ipykernel", display)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    row = {"run_id": "r", "name": "<i>", "status": "running", "reason": None, "config": {"run": {"rounds": 4}}}
    with fleet_module._NotebookProgress() as progress:
        progress.update({**row, "rounds": 1})
        progress.update({**row, "rounds": 2, "accuracy": 0.5})
    assert shown == [
        '<p><progress value="1" max="4"></progress> &lt;i&gt; running: round 1 of 4</p>',
        '<p><progress value="2" max="4"></progress> &lt;i&gt; running: round 2 of 4, accuracy 0.5000</p>',
    ]


@pytest.mark.extended
def test_a_live_run_is_submitted_waited_for_and_read_and_one_is_stopped(tmp_path, monkeypatch):
    devices, test_shards = partition_devices("digits", "iid", 2, tmp_path / "shards", None, 7)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with LocalFleet(root=tmp_path, devices=devices, test_shards=test_shards):
        fleet = edgefl.connect()
        assert {"device-01", "device-02"} <= {row["device_id"] for row in fleet.devices}
        live = {"run": {"task": "digits", "rounds": 4, "evaluate_on": "coordinator"}, "devices": {"min": 2}}
        seen = []
        run = fleet.submit(live).wait(timeout_s=100, on_change=seen.append)
        assert (run.status, seen[-1]["rounds"]) == ("finished", 4)
        assert isinstance(run, Run)
        assert len(run.rounds) == 4
        assert run.model().predict(np.zeros((1, 64), np.float32)).shape == (1, 10)
        assert run._repr_html_() == fleet.run()._repr_html_()
        assert "finished: round 4 of 4" in run._repr_html_()
        long = fleet.submit({**live, "run": {**live["run"], "rounds": 100_000}})
        with pytest.raises(RunFailedError, match=r"is \w+ after 0 s"):
            long.wait(timeout_s=0)
        long.stop()
        with pytest.raises(RunFailedError, match="stopped by the operator"):
            asyncio.run(long.wait_async(timeout_s=100))
