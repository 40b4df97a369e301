"""`edgefl device infer` and `serve` as a user types them."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from onnx_graphs import constant_model

from edgefl.device.inference.model_store import DeployedModel, ModelStore, Note
from edgefl.tasks.cutting import cut_shards


@pytest.fixture
def state(tmp_path):
    """A board on which a model is deployed that answers 4 to everything."""
    store = ModelStore(tmp_path / "pi")
    store.folder.parent.mkdir()
    store.write(Note())
    sha256 = constant_model(tmp_path / "made.onnx", 4)
    current = DeployedModel(deployment="d1", sha256=sha256, model="ab" * 32, task="digits")
    (tmp_path / "made.onnx").rename(store.path(current))
    store.write(Note(current=current))
    return tmp_path / "pi"


def edgefl(*arguments):
    command = [sys.executable, "-m", "edgefl.cli.main", "device", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_infer_prints_class_and_probability_of_every_row(state, tmp_path):
    np.save(tmp_path / "rows.npy", np.zeros((3, 8, 8)))
    done = edgefl("infer", "--state", state, "--input", tmp_path / "rows.npy", "--format", "json")
    told = json.loads(done.stdout)
    assert (told["v"], told["kind"], len(told["rows"])) == (1, "predictions", 3)
    assert (told["rows"][2]["row"], told["rows"][2]["class"], told["rows"][2]["index"]) == (2, "4", 4)
    assert told["rows"][0]["probability"] == pytest.approx(np.exp(5) / (np.exp(5) + 9), abs=1e-5)
    table = edgefl("infer", "--state", state, "--input", tmp_path / "rows.npy").stdout.splitlines()
    assert table[0].split() == ["row", "class", "index", "probability"]
    assert len(table) == 4


def test_infer_tells_the_accuracy_where_there_are_labels(state, tmp_path):
    shard = cut_shards("digits", "iid", 2, tmp_path / "shards")[0]
    done = edgefl("infer", "--state", state, "--input", shard, "--format", "csv")
    assert done.stdout.splitlines()[0] == "row,class,index,probability,label"
    assert done.stderr.startswith("accuracy 0.")


def test_infer_runs_a_file_of_any_board(tmp_path):
    constant_model(tmp_path / "other.onnx", 7)
    np.save(tmp_path / "rows.npy", np.zeros((1, 8, 8)))
    done = edgefl("infer", "--model", tmp_path / "other.onnx", "--input", tmp_path / "rows.npy", "--format", "csv")
    assert done.stdout.splitlines()[1].startswith("0,7,7,")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["infer", "--state", "nowhere", "--input", "x.npy"], 40, "no model is deployed in nowhere"),
        (["infer", "--model", "no.onnx", "--input", "x.npy"], 4, "there is no model file no.onnx"),
        (["infer", "--input", "x.npy", "--threads", "0"], 2, "threads"),
        (["serve", "--model", "no.onnx", "--port", "0"], 4, "there is no model file no.onnx"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(arguments, code, expected):
    done = edgefl(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_answers_until_sigterm_and_ends_with_zero(state):
    command = [sys.executable, "-m", "edgefl.cli.main", "device", "serve", "--state", str(state), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/predict", body=json.dumps({"rows": [[0] * 64]}))
        told = json.loads(connection.getresponse().read())
        assert (told["deployment"], told["rows"][0]["class"]) == ("d1", "4")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        connection.close()
