"""A Flower app as a run: a process for its ServerApp, whose messages are assignments and get updates as replies."""

import io
import math
import os
import re
import sys
import zipfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flower_apps import CLIENT, PRIVATE_APP, PROJECT, SERVER, HereGrid, forget_modules, imported_app, write_app
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.common.config import get_fab_config

from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import CodecError, ConfigError, RunFailedError, TaskError
from edgefl.core.types import DeviceInfo, HealthMetrics, Role, Update, UpdateMetrics
from edgefl.engine.assembly import job as assembly
from edgefl.flower import server_link
from edgefl.flower.app_check import check_app
from edgefl.flower.app_codec import ChangeCodec
from edgefl.flower.app_folder import read_app
from edgefl.flower.app_inputs import MessageInputs
from edgefl.flower.app_job import LOAD_S, FlowerApp, compute_fingerprint, load_component, make_app_run
from edgefl.flower.app_messages import decode_message, encode_envelope, encode_message, split_envelope
from edgefl.flower.app_strategy import SENT_S, read_reply
from edgefl.flower.server_process import ProcessGrid, run_app
from edgefl.strategies.job_strategy import RESULT
from edgefl.strategies.participation import DeviceSelection, RunParticipationPolicy
from edgefl.system.process_messages import write_message
from edgefl.tasks.job import JobContext

BOARDS = ("a", "b", "c")
METRICS = UpdateMetrics(iterations=1, num_examples=0, loss=None, compute_s=0.0, send_s=0.0, bytes_up=0, bytes_down=0)


@dataclass
class View:
    """Boards that are there, and what they do."""

    devices: dict = field(default_factory=lambda: {name: DeviceInfo(device_id=name) for name in BOARDS})
    busy: dict = field(default_factory=dict)
    health: dict = field(default_factory=dict)
    now_s: float = 0.0

    @property
    def idle(self):
        trainers = (name for name, info in sorted(self.devices.items()) if info.role == Role.TRAINER)
        return [name for name in trainers if name not in self.busy]


class Fleet:
    """Boards in this process that do the parts of a run's strategy."""

    def __init__(self, root, folder, **job):
        self.app = read_app(folder)
        kind = partial(type("App", (FlowerApp,), {"root": folder}), run_config=job.get("run_config", ""))
        self.jobs = {name: kind() for name in BOARDS}
        self.root, self.view, self.lines, self.asked = root, View(), [], []
        self.policy = RunParticipationPolicy(selection=DeviceSelection(unhealthy_policy="rest", max_temperature_c=80))
        self.paths = [root / name for name in BOARDS]
        for path in self.paths:
            path.mkdir(exist_ok=True)
        self.strategy = self.build(kind(), **job)
        self.state = self.strategy.init({})
        self.left, self.server_s = [], 0.0

    def build(self, job, *, codec="dense", down="dense", **options):
        tables = {"job": {"name": "flower-mean-app", **options}, "devices": {"min": 2}}
        config = parse_run({**tables, "compression": {"up": codec, "down": down}})
        return assembly._make_app_strategy(config, "run-1", job, self.root / "coordinator" / "bases")

    def turn(self, seconds=0.0):
        """One turn of the round loop; the work that it gives out is under way then."""
        self.view.now_s += seconds
        if self.strategy.ready(self.state, self.view):
            self.state = self.strategy.aggregate(self.state)
        self.state, decision = self.strategy.assign(self.state, self.policy.eligible_view(self.view))
        for instruction in decision.instructions:
            self.view.busy[instruction.device_id] = [instruction.assignment_id]
            self.left.append((instruction, self.strategy.make_input(instruction.block)))
        is_late = (
            bool(decision.instructions) and self.server_s > 0
        )  # it had the time of before the ServerApp sent them
        self.view.now_s += self.server_s if is_late else 0.0
        return self.turn() if is_late or decision.next_wake_s == SENT_S else decision

    def work(self, *names):
        """Lets boards, all of them by default, answer what they have."""
        for instruction, body in [*self.left]:
            name = instruction.device_id
            if name in (names or BOARDS):
                self.left.remove((instruction, body))
                self.asked.append(instruction.assignment_id)
                self.receive(instruction, self.answer(name, instruction.block, body))

    def answer(self, name, part, body):
        scratch = self.root / f"scratch-{name}"
        scratch.mkdir(exist_ok=True)
        context = JobContext(
            part=part,
            num_parts=0,
            input=body,
            device_id=name,
            path=self.root / name,
            scratch=scratch,
            log=lambda line: self.lines.append(f"{name} {line}"),
        )
        before = Path.cwd()
        os.chdir(scratch)
        if self.jobs[name]._client is None:  # each board has a process of its own, where nothing is imported yet
            forget_modules()
        try:
            return self.jobs[name].work(context)
        finally:
            os.chdir(before)

    def receive(self, instruction, body):
        self.view.busy.pop(instruction.device_id, None)
        update = Update(
            assignment_id=instruction.assignment_id,
            device_id=instruction.device_id,
            base_version=0,
            tensors={RESULT: np.frombuffer(body, np.uint8)},
            metrics=METRICS,
            received_s=self.view.now_s,
        )
        self.state = self.strategy.receive(self.state, update)

    def run(self):
        """Goes on until the app has ended; returns the files that it left."""
        for _ in range(100):
            self.turn(1.0)
            if self.state.version:
                return self.read_result()
            self.work()
        raise AssertionError("the app does not end")

    def read_result(self):
        with zipfile.ZipFile(io.BytesIO(self.state.model[RESULT].tobytes())) as archive:
            return {name: archive.read(name) for name in archive.namelist()}


def compute_expected(fleet, tmp_path, monkeypatch, is_away=lambda *_: False):
    """Returns the model of Flower's own strategy over ClientApps in this process."""
    folder = tmp_path / "expected"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = dict(fleet.app.config)
    setup = {"root": str(fleet.app.root), "server": fleet.app.server, "run_config": config, "run_id": 1, "seed": 7}
    run_app(setup, HereGrid(fleet.app, fleet.paths, is_away))
    return load_model(io.BytesIO((folder / "final_model.npz").read_bytes()))


def load_model(file):
    with np.load(file) as arrays:
        return arrays["arr_0"]


@pytest.fixture
def make_fleet(tmp_path):
    """Makes a fleet of an app with other files; the app's modules and processes are gone afterwards."""
    made = []

    def make(changes=None, **job):
        folder = write_app(tmp_path / f"app-{len(made)}", changes)
        context = imported_app(read_app(folder))
        context.__enter__()
        made.append((context, fleet := Fleet(tmp_path, folder, **job)))
        return fleet

    yield make
    for context, fleet in made:
        fleet.strategy.link.close()
        context.__exit__(None, None, None)


def test_an_app_ends_with_the_model_of_flowers_own_strategy(make_fleet, tmp_path, monkeypatch):
    fleet = make_fleet()
    files = fleet.run()
    assert set(files) == {"final_model.npz", "server-app.log"}
    assert b"[ROUND 3/3]" in files["server-app.log"]
    model = load_model(io.BytesIO(files["final_model.npz"]))
    np.testing.assert_array_equal(model, compute_expected(fleet, tmp_path, monkeypatch))
    assert np.abs(model).min() > 0
    assert len(fleet.state.used) == len(fleet.asked) == 18
    assert fleet.state.rounds == [number for number in (1, 2, 3) for _ in range(6)]
    assert [name[0] for name in fleet.asked] == [*"mmmeee"] * 3
    assert "a train in round 1: num-examples 10, train_loss 0.0284003, calls 1" in fleet.lines
    assert any(
        line.startswith("c evaluate in round 3: num-examples 30,") and line.endswith("calls 6")
        for line in fleet.lines
    )
    assert fleet.strategy.facts(fleet.state) == {"messages": 18.0, "errors": 0.0}


def find_model(fleet, expected, keep):
    """Returns the model of FedAvg where boards keep so many of their largest changes."""
    model, weights = np.zeros_like(expected), np.array([10, 20, 30]) / 60
    for _ in range(3):
        mean = np.zeros_like(model)
        for number, weight in enumerate(weights):
            change = 0.5 * (np.random.default_rng(number).standard_normal(model.shape) - model)
            change[np.argsort(np.abs(change))[:-keep]] = 0
            mean += weight * change
        model = model + mean
    return model


@pytest.mark.parametrize(("line", "share"), [("int8", 0.2), ("topk:0.1", 0.2), ("ef|topk:0.1", 0.2)])
def test_a_codec_makes_replies_small_and_the_model_is_within_its_bound(
    make_fleet, tmp_path, monkeypatch, line, share
):
    fleet, sizes = make_fleet(run_config="model.size=2000", codec=line), []
    answer = fleet.answer
    fleet.answer = lambda name, part, body: sizes.append(len(reply := answer(name, part, body))) or reply
    model = load_model(io.BytesIO(fleet.run()["final_model.npz"]))
    fleet.app = replace(fleet.app, config={**fleet.app.config, "model.size": 2000})
    expected = compute_expected(fleet, tmp_path, monkeypatch)
    assert max(sizes) < share * 8 * 2000
    assert len(fleet.state.used) == 18
    if line.startswith("ef"):
        assert np.abs(model - expected).mean() < 0.97 * np.abs(find_model(fleet, expected, 200) - expected).mean()
    elif line == "int8":
        # Half a step of a 127th of the largest change, in each of three rounds, of which a round halves what is left.
        largest = (
            0.5 * 2 * max(np.abs(np.random.default_rng(number).standard_normal(2000)).max() for number in range(3))
        )
        assert 0 < np.abs(model - expected).max() <= 2 * largest / 254
    else:
        np.testing.assert_allclose(model, find_model(fleet, expected, 200), atol=1e-5)


@pytest.mark.parametrize("codec", ["dense", "int8"])
def test_messages_that_train_or_evaluate_are_small_and_boards_start_from_the_rounded_model(make_fleet, codec):
    fleet, sizes = make_fleet(run_config="model.size=2000", codec=codec, down="fp16"), []
    answer = fleet.answer
    fleet.answer = lambda name, part, body: sizes.append(len(body)) or answer(name, part, body)
    model = load_model(io.BytesIO(fleet.run()["final_model.npz"]))
    assert len(sizes) == 18
    assert max(sizes) < 0.3 * 8 * 2000
    plain = make_fleet(run_config="model.size=2000")
    exact = load_model(io.BytesIO(plain.run()["final_model.npz"]))
    assert 0 < np.abs(model - exact).max() < (0.003 if codec == "dense" else 0.1)


def test_a_run_with_a_codec_goes_on_with_the_same_messages_and_replies(make_fleet):
    fleet = make_fleet(codec="qsgd:4")
    fleet.turn()
    instruction, body = fleet.left[0]
    assert split_envelope(body)[0]["codec"] == "qsgd:4"
    assert fleet.answer("a", instruction.block, body) == fleet.answer("a", instruction.block, body)


@pytest.mark.parametrize("kind", ["train", "query"])
def test_replies_that_train_have_changes_and_no_others(make_fleet, kind):
    fleet = make_fleet()
    fleet.jobs["a"]._client = lambda message, _: Message(message.content, reply_to=message)
    content = RecordDict({"arrays": ArrayRecord([np.arange(500.0)])})
    envelope = {"run": "r", "run_id": 1, "node_id": 2, "node_config": {}, "codec": "int8"}
    body = encode_envelope(envelope) + encode_message({"type": kind, "group": ""}, content)
    assert (b'"changes"' in fleet.answer("a", 0, body)) == (kind == "train")


def test_what_ef_leaves_out_stays_on_the_board_over_a_restart_and_the_app_does_not_see_it(make_fleet):
    fleet, states = make_fleet(), []

    def client(message, context):
        states.append([*context.state])
        context.state["mine"] = MetricRecord({"count": len(states)})
        if message.metadata.message_type == "query":
            return Message(RecordDict({"seen": MetricRecord({"n": 1})}), reply_to=message)
        changed = message.content["arrays"].to_numpy_ndarrays()[0] + np.arange(1.0, 101.0)
        return Message(RecordDict({"arrays": ArrayRecord([changed])}), reply_to=message)

    envelope = {"run": "r", "run_id": 1, "node_id": 2, "node_config": {}, "codec": "ef|topk:0.2"}
    content, total, first = RecordDict({"arrays": ArrayRecord([np.zeros(100)])}), np.zeros(100), b""
    for part, kind in enumerate(["train", "train", "query", "train", "train", "train"]):
        fleet.jobs["a"] = type(fleet.jobs["a"])()
        fleet.jobs["a"]._client = client
        body = encode_envelope(envelope) + encode_message({"type": kind, "group": ""}, content)
        reply = fleet.answer("a", part, body)
        assert fleet.answer("a", part, body) == reply, "its reply was lost, and the message comes again"
        if kind == "train":
            total += decode_message(reply, ChangeCodec(content))[1]["arrays"].to_numpy_ndarrays()[0]
            first = first or reply
    assert states == [[], [], *[["mine"]] * 10]
    # 20 of 100 entries in each of five replies: the largest of what is left over.
    assert np.count_nonzero(total) > 50
    np.testing.assert_array_less(total, 5 * np.arange(1.0, 101.0) + 1e-3)
    # Another run begins without it.
    anew = encode_envelope(envelope | {"run": "s"}) + encode_message({"type": "train", "group": ""}, content)
    assert fleet.answer("a", 0, anew) == first


@pytest.mark.parametrize(
    ("name", "section", "words"),
    [
        ("flower-mean-app", {"up": "auto"}, "compression.up must be one codec for a Flower app"),
        ("flower-mean-app", {"up": "int7"}, "compression.up: "),
        ("flower-mean-app", {"up": "powersgd:2"}, "compression.up: "),
        (
            "flower-mean-app",
            {"down": "delta|fp16"},
            "compression.down must be a codec of whole models for a Flower app",
        ),
        ("flower-mean-app", {"down": "auto"}, "compression.down must be a codec of whole models for a Flower app"),
        ("flower-mean-app", {"down": "topk:0.1"}, "compression.down: "),
        ("flower-mean-app", {"residuals": "durable"}, "compression.residuals means nothing for a Flower app"),
        ("texts:Words", {"up": "int8"}, "compression means nothing beside job"),
    ],
)
def test_settings_of_compression_that_do_not_go_with_an_app_are_refused(name, section, words):
    with pytest.raises((CodecError, ConfigError)) as raised:
        assembly._make_codec_line(parse_run({"job": {"name": name}, "compression": section}))
    assert words in str(raised.value)


def test_a_board_that_goes_away_is_an_error_to_the_strategy_and_the_others_go_on(make_fleet, tmp_path, monkeypatch):
    fleet = make_fleet()
    fleet.turn()
    for _ in range(2):
        fleet.work()
        fleet.turn()
    fleet.work("a", "b")
    del fleet.view.devices["c"], fleet.view.busy["c"]
    fleet.left.clear()
    model = load_model(io.BytesIO(fleet.run()["final_model.npz"]))

    def is_away(number, kind, round_number):
        return number == 2 and (round_number > 2 or (round_number == 2 and kind != "train"))

    np.testing.assert_array_equal(model, compute_expected(fleet, tmp_path, monkeypatch, is_away))
    assert list(fleet.state.failed.values()) == [(5, "c is away")]


def test_a_board_that_never_becomes_idle_is_no_node(make_fleet, tmp_path, monkeypatch):
    """Such as an evaluator; one that rests is asked again when it may work."""
    fleet = make_fleet()
    fleet.view.devices["0"] = DeviceInfo(device_id="0", role=Role.EVALUATOR)
    fleet.view.health["c"] = HealthMetrics(temperature_c=90.0)
    fleet.turn()
    assert [instruction.device_id for instruction, _ in fleet.left] == ["a", "b"]
    fleet.work()
    fleet.view.health.clear()
    model = load_model(io.BytesIO(fleet.run()["final_model.npz"]))
    assert fleet.state.nodes == [*BOARDS]
    assert fleet.state.failed == {}

    def is_away(number, kind, round_number):
        return number == 2 and (round_number, kind) == (1, "train")

    np.testing.assert_array_equal(model, compute_expected(fleet, tmp_path, monkeypatch, is_away))


def test_a_message_to_a_board_that_has_to_rest_is_an_error_and_waits_for_nothing(make_fleet):
    fleet = make_fleet({"mean_app/server_app.py": ASKING})
    fleet.turn()
    fleet.turn(5.0)
    assert len(fleet.left) == 1
    fleet.view.health["a"] = HealthMetrics(temperature_c=90.0)
    fleet.work()
    fleet.turn()
    assert list(fleet.state.failed.values())[-1] == (5, "a is away")


BAD_REPLIES = (
    b"", b"\xff" * 40, encode_message({}, RecordDict())[:-1],
    *(encode_message({"error": code}) for code in ("x", {}, math.inf, [8], None)),
)  # fmt: skip


def test_a_reply_that_makes_no_sense_is_an_error_of_its_board_and_takes_no_others_place():
    answers, good = io.BytesIO(), encode_message({}, RecordDict({"c": ConfigRecord({"n": 1})}))
    write_message(answers, {"count": len(BAD_REPLIES) + 1})
    for number, body in enumerate((*BAD_REPLIES, good)):
        write_message(answers, {"message": str(number)}, body)
    write_message(answers, {"nodes": [7]})
    answers.seek(0)
    grid = ProcessGrid(answers, io.BytesIO(), 1)
    grid._sent = {str(number): Metadata(1, "", 1, 2, "", "", 0.0, 1.0, "train") for number in range(9)}
    *bad, last = grid.pull_messages(grid._sent)
    assert [(reply.error.code, reply.error.reason.partition(":")[0]) for reply in bad] == [
        (8, "the reply makes no sense")
    ] * len(BAD_REPLIES)
    assert last.content["c"]["n"] == 1
    assert grid.get_node_ids() == [7]


def test_a_bad_reply_of_one_board_does_not_end_the_run(make_fleet):
    fleet = make_fleet()
    fleet.turn()
    instruction, _ = fleet.left.pop(0)
    fleet.receive(instruction, BAD_REPLIES[1])
    files = fleet.run()
    assert "Received 2 results and 1 failures" in files["server-app.log"].decode()
    assert len(fleet.asked) == 17


def test_messages_without_a_reply_are_bounded_and_a_model_for_all_boards_is_kept_once(make_fleet):
    fleet = make_fleet(max_part_bytes=10**6)
    inputs = MessageInputs()
    sizes = [inputs.add(part, {"node": part}, bytes(1000)) for part in range(3)]
    assert inputs.num_bytes == sum(sizes) - 2000
    assert [split_envelope(inputs.make_body(part)) for part in range(3)] == [
        ({"node": part}, bytes(1000)) for part in range(3)
    ]
    for part in (0, 2, 1, 1):
        inputs.remove(part)
    assert (inputs.num_bytes, inputs.make_body(1), inputs._bodies) == (0, b"", {})
    object.__setattr__(fleet.strategy, "max_state_bytes", 500)
    with pytest.raises(RunFailedError, match=r"without a reply have \d+ bytes, more than run\.max_state_bytes"):
        fleet.turn()


def test_an_error_of_the_client_app_is_a_reply_and_no_part_is_tried_again(make_fleet):
    fleet = make_fleet()
    (fleet.root / "b" / "broken-2").touch()
    log = fleet.run()["server-app.log"].decode()
    assert "Received 2 results and 1 failures" in log
    assert "b train in round 2: ValueError: broken on purpose" in fleet.lines
    assert len(fleet.asked) == 18


def test_a_new_process_of_the_same_app_gives_out_the_same_messages_and_another_one_is_noticed(make_fleet):
    first, second, other = (
        make_fleet(),
        make_fleet(),
        make_fleet({"mean_app/server_app.py": SERVER.replace("zeros", "ones")}),
    )
    for fleet in (first, second, other):
        fleet.run()
    assert first.asked == second.asked
    assert set(first.asked).isdisjoint(other.asked)


def test_a_state_from_before_the_first_reply_begins_anew_under_other_names(make_fleet):
    fleet = make_fleet()
    fleet.turn()
    former = [instruction.assignment_id for instruction, _ in fleet.left]
    fleet.strategy.link.close()
    fleet.strategy = fleet.build(fleet.jobs["a"])
    fleet.left.clear()
    fleet.view.busy.clear()
    fleet.run()
    assert len(fleet.asked) == 18
    assert set(former).isdisjoint(fleet.asked)


def test_a_client_app_is_imported_before_the_run_and_one_that_cannot_be_is_an_error_of_each_message(make_fleet):
    fleet = make_fleet()
    job = fleet.jobs["a"]
    job.load()
    assert "mean_app.client_app" in sys.modules
    assert make_app_run(fleet.app, "", name=None, num_boards=1, groups=()).devices.ready_s == LOAD_S
    broken = make_fleet({"mean_app/client_app.py": "raise SystemExit(3)\n" + CLIENT})
    forget_modules()
    for job in broken.jobs.values():
        job.load()
    log = broken.run()["server-app.log"].decode()
    assert "Received 0 results and 3 failures" in log
    assert "a train in round 1: SystemExit: 3" in broken.lines


def test_a_client_apps_state_outlives_its_process_and_not_its_run(make_fleet):
    fleet = make_fleet()
    fleet.turn()
    fleet.work()
    fleet.jobs["b"] = type(fleet.jobs["b"])()
    fleet.turn()
    body = next(body for instruction, body in fleet.left if instruction.device_id == "b")
    fleet.work()
    assert next(line for line in fleet.lines if line.startswith("b evaluate in round 1")).endswith("calls 2")
    fleet.answer("b", 5, body.replace(b'"run": "run-1/0"', b'"run": "run-1/1"'))
    assert fleet.lines[-1].endswith("calls 1")


def test_a_message_that_comes_again_since_its_reply_was_lost_begins_with_the_same_state(make_fleet):
    fleet = make_fleet()
    fleet.turn()
    fleet.work()
    fleet.turn()
    part, body = next((one.block, body) for one, body in fleet.left if one.device_id == "b")
    first = fleet.answer("b", part, body)
    fleet.jobs["b"] = type(fleet.jobs["b"])()
    assert fleet.answer("b", part, body) == fleet.answer("b", part, body) == first
    fleet.answer("b", part + 3, body)
    assert [line.rpartition(" ")[2] for line in fleet.lines if line.startswith("b ")] == ["1", "2", "2", "2", "3"]


def test_a_module_of_another_app_is_never_run_in_the_place_of_ones_own(make_fleet, tmp_path):
    fleet = make_fleet()
    load_component(fleet.app.root, fleet.app.client)
    with pytest.raises(TaskError, match=r"mean_app\.client_app is that of .*app-0.*, which was imported before"):
        load_component(write_app(tmp_path / "other"), fleet.app.client)


ENDING = """
import atexit, sys, threading, time
from pathlib import Path
from flwr.serverapp import ServerApp
app, left = ServerApp(), open("left", "w")

def write():
    time.sleep(0.5)
    Path("thread").write_text("a" * 10000)

@app.main()
def main(grid, context):
    import torch
    left.write(str(torch.SEEDS))
    atexit.register(lambda: Path("exit").touch())
    threading.Thread(target=write).start()
    sys.exit(0)
"""
TORCH = "SEEDS = []\nmanual_seed = SEEDS.append\n"


def test_losses_are_read_of_replies_to_messages_that_train_or_evaluate_and_of_no_others():
    body = np.frombuffer(encode_message({}, RecordDict({"m": MetricRecord({"loss": 0.5})})), np.uint8)
    found = [
        read_reply(Update(assignment_id=name, device_id="a", base_version=0, tensors={RESULT: body},
                          metrics=METRICS, received_s=0.0))
        for name in ("m0-t1", "e1-t1", "q2-t1")
    ]  # fmt: skip
    assert [(reply.is_evaluation, reply.loss) for reply in found] == [(False, 0.5), (True, 0.5), (False, None)]


def test_an_app_ends_when_its_threads_do_with_all_it_wrote_and_torch_is_seeded_wherever_it_is_imported(make_fleet):
    project = PROJECT.replace("numpy>=1.26", "torch>=2")
    changes = {"pyproject.toml": project, "torch.py": TORCH, "mean_app/server_app.py": ENDING}
    fleet = make_fleet(changes)
    files = fleet.run()
    assert (files["left"], files["thread"], files["exit"]) == (b"[7]", b"a" * 10000, b"")
    assert fleet.state.model[RESULT].size < 2000


ASKING = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    first, *_ = grid.get_node_ids()
    content = RecordDict({"config": ConfigRecord({"server-round": 1, "lr": 0.0})})
    message = lambda node: Message(content, node, "query")
    print("unknown", [reply.error.code for reply in grid.send_and_receive([message(1)])])
    print("slow", list(grid.send_and_receive([message(first)], timeout=5)))
    (name,) = grid.push_messages([message(first)])
    print("none yet", list(grid.pull_messages([name])))
    (reply,) = grid.pull_messages([name])
    print("then", reply.error.code, reply.error.reason, reply.metadata.reply_to_message_id == name)
    print("once", list(grid.pull_messages([name])))
    while len(list(grid.get_node_ids())) > 2: pass
    print("two", len(list(grid.get_node_ids())))
"""


def test_a_wait_for_replies_begins_when_the_messages_are_sent_however_long_the_server_app_took(make_fleet):
    fleet = make_fleet(PRIVATE_APP, run_config='privacy="secagg" timeout=5.0')
    fleet.server_s = 60.0
    model = load_model(io.BytesIO(fleet.run()["final_model.npz"]))
    np.testing.assert_allclose(model, 2.0, atol=0.02)


def test_the_grid_waits_no_longer_than_it_is_told_and_gives_each_reply_once(make_fleet):
    fleet = make_fleet({"mean_app/server_app.py": ASKING})
    assert fleet.turn().next_wake_s == 5.0
    assert fleet.turn(4.0).next_wake_s == 1.0
    assert len(fleet.left) == 1
    fleet.turn(1.0)
    fleet.work()
    fleet.turn(0.5)
    fleet.turn(0.5)
    fleet.work()
    fleet.turn()
    fleet.turn(1.0)
    fleet.turn(1.0)
    del fleet.view.devices["c"]
    log = fleet.run()["server-app.log"].decode()
    words = {"unknown", "slow", "none", "then", "once", "two"}
    assert {name[0] for name in fleet.asked} == {"q"}
    assert [line for line in log.splitlines() if line.partition(" ")[0] in words] == [
        "unknown [5]",
        "slow []",
        "none yet []",
        "then 2 ValueError: No query function registered with name 'default' True",
        "once []",
        "two 2",
    ]  # fmt: skip


TALKING = """
from flwr.serverapp import ServerApp
from edgefl.system.process_messages import write_message
app = ServerApp()

@app.main()
def main(grid, context):
    {}
    grid._sink.flush()
"""


@pytest.mark.parametrize(
    ("server", "job", "words"),
    [
        ("raise OSError('no such data')\n", {}, "the ServerApp raised OSError: no such data"),
        ("app = 3\n", {}, "is a int, no ServerApp"),
        ("import os\nprint('last words', flush=True)\nos._exit(3)\n", {}, "process ended: last words"),
        ("import time\ntime.sleep(60)\n", {"deadline_s": 0.5}, "computed for more than 0.5 s between two messages"),
        (SERVER, {"max_part_bytes": 200}, "bytes, at most 200 are taken: raise job.max_part_bytes"),
        (
            TALKING.format("write_message(grid._sink, {'do': 'push', 'node': min(grid.get_node_ids())}, bytes(450))"),
            {"max_part_bytes": 500},
            "bytes, at most 500 are taken: raise job.max_part_bytes",
        ),
        ("raise OSError('a\\x1b[2J' + 'x' * 10**4)\n", {}, "the ServerApp raised OSError: a\\x1b[2Jxx"),
        (
            TALKING.format("write_message(grid._sink, {'do': 'fail', 'reason': 'a\\x1b[2J' + 'x' * 10**4})"),
            {},
            "the ServerApp raised a\\x1b[2Jxx",
        ),
        (TALKING.format("grid._sink.write(b'x' * 8)"), {}, "sent a message whose header has 2021161080 bytes"),
        (SERVER + "    open('big', 'wb').write(bytes(5000))\n", {"max_result_bytes": 4000}, "more than 4000 bytes"),
        (SERVER + "    for n in range(10): open(f'f{n}', 'w')\n", {}, "wrote more than 8 files"),
        ("import socket\nsocket.socket()\n", {}, "PermissionError"),
        ("open('/etc/passwd').read()\n", {}, "PermissionError"),
    ],
)
def test_a_server_app_that_fails_fails_its_run_with_the_reason(make_fleet, monkeypatch, server, job, words):
    monkeypatch.setattr(server_link, "MAX_RESULT_FILES", 8)
    fleet = make_fleet({"mean_app/server_app.py": server}, **job)
    with pytest.raises(RunFailedError, match="ServerApp") as raised:
        fleet.run()
    assert words in str(raised.value)
    assert len(str(raised.value)) < 800


@pytest.mark.parametrize("last", ["raise OSError('no disk')", "import os\n    os._exit(3)"])
def test_the_log_of_an_app_that_fails_is_kept(make_fleet, tmp_path, last):
    folder = tmp_path / "coordinator" / "runs" / "run-1"
    folder.mkdir(parents=True)
    with pytest.raises(RunFailedError, match=f"the app's log is {re.escape(str(folder))}/server-app.log"):
        make_fleet({"mean_app/server_app.py": f"{SERVER}    print('what it did', flush=True)\n    {last}\n"}).run()
    assert "what it did" in (folder / "server-app.log").read_text()
    assert (folder / "server-app.log").stat().st_mode & 0o777 == 0o600


def test_a_link_in_the_place_of_an_apps_log_is_not_followed(make_fleet, tmp_path):
    folder = tmp_path / "coordinator" / "runs" / "run-1"
    folder.mkdir(parents=True)
    fleet = make_fleet()
    fleet.turn()
    link = fleet.strategy.link
    (tmp_path / "key").write_text("a key of the coordinator")
    log = Path(link._folder.name) / "server-app.log"
    log.unlink()
    log.symlink_to(tmp_path / "key")
    assert str(link.fail("over")) == f"over; the app's log is {folder / 'server-app.log'}"
    assert (folder / "server-app.log").read_text() == ""


def test_the_rounds_of_a_second_strategy_come_after_those_of_the_first(make_fleet):
    twice = SERVER.replace(
        "    np.savez",
        "    result = FedAvg(**dict.fromkeys(limits, 2)).start(grid, arrays, num_rounds=2)\n    np.savez",
    )
    fleet = make_fleet({"mean_app/server_app.py": twice})
    fleet.run()
    assert sorted({*fleet.state.rounds}) == [1, 2, 3, 4, 5]
    assert fleet.state.rounds == sorted(fleet.state.rounds)


def test_a_process_that_does_not_read_its_answers_is_ended(make_fleet):
    waiting = "write_message(grid._sink, {'do': 'nodes'})\n    import time\n    time.sleep(100)"
    link = make_fleet({"mean_app/server_app.py": TALKING.format(waiting)}).strategy.link
    assert link.get_request() == ({"do": "nodes"}, b"")
    link._deadline_s = 0.3
    link.answer({}, bytes(1024 * 1024))
    with pytest.raises(RunFailedError, match=r"the ServerApp's process did not read its answers for 0\.3 s"):
        link.get_request()


def test_replies_are_bounded_and_a_stop_ends_the_process(make_fleet):
    fleet = make_fleet()
    fleet.turn()
    fleet.work("a")
    process = fleet.strategy.link._process
    fleet.state = fleet.strategy.finish(fleet.state)
    assert process.poll() is not None
    assert fleet.turn().instructions == ()
    assert (fleet.state.complete, fleet.state.pending, fleet.state.in_flight) == ({}, [], {})
    small = make_fleet()
    small.turn()
    object.__setattr__(small.strategy, "max_state_bytes", 100)
    with pytest.raises(RunFailedError, match=r"replies are more than run\.max_state_bytes = 100"):
        small.work()


def test_a_plan_starts_no_process_and_names_every_board(make_fleet):
    fleet = make_fleet()
    plan = fleet.strategy.preview(fleet.state, fleet.view)
    assert [instruction.device_id for instruction in plan.instructions] == [*BOARDS]
    assert not fleet.strategy.link.is_started
    assert fleet.strategy.preview(fleet.state, View(devices={"a": DeviceInfo(device_id="a")})).instructions == ()


def test_a_run_names_the_app_its_files_and_its_configuration(tmp_path):
    app = read_app(write_app(tmp_path / "app"))
    config = make_app_run(
        app, "num-server-rounds=9 model.size=2", name=None, num_boards=3, groups=["lab"], codec="int8", seed=3
    )
    assert config.compression.up == "int8"
    assert RunConfig.from_json(config.to_json()).run.seed == 3
    assert RunConfig.from_json(config.to_json()) == config
    assert (config.job.name, config.run.name, config.devices.min) == ("flower-mean-app", "mean-app", 3)
    kind = type("App", (FlowerApp,), {"root": app.root})
    job = kind(**config.job.options)
    assert job.run_config == {"num-nodes": 2, "num-server-rounds": 9, "model.size": 2}
    assert not job.needs_torch
    words = f"the run is of {compute_fingerprint(app)}; install"
    (app.root / "mean_app" / "data.py").write_text("changed")
    with pytest.raises(TaskError, match=words):
        kind(**config.job.options)
    (app.root / "pyproject.toml").write_text(PROJECT.replace("numpy>=1.26", "numpy>=2"))
    assert kind().fingerprint != compute_fingerprint(app)
    for text, words in (
        ("lr=1", "has no 'lr'; it has model.size"),
        ("model.size", "must be pairs"),
        ("model.size=[1]", "text"),
    ):
        with pytest.raises(ConfigError, match="run_config") as raised:
            make_app_run(app, text, name=None, num_boards=2, groups=())
        assert words in str(raised.value)
    torch = write_app(tmp_path / "torch", {"pyproject.toml": PROJECT.replace("numpy>=1.26", "torch>=2")})
    assert type("App", (FlowerApp,), {"root": torch})().needs_torch


@pytest.mark.parametrize("publisher", ['"nobody"', None, '""', '"a/b"', "3"])
def test_only_an_app_that_names_its_publisher_is_there_for_stock_supernodes(tmp_path, monkeypatch, caplog, publisher):
    line = "" if publisher is None else f"publisher = {publisher}\n"
    project = PROJECT.replace('publisher = "nobody"\n', line)
    job = type("App", (FlowerApp,), {"root": write_app(tmp_path / "app", {"pyproject.toml": project})})()
    monkeypatch.setattr(assembly, "make_job", lambda *_: job)
    make_bundle = assembly.build_job(parse_run({"job": {"name": "flower-mean-app"}}), "run-1").make_bundle
    findings = [finding.what for finding in check_app(job.app) if finding.verdict == "check"]
    if publisher == '"nobody"':
        assert get_fab_config(make_bundle().content)["tool"]["flwr"]["app"]["publisher"] == "nobody"
        assert (caplog.messages, findings) == ([], [])
    else:
        assert make_bundle is None
        assert caplog.messages == [f"mean-app: {findings[0]}"]
        assert "stock SuperNodes take no part: tool.flwr.app.publisher must be" in findings[0]


def test_instructions_name_the_coordinators_own_files_also_where_the_run_file_does_not(tmp_path, monkeypatch):
    job = type("App", (FlowerApp,), {"root": write_app(tmp_path / "app")})()
    monkeypatch.setattr(assembly, "make_job", lambda *_: job)
    run = parse_run({"job": {"name": "flower-mean-app", "run_config": "model.size=3"}})
    expected = {"run_config": "model.size=3", "fingerprint": compute_fingerprint(read_app(job.root))}
    assert assembly.build_job(run, "run-1").header["options"] == expected


@pytest.mark.parametrize(
    ("privacy", "expected"),
    [("none", 2.0), ("secagg", 2.0), ("clipping", 1.0), ("secagg clipping", 1.0), ("local", 1.0)],
)
def test_an_app_of_the_older_interface_runs_with_secure_aggregation_and_privacy(make_fleet, privacy, expected):
    fleet = make_fleet(PRIVATE_APP, run_config=f'privacy="{privacy}"')
    files = fleet.run()
    model = load_model(io.BytesIO(files["final_model.npz"]))
    assert not any("Error" in line for line in fleet.lines), fleet.lines
    np.testing.assert_allclose(model, expected, atol=0.02)


def test_secure_aggregation_goes_on_without_a_board_that_is_late_and_with_it_in_the_next_round(make_fleet):
    fleet = make_fleet(PRIVATE_APP, run_config='privacy="secagg" timeout=5.0')
    for _ in range(2):  # keys, and shares of them
        fleet.turn(1.0)
        fleet.work()
    fleet.turn(1.0)
    fleet.work("a", "b")
    fleet.turn(5.0)
    fleet.work("a", "b")
    fleet.turn(1.0)
    log = (Path(fleet.strategy.link._folder.name) / "server-app.log").read_text()
    assert "aggregate_fit: received 2 results and 0 failures" in log
    model = load_model(io.BytesIO(fleet.run()["final_model.npz"]))
    np.testing.assert_allclose(model, 2.0, atol=0.02)


def test_an_app_of_functions_that_make_server_and_clients_runs(make_fleet):
    server = """from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

strategy = FedAvg(min_available_clients=3)
app = ServerApp(server_fn=lambda _: ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=2)))
"""
    fleet = make_fleet({**PRIVATE_APP, "mean_app/server_app.py": server})
    log = fleet.run()["server-app.log"].decode()
    assert re.search(r"round 1: (8\.0|7\.9999)", log), log  # by the order in which it samples its clients
    assert "Error" not in "".join(fleet.lines)
