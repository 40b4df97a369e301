"""The exported app runs on Flower alone: its two halves over a grid in this process, and over stock processes."""

import importlib
import io
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.serverapp import Grid
from packaging.requirements import Requirement

import edgefl
from edgefl.compression.codec import make_codec
from edgefl.core.config import load_run, parse_run
from edgefl.core.errors import ConfigError, NetworkError, UsageError
from edgefl.core.types import (
    DeviceAvailable,
    EvaluateInstruction,
    EvaluateResult,
    FinishEarlyInstruction,
    InstructionFailed,
    TrainConfig,
    TrainInstruction,
    Update,
    UpdateMetrics,
    UpdateStatus,
)
from edgefl.flower.app_export import EXCLUDED_FOLDERS, export_flower_app
from edgefl.flower.app_runtime import InMemoryJournal, decode_content, encode_content, make_body_record
from edgefl.flower.grid_fleet import GridFleet
from edgefl.flower.internals import ensure_identity
from edgefl.storage.checkpoints import load_model_file
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.registry import make_task

CONFIG = {
    "run": {"task": "digits", "rounds": 3, "seed": 11},
    "strategy": {"name": "fedavg", "learning_rate": 0.5, "epochs": 2.0},
    "compression": {"down": "dense|fp16"},
    "devices": {"min": 2},
}


REFUSED, SILENT = object(), object()


class HereGrid(Grid):
    """Nodes that are ClientApps in this process and answer when they are asked for; `wrong` makes a node fail."""

    def __init__(self, app, configs, run_config):
        self.app, self.wrong, self.replies, self.numbers = app, {}, {}, itertools.count(1)
        self.contexts = {
            node_id: Context(run_id=1, node_id=node_id, node_config=config, state=RecordDict(), run_config=run_config)
            for node_id, config in configs.items()
        }
        self.requests, self.headers = [], []

    run = property(lambda self: None)
    set_run = create_message = send_and_receive = None  # an app of ours calls none of them

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        self.requests.append(len(list(messages)))
        return [self._push(message) for message in messages]

    def _push(self, message):
        key = f"m{next(self.numbers)}"
        message.metadata.__dict__["_message_id"] = key
        node_id = message.metadata.dst_node_id
        self.headers.append(decode_content(message.content)[0])
        wrong = self.wrong.get((node_id, message.metadata.message_type))
        if wrong is REFUSED:
            return None
        if wrong is SILENT:
            return key
        if isinstance(wrong, Error | RecordDict):
            self.replies[key] = Message(wrong, reply_to=message)
        else:
            self.replies[key] = self.app(message, self.contexts[node_id])
        return key

    def pull_messages(self, message_ids):
        return [self.replies.pop(key) for key in message_ids if key in self.replies]


@pytest.fixture
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def export(tmp_path, monkeypatch, state_home):
    """Writes an app and returns its folder; its package can be imported meanwhile."""
    ensure_identity()

    def write(config=CONFIG, **options):
        out = tmp_path / "app"
        export_flower_app(parse_run(config), out, scheme="iid", **options)
        monkeypatch.syspath_prepend(out)
        return out

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "edgefl_app"]:
        del sys.modules[name]


def app_of(name):
    return importlib.import_module(f"edgefl_app.{name}").app


def run_config_of(out, **overrides):
    return {**tomllib.loads((out / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"], **overrides}


@pytest.fixture
def nodes(tmp_path):
    """Two nodes with shards of their own, cut by a scheme."""

    def cut(scheme="iid"):
        paths = create_shards("digits", scheme, 2, tmp_path / "cut")
        return {n: {"shard": str(path), "name": path.stem} for n, path in enumerate(paths, 1)}

    return cut


def partitions(number):
    return {100 + n: {"partition-id": n, "num-partitions": number} for n in range(number)}


def run_app(out, configs, **overrides):
    """Runs the ServerApp to its end and returns the model and the rows that it wrote."""
    run_config = run_config_of(out, result=str(out / "result"), **overrides)
    grid = HereGrid(app_of("client_app"), configs, run_config)
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    app_of("server_app")(grid, context)
    history = json.loads((out / "result" / "history.json").read_text())
    return load_model_file(out / "result" / "model.safetensors"), history


def test_the_app_learns_and_writes_down_how(export):
    _, history = run_app(export(), partitions(3))
    rows = history["versions"]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert history["reason"] == "rounds reached 3"
    assert {row["num_updates"] for row in rows} == {3} or rows[0]["num_updates"] == 2
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["accuracy"] > 0.7
    assert rows[0]["bytes_up"] > 2 * 4 * 650
    assert 0 < rows[0]["bytes_down"] < rows[0]["bytes_up"], "the model goes out as fp16"


def test_the_same_seed_gives_the_same_model_whatever_flower_calls_its_nodes(export):
    out = export()
    model, _ = run_app(out, partitions(2))
    (out / "result").rename(out / "first")
    again, _ = run_app(
        out, {77: {"partition-id": 1, "num-partitions": 2}, 5: {"partition-id": 0, "num-partitions": 2}}
    )
    assert {name: tensor.tobytes() for name, tensor in model.items()} == {n: t.tobytes() for n, t in again.items()}


@pytest.mark.parametrize("name", ["asgd", "flwr:FedAdam", "redundant", "esync"])
def test_other_kinds_of_strategies_run_too(export, name, nodes):
    config = {**CONFIG, "run": {**CONFIG["run"], "rounds": 2}, "strategy": {"name": name}}
    model, history = run_app(export(config), nodes("redundant:2" if name == "redundant" else "iid"))
    assert history["reason"] == "rounds reached 2"
    assert all(np.isfinite(tensor).all() for tensor in model.values())


@pytest.mark.parametrize("name", ["dsgd", "scaffold"])
def test_a_strategy_that_sends_messages_beside_the_model_is_refused(export, name, nodes):
    with pytest.raises(ConfigError, match="a plain Flower app does not carry"):
        run_app(export({**CONFIG, "strategy": {"name": name}}), nodes())


def test_scales_that_only_a_fleet_can_find_are_refused(export):
    task = {"columns": "heat,damp", "target": "load", "normalise": "fleet"}
    with pytest.raises(ConfigError, match="asks boards for sums before the first round"):
        export({**CONFIG, "run": {"task": "table", "rounds": 3}, "task": task})


def test_a_shard_may_be_named_for_all_nodes_at_once(export, tmp_path):
    create_shards("digits", "iid", 2, tmp_path / "cut")
    pattern = str(tmp_path / "cut" / "device-{partition}.npz")
    _, history = run_app(export(), {1: {"partition-id": 0}, 2: {"partition-id": 1}}, shard=pattern)
    assert len(history["versions"]) == 3


def test_a_users_own_strategy_goes_into_the_app(export, tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    source = "from edgefl.strategies.synchronous.fedavg import FedAvgConfig\n\nclass Plain(FedAvgConfig):\n    pass\n"
    (tmp_path / "modules" / "my_plain.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "my_plain")
    out = export({**CONFIG, "strategy": {"name": "my_plain:Plain"}})
    assert (out / "my_plain.py").read_text() == source
    assert "`my_plain:Plain`" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({"name": "nowhere_at_all:Plain"}, "the module of nowhere_at_all:Plain is not found"),
        ({"name": "esync", "mode": "live"}, r"strategy\.mode = 'live' needs devices that can be recalled"),
        ({"name": "esync", "mode": "query"}, r"strategy\.mode = 'query' needs devices that can be recalled"),
    ],
)
def test_what_a_stock_node_cannot_do_is_not_exported(tmp_path, monkeypatch, strategy, told):
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "nowhere_at_all")
    with pytest.raises(ConfigError, match=told):
        export_flower_app(parse_run({**CONFIG, "strategy": strategy}), tmp_path / "app", scheme="iid")
    assert not (tmp_path / "app").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UsageError, match="exists and is not an empty folder"):
            export_flower_app(parse_run(CONFIG), out, scheme="iid")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_run_file_of_the_app_says_the_same_as_the_one_it_was_made_from(export):
    config = {
        **CONFIG,
        "run": {"task": "digits", "name": 'a "name" \\ ü', "seconds": 1e-7, "bytes": 10**15, "accuracy": 1},
        "devices": {"groups": ["lab", "roof"], "accelerator": True},
    }
    out = export(config)
    assert load_run(out / "edgefl_app" / "run.toml") == parse_run(config)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # of Flower's own
def test_the_app_is_one_that_flower_accepts_and_packs_whole(export):
    out = export({**CONFIG, "run": {**CONFIG["run"], "name": "My run / 3"}})
    project = tomllib.loads((out / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-run-3"
    for path in project["tool"]["flwr"]["app"]["components"].values():
        module, _, name = path.partition(":")
        assert hasattr(importlib.import_module(module), name)
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(out))) as fab:
        packed = set(fab.namelist()) - {".info/CONTENT"}
    assert packed == {path.relative_to(out).as_posix() for path in out.rglob("*.*") if path.suffix != ".pyc"} | {
        "LICENSE"
    }


@pytest.mark.parametrize(
    ("task", "options", "names"),
    [
        ("digits", {}, {"safetensors", "scikit-learn", "zstandard"}),
        ("fashion-mnist", {"model": "logistic"}, {"safetensors", "zstandard"}),
        ("fashion-mnist", {}, {"safetensors", "torch", "zstandard"}),
    ],
)
def test_an_app_depends_on_what_flower_does_not_bring_and_never_on_edgefl(export, task, options, names):
    out = export({**CONFIG, "run": {**CONFIG["run"], "task": task}, "task": options})
    needs = [
        Requirement(text) for text in tomllib.loads((out / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    assert {need.name for need in needs} == names
    assert all(need.specifier and "extra" not in str(need.marker) for need in needs)


EVERYTHING = """
import importlib, sys
from edgefl.strategies import registry as strategies
from edgefl.tasks import registry as tasks
names = [place.partition(":")[0] for place in (*strategies.BUILT_IN_STRATEGIES.values(), *tasks.BUILT_IN.values())]
for name in (*names, "edgefl.flower.strategy", "edgefl_app.server_app", "edgefl_app.client_app"):
    importlib.import_module(name)
print(*(module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "edgefl"))
"""


def test_an_app_imports_edgefl_from_its_own_folder(export):
    out = export()
    assert all((Path(edgefl.__file__).parent / room).is_dir() for room in EXCLUDED_FOLDERS)
    code = f"import sys; sys.path.insert(0, {str(out)!r})\n{EVERYTHING}"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(out / "edgefl") for file in done.stdout.split())


def test_updates_that_come_together_are_all_in_the_rows_and_the_average_and_the_nodes_apart():
    journal, keys = InMemoryJournal(), ("a", "b", "c", "d")
    metrics = UpdateMetrics(num_examples=1, bytes_up=7)
    journal.record_events(
        [Update(assignment_id=key, device_id=key, base_version=0, tensors={}, metrics=metrics) for key in keys]
    )
    for version, key in enumerate(keys, 1):
        journal.record_aggregation(version, [key], None)
    assert [(row["num_updates"], row["bytes_up"]) for row in journal.rows] == [(1, 7)] * 4
    journal = InMemoryJournal()
    journal.record_aggregation(1, [], None)
    for device, subject, accuracy in (("a", "", 0.5), ("a", "a", 0.25), ("b", "", 0.5), ("b", "b", 0.75)):
        scored = EvaluateResult(
            assignment_id=f"{device}:{subject}", device_id=device, version=1, round=1, source="device",
            num_examples=9, loss=0.1, accuracy=accuracy, subject=subject,
        )  # fmt: skip
        journal.record_events([scored])
    (row,) = journal.rows
    assert (row["accuracy"], row["node_accuracy"], row["worst_node_accuracy"]) == (0.5, 0.5, 0.25)
    journal.record_aggregation(2, [], None)
    assert "node_accuracy" not in journal.rows[1]


# The fleet


def node_fleet(out, configs, clock=time.monotonic):
    """A fleet over nodes that have introduced themselves, and its grid."""
    grid = HereGrid(app_of("client_app"), configs, run_config_of(out))
    header = {"v": 2, "run": "r1", "task": "digits", "options": {}, "seed": 1, "test_fraction": 0.1}
    fleet = GridFleet(grid, header=header, encode=encode, decode=lambda body: {"w": body}, clock=clock)
    return fleet, grid


def encode(model, version):
    task = make_task("digits")
    first = task.init(version)
    tensors = {name: 0 * tensor for name, tensor in first.items()} if model else first
    return make_codec("dense", task.shapes()).encode(tensors, np.random.default_rng(0))


class Source:
    version = 0

    def device_model(self, subject):
        return {"own": subject} if subject else {}

    def changed(self, since):
        return None


def order(key="a1", device="device-01", **options):
    plan = TrainConfig(iterations=1)
    return TrainInstruction(assignment_id=key, device_id=device, base_version=0, plan=plan, codec="dense", **options)


def events_of(fleet, number, timeout_s=10):
    events, until_s = [], time.monotonic() + timeout_s
    while len(events) < number and time.monotonic() < until_s:
        events += fleet.wait(fleet.view().now_s + 0.5)
    return events


def test_nodes_join_under_their_own_names(export):
    fleet, _ = node_fleet(export(), {**partitions(2), 9: {"partition-id": 0, "num-partitions": 2, "name": "roof"}})
    assert {event.device_id for event in events_of(fleet, 3)} == {"device-01", "device-02", "roof"}
    view = fleet.view()
    assert view.idle == ["device-01", "device-02", "roof"]
    assert view.devices["roof"].examples["digits"] > 100
    assert view.devices["roof"].tasks == ("digits",)


def test_work_keeps_a_device_busy_until_its_update_is_there(export):
    fleet, grid = node_fleet(export(), partitions(2))
    events_of(fleet, 2)
    evaluation = EvaluateInstruction(assignment_id="e1", device_id="device-02", version=0, round=0)
    fleet.dispatch(
        [
            order(used_assignments=("a0",)),
            evaluation,
            FinishEarlyInstruction(assignment_id="a1", device_id="device-01"),
        ],
        Source(),
    )
    assert (fleet.view().busy, fleet.view().idle) == ({"device-01": ["a1"]}, ["device-02"])
    assert grid.requests == [2, 2], "one request for the introductions, one for the orders"
    assert (grid.headers[2]["used_assignments"], grid.headers[2]["assignment"]) == (["r1/a0"], "r1/a1")
    events = {type(event): event for event in events_of(fleet, 2)}
    update, evaluated = events[Update], events[EvaluateResult]
    assert (update.assignment_id, update.metrics.iterations, update.base_version) == ("a1", 1, 0)
    assert (update.metrics.bytes_up, update.metrics.bytes_down) == (len(update.tensors["w"]), len(encode({}, 0)))
    assert (evaluated.device_id, evaluated.source, evaluated.num_examples > 10) == ("device-02", "device", True)
    assert fleet.view().busy == {}
    assert fleet.view().speeds["device-01"].seconds_per_iteration > 0


def test_what_a_node_claims_of_its_own_work_is_bounded(export):
    fleet, grid = node_fleet(export(), partitions(2))
    events_of(fleet, 2)
    known = fleet.view().devices["device-01"].examples["digits"]
    claims = {"num_examples": 2**53, "iterations": 2**53, "compute_s": 1e9, "loss": 0.1, "accuracy": 1.0}
    for kind in ("train", "evaluate"):
        grid.wrong[100, kind] = encode_content({"v": 2, "metrics": claims}, make_body_record(b"x"))
    fleet.dispatch(
        [order(), EvaluateInstruction(assignment_id="e1", device_id="device-01", version=0, round=0)], Source()
    )
    events = {type(event): event for event in events_of(fleet, 2)}
    metrics = events[Update].metrics
    assert (metrics.num_examples, metrics.iterations, metrics.compute_s < 60) == (known, 1, True)
    assert events[EvaluateResult].num_examples == known


NONSENSE = "its answer makes no sense: "


@pytest.mark.parametrize(
    ("wrong", "outcome", "reason"),
    [
        (REFUSED, UpdateStatus.LOST, "the SuperLink did not take the message"),
        (Error(code=3, reason="node offline"), UpdateStatus.LOST, "Flower: node offline"),
        (Error(code=2, reason="it raised"), UpdateStatus.FAILED, "Flower: it raised"),
        (RecordDict(), UpdateStatus.FAILED, "a message without our header"),
        (encode_content({"v": 1, "error": "DataError: no shard"}), UpdateStatus.FAILED, "DataError: no shard"),
        (encode_content({"v": 1}), UpdateStatus.FAILED, f"{NONSENSE}KeyError"),
        (encode_content({"metrics": {"compute_s": "x"}}), UpdateStatus.FAILED, f"{NONSENSE}ValueError"),
        (encode_content({"metrics": 3}), UpdateStatus.FAILED, f"{NONSENSE}AttributeError"),
        (encode_content({"metrics": {"compute_s": math.nan}}), UpdateStatus.FAILED, f"{NONSENSE}ValueError"),
        (
            encode_content({"metrics": {"compute_s": 1.0, "iterations": math.inf}}),
            UpdateStatus.FAILED,
            f"{NONSENSE}OverflowError",
        ),
        (SILENT, UpdateStatus.LOST, "its deadline has passed"),
    ],
)
def test_an_assignment_that_brings_nothing_is_lost_with_its_reason(export, wrong, outcome, reason):
    fleet, grid = node_fleet(export(), partitions(1))
    events_of(fleet, 1)
    grid.wrong[100, "train"] = wrong
    fleet.dispatch([order(deadline_s=0.3 if wrong is SILENT else None)], Source())
    (lost,) = events_of(fleet, 1)
    assert isinstance(lost, InstructionFailed)
    assert (lost.assignment_id, lost.outcome, reason in lost.reason) == ("a1", outcome, True)
    assert fleet.view().idle == ["device-01"]


def test_an_evaluation_that_is_not_a_number_is_lost_with_its_reason(export):
    fleet, grid = node_fleet(export(), partitions(1))
    events_of(fleet, 1)
    grid.wrong[100, "evaluate"] = encode_content({"metrics": {"loss": 0.5, "accuracy": math.nan, "num_examples": 9}})
    fleet.dispatch([EvaluateInstruction(assignment_id="e1", device_id="device-01", version=0, round=0)], Source())
    (lost,) = events_of(fleet, 1)
    assert isinstance(lost, InstructionFailed)
    assert lost.reason.startswith(f"{NONSENSE}ValueError")


def test_a_node_that_leaves_loses_its_work_and_may_come_back(export):
    now = [0.0]
    fleet, grid = node_fleet(export(), partitions(2), clock=lambda: now[0])
    assert len(fleet.wait(0)) == 2
    grid.wrong[101, "train"] = SILENT
    fleet.dispatch([order(device="device-02")], Source())
    context = grid.contexts.pop(101)
    now[0] = 4.0
    (lost,) = fleet.wait(4.0)
    assert (lost.device_id, lost.outcome, lost.reason) == ("device-02", UpdateStatus.LOST, "the node is gone")
    assert list(fleet.view().devices) == ["device-01"]
    fleet.dispatch([order("a2", device="device-02")], Source())
    (lost,) = fleet.wait(4.0)
    assert lost.reason == "the node is gone"
    grid.contexts[202] = context
    now[0] = 8.0
    assert [type(event) for event in fleet.wait(8.0)] == [DeviceAvailable]
    assert fleet.view().idle == ["device-01", "device-02"]


def test_a_node_without_a_shard_takes_no_part_and_is_asked_again(export, caplog):
    now = [0.0]
    fleet, grid = node_fleet(export(), {**partitions(1), 9: {}, 8: partitions(1)[100]}, clock=lambda: now[0])
    assert len(fleet.wait(0)) == 1
    assert "node 9 takes no part: ConfigError: this node has no shard" in caplog.text
    assert re.search(r"node (8|100) takes no part: .*two nodes are called device-01", caplog.text)
    grid.contexts[9].node_config = {"partition-id": 1, "num-partitions": 2}
    now[0] = 30.0
    assert fleet.wait(30.0) == []
    now[0] = 61.0
    assert [event.device_id for event in fleet.wait(61.0)] == ["device-02"]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"partition-id": 2, "num-partitions": 2}, "partition-id must lie in 0 to num-partitions - 1 = 1, got 2"),
        ({"shard": "x.npz", "name": "../../up"}, "a node's name must be letters"),
        ({"shard": "no-such-file.npz"}, "this node's shard cannot be read"),
    ],
)
def test_a_node_with_a_wrong_configuration_says_so(export, caplog, config, told):
    fleet, _ = node_fleet(export(), {5: config})
    assert fleet.wait(0) == []
    assert told in caplog.text


def test_a_message_of_somebody_else_is_refused():
    for content in (RecordDict(), encode_content([1, 2])):
        with pytest.raises(NetworkError):
            decode_content(content)


# Flower's simulation engine

SIMULATION = """
import json, sys, traceback
from edgefl_app import client_app, server_app
from edgefl.flower.app_runtime import InMemoryJournal
from flwr.simulation import run_simulation

journals = []
server_app.InMemoryJournal = lambda: journals.append(InMemoryJournal()) or journals[-1]
run_simulation(server_app.app, client_app.app, num_supernodes=3)
print("rows", json.dumps(journals[0].rows))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_it_runs_on_flowers_simulation_engine(export, tmp_path, state_home):
    pytest.importorskip("ray", reason="needs ray: pip install 'flwr[simulation]'")
    out = export({**CONFIG, "devices": {"min": 3}})
    environment = {**os.environ, "PYTHONPATH": f"{out}{os.pathsep}{Path(edgefl.__file__).parents[1]}"}
    done = subprocess.run(
        [sys.executable, "-c", SIMULATION], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("rows ")]
    rows = json.loads(line.removeprefix("rows "))
    assert [row["num_updates"] for row in rows] == [3, 3, 3]
    assert rows[-1]["accuracy"] > 0.7


def test_a_node_evaluates_its_own_model_beside_the_global_one(export):
    fleet, _ = node_fleet(export(), partitions(2))
    events_of(fleet, 2)
    asked = [("device-01", ""), ("device-02", "device-02"), ("device-02", ""), ("device-01", "device-01")]
    orders = [
        EvaluateInstruction(assignment_id=f"{name}:{subject}", device_id=name, version=0, round=0, subject=subject)
        for name, subject in asked
    ]
    fleet.dispatch(orders, Source())
    found = {(event.device_id, event.subject): event for event in events_of(fleet, 4)}
    assert set(found) == set(asked)
    # Zero weights find every digit equally likely.
    is_zero = {key: event.loss == pytest.approx(math.log(10), abs=1e-6) for key, event in found.items()}
    assert is_zero == {key: bool(key[1]) for key in asked}
