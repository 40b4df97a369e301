"""The inference server: answers, refusals, and a change of models in the middle of everything."""

import contextlib
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import threading
import tracemalloc

import numpy as np
import pytest
from onnx_graphs import constant_model
from peer_boards import eventually
from wheel_files import Signer

from edgefl.core.errors import DataError, PortInUseError
from edgefl.device.inference import server
from edgefl.device.inference.deployments import DeployedModel, DeploymentState, ModelStore
from edgefl.device.inference.server import MAX_BODY_BYTES, InferenceServer, ServedModel, open_listener
from edgefl.device.inference.table_rows import parse_lines
from edgefl.device.rollouts.client import RolloutReport
from edgefl.device.updates.slots import SoftwareUpdateConfig
from edgefl.tasks.export.model_export import export_onnx
from edgefl.tasks.losses.class_losses import softmax
from edgefl.tasks.registry import make_task

ROW = np.zeros((8, 8)).tolist()


class Serving:
    """A server over a model store that tests deploy to."""

    def __init__(self, root, file=None):
        self.store, self.root = ModelStore(root / "pi"), root
        self.store.folder.parent.mkdir(parents=True)
        model = ServedModel(store=self.store) if file is None else ServedModel(file=file)
        self.server = InferenceServer(model, open_listener("127.0.0.1", 0))
        self.server.start()

    def deploy(self, winner):
        self.store.save(self.store.load())
        sha256 = constant_model(self.root / "made.onnx", winner)
        new = DeployedModel(deployment=f"d{winner}", sha256=sha256, model=f"{winner}" * 64, task="digits")
        (self.root / "made.onnx").replace(self.store.path(new))
        self.store.activate(self.store.load(), new, RolloutReport(id=new.deployment, state="running"))

    def ask(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, body=body, headers=headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def predict(self, rows):
        return self.ask("POST", "/predict", json.dumps(rows).encode())

    def serve(self, winner):
        """Deploys a model that says so, and waits until it is served."""
        self.deploy(winner)
        eventually(lambda: self.ask("GET", "/model")[1].get("deployment") == f"d{winner}")


@contextlib.contextmanager
def served_file(root, file):
    made = Serving(root, file)
    try:
        yield made
    finally:
        made.server.stop()


@pytest.fixture
def serving(tmp_path):
    made = Serving(tmp_path)
    yield made
    made.server.stop()


def test_json_rows_and_npy_arrays_are_answered(serving):
    serving.serve(3)
    content = io.BytesIO()
    np.save(content, np.zeros((2, 8, 8), np.uint8))
    status, told = serving.ask("POST", "/predict", content.getvalue())
    assert (status, told["model"], told["deployment"]) == (200, "3" * 64, "d3")
    assert [row["class"] for row in told["rows"]] == ["3", "3"]
    for rows in ({"rows": [ROW, ROW]}, [ROW, ROW], [np.zeros(64).tolist()] * 2):
        assert len(serving.predict(rows)[1]["rows"]) == 2
    assert len(serving.predict(ROW)[1]["rows"]) == 1
    status, told = serving.ask("GET", "/model")
    assert (told["task"], told["input_shape"], told["classes"][:2]) == ("digits", [8, 8], ["0", "1"])


def test_texts_are_answered_by_a_model_of_texts_alone(tmp_path):
    options = {"column": "note", "target": "is", "labels": "calm,warning", "size": 64}
    task = make_task("text", options)
    export_onnx(task, task.init(3), tmp_path / "text.onnx", options=options)
    learner = task.learner()
    learner.load(task.init(3))
    texts = ["too hot", "", "all well, and quiet"]
    expected = softmax(learner.logits(task.text_converter(texts)))
    with served_file(tmp_path / "a", tmp_path / "text.onnx") as serving:
        status, told = serving.predict({"texts": texts})
        assert status == 200, told
        assert [row["class"] for row in told["rows"]] == [task.labels[index] for index in expected.argmax(axis=1)]
        found = [row["probability"] for row in told["rows"]]
        assert found == pytest.approx(expected.max(axis=1).tolist(), abs=1e-5)
        for texts in ([], ["a"] * 257, ["a", 1], [["a"]]):
            assert serving.predict({"texts": texts}) == (400, {"v": 1, "error": "texts must be 1 to 256 strings"})
        error = "texts must have at most 100,000 characters in all, got 100,001"
        assert serving.predict({"texts": ["a" * 100_000, "b"]}) == (400, {"v": 1, "error": error})
    constant_model(tmp_path / "digits.onnx", 1)
    with served_file(tmp_path / "b", tmp_path / "digits.onnx") as serving:
        status, told = serving.predict({"texts": ["a"]})
        assert (status, told["error"]) == (400, "the model takes rows of numbers, and no texts")


def test_without_a_model_it_is_healthy_and_says_what_is_missing(serving):
    assert serving.ask("GET", "/healthz")[1]["has_model"] is False
    for status, told in (serving.predict([ROW]), serving.ask("GET", "/model")):
        assert status == 503
        assert "edgefl model deploy" in told["error"]
    serving.serve(1)
    assert serving.ask("GET", "/healthz") == (
        200, {"v": 1, "status": "ok", "version": server.__version__, "has_model": True},
    )  # fmt: skip


NONSENSE = [
    (b"", "must be JSON rows or a .npy array"),
    (b"{", "must be JSON rows or a .npy array"),
    (b"[" * 100_000, "must be JSON rows or a .npy array"),
    (b"\x93NUMPYrest", "is no .npy array"),
    (b"{}", "with at least one row"),
    (b"[]", "with at least one row"),
    (b'{"rows": [[1, 2], [3]]}', "all of one shape"),
    (b'{"rows": [["a"]]}', "rows must be lists of numbers"),
    (b'{"rows": [[1, 2]]}', "a row must have shape [8, 8], got [2]"),
    (json.dumps([[[float("nan")] * 8] * 8]).encode(), "a NaN or an infinity"),
    (b"[1e999]", "a NaN or an infinity"),
]


def test_a_body_that_makes_no_sense_gets_400_and_one_line_and_others_are_not_read(serving):
    serving.serve(1)
    for body, expected in NONSENSE:
        status, told = serving.ask("POST", "/predict", body)
        assert (status, expected in told["error"], "\n" in told["error"]) == (400, True, False), told
    status, told = serving.ask("POST", "/predict", b"x", **{"Content-Length": str(MAX_BODY_BYTES + 1)})
    assert (status, str(MAX_BODY_BYTES) in told["error"]) == (413, True)
    with socket.create_connection(("127.0.0.1", serving.server.port), timeout=10) as raw:
        raw.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 411 " in raw.recv(1000)


def test_other_paths_get_404_and_a_body_there_is_not_taken_for_the_next_request(serving):
    assert serving.ask("GET", "/")[0] == 404
    assert serving.ask("GET", "/predict")[0] == 404
    with socket.create_connection(("127.0.0.1", serving.server.port), timeout=10) as raw:
        raw.sendall(b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\nGET /healthz HTTP/1.1")
        told = b""
        while piece := raw.recv(1000):
            told += piece
    assert told.count(b"HTTP/1.1") == 1


def test_a_new_model_is_taken_over_without_dropping_a_request(serving):
    """Clients ask without a pause on connections that stay open, while models change under them."""
    serving.serve(0)
    stopping, failures, seen = threading.Event(), [], set()

    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", serving.server.port, timeout=10)
        body = json.dumps({"rows": [ROW]})
        try:
            while not stopping.is_set():
                connection.request("POST", "/predict", body=body)
                answer = connection.getresponse()
                told = json.loads(answer.read())
                seen.add(told["deployment"])
                if answer.status != 200 or told["deployment"] != f"d{told['rows'][0]['class']}":
                    failures.append(told)
        except Exception as error:  # noqa: BLE001 whatever it is, the test must hear of it
            failures.append(repr(error))
        finally:
            connection.close()

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    for winner in (1, 2, 3):
        serving.serve(winner)
    eventually(lambda: "d3" in seen or failures)
    stopping.set()
    for client in clients:
        client.join()
    assert (failures, seen) == ([], {"d0", "d1", "d2", "d3"})


def test_a_model_that_cannot_be_loaded_leaves_the_one_before(serving):
    serving.serve(1)
    note = serving.store.load()
    broken = DeployedModel(deployment="d9", sha256="9" * 64, model="9" * 64, task="digits")
    serving.store.path(broken).write_bytes(b"no model")
    serving.store.save(DeploymentState(current=broken, former=note.current))
    serving.server.served_model.refresh()
    assert serving.predict([ROW])[1]["deployment"] == "d1"
    serving.store.save(DeploymentState())
    serving.server.served_model.refresh()
    assert serving.predict([ROW])[0] == 503


def test_a_model_that_no_signer_permits_is_not_served(tmp_path, caplog):
    store = ModelStore(tmp_path, SoftwareUpdateConfig(slots=None, signers=Signer(tmp_path).trusted))
    sha256 = constant_model(tmp_path / "made.onnx", 1)
    new = DeployedModel(deployment="d1", sha256=sha256, model="1" * 64, task="digits")
    store.activate(DeploymentState(), new, RolloutReport(id="d1", state="running"))
    (tmp_path / "made.onnx").replace(store.path(new))
    assert ServedModel(store=store).current is None
    assert "model 111111111111 of deployment d1 is not run: it is unsigned" in caplog.text


def test_stopping_answers_what_has_begun_and_takes_no_more(serving):
    serving.serve(1)
    serving.server._server.wait_idle(10)
    with socket.create_connection(("127.0.0.1", serving.server.port), timeout=10) as raw:
        body = json.dumps([ROW]).encode()
        raw.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        eventually(lambda: serving.server._server.num_active_requests)
        stopper = threading.Thread(target=serving.server.stop)
        stopper.start()
        raw.sendall(body)
        assert b" 200 " in raw.recv(1000)
        stopper.join(60)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", serving.server.port), timeout=1)


def test_a_port_that_is_taken_and_a_missing_file_are_named(serving, tmp_path):
    with pytest.raises(PortInUseError, match=str(serving.server.port)):
        open_listener("127.0.0.1", serving.server.port)
    with pytest.raises(DataError, match="there is no model file"):
        ServedModel(file=tmp_path / "none.onnx")


SPY = """
import json, os, socket
from pathlib import Path

setup = json.loads(os.environ["EDGEFL_SERVE"])
state_dir = Path(setup["state_dir"])
attacks = {
    "key": lambda: (state_dir / "key.pem").read_bytes(),
    "folder": lambda: list(state_dir.iterdir()),
    "write": lambda: (state_dir / "models" / "x.onnx").write_bytes(b""),
    "socket": socket.socket,
    "program": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "model": lambda: (state_dir / "models" / "new.onnx").read_bytes(),
}
refused = []
listener = socket.socket(fileno=setup["listener"])
connection, _ = listener.accept()
connection.recv(1)
for name, attack in attacks.items():
    try:
        attack()
    except OSError:
        refused.append(name)
connection.sendall(json.dumps(refused).encode())
connection.shutdown(socket.SHUT_RDWR)
"""


@pytest.mark.extended
def test_what_serves_reads_the_models_and_neither_the_key_nor_the_network(tmp_path):
    state_dir = tmp_path / "pi"
    state_dir.mkdir()
    (state_dir / "key.pem").write_text("secret")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "spy_on_board.py").write_text(SPY)
    code = (
        "import sys; from pathlib import Path; from edgefl.device.inference import server; "
        "server.MODULE = 'spy_on_board'; listener = server.open_listener('127.0.0.1', 0); "
        "print(listener.getsockname()[1], flush=True); "
        "server.run_confined(listener, Path(sys.argv[1]), Path(sys.argv[1], 'no-signers'), None, 1)"
    )
    paths = os.pathsep.join([str(modules), *(path for path in sys.path if path)])
    environment = {**os.environ, "PYTHONPATH": paths, "EDGEFL_ALLOW_MODULES": "spy_on_board"}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(state_dir)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            eventually((state_dir / "models").is_dir)
            new = state_dir / "models" / "new.onnx"
            new.write_bytes(b"a model that came later")
            connection.sendall(b"x")
            refused = json.loads(b"".join(iter(lambda: connection.recv(1000), b"")))
        assert process.wait(60) == 0
    assert refused == ["key", "folder", "write", "socket", "program"]


def test_rows_with_names_are_answered_as_the_task_of_the_model_reads_them(tmp_path):
    options = {"columns": "a,b", "window": 4, "target": "label", "labels": "shut,open", "group": "span"}
    task = make_task("series", options)
    export_onnx(task, task.init(2), tmp_path / "series.onnx", options=options)
    csv = {"Content-Type": "text/csv; charset=utf-8"}
    rows = "".join(f"{at},{10 * at},{at // 4}\n" for at in range(11))
    with served_file(tmp_path, tmp_path / "series.onnx") as serving:
        assert serving.ask("GET", "/model")[1]["rows"] == 4
        status, told = serving.ask("POST", "/predict", f"a,b,span\n{rows}".encode(), **csv)
        windows = np.array([[range(at, at + 4), range(10 * at, 10 * at + 40, 10)] for at in (0, 4)], np.float32)
        expected = [row["probability"] for row in serving.predict({"rows": windows.tolist()})[1]["rows"]]
        assert (status, [row["probability"] for row in told["rows"]]) == (200, expected)
        for content, reason in (
            (b"a,b,span\n", "at least one row"),
            (b"a,b,span\n1,2\n", "line 2 of the rows has 2 cells"),
            (b"a,span\n1,2\n", "b"),
            (b'a,b,span\n"1,2,3\n', "no CSV"),
            (b"\xff", "no CSV"),
        ):
            status, told = serving.ask("POST", "/predict", content, **csv)
            assert status == 400
            assert reason in told["error"]
    with served_file(tmp_path / "other", _constant(tmp_path)) as serving:
        assert serving.ask("GET", "/model")[1]["rows"] is None
        status, told = serving.ask("POST", "/predict", b"a\n1\n", **csv)
        assert (status, told["error"]) == (400, "the model's task 'digits' makes no examples of rows with names")


def test_a_model_whose_task_cannot_be_made_is_shown_as_one_that_takes_no_rows(tmp_path):
    constant_model(tmp_path / "m.onnx", 1, task="table", task_options='{"columns": "a", "model": "gone:Net"}')
    with served_file(tmp_path, tmp_path / "m.onnx") as serving:
        status, told = serving.ask("GET", "/model")
        assert (status, told["task"], told["rows"]) == (200, "table", None)
        assert serving.predict({"rows": [ROW]})[0] == 200


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"a\n" + b"12\n" * 2_796_000, "got 4,098 cells up to line 4,098"),
        (b"12," * 2_796_000, "got 2,796,001 cells up to line 1"),
        (b"a\r" + b"12,12,12,12,12,12,12,12,12,12\r" * 279_600, "got 40,971 cells up to line 4,098"),
    ],
)
def test_rows_with_names_are_bounded_before_they_take_memory(content, found):
    assert len(content) <= MAX_BODY_BYTES
    tracemalloc.start()
    with pytest.raises(DataError, match="at most 4,096 of 250,000 cells in all, " + found):
        parse_lines(content)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * MAX_BODY_BYTES


def _constant(folder):
    constant_model(folder / "constant.onnx", 1)
    return folder / "constant.onnx"
