"""`edgefl device infer` and `serve` as a user types them."""

import http.client
import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from onnx_graphs import constant_model

from edgefl.device.inference.model_store import DeployedModel, DeploymentState, ModelStore


@pytest.fixture
def state(tmp_path):
    """A board on which a model is deployed that answers 4 to everything."""
    store = ModelStore(tmp_path / "pi")
    store.folder.parent.mkdir()
    store.save(DeploymentState())
    sha256 = constant_model(tmp_path / "made.onnx", 4)
    current = DeployedModel(deployment="d1", sha256=sha256, model="ab" * 32, task="digits")
    (tmp_path / "made.onnx").rename(store.path(current))
    store.save(DeploymentState(current=current))
    return tmp_path / "pi"


def test_infer_prints_class_and_probability_of_every_row_and_the_accuracy_where_there_are_labels(
    run, state, shard, tmp_path
):
    np.save(tmp_path / "rows.npy", np.zeros((3, 8, 8)))
    words = ("device", "infer", "--state", state, "--input")
    rows = run(*words, tmp_path / "rows.npy", "--format", "json").rows
    assert [(row["row"], row["class"], row["index"]) for row in rows] == [(0, "4", 4), (1, "4", 4), (2, "4", 4)]
    assert rows[0]["probability"] == pytest.approx(np.exp(5) / (np.exp(5) + 9), abs=1e-5)
    table = run(*words, tmp_path / "rows.npy").out.splitlines()
    assert (table[0].split(), len(table)) == (["row", "class", "index", "probability"], 4)
    labelled = run(*words, shard, "--format", "csv")
    assert labelled.out.splitlines()[0] == "row,class,index,probability,label"
    assert labelled.err.startswith("accuracy 0.")
    constant_model(tmp_path / "other.onnx", 7)
    other = run("device", "infer", "--model", tmp_path / "other.onnx", "--input", shard, "--format", "csv")
    assert other.out.splitlines()[1].startswith("0,7,7,")


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("infer --state nowhere --input x.npy", 40, "no model is deployed in nowhere"),
        ("infer --model no.onnx --input x.npy", 4, "there is no model file no.onnx"),
        ("infer --input x.npy --threads 0", 2, "threads"),
        ("serve --model no.onnx --port 0", 4, "there is no model file no.onnx"),
    ],
)
def test_bad_input_is_told_with_an_exit_code(run, arguments, code, expected):
    ran = run("device", *arguments.split())
    assert (ran.code, ran.out, expected in ran.err) == (code, "", True)


def test_serve_answers_until_sigterm_and_ends_with_zero(state):
    command = [sys.executable, "-m", "edgefl.cli.main", "device", "serve", "--state", str(state), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/predict", body=json.dumps({"rows": [[0] * 64]}))
        told = json.loads(connection.getresponse().read())
        assert (told["deployment"], told["rows"][0]["class"]) == ("d1", "4")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        connection.close()
