"""The confined training process: what code of others can do in it, and what its end does to the agent."""

import json
import os
import queue
import threading
from types import SimpleNamespace

import hostile_task
import numpy as np
import pytest
from digit_shards import digit_shard
from peer_boards import eventually

from edgefl.compression.codec import make_codec
from edgefl.core.config import AdaptSection
from edgefl.core.types import Dataset, derive_rng
from edgefl.device.drift_watch import list_reference_paths
from edgefl.device.hardware import requirements
from edgefl.device.training.confined_process import TrainingProcess
from edgefl.device.training.confined_trainer import ConfiningTrainer, is_built_in
from edgefl.device.training.gossip_worker import INSTRUCTION_FILE
from edgefl.device.training.process_link import TrainingSetup
from edgefl.system.confinement import find_gaps
from edgefl.tasks.adaptation.base_file import AdaptPlan
from edgefl.tasks.datasets.shards import ShardMetadata, write_shard
from edgefl.tasks.registry import make_task

pytestmark = pytest.mark.extended
HOSTILE = "hostile_task:Hostile"
MARK = "secret-of-the-agent"


class Board:
    """A trainer with a key, two shards, and a task of others."""

    def __init__(self, root, policy="auto", *, on_progress=None, **options):
        self.root, self.progress = root / "device", []
        self.root.mkdir(exist_ok=True)
        self.secret = MARK.encode() + b" of the key"
        for name in ("key.pem", "device.json", "other.npz"):
            (self.root / name).write_bytes(self.secret)
        np.savez(root / "shard.npz", inputs=np.zeros((40, 1), np.float32), labels=np.zeros(40, np.int64))
        self.shards = {HOSTILE: str(root / "shard.npz"), "digits": str(digit_shard(root / "digits.npz", 120))}
        self.trainer = ConfiningTrainer(
            get_policy=lambda: policy,
            next_incarnation=iter(range(1, 100)).__next__,
            device_id="pi",
            role="trainer",
            shards=lambda: self.shards,
            accelerator="cpu",
            threads=1,
            state_dir=self.root,
            on_progress=on_progress or (lambda *report: self.progress.append(report)),
            **options,
        )

    def header(self, attack="", task=HOSTILE, **changes):
        header = {
            "v": 2, "run": "r", "task": task, "options": {"attack": attack, "place": str(self.root)}, "seed": 7,
            "test_fraction": 0.25, "assignment": f"r/{attack}", "version": 0, "codec": "dense",
            "used_assignments": [],
            "plan": {"algorithm": "sgd", "iterations": 3, "batch_size": 16, "learning_rate": 0.5},
        }  # fmt: skip
        return {**header, **({"options": {}} if task != HOSTILE else {}), **changes}

    def train(self, attack="", task=HOSTILE, **changes):
        return self.trainer.train(self.header(attack, task, **changes), encode_first_model(task))

    def get_error(self, attack):
        return self.train(attack)[0].get("error", "no error")


def encode_first_model(task):
    known = make_task(task)
    return make_codec("dense", known.shapes()).encode(known.init(1), derive_rng(0))


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEFL_ALLOW_MODULES", "hostile_task")
        patch.setenv("EDGEFL_OPERATOR_TOKEN", MARK)
        board = Board(tmp_path_factory.mktemp("board"))
        yield board
        board.trainer.close()


def test_this_machine_confines_completely():
    assert find_gaps() == []


@pytest.mark.parametrize("attack", hostile_task.ATTACKS)
def test_an_attack_of_a_task_is_refused_and_the_agent_goes_on(board, attack):
    key = board.root / "key.pem"
    outcome = "succeeded: None" if attack == "change-key" else "refused: "  # that one does nothing
    assert outcome in board.get_error(attack)
    assert (key.read_bytes(), oct(key.stat().st_mode & 0o700)) == (board.secret, "0o600")
    assert board.train()[0]["metrics"]["iterations"] == 3


@pytest.mark.parametrize("place", hostile_task.FINDS)
def test_the_process_holds_nothing_of_the_agent(board, place):
    assert board.get_error(place) == "RuntimeError: found: []"


def test_without_confinement_the_same_attacks_succeed(board, tmp_path):
    free = Board(tmp_path, "never")
    for attack in ("key-by-path", "settings", "other-shard", "socket", "write-outside", "agent-environment"):
        assert "succeeded: " in free.get_error(attack), attack
    assert free.get_error("environment") == "RuntimeError: found: ['EDGEFL_OPERATOR_TOKEN']"
    assert "own-memory" in hostile_task.FINDS
    assert free.get_error("own-memory") != "RuntimeError: found: []"


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        ("exit", "ended with code 3"),
        ("crash", "was ended by SIGSEGV"),
        ("hang", "said nothing for"),
        ("loop", "said nothing for"),
        ("memory", "MemoryError"),
        ("junk", "made no sense"),
        ("text", "made no sense"),
        ("unasked", "answered nothing"),
    ],
)
def test_a_process_that_ends_badly_fails_its_assignment_alone(board, attack, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(requirements, "MIN_CONFINED_BYTES", 600_000_000)
    monkeypatch.setattr(requirements, "read_available_memory_bytes", lambda *_: 0)
    own = Board(tmp_path, silence_s=10.0 if attack in {"hang", "loop"} else 60.0)
    try:
        assert own.train()[0]["metrics"]["iterations"] == 3
        reply, body = own.train(attack)
        assert (reply["run"], reply["assignment"], body) == ("r", f"r/{attack}", b"")
        assert reason in reply["error"]
        assert own.train()[0]["metrics"]["iterations"] == 3
    finally:
        own.trainer.close()


def test_what_is_built_in_trains_in_the_agent_and_always_confines_that_too_with_the_same_bytes(board, tmp_path):
    assert is_built_in(board.header(task="digits"))
    free = board.train(task="digits", run="own")
    assert board.trainer._process_key[:1] != ("digits",)
    always = Board(tmp_path, "always")
    try:
        confined = always.train(task="digits", run="own")
        assert always.trainer._process_key[0] == "digits"
        assert confined[1] == free[1]
        assert confined[0]["metrics"]["loss"] == free[0]["metrics"]["loss"]
        assert always.trainer.evaluate(board.header(task="digits"), b"")[0]["error"].startswith("CodecError")
    finally:
        always.trainer.close()


def test_a_query_of_a_confined_process_is_answered_by_the_coordinator(tmp_path):
    def answer(assignment, iteration, _seconds):
        own.progress.append(iteration)
        if len(own.progress) < 3:
            own.trainer.continue_training(f"{assignment} {iteration}")
        else:
            own.trainer.finish_early(assignment)
        return True

    own = Board(tmp_path, "always", on_progress=answer)
    plan = {"iterations": 10_000_000, "report_progress": True, "fallback_iterations": 2, "learning_rate": 0.5}
    try:
        reply = own.train(task="digits", plan={"algorithm": "sgd", "batch_size": 16, **plan})[0]
        assert reply["metrics"]["iterations"] == own.progress[-1] > 2
        assert len(own.progress) == 3
    finally:
        own.trainer.close()


def test_a_confined_process_keeps_what_a_run_leaves_on_the_board(board, tmp_path):
    own = Board(tmp_path)
    assert own.root != board.root  # which allows the module
    assert "error" not in own.train(codec="ef|topk:0.5", run="kept")[0]
    own.trainer.close()
    assert [path.name for path in own.root.glob("confined/*/residuals/*")] == ["kept.npz"]


def test_an_interrupt_that_follows_a_call_at_once_ends_it(board, tmp_path):
    """The process reads both before its main thread takes the call."""
    is_read, replies = threading.Event(), []
    header = board.header(task="digits")
    messages = [({"call": "train", "header": header}, encode_first_model("digits")), ({"notice": "interrupt"}, b"")]

    def receive():
        if messages:
            return messages.pop(0)
        is_read.set()
        return threading.Event().wait(), b""

    class Calls(queue.SimpleQueue):
        def get(self, **options):
            assert is_read.wait(30)
            return super().get(**options)

    def send(message, _body=b""):
        replies.extend([message["reply"]] if "reply" in message else [])

    agent = SimpleNamespace(receive=receive, send=send, calls=Calls())
    shards = {"digits": board.shards["digits"]}
    setup = TrainingSetup(
        device_id="pi", role="trainer", shards=shards, accelerator="cpu", threads=1, scratch=str(tmp_path),
        incarnation=1, max_temperature_c=None, bases=str(tmp_path), min_group=1, drift_references={},
    )  # fmt: skip
    threading.Thread(target=TrainingProcess(setup, agent).run, daemon=True).start()
    eventually(lambda: replies, "a reply")
    assert replies == [{"is_aborted": True}]


def test_the_process_is_started_anew_with_the_lowest_priority_where_the_owner_wants_it_to_yield(tmp_path):
    yields = []
    site = Board(tmp_path, "always", get_yields=lambda: bool(yields))

    def train():
        assert "error" not in site.train(task="digits")[0]
        process = site.trainer._process._process.pid
        return process, os.getpriority(os.PRIO_PROCESS, process)

    former = train()
    yields.append(True)
    assert train()[1] == 19 > former[1]
    assert train()[0] != former[0]
    site.trainer.close()


def test_the_drift_of_a_confined_task_is_measured_in_its_process(tmp_path):
    always = Board(tmp_path, "always", get_drift_references=lambda: {"digits": "first"})
    try:
        always.train(task="digits")
        (kept,) = list_reference_paths(always.root, "digits")[1:]
        assert kept.exists()
        paler = Dataset(inputs=np.full((120, 8, 8), 3, np.uint8), targets=np.arange(120) % 10)
        write_shard(tmp_path / "digits.npz", paler, ShardMetadata(task="digits"))
        drift = always.trainer.measure_drift()
        assert drift.keys() == {"digits"}
        assert (drift["digits"]["num_newer"], drift["digits"]["psi"] > 1.0) == (120, True)
    finally:
        always.trainer.close()


def test_no_confined_node_is_resumed_or_goes_on_where_the_owner_limits_epsilon(tmp_path):
    limits = [None]
    board, calls = Board(tmp_path, get_max_epsilon=lambda: limits[-1]), []
    board.trainer._call = lambda task, name, *_: calls.append(name)
    folder = board.root / requirements.CONFINED_FOLDER
    scratch = board.trainer._get_scratch(HOSTILE)
    scratch.mkdir(parents=True)
    for path in (folder, scratch):
        (path / INSTRUCTION_FILE).write_text(json.dumps(board.header()))
    board.trainer.resume()
    assert calls == ["resume"]
    limits.append(3.0)
    board.trainer.resume()
    assert calls == ["resume"]
    board.trainer._process = SimpleNamespace(close=lambda: calls.append("close"))
    board.trainer._node_run = "r"
    board.trainer.remove_expired()
    assert (calls, board.trainer.node_run) == (["resume", "close"], "")


def test_nothing_is_confined_without_masks_where_the_owner_asks_for_them(tmp_path):
    board, calls = Board(tmp_path, "always", get_only_masked=lambda: True), []
    board.trainer._call = lambda task, name, *_: calls.append(name)
    board.trainer.resume()
    assert "--only-masked" in board.trainer.train(board.header(), b"")[0]["error"]
    assert calls == []


def test_no_base_is_fetched_for_a_task_without_a_shard(tmp_path, monkeypatch):
    own, fetched = Board(tmp_path, "always"), []
    monkeypatch.setattr(own.trainer._bases, "fetch", fetched.append)
    del own.shards["digits"]
    plan = AdaptPlan(AdaptSection(method="head"), "ab" * 32, 100)
    assert "has no shard for task 'digits'" in own.train(task="digits", adapt=plan.to_json())[0]["error"]
    assert fetched == []
