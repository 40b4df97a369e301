"""Runs in TensorBoard and MLflow: each round once, whatever was killed, and only under names that they take."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import plotted_store as made
import pytest

import edgefl
from edgefl.cli.main import main
from edgefl.core.errors import DataError, MissingPackageError, NetworkError, StoreError, UsageError
from edgefl.history import tracking
from edgefl.history.tracking import BoardFigures, HistoryTracking, MlflowTracker, TensorBoardTracker, make_point
from edgefl.storage.queries.history import read_history_pages
from edgefl.storage.store import Store

MISSING = "tensorboard is not installed: pip install 'edgefl-fleet[track]'"
event_file_loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason=MISSING)
event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2", reason=MISSING)

MLFLOW_SERVER = os.environ.get("EDGEFL_MLFLOW")
needs_server = pytest.mark.skipif(not MLFLOW_SERVER, reason="no MLflow server is named: make test-track")


class PageReader(made.StoreReader):
    def read_pages(self, kind, filters):
        return read_history_pages(self._store, kind, **filters)


@pytest.fixture
def source(store):
    return PageReader(store)


@pytest.fixture
def board(tmp_path):
    return TensorBoardTracker(tmp_path / "tb")


def read_board(folder, name="accuracy"):
    """Returns (round, value) of every point in a run's event files, in the order in which they stand there."""
    files = [event_file_loader.RawEventFileLoader(str(path)) for path in sorted(folder.glob("events*"))]
    events = [event_pb2.Event.FromString(one) for file in files for one in file.Load()]
    return [
        (event.step, round(value.simple_value, 6))
        for event in events
        for value in event.summary.value
        if value.tag == name and value.WhichOneof("value") == "simple_value"
    ]


def find_mlflow(tracker):
    """Returns the one run that is not superseded."""
    client = tracker._client
    experiment = client.get_experiment_by_name("edgefl")
    runs = client.search_runs([experiment.experiment_id])
    (run,) = [run for run in runs if tracking.SUPERSEDED_TAG not in run.data.tags]
    return run


def read_mlflow(tracker, name="accuracy"):
    """Returns (round, value) of every point of that run."""
    points = tracker._client.get_metric_history(find_mlflow(tracker).info.run_id, name)
    return sorted((point.step, point.value) for point in points)


def test_every_round_has_its_qualities_costs_and_figures_of_the_boards_by_group():
    row = {"round": 3, "closed_at": 7.5, "loss": 0.5, "accuracy": None, "train_loss": float("nan"), "seconds": 2.0,
           "bytes_up": 10, "bytes_down": 30, "num_updates": 2, "num_devices": 2, "node_accuracy": 0.25,
           "worst_node_accuracy": None, "facts": None,
           "metrics": {"rmse": 1.5, "../up": 2.0, "loss": 9.0, "": 1.0}}  # fmt: skip
    updates = [
        {"compute_s": 1.0, "send_s": 0.5, "wait_s": None, "staleness": 0, "max_temperature_c": 50.0},
        {"compute_s": 3.0, "send_s": 0.5, "wait_s": None, "staleness": 1, "max_temperature_c": 60.0},
    ]
    fleet, roof = BoardFigures(), BoardFigures()
    for update in updates:
        fleet.add(update)
    roof.add(updates[0])
    point = make_point(row, {"all": fleet, "roof/a": roof})
    assert (point.round, point.closed_at) == (3, 7.5)
    assert point.values == {
        "round": 3.0, "loss": 0.5, "seconds": 2.0, "bytes_up": 10.0, "bytes_down": 30.0, "num_updates": 2.0,
        "num_devices": 2.0, "node_accuracy": 0.25, "rmse": 1.5, ".._up": 2.0,
        "boards/all/compute_s": 2.0, "boards/all/send_s": 0.5, "boards/all/staleness": 0.5,
        "boards/all/max_temperature_c": 60.0, "boards/roof_a/compute_s": 1.0, "boards/roof_a/send_s": 0.5,
        "boards/roof_a/staleness": 0.0, "boards/roof_a/max_temperature_c": 50.0,
    }  # fmt: skip


def test_many_metrics_of_a_task_leave_a_round_its_own_values(monkeypatch):
    monkeypatch.setattr(tracking, "MAX_VALUES", 3)
    row = dict.fromkeys((*tracking._QUALITIES, *tracking._COSTS), 1.0) | {"round": 1, "closed_at": 2.0, "facts": None}
    point = make_point(row | {"metrics": {f"a{number}": 0.5 for number in range(9)}}, {})
    assert sorted(point.values) == sorted([*tracking._QUALITIES, *tracking._COSTS, "round", "a0", "a1", "a2"])


def test_settings_are_flat_bounded_and_texts_where_they_are_no_numbers(monkeypatch):
    monkeypatch.setattr(tracking, "MAX_SETTINGS", 4)
    config = {
        "run": {"rounds": 3, "name": None, "on": True, "groups": [], "zone": ""},
        "strategy": {"a b": [1, 2]},
        "x": "y" * 900,
        "z": 1,
    }
    flat = tracking.flatten_settings(config)
    assert flat == {"run.rounds": 3, "run.on": True, "strategy.a_b": "[1, 2]", "x": "y" * 500}


def test_a_run_that_goes_on_gets_its_new_rounds_alone(store, source, board):
    run = made.add_synchronous(store, "one", rounds=2)
    store.set_run_status(run, made.RunStatus.RUNNING, at=made.BEGIN)
    follower = HistoryTracking(source, [board])
    assert (follower.update(), follower.is_over) == (2, False)
    assert follower.update() == 0
    made.add_round(store, run, 3, made.BEGIN + 100, made.PACES_S)
    made.evaluate(store, run, 3, 0.75)
    assert follower.update() == 1
    assert read_board(board.folder / run) == [(1, 0.1), (2, 0.2), (3, 0.75)]
    store.set_run_status(run, made.RunStatus.STOPPED, at=made.BEGIN)
    assert (follower.update(), follower.is_over) == (3, True), "all are compared at the end"
    assert follower.update() == 0
    assert read_board(board.folder / run) == [(1, 0.1), (2, 0.2), (3, 0.75)]


def test_a_round_waits_for_its_evaluation_and_one_that_comes_late_is_there_at_the_end(store, source, board):
    run = made.add_synchronous(store, "one", rounds=3, accuracies={2: 0.2})
    store.set_run_status(run, made.RunStatus.RUNNING, at=made.BEGIN)
    follower = HistoryTracking(source, [board])
    assert follower.update() == 2, "the newest may still be evaluated"
    made.evaluate(store, run, 3, 0.3)
    made.evaluate(store, run, 1, 0.1)
    follower.update()
    assert read_board(board.folder / run) == [(2, 0.2), (3, 0.3)]
    store.set_run_status(run, made.RunStatus.FINISHED, at=made.BEGIN)
    follower.update()
    assert read_board(board.folder / run) == [(1, 0.1), (2, 0.2), (3, 0.3)]


def test_a_file_that_was_cut_anywhere_becomes_the_whole_one(store, source, board):
    run = made.add_synchronous(store, "one", rounds=4)
    HistoryTracking(source, [board]).update()
    (path,) = (board.folder / run).glob("events*")
    whole = path.read_bytes()
    for size in (0, 1, 11, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        HistoryTracking(source, [board]).update()
        assert path.read_bytes() == whole, size
    path.write_bytes(b"of something else")
    HistoryTracking(source, [board]).update()
    assert path.read_bytes() == whole


def test_a_run_that_went_back_to_a_checkpoint_has_no_round_twice(tmp_path, board):
    with Store.open(tmp_path / "a.db") as store, Store.open(tmp_path / "b.db") as rolled_back:
        run = made.add_synchronous(store, "one", rounds=4)
        made.add_synchronous(rolled_back, "one", rounds=2)
        made.add_round(rolled_back, run, 3, made.BEGIN + 500, made.PACES_S)
        made.evaluate(rolled_back, run, 3, 0.9)
        for one in (store, rolled_back):
            one.set_run_status(run, made.RunStatus.RUNNING, at=made.BEGIN)
        follower = HistoryTracking(PageReader(store), [board])
        follower.update()
        follower.source = PageReader(rolled_back)
        follower.update()
    assert read_board(board.folder / run) == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_a_run_that_goes_on_after_a_stop_keeps_the_round_that_was_not_evaluated(store, source, board):
    run = made.add_synchronous(store, "one", rounds=3, accuracies={1: 0.1, 2: 0.2})
    calls = []
    recorder = SimpleNamespace(record=lambda _run, points, **how: calls.append(([one.round for one in points], how)))
    follower = HistoryTracking(source, [board, recorder])
    follower.update()
    store.set_run_status(run, made.RunStatus.RUNNING, at=made.BEGIN)
    follower.update()
    HistoryTracking(source, [recorder]).update()
    assert calls == [
        ([1, 2, 3], {"is_whole": True, "num_ready": 3}),
        ([], {"is_whole": False, "num_ready": 0}),
        ([1, 2, 3], {"is_whole": True, "num_ready": 2}),
    ]
    assert read_board(board.folder / run, "round") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_tracker_that_refuses_one_run_gets_the_others(store, source):
    runs = [made.add_synchronous(store, name, rounds=1) for name in ("one", "two")]
    recorded = []

    def record(run, _points, **_how):
        recorded.append(run.run_id)
        if run.run_id == runs[0]:
            raise NetworkError("no")

    follower = HistoryTracking(source, [SimpleNamespace(record=record)])
    with pytest.raises(NetworkError, match="no"):
        follower.update()
    assert recorded == runs


def test_two_followers_of_one_folder_write_no_round_twice(store, source, board):
    run = made.add_synchronous(store, "one", rounds=2)
    store.set_run_status(run, made.RunStatus.RUNNING, at=made.BEGIN)
    first, second = HistoryTracking(source, [board]), HistoryTracking(source, [TensorBoardTracker(board.folder)])
    assert (first.update(), second.update()) == (2, 2)
    made.add_round(store, run, 3, made.BEGIN + 100, made.PACES_S)
    made.evaluate(store, run, 3, 0.75)
    second.update()
    with pytest.raises(StoreError, match="another program writes it"):
        first.update()
    first.update()
    assert read_board(board.folder / run) == [(1, 0.1), (2, 0.2), (3, 0.75)]


def test_an_id_that_would_be_a_path_is_refused(source, board):
    row = {"run_id": "../up", "status": "running", "name": "x", "started_at": 1.0, "finished_at": None}
    source.read_pages = lambda kind, _filters: iter([[row] if kind == "runs" else []])
    with pytest.raises(DataError, match="no name of a run"):
        HistoryTracking(source, [board]).update()


def test_a_package_that_is_missing_and_a_command_that_names_no_tracker_are_told(monkeypatch, tmp_path, capsys):
    for module, options in {"tensorboard": ["tb"], "mlflow": ["http://127.0.0.1:1"]}.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(SystemExit) as ended:
            main(["history", "track", "--dir", str(tmp_path), f"--{module}", *options])
        assert ended.value.code == MissingPackageError.exit_code
        assert "pip install 'edgefl-fleet[track]'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["history", "track", "--dir", str(tmp_path)])
    assert ended.value.code == 2
    assert "--tensorboard DIR, --mlflow URL, --otlp URL" in capsys.readouterr().err
    words = ["model", "register", "best", "--dir", str(tmp_path), "--mlflow", "http://127.0.0.1:1"]
    for names in (["--name", "a/b"], ["--name", "a", "--alias", "it's"]):
        with pytest.raises(SystemExit) as ended:
            main([*words, *names])
        assert ended.value.code == 2
        assert f"{names[-2]} must have 1 to 200 letters" in capsys.readouterr().err
    for url, words in {"htp://x": "URL of a server", "mlruns": "URL of a server", "http://a:b@c": "no login"}.items():
        with pytest.raises(UsageError, match=words):
            MlflowTracker(url)


def test_a_board_s_own_model_is_another_version_than_the_shared_one():
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'edgefl-fleet[track]'")
    shared, others = {"edgefl.sha256": "12"}, {"by": "somebody"}
    held = [
        SimpleNamespace(version="1", tags={**shared, "edgefl.cluster": "0"}),
        SimpleNamespace(version="2", tags={**shared, **others}),
    ]
    tracker = MlflowTracker("http://127.0.0.1:1")
    tracker._client = SimpleNamespace(
        search_registered_models=lambda _filter: ["digits"], search_model_versions=lambda _filter: held
    )
    assert tracker._find_version("digits", shared) == 2
    assert tracker._find_version("digits", {**shared, "edgefl.cluster": "0"}) == 1
    assert tracker._find_version("digits", {**shared, "edgefl.cluster": "1"}) is None


@contextmanager
def started_server(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [MLFLOW_SERVER, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/server.db", "--artifacts-destination", str(folder)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        until = time.monotonic() + 90
        while True:
            assert process.poll() is None, (folder / "server.log").read_text()[-2000:]
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < until, (folder / "server.log").read_text()[-2000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.extended
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["tensorboard", pytest.param("mlflow", marks=needs_server)])
def test_followers_that_are_killed_at_any_moment_lose_and_double_nothing(store, tmp_path, kind):
    run = made.add_synchronous(store, "one", rounds=1)
    with started_server(tmp_path) if kind == "mlflow" else nullcontext((tmp_path / "tb", None)) as (where, _):
        tracker = MlflowTracker(where) if kind == "mlflow" else TensorBoardTracker(where)
        read = partial(read_mlflow, tracker) if kind == "mlflow" else partial(read_board, tmp_path / "tb" / run)
        HistoryTracking(PageReader(store), [tracker]).update()
        command = [sys.executable, "-m", "edgefl", "history", "track", "--dir", str(tmp_path), "--follow"]
        command += [f"--{kind}", str(where), "--interval-s", "0.2", "--run", run]
        delays, number = random.Random(7), 1
        for _ in range(4):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            held, until = len(read()), time.monotonic() + 60
            while len(read()) <= held + 2:  # at least one round of this process, then some more
                assert time.monotonic() < until, "nothing was tracked"
                number += 1
                made.add_round(store, run, number, made.BEGIN + 10 * number, made.PACES_S)
                made.evaluate(store, run, number, number / 1000)
                time.sleep(delays.uniform(0.05, 0.4))
            process.kill()
            process.wait()
        HistoryTracking(PageReader(store), [tracker]).update()
        wanted = [(1, 0.1), *((step, step / 1000) for step in range(2, number + 1))]
        assert read() == [(step, pytest.approx(value)) for step, value in wanted]


@pytest.mark.extended
@pytest.mark.timeout(300)
@needs_server
def test_a_server_of_mlflow_has_runs_settings_and_points_and_may_be_killed(store, source, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    run = made.add_synchronous(store, "one", rounds=3)
    source.find_run = lambda _text: made.RunInfo(
        run_id=run, name="one", strategy="fedavg", config={"strategy": {"name": "fedavg", "learning_rate": 0.1}}
    )
    with started_server(tmp_path) as (url, process):
        follower = HistoryTracking(source, [MlflowTracker(url)])
        assert follower.update() == 3
        made.add_round(store, run, 4, made.BEGIN + 100, made.PACES_S)
        assert follower.update() == 4, "a run that has ended is looked at whole"
        made.evaluate(store, run, 4, 0.5)
        made.add_round(store, run, 5, made.BEGIN + 200, made.PACES_S)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(NetworkError, match="MLflow at"):
            follower.update()
    with started_server(tmp_path) as (url, _process):
        tracker = MlflowTracker(url)
        assert HistoryTracking(source, [tracker]).update() == 5
        found = find_mlflow(tracker)
        assert read_mlflow(tracker) == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.5)]
        assert found.data.params == {"strategy.name": "fedavg", "strategy.learning_rate": "0.1"}
        assert found.data.metrics["boards/all/compute_s"] == 2.0
        assert (found.info.run_name, found.info.status) == ("one", "FINISHED")
        with Store.open(tmp_path / "b.db") as rolled_back:
            made.add_synchronous(rolled_back, "one", rounds=2)
            HistoryTracking(PageReader(rolled_back), [tracker]).update()
        assert read_mlflow(tracker) == [(1, 0.1), (2, 0.2)], "the other run is superseded"


@pytest.mark.extended
@pytest.mark.timeout(300)
@needs_server
def test_a_model_becomes_one_version_of_mlflow_that_answers_as_the_task_does(tmp_path, monkeypatch, capsys):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'edgefl-fleet[track]'")
    datasets = pytest.importorskip(
        "sklearn.datasets", reason="scikit-learn is not installed: pip install 'edgefl-fleet[demo]'"
    )
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    home, settings = tmp_path / "home", {"run": {"task": "digits", "rounds": 1}, "simulation": {"devices": 2}}
    runs = [edgefl.simulate({**settings, "strategy": {"learning_rate": rate}}, root=home) for rate in (0.1, 0.2)]
    scores = {run.run_id: run.rounds[-1]["accuracy"] for run in runs}
    first, second = scores
    with started_server(tmp_path) as (url, _process):

        def register(run):
            words = ["--mlflow", url, "--name", "digits", "--alias", "champion", "--dir", str(home), "--run", run]
            with pytest.raises(SystemExit) as ended:
                main(["model", "register", "latest", *words])
            return ended.value.code

        with monkeypatch.context() as interrupted:  # between the upload and the version
            interrupted.setattr(
                "mlflow.MlflowClient.create_model_version", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)
            )
            assert register(first) == 1
        assert [register(run) for run in (first, first, second)] == [0, 0, 0], capsys.readouterr().err
        tracker = MlflowTracker(url)
        versions = tracker._client.search_model_versions("name = 'digits'")
        held = {tracker._client.get_run(one.run_id).data.tags[tracking.RUN_TAG]: one.version for one in versions}
        assert held == {first: "1", second: "2"}
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        with warnings.catch_warnings(action="ignore"):
            model = mlflow.pyfunc.load_model("models:/digits@champion")
        images, labels = datasets.load_digits(return_X_y=True)
        logits = model.predict({"inputs": images.reshape(-1, 8, 8).astype("float32")})["logits"]
    assert (logits.argmax(axis=1) == labels).mean() == pytest.approx(scores[second], abs=0.1)
    assert model.metadata.signature.inputs.inputs[0].shape == (-1, 8, 8)
