"""The trainer on real shards: digits in files, and a small task of a user's own that counts what is done to it."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from board_trees import plant, zones
from digit_shards import digit_shard, some_digits

from edgefl import __version__
from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.delta import encode_delta
from edgefl.core.clusters import make_stack_shapes, make_update_shapes
from edgefl.core.protocol import model_fingerprint
from edgefl.core.renyi_accounting import compute_divergences, compute_epsilon
from edgefl.core.types import ZERO_CONTROL_VARIATE, PeerMessage, SparseTensor, TrainConfig, derive_rng
from edgefl.device.hardware.health import HealthSampler, LinkQuality
from edgefl.device.training import trainer
from edgefl.device.training.trainer import DeviceTrainer, TrainingAbortedError
from edgefl.strategies.peer_algorithms.gossip_node import encode_messages
from edgefl.strategies.synchronous.scaffold import encode_control_variate
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.classification import ClassificationTask
from edgefl.tasks.datasets.shards import ShardMetadata, split_train_test, write_shard
from edgefl.tasks.local_algorithms import registry
from edgefl.tasks.metrics.evaluation import make_task_metrics
from edgefl.tasks.metrics.exact_sums import read_sum
from edgefl.tasks.registry import make_task

OWN = '''
import numpy as np
from edgefl.tasks.noop import NoopTask
from edgefl.core.types import Dataset, Task, TensorSpec

made, read = [], []

class Learner:
    def __init__(self, shapes):
        self.parameters = {spec.name: np.zeros(spec.shape, np.float32) for spec in shapes}
        self.gradients = {name: np.ones_like(value) for name, value in self.parameters.items()}
    def load(self, tensors):
        for name, tensor in tensors.items():
            self.parameters[name][...] = tensor
    def read(self):
        return {name: value.copy() for name, value in self.parameters.items()}
    def gradient(self, batch):
        return 1.0
    def evaluate(self, data):
        return float(self.parameters["head"].sum()), 0.5

class Personal(Task):
    """The body of the model is shared, its head stays on the board."""
    name = "personal"
    def __init__(self, *, size=2):
        made.append(self)
        self._shapes = (TensorSpec(name="body", shape=(size,)), TensorSpec(name="head", shape=(1,), shared=False))
    def shapes(self):
        return self._shapes
    def init(self, seed):
        return {"body": np.zeros(self._shapes[0].shape, np.float32), "head": np.full(1, 100.0, np.float32)}
    def read(self, path):
        read.append(path)
        if path.endswith("broken"):
            raise KeyError("no such column")
        inputs = np.arange(40, dtype=np.float32).reshape(-1, 1)
        weak = np.arange(40) % 2 == 1 if path.endswith("weak") else None
        return Dataset(inputs=inputs, targets=np.zeros(40, np.int64), weak=weak)
    def learner(self, *, accelerator="cpu", threads=None):
        return Learner(self._shapes)
'''


@pytest.fixture
def shard(tmp_path):
    return digit_shard(tmp_path / "digits.npz", 120)


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_trainer_task.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "own_trainer_task")
    import own_trainer_task  # noqa: PLC0415 it has just been written

    yield own_trainer_task
    sys.modules.pop("own_trainer_task")


OWN_TASK = "own_trainer_task:Personal"


class Device:
    """A trainer with its shards, and the messages that a coordinator would send."""

    def __init__(
        self, root, shards, *, role="trainer", options=None, task="digits", device_id="pi", on_progress=None
    ):
        self.shards, self.progress, self.task, self.options = dict(shards), [], task, options or {}
        self.trainer = DeviceTrainer(
            device_id=device_id,
            role=role,
            shards=lambda: self.shards,
            accelerator="cpu",
            threads=1,
            state_dir=root,
            on_progress=on_progress or (lambda *report: self.progress.append(report)),
        )

    @property
    def shapes(self):
        return make_task(self.task, self.options).shapes()

    def model(self, value=None):
        task = make_task(self.task, self.options)
        tensors = task.init(1)
        if value is not None:
            tensors = {name: np.full_like(tensor, value) for name, tensor in tensors.items()}
        return make_codec("dense", task.shapes()).encode(tensors, derive_rng(0))

    def header(self, assignment="r/a-1", **changes):
        header = {
            "v": 2, "run": "r", "task": self.task, "options": self.options, "seed": 7, "test_fraction": 0.25,
            "assignment": assignment, "version": 0, "codec": "dense", "used_assignments": [],
            "plan": {"algorithm": "sgd", "iterations": 3, "batch_size": 16, "learning_rate": 0.5},
        }  # fmt: skip
        return {**header, **changes}

    def train(self, *, body=None, plan=None, **changes):
        header = self.header(**changes)
        header["plan"] = {**header["plan"], **(plan or {})}
        return self.trainer.train(header, self.model() if body is None else body)

    def evaluate(self, *, body=None, **changes):
        return self.trainer.evaluate(self.header(**changes), self.model() if body is None else body)


@pytest.fixture
def device(tmp_path, shard):
    return Device(tmp_path, {"digits": str(shard)})


def test_training_answers_with_what_was_done_and_a_displacement_that_helps(device, shard):
    header, body = device.train(plan={"iterations": 30})
    assert (header["v"], header["run"], header["assignment"]) == (2, "r", "r/a-1")
    metrics = header["metrics"]
    task = make_task("digits")
    data = task.read(str(shard))
    train, _ = split_train_test(data, 0.25)
    assert (metrics["iterations"], metrics["num_examples"]) == (30, len(train))
    assert metrics["loss"] > 0
    assert metrics["compute_s"] > 0
    moved, start, learner = decode_body(body, task.shapes()), task.init(1), task.learner()
    learner.load(start)
    before = learner.evaluate(train)[0]
    learner.load({name: start[name] + moved[name] for name in start})
    assert learner.evaluate(train)[0] < before


def test_the_same_work_gives_the_same_bytes_also_from_another_process(device, tmp_path, shard):
    first = device.train()
    again = device.train()
    other = Device(tmp_path / "other", {"digits": str(shard)}).train()
    assert first[1] == again[1] == other[1]
    assert device.train(version=1)[1] != first[1]
    assert device.train(seed=8)[1] != first[1]
    half = device.train(codec="dense|fp16")[1]
    assert len(half) < 0.6 * len(first[1])
    exact, rounded = decode_body(first[1], device.shapes), decode_body(half, device.shapes)
    assert all(np.allclose(exact[name], rounded[name], atol=1e-2) for name in exact)


def test_a_task_that_augments_trains_the_same_after_a_restart_and_is_evaluated_on_what_it_read(
    device, tmp_path, shard, monkeypatch
):
    plain, judged = device.train(), device.evaluate()
    monkeypatch.setattr(
        ClassificationTask,
        "augment",
        lambda self, inputs, targets, rng: (inputs + rng.normal(size=inputs.shape), targets),
        raising=False,
    )
    first = device.train()
    restarted = Device(tmp_path / "other", {"digits": str(shard)})
    assert plain[1] != first[1] == restarted.train()[1] == device.train()[1]
    assert device.train(version=1)[1] != first[1]
    assert device.evaluate()[0] == judged[0] == restarted.evaluate()[0]


def test_a_trainer_evaluates_on_its_test_split_and_an_evaluator_on_all_it_has(device, tmp_path, shard):
    metrics = device.evaluate()[0]["metrics"]
    data = make_task("digits").read(str(shard))
    _, test = split_train_test(data, 0.25)
    learner = make_task("digits").learner()
    learner.load(make_task("digits").init(1))
    loss, accuracy = learner.evaluate(test)
    assert metrics == {"num_examples": len(test), "loss": pytest.approx(loss), "accuracy": accuracy}
    judge = Device(tmp_path / "judge", {"digits": str(shard)}, role="evaluator")
    assert judge.evaluate()[0]["metrics"]["num_examples"] == 120
    assert judge.evaluate()[1] == b""
    header, body = device.evaluate(test_fraction=0.0)
    assert ("holds no examples" in header["error"], body) == (True, b"")


def test_an_evaluator_trains_on_the_root_examples_alone_and_evaluates_on_the_others(tmp_path, shard):
    judge = Device(tmp_path / "judge", {"digits": str(shard)}, role="evaluator")
    assert "holds no examples" in judge.train()[0]["error"]
    for asked, least, most in ((30, 15, 45), (1000, 45, 75)):
        trained = judge.train(root_examples=asked)[0]["metrics"]["num_examples"]
        assert least <= trained <= most
        assert judge.evaluate(root_examples=asked)[0]["metrics"]["num_examples"] == 120 - trained
    assert "must be a whole number" in judge.train(root_examples="30")[0]["error"]
    trainer = Device(tmp_path / "trainer", {"digits": str(shard)})
    assert trainer.train(root_examples=30)[1] == trainer.train()[1]


def test_an_evaluator_neither_trains_nor_evaluates_on_weak_labels(own, tmp_path):
    (tmp_path / "weak").mkdir()
    judge = Device(tmp_path / "judge", {OWN_TASK: str(tmp_path / "weak")}, role="evaluator", task=OWN_TASK)
    assert judge.evaluate()[0]["metrics"]["num_examples"] == 20
    trained = judge.train(root_examples=10)[0]["metrics"]["num_examples"]
    assert 0 < trained < 20
    assert judge.evaluate(root_examples=10)[0]["metrics"]["num_examples"] == 20 - trained


def test_task_and_shard_stay_warm_and_of_tasks_with_other_options_two(own, tmp_path):
    device = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    bodies = {}
    for size in (2, 3, 4):
        device.options = {"size": size}
        bodies[size] = device.model()
    own.made.clear()
    for size, num_made in ((2, 1), (2, 1), (3, 2), (2, 2), (4, 3), (2, 3), (3, 4)):
        assert "error" not in device.train(body=bodies[size], options={"size": size})[0]
        assert "error" not in device.evaluate(body=bodies[size], options={"size": size})[0]
        assert (len(own.made), len(own.read)) == (num_made, num_made)


def test_a_shard_or_folder_that_grew_is_read_again_and_others_are_not(device, shard, tmp_path):
    stamp = device.trainer.compute_shard_fingerprint()
    first = device.train()[0]["metrics"]["num_examples"]
    assert device.trainer.compute_shard_fingerprint() == stamp
    digit_shard(shard, 400, seed=1)
    assert device.trainer.compute_shard_fingerprint() != stamp
    assert device.train()[0]["metrics"]["num_examples"] > 2 * first
    assert device.trainer.count_examples() == {"digits": 400}
    folder = tmp_path / "collected"
    folder.mkdir()
    collector = Device(tmp_path / "other", {"digits": str(folder)}, role="evaluator")
    for day, count in enumerate((10, 21, 33)):
        data = some_digits(10 + day, seed=day)
        np.savez(folder / f"day-{day}.npz", inputs=data.inputs, labels=data.targets)
        assert collector.evaluate()[0]["metrics"]["num_examples"] == count


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"task": "mnist"}, "no shard for task 'mnist'"),
        ({"task": "no-such-task"}, "no shard for task 'no-such-task'"),
        ({"task": "os:system", "options": {"command": "touch /tmp/never"}}, "no shard for task 'os:system'"),
        ({"options": {"model": "gpt"}}, "ConfigError"),
        ({"codec": "rar"}, "unknown stage 'rar'"),
        ({"v": 1}, "update it"),
        ({"plan": {"algorithm": "alchemy"}}, "alchemy"),
        ({"plan": {"iterations": None}}, "exactly one of iterations"),
        ({"plan": {"iterations": "many"}}, "ConfigError: plan.iterations must be a whole number"),
        ({"body": b"junk"}, "CodecError"),
        ({"body": b""}, "CodecError"),
        ({"seed": "x"}, "TypeError: must be a whole number, got 'x'"),
        ({"plan": {"algorithm": "prox", "options": {"my": 0.1}}}, "prox has no option 'my', only mu"),
        ({"block": 0}, "holds no block 0 of task digits; it holds none"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_answered_and_the_next_assignment_works(device, changes, error):
    header, body = device.train(**changes)
    assert error in header["error"]
    assert (header["assignment"], body) == ("r/a-1", b"")
    assert device.trainer.current is None
    assert "metrics" in device.train()[0]


def test_a_shard_that_is_damaged_foreign_or_gone_is_answered_and_not_counted(device, shard, own, tmp_path):
    # A loader of a user's own may do anything.
    loading = Device(tmp_path / "own", {OWN_TASK: "broken"}, task=OWN_TASK)
    assert "KeyError" in loading.train()[0]["error"]
    assert loading.trainer.count_examples() == {}
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert "DataError" in device.train()[0]["error"]
    assert device.trainer.count_examples() == {}
    digit_shard(shard, 50, task="mnist")
    assert "of task mnist" in device.train()[0]["error"]
    shard.unlink()
    assert "DataError" in device.train()[0]["error"]
    device.shards["digits"] = str(tmp_path / "no" / "such" / "place.npz")
    assert "DataError" in device.train()[0]["error"]
    assert device.trainer.count_examples() == {}
    assert device.trainer.compute_shard_fingerprint()


def test_a_model_that_has_diverged_is_said_and_not_sent_as_a_number_that_is_none(device):
    body = device.model(np.nan)
    assert "diverged" in device.evaluate(body=body)[0]["error"]
    assert device.train(body=body)[0]["metrics"]["loss"] is None


def at_iteration(device, number, action):
    """Does something when the trainer has finished so many iterations; watches as a heartbeat would."""

    def watch():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            now = device.trainer.current
            if now is not None and now[2] >= number:
                return action()
            time.sleep(0.001)
        return None

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_recall_ends_after_the_current_iteration_and_sends_what_was_learnt(device):
    seen = []
    thread = at_iteration(
        device, 5, lambda: (seen.append(device.trainer.current), device.trainer.finish_early("r/a-1"))
    )
    header, body = device.train(plan={"iterations": 10_000_000})
    thread.join()
    assert (seen[0][:2], device.trainer.current) == (("r", "r/a-1"), None)
    assert 5 <= header["metrics"]["iterations"] < 10_000_000
    moved = decode_body(body, device.shapes)
    assert any(np.abs(tensor).max() > 0 for tensor in moved.values())


def test_a_recall_that_came_before_the_work_leaves_one_iteration_and_does_not_last(device):
    for number in range(1000):
        device.trainer.finish_early(f"r/{number}")
    device.trainer.finish_early("r/a-1")
    assert len(device.trainer._finish_early_ids) <= 64
    assert device.train()[0]["metrics"]["iterations"] == 1
    assert device.train()[0]["metrics"]["iterations"] == 3
    device.trainer.finish_early("r/a-1")
    assert "error" in device.train(body=b"junk", plan={"iterations": 5})[0]
    assert device.train()[0]["metrics"]["iterations"] == 3, "a failed assignment's recall has ended with it"


@pytest.mark.parametrize("phase", [{}, {"phase": "can", "edgefl": __version__, "layout": "x"}], ids=["train", "can"])
def test_a_task_without_a_shard_is_not_even_imported_and_a_function_is_called_by_no_name(
    device, tmp_path, monkeypatch, phase
):
    touched = tmp_path / "touched"
    (tmp_path / "evil_task.py").write_text(f"open({str(touched)!r}, 'w').close()\nclass Task: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    header, body = device.train(body=b"", task="evil_task:Task", **phase)
    assert "this device has no shard for task 'evil_task:Task'" in header.get("error", header.get("reason"))
    assert (body, "evil_task" in sys.modules) == (b"", False)
    device.shards["os:system"] = "anywhere"
    header, _ = device.train(body=b"", task="os:system", options={"command": f"touch {touched}"}, **phase)
    assert "os is of Python's own library, and holds no task" in header.get("error", header.get("reason"))
    assert not touched.exists()


def test_abandoning_ends_without_an_answer(device):
    thread = at_iteration(device, 5, device.trainer.abort)
    with pytest.raises(TrainingAbortedError):
        device.train(plan={"iterations": 10_000_000})
    thread.join()
    assert device.trainer.current is None


def test_progress_is_reported_when_asked_and_at_most_ten_times_a_second(device):
    device.train(plan={"iterations": 50})
    assert device.progress == []
    started = time.monotonic()
    header, _ = device.train(plan={"iterations": None, "seconds": 0.35, "report_progress": True})
    elapsed_s = time.monotonic() - started
    assert 2 <= len(device.progress) <= 1 + elapsed_s / 0.1
    assignments, iterations, paces = zip(*device.progress, strict=True)
    assert set(assignments) == {"r/a-1"}
    assert list(iterations) == sorted(set(iterations))
    assert iterations[-1] <= header["metrics"]["iterations"]
    assert all(0 < pace < elapsed_s for pace in paces)


QUERY = {"iterations": 10_000_000, "report_progress": True, "fallback_iterations": 5}


def test_a_device_that_asks_stands_still_until_it_is_answered_and_goes_on_past_its_fallback(tmp_path, shard):
    asked = []

    def answer(assignment, iteration, _seconds):
        asked.append((iteration, device.trainer.current[2]))
        if len(asked) == 3:
            threading.Timer(0.05, device.trainer.finish_early, [assignment]).start()
        else:
            device.trainer.continue_training(f"{assignment} {iteration - 1}")  # of an earlier query
            threading.Timer(0.05, device.trainer.continue_training, [f"{assignment} {iteration}"]).start()
        return True

    device = Device(tmp_path, {"digits": str(shard)}, on_progress=answer)
    iterations = device.train(plan=QUERY)[0]["metrics"]["iterations"]
    assert iterations == asked[-1][0] > 5, "it ends with the iteration after which it asked"
    assert all(iteration == current for iteration, current in asked)


@pytest.mark.parametrize(("is_sent", "waits"), [(True, 1), (False, 0)], ids=["no answer", "no connection"])
def test_a_device_whose_queries_nobody_answers_waits_once_and_finishes_after_its_fallback(
    tmp_path, shard, monkeypatch, is_sent, waits
):
    monkeypatch.setattr(trainer, "PROGRESS_INTERVAL_S", 0.0)
    asked = []
    device = Device(tmp_path, {"digits": str(shard)}, on_progress=lambda *query: asked.append(query) or is_sent)
    device.train(plan={"iterations": 1})
    started_s = time.monotonic()
    assert device.train(plan=QUERY)[0]["metrics"]["iterations"] == 5
    assert len(asked) == 5, "it goes on to report"
    assert 0.0 <= time.monotonic() - started_s - waits * trainer.ANSWER_TIMEOUT_S < 3.0


def test_tensors_that_stay_on_the_board_are_neither_sent_nor_forgotten(own, tmp_path):
    device = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    body = device.model(0.0)
    _, moved = device.train(body=body)
    assert set(decode_body(moved, device.shapes)) == {"body"}
    after = 100.0 - 3 * 0.5  # three steps of size 0.5 from where the head began
    assert device.evaluate(body=body)[0]["metrics"]["loss"] == after
    rebooted = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    assert rebooted.evaluate(body=body)[0]["metrics"]["loss"] == after
    rebooted.train(body=body)
    assert rebooted.evaluate(body=body)[0]["metrics"]["loss"] == after - 1.5
    assert rebooted.evaluate(body=body, run="r2")[0]["metrics"]["loss"] == 100.0, "another run has its own"


def test_tensors_that_stay_on_the_board_are_trained_on_while_its_card_is_full(own, tmp_path, full_card):
    device = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    body = device.model(0.0)
    with full_card():
        for number in (1, 2):
            assert "error" not in device.train(body=body, assignment=f"r/a-{number}")[0]
            assert device.evaluate(body=body)[0]["metrics"]["loss"] == 100.0 - 1.5 * number
    device.trainer.close()
    rebooted = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    assert rebooted.evaluate(body=body)[0]["metrics"]["loss"] == 97.0


ADAM = {"algorithm": "adam", "learning_rate": 0.01, "iterations": 2}


def test_moments_live_on_from_one_assignment_to_the_next_and_over_a_restart_where_the_plan_keeps_them(
    device, tmp_path, shard
):
    first = device.train(plan=ADAM)[1]
    assert device.train(plan=ADAM)[1] == first
    device.trainer.close()
    assert not (tmp_path / "steps").exists()
    kept = {**ADAM, "keeps_state": True}
    assert device.train(plan=kept)[1] == first
    second = device.train(assignment="r/a-2", plan=kept)[1]
    assert first != second, "the same model and batches, with other moments"
    device.trainer.close()
    third = device.train(assignment="r/a-3", plan=kept)[1]
    rebooted = Device(tmp_path, {"digits": str(shard)})
    assert rebooted.train(assignment="r/a-3", plan=kept)[1] == third
    assert rebooted.train(run="r2", plan=kept)[1] == first


def test_a_device_that_is_killed_goes_on_from_the_control_variate_that_counted(tmp_path, shard):
    zero = {spec.name: np.zeros(spec.shape, np.float32) for spec in make_task("digits", {}).shapes()}

    def work(device, place, *, began=0):
        mail = PeerMessage(edge=("coordinator", "pi"), step=began, body=encode_control_variate(zero))
        told, body = encode_messages([mail], device.model())
        used = [f"r/a-{place - 2}", f"r/a-{place - 1}"][-min(place, 2) :] if place else []
        plan = {"algorithm": "scaffold", "keeps_state": True}
        return device.train(
            body=body, messages=told, assignment=f"r/a-{place}", version=place, used_assignments=used, plan=plan
        )

    never_killed = Device(tmp_path / "a", {"digits": str(shard)})
    undisturbed = [work(never_killed, place) for place in range(4)]
    for place in range(4):  # a process for each
        header, body = work(Device(tmp_path / "b", {"digits": str(shard)}), place)
        assert body == undisturbed[place][1]
        assert header["metrics"].get("extra") == ({ZERO_CONTROL_VARIATE: 1.0} if place == 0 else None)
    assert work(Device(tmp_path / "b", {"digits": str(shard)}), 3)[1] == body, "done again"
    shutil.rmtree(tmp_path / "b" / "variates")
    header, body = work(Device(tmp_path / "b", {"digits": str(shard)}), 4)
    assert header["metrics"]["extra"] == {ZERO_CONTROL_VARIATE: 1.0}
    header, again = work(never_killed, 4, began=4)
    assert header["metrics"]["extra"] == {ZERO_CONTROL_VARIATE: 1.0}
    assert again == body


BLOCKS = {0: (0, 40), 3: (40, 90), 4: (90, 120)}


@pytest.fixture
def redundant(tmp_path):
    return digit_shard(tmp_path / "redundant.npz", 120, blocks=BLOCKS)


def test_a_block_is_trained_whole_and_alike_on_every_device_that_holds_it(tmp_path, redundant):
    device = Device(tmp_path, {"digits": str(redundant)})
    header, body = device.train(block=3, codec="qsgd:4")
    assert header["metrics"]["num_examples"] == 50
    # Another holder has it at another place of its shard, and another name.
    other_shard, rows = tmp_path / "other.npz", np.concatenate([np.arange(100, 120), np.arange(40, 90)])
    write_shard(
        other_shard, some_digits(120).take(rows), ShardMetadata(task="digits", blocks={9: (0, 20), 3: (20, 70)})
    )
    other = Device(tmp_path / "other", {"digits": str(other_shard)}, device_id="another-pi")
    assert other.train(block=3, codec="qsgd:4")[1] == body
    assert device.train(block=4, codec="qsgd:4")[1] != body
    assert device.train(block=3, codec="qsgd:4", version=1)[1] != body
    assert other.train(codec="qsgd:4")[1] != device.train(codec="qsgd:4")[1]


def test_blocks_are_reported_by_task_and_only_where_there_are_some(tmp_path, shard, redundant):
    device = Device(tmp_path, {"digits": str(redundant), "mnist": str(shard), "noop": "", "x": str(tmp_path)})
    assert device.trainer.list_blocks() == {"digits": [0, 3, 4]}
    redundant.with_suffix(".json").write_text("torn")
    assert device.trainer.list_blocks() == {}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"block": 7}, "TaskError: this device holds no block 7 of task digits; it holds 0, 3, 4"),
        ({"block": "x"}, "TypeError: must be a whole number, got 'x'"),
        ({"block": 3, "codec": "ef|topk:0.1"}, "must give the same result on all who hold it"),
        ({"block": 3, "plan": {"keeps_state": True}}, "must give the same result on all who hold it"),
    ],
    ids=str,
)
def test_work_on_a_block_that_cannot_be_done_is_answered(tmp_path, redundant, changes, error):
    device = Device(tmp_path, {"digits": str(redundant)})
    assert error in device.train(**changes)[0]["error"]
    assert "metrics" in device.train(block=3)[0]
    digit_shard(redundant, 100, blocks=BLOCKS)
    assert "is rows 90 to 120 of a shard of 100; cut the shards again" in device.train(block=4)[0]["error"]
    assert "metrics" in device.train(block=3)[0]


def sent(body, shapes):
    """Returns what travelled, in full."""
    decoded = decode_body(body, shapes).items()
    return {name: tensor.dense() if isinstance(tensor, SparseTensor) else tensor for name, tensor in decoded}


FEEDBACK = {"codec": "ef|topk:0.1"}


def test_what_a_codec_leaves_out_comes_with_the_next_update(device):
    whole = sent(device.train()[1], device.shapes)
    first = sent(device.train(**FEEDBACK)[1], device.shapes)
    second = sent(device.train(**FEEDBACK, assignment="r/a-2", used_assignments=["r/a-1"])[1], device.shapes)
    # The same model and version twice, so that the displacement is the same and the residual all the difference.
    again = {name: 2 * whole[name] - first[name] for name in whole}
    for name, tensor in second.items():
        kept = tensor != 0
        np.testing.assert_allclose(tensor[kept], again[name][kept], rtol=1e-5, atol=1e-7)
        assert np.abs(again[name][~kept]).max() <= np.abs(again[name][kept]).min() + 1e-6


def test_an_update_that_was_lost_goes_back_whole(device, tmp_path, shard):
    device.train(**FEEDBACK)
    device.train(**FEEDBACK, assignment="r/a-2", version=1)
    # Only the second was used: the first goes back into what comes next.
    third = device.train(**FEEDBACK, assignment="r/a-3", version=2, used_assignments=["r/a-2"])[1]
    other = Device(tmp_path / "other", {"digits": str(shard)})
    other.train(**FEEDBACK)
    other.train(**FEEDBACK, assignment="r/a-2", version=1)
    used_both = other.train(**FEEDBACK, assignment="r/a-3", version=2, used_assignments=["r/a-1", "r/a-2"])[1]
    assert third != used_both


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_left_out_survives_a_power_cut_where_a_run_wants_that_and_else_a_stop(
    device, tmp_path, shard, durable
):
    options = {**FEEDBACK, "residuals": "durable"} if durable else FEEDBACK
    device.train(**options)
    if not durable:
        assert not (tmp_path / "residuals").exists()
        device.trainer.close()
    after = {**options, "assignment": "r/a-2", "version": 1, "used_assignments": ["r/a-1"]}
    rebooted = Device(tmp_path, {"digits": str(shard)}).train(**after)[1]
    assert rebooted == device.train(**after)[1]
    assert rebooted != Device(tmp_path / "cold", {"digits": str(shard)}).train(**after)[1]


def change(device, *, row, value):
    """Returns the model with one row of a tensor changed, and the delta that says so."""
    task = make_task("digits")
    tensors = task.init(1)
    tensors["fc1.weight"][row] = value
    indices = {"fc1.weight": np.arange(row * 64, (row + 1) * 64)}
    delta = encode_delta(tensors, indices, task.shapes(), "dense", derive_rng(0))
    return make_codec("dense", task.shapes()).encode(tensors, derive_rng(0)), delta


def test_changes_to_the_model_that_is_held_train_as_the_whole_model_does(device):
    whole, delta = change(device, row=2, value=0.5)
    assert len(delta) < len(whole) / 10
    expected = device.train(body=whole, version=1)[1]
    assert "metrics" in device.train(keeps_model=True)[0]
    header, body = device.train(body=delta, version=1, base_version=0, keeps_model=True)
    assert "error" not in header
    assert body == expected
    # Now it holds version 1, and goes on from there.
    assert device.train(body=delta, version=2, base_version=1)[1] == device.train(body=whole, version=2)[1]


@pytest.mark.parametrize("held", ["nothing", "another version", "another run", "not kept"])
def test_changes_to_a_model_that_is_not_held_ask_for_the_whole_one(device, held):
    _, delta = change(device, row=2, value=0.5)
    if held != "nothing":
        device.train(
            keeps_model=held != "not kept", version=1 if held == "another version" else 0,
            run="r0" if held == "another run" else "r",
        )  # fmt: skip
    header, body = device.train(body=delta, version=3, base_version=0)
    assert header["requires_full_model"] is True
    assert "needs the whole model: changes since version 0 came, it holds" in header["error"]
    assert (header["assignment"], body) == ("r/a-1", b"")
    assert "requires_full_model" not in device.train(version=3)[0]


def test_a_damaged_delta_is_an_error_and_leaves_the_model_that_is_held(device):
    whole, delta = change(device, row=2, value=0.5)
    device.train(keeps_model=True)
    header, _ = device.train(body=delta[:-3], version=1, base_version=0, keeps_model=True)
    assert "CodecError" in header["error"]
    assert "requires_full_model" not in header
    assert device.train(body=delta, version=1, base_version=0)[1] == device.train(body=whole, version=1)[1]


def test_an_update_tells_how_the_board_was_while_it_was_made(device, tmp_path):
    plant(tmp_path, zones({"cpu-thermal": 83.2}))
    assert "health" not in device.train()[0]["metrics"]
    device.trainer._health_sampler = HealthSampler(tmp_path, read_quality=lambda _: LinkQuality(signal_dbm=-70.0))
    told, _ = device.train(assignment="r/a-2")
    assert told["metrics"]["health"] == {"max_temperature_c": 83.2, "signal_dbm": -70.0}


def test_a_member_of_a_collective_uploads_in_its_turn_keeps_the_model_and_sends_it_again_when_asked(device):
    group = {"collective": "ring", "members": ["pi"], "group": "g", "reductions": 2, "addresses": [""]}
    answer, body = device.train(plan={"collective": {**group, "uploader": "pi"}}, keeps_model=True)
    assert answer["metrics"]["extra"] == {"reductions": 2.0, "peer_bytes_up": 0.0}
    assert answer["metrics"]["iterations"] == 6
    twice = decode_body(device.train(assignment="r/b", plan={"iterations": 6})[1], device.shapes)
    moved = decode_body(body, device.shapes)
    assert max(float(np.abs(moved[name] - twice[name]).max()) for name in moved) > 0, "other batches"
    hashes = {answer["next_model_sha256"]}
    answer, body = device.train(assignment="r/c", plan={"collective": group}, keeps_model=True)
    assert (body, answer["metrics"]["extra"]["reductions"]) == (b"", 2.0)
    hashes.add(answer["next_model_sha256"])
    assert len(hashes) == 1, "the same model again"
    nothing_changed = encode_delta(make_task("digits").init(1), {}, device.shapes, "dense", derive_rng(0))
    answer, _ = device.train(assignment="r/d", version=1, base_version=1, body=nothing_changed, keeps_model=True)
    assert "metrics" in answer, "it holds the next version"
    answer, body = device.train(assignment="r/e", plan={"collective": {**group, "resend": "r/c"}})
    resent = decode_body(body, device.shapes)
    assert answer["metrics"]["iterations"] == 0
    assert all(np.array_equal(resent[name], moved[name]) for name in moved)
    answer, _ = device.train(assignment="r/f", plan={"collective": {**group, "resend": "r/a-1"}})
    assert "not held here any more" in answer["error"]
    answer, _ = device.train(assignment="r/g", plan={"collective": {**group, "members": ["other"]}})
    assert "this device among them" in answer["error"]


ASKED = {
    "analysis": {"name": "statistics", "options": {"columns": "10"}},
    "test_fraction": 0.0,
    "codec": "dense|zstd",
}


def test_an_analysis_is_answered_with_sums_over_the_whole_shard_and_trains_nothing(device, shard):
    analysis = make_analysis(make_task("digits"), "statistics", {"columns": "10"})
    request = analysis.make_request(analysis.make_model())
    body = make_codec("dense", analysis.request_spec).encode(request, derive_rng(0))
    header, answer = device.train(body=body, **ASKED)
    assert (header["metrics"]["num_examples"], header["metrics"]["loss"]) == (120, None)
    sums = decode_body(answer, analysis.sums_spec)
    assert analysis.find_fault(sums) is None
    values = make_task("digits").read(str(shard)).inputs.reshape(120, -1)[:, 10].astype(float)
    assert sums["counts"].tolist() == [[120, 0]]
    assert float(read_sum(sums["sums"][0, 0])) == values.sum()
    assert "metrics" in device.train(assignment="r/a-2")[0], "a training beside it goes on as ever"


def test_a_board_says_nothing_about_fewer_examples_than_its_owner_lets_it(device):
    asked = {**ASKED, "analysis": {"name": "statistics", "options": {"columns": "10", "min_group": 4}}}
    header, body = device.train(**asked)
    assert (body, "min_group must be at least 5 on this board, got 4" in header["error"]) == (b"", True)
    checked = {"phase": "can", "edgefl": __version__, "layout": "", **asked}
    assert "at least 5 on this board" in device.train(**checked)[0]["reason"]
    device.trainer._task_cache._get_min_group = lambda: 4
    assert "on this board" not in device.train(body=b"", **asked)[0]["error"]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ("statistics", "must be a table with a name"),
        ({"name": "statistics", "options": 3}, "options of an analysis must be a table"),
        ({"name": "raw-rows", "options": {}}, "analysis 'raw-rows' is not known here"),
        ({"name": "statistics", "options": {"min_group": 0}}, "min_group must be"),
        ({"name": "statistics", "options": {"columns": ["1"]}}, "columns must be a text"),
    ],
)
def test_an_analysis_that_is_malformed_is_refused(device, asked, error):
    header, body = device.train(analysis=asked)
    assert (error in header["error"], body) == (True, b""), header["error"]


def test_a_personal_copy_goes_on_after_a_kill_and_is_evaluated_beside_the_model(tmp_path, shard):
    plan = {"personal_lambda": 0.1, "iterations": 20}
    metrics = make_task_metrics(make_task("digits"), has_personal=True)

    def score(device):
        header, sums = device.evaluate(has_personal=True)
        values = metrics.combine([sums])
        assert values["accuracy"] == header["metrics"]["accuracy"]
        return values["personal-accuracy"]

    never_killed = Device(tmp_path / "a", {"digits": str(shard)})
    assert score(never_killed) == never_killed.evaluate()[0]["metrics"]["accuracy"], (
        "before any training it is the model"
    )
    for version in range(4):
        killed = Device(tmp_path / "b", {"digits": str(shard)})
        replies = [board.train(plan=plan, version=version) for board in (never_killed, killed)]
        assert replies[0][1] == replies[1][1]
        assert replies[0][0]["metrics"]["iterations"] == 40
        assert score(never_killed) == score(Device(tmp_path / "b", {"digits": str(shard)}))
    kept = [np.load(tmp_path / board / "runs" / "r.npz") for board in "ab"]
    for name in kept[0]:
        assert name.startswith("personal/")
        assert np.array_equal(kept[0][name], kept[1][name])
    # The model that came was the same each time: four trainings from it get less far than the copy, which goes on.
    task = make_task("digits")
    training, learner = split_train_test(task.read(str(shard)), 0.25)[0], task.learner()
    moved = decode_body(replies[0][1], task.shapes())
    once = {name: value + moved[name] for name, value in task.init(1).items()}
    losses = []
    for tensors in (task.init(1), once, {name.removeprefix("personal/"): kept[0][name] for name in kept[0]}):
        learner.load(tensors)
        losses.append(learner.evaluate(training)[0])
    assert losses[0] > losses[1] > losses[2]


def test_a_board_writes_nothing_of_its_own_where_it_has_no_copy(device, tmp_path):
    device.train()
    assert not (tmp_path / "runs").exists()


def test_an_update_names_the_version_of_its_shard_which_changes_with_its_files(device):
    found = device.train()[0]["metrics"]["shard"]
    assert found["num_examples"] == 120
    assert device.train(assignment="r/a-2")[0]["metrics"]["shard"] == found
    os.utime(device.shards["digits"], ns=(1, 1))
    changed = device.train(assignment="r/a-3")[0]["metrics"]["shard"]
    assert changed["num_examples"] == 120
    assert 0 <= changed["version"] < 2**48
    assert changed["version"] != found["version"]


def test_a_board_trains_and_evaluates_the_cluster_model_that_fits_its_examples_before_and_after_a_kill(
    tmp_path, shard
):
    task = make_task("digits")
    training, test = split_train_test(task.read(str(shard)), 0.25)
    models = [task.init(seed) for seed in (3, 1, 2)]
    learner, losses = task.learner(), []
    for model in models:
        learner.load(model)
        losses.append((learner.evaluate(training)[0], *learner.evaluate(test)))
    best = int(np.argmin([loss[0] for loss in losses]))
    stack = {
        spec.name: models[int(spec.name[8])][spec.name.partition("/")[2]]
        for spec in make_stack_shapes(task.shapes(), 3)
    }
    body = make_codec("dense", make_stack_shapes(task.shapes(), 3)).encode(stack, derive_rng(0))
    replies = []
    for root in "ab":
        device = Device(tmp_path / root, {"digits": str(shard)})
        header, update = device.train(body=body, clusters=3)
        assert header["metrics"]["extra"] == {"cluster": float(best)}
        alone = make_codec("dense", task.shapes()).encode(models[best], derive_rng(0))
        moved = decode_body(update, make_update_shapes(task.shapes()))
        assert moved.pop("-cluster").tolist() == [best]
        plain = decode_body(Device(tmp_path / "c", {"digits": str(shard)}).train(body=alone)[1], task.shapes())
        assert all(np.array_equal(moved[name], plain[name]) for name in plain), "it trains that model, and no other"
        replies.append(update)
        found = device.evaluate(body=body, clusters=3)[0]["metrics"]
        assert (found["loss"], found["accuracy"]) == pytest.approx(losses[best][1:])
    assert replies[0] == replies[1]
    assert not [*tmp_path.rglob("runs/*.npz")]


@pytest.mark.parametrize("clusters", [17, -1, True])
def test_a_number_of_cluster_models_that_is_out_of_bounds_is_refused(device, clusters):
    header, body = device.train(clusters=clusters)
    assert (f"clusters must be 2 to 16, got {clusters!r}" in header["error"], body) == (True, b""), header["error"]


PRIVACY = {"optimizer": "sgd", "clip": 1.0, "epsilon": 8.0, "delta": 1e-5, "noise": 1.5}
PRIVATE = {"algorithm": "dp-sgd", "privacy": PRIVACY}


NUM_TRAINED = 88
"""Of the 120 examples of the shard."""


def compute_spent(steps):
    return compute_epsilon(compute_divergences(16 / NUM_TRAINED, 1.5, steps), 1e-5)


def test_a_private_update_says_what_its_run_has_spent_over_a_restart_too(device, tmp_path, shard):
    replies = [device.train(plan=PRIVATE), device.train(plan=PRIVATE, assignment="r/a-2")]
    restarted = Device(tmp_path, {"digits": str(shard)})
    replies += [restarted.train(plan=PRIVATE, assignment="r/a-3"), restarted.train(plan=PRIVATE, run="other")]
    spent = [header["metrics"]["extra"]["epsilon"] for header, _ in replies]
    assert spent == pytest.approx([compute_spent(3), compute_spent(6), compute_spent(9), compute_spent(3)])
    assert {header["metrics"]["num_examples"] for header, _ in replies} == {NUM_TRAINED}
    assert {header["metrics"]["loss"] for header, _ in replies} == {None}  # it has no noise
    assert len({body for _, body in replies}) == 4  # two boards of one name and seed share no noise


def test_nobody_knows_the_changes_of_augment_under_a_private_plan(device, monkeypatch):
    seen = []

    def record(_task, inputs, targets, rng):
        seen.append((len(inputs), rng.random()))
        return inputs, targets

    monkeypatch.setattr(ClassificationTask, "augment", record, raising=False)
    device.train(plan={"iterations": 1})
    device.train(plan={"iterations": 1}, run="other")
    assert seen[0] == seen[1], "of another plan they follow from the seed"
    seen.clear()
    private = {**PRIVATE, "batch_size": 1000, "iterations": 1, "privacy": {**PRIVACY, "epsilon": 1000.0}}
    replies = [device.train(plan=private, run=run)[0] for run in ("third", "fourth")]
    assert not any("error" in reply for reply in replies), replies
    assert [size for size, _ in seen] == [1] * 2 * NUM_TRAINED
    assert len({value for _, value in seen}) == 2 * NUM_TRAINED


KILLED = """
import os, signal, sys
from pathlib import Path
from test_trainer import PRIVATE, Device
device = Device(Path(sys.argv[1]), {"digits": sys.argv[2]})
device.trainer._encode_update = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
device.train(plan=PRIVATE)
"""


def test_a_board_that_is_killed_between_training_and_sending_has_spent_it(device, tmp_path, shard):
    folders = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(shard)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)}, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    header, _ = device.train(plan=PRIVATE)
    assert header["metrics"]["extra"]["epsilon"] == pytest.approx(compute_spent(6))


def test_a_board_whose_budget_of_the_run_is_spent_declines_and_trains_nothing(device):
    tight = {**PRIVATE, "privacy": {**PRIVACY, "epsilon": compute_spent(7)}}
    assert all("error" not in device.train(plan=tight)[0] for _ in range(2))
    header, body = device.train(plan=tight)
    assert (body, "metrics" in header) == (b"", False)
    assert "this board's budget of the run is spent: another 3 steps would come to epsilon" in header["error"]


def test_a_damaged_account_of_privacy_trains_nothing(device, tmp_path):
    (tmp_path / "example_privacy.json").write_text("{")
    header, body = device.train(plan=PRIVATE)
    assert (body, "it is not known how much privacy" in header["error"]) == (b"", True)


def test_a_board_that_does_not_know_privacy_refuses_the_plan_and_trains_nothing(device, monkeypatch):
    """A release before: its plans have no such field, which `from_json` drops, and no such algorithm."""
    plan = {**device.header()["plan"], **PRIVATE}
    monkeypatch.setattr(TrainConfig, "_check_privacy", lambda *_: None)
    older = {name: make for name, make in registry.BUILT_IN.items() if name != "dp-sgd"}
    monkeypatch.setattr(registry, "BUILT_IN", older)
    del plan["privacy"]
    header, body = device.trainer.train(device.header(plan=plan), device.model())
    assert (body, "local algorithm 'dp-sgd' is not installed on this board" in header["error"]) == (b"", True)


def limited(tmp_path, shard, limit):
    device = Device(tmp_path, {"digits": str(shard)})
    device.trainer._get_max_epsilon = lambda: limit
    return device


READY = {"phase": "can", "edgefl": __version__, "needs": {}}


def test_a_board_whose_owner_limits_epsilon_takes_part_in_private_runs_alone(tmp_path, shard):
    device = limited(tmp_path, shard, 3.0)
    for changes in ({}, ASKED, {"plan": {**device.header()["plan"], "algorithm": "dp-sgd"}}):
        header, body = device.trainer.train(device.header(**changes), device.model())
        assert (body, "lets a task spend at most epsilon = 3" in header["error"]) == (b"", True)
    layout = model_fingerprint(device.shapes)
    answer, _ = device.trainer.train(device.header(**READY, layout=layout), b"")
    assert (answer["ready"], "has no bound" in answer["reason"]) == (False, True)
    answer, _ = device.trainer.train(device.header(**READY, layout=layout, privacy="example"), b"")
    assert answer["ready"]
    assert "error" not in device.train(plan=PRIVATE)[0]
    for changes in ({}, {"privacy": "example"}, {"phase": "can"}):
        header, body = device.evaluate(**changes)
        assert (body, "metrics" in header) == (b"", False)
    assert "an evaluation has no bound; set run.evaluate_on" in device.evaluate()[0]["error"]


SECURE = {"step": "update", "group": "g", "version": 0, "threshold": 0.67, "clip": 1.0, "max_examples": 9}


def test_a_board_whose_owner_asks_for_masks_trains_in_secure_aggregation_alone(tmp_path, shard):
    device = limited(tmp_path, shard, None)
    device.trainer._get_only_masked = lambda: True
    plan = device.header()["plan"]
    masked = {**plan, "secure": {**SECURE, "num_members": 3}}
    collective = {"collective": "ring", "group": "g", "members": ["pi"], "weighting": "examples"}
    unmasked = (
        {}, ASKED, {"secure": True}, {"plan": "?"}, {"plan": {**masked, "node": {}}}, {**ASKED, "plan": masked},
        {"plan": {**masked, "collective": collective}}, {"plan": masked, "split": {"after": "x"}},
        {"plan": masked, "job": {"deadline_s": 3}},
    )  # fmt: skip
    for changes in unmasked:
        header, body = device.trainer.train(device.header(**changes), device.model())
        assert (body, "masked updates alone (--only-masked)" in header["error"]) == (b"", True)
    layout = model_fingerprint(device.shapes)
    answers = [
        device.trainer.train(device.header(**READY, layout=layout, **more), b"")[0] for more in ({}, {"secure": True})
    ]
    assert [answer["ready"] for answer in answers] == [False, True]
    assert "error" not in device.train(plan=masked)[0]


@pytest.mark.parametrize("limit", [{"_get_max_epsilon": lambda: 3.0}, {"_get_only_masked": lambda: True}])
def test_a_node_that_runs_stops_where_its_owner_then_limits_what_it_sends(tmp_path, shard, limit):
    device, calls = limited(tmp_path, shard, None), []
    device.trainer._gossip_worker.pause = lambda: calls.append("pause")
    device.trainer._gossip_worker.resume = lambda: calls.append("resume")
    device.trainer._pace_node(lambda: False)
    assert not calls
    vars(device.trainer).update(limit)
    device.trainer.resume()
    device.trainer._pace_node(lambda: False)
    assert calls == ["pause"]


def test_what_a_run_held_back_before_it_was_private_is_not_sent(device):
    state, codec = device.trainer._client_state, "ef|topk:0.01"
    header, _ = device.train(codec=codec)
    assert "error" not in header
    feedback = state.get_feedback("r", codec, device.shapes)
    device.trainer.close()
    assert "error" not in device.train(plan=PRIVATE, assignment="r/a-2")[0]  # dense: it would lie there still
    assert state.get_feedback("r", codec, device.shapes) is not feedback
    assert not any(np.any(value) for value in state.get_feedback("r", codec, device.shapes).state().values())
    kept = state.get_feedback("r", codec, device.shapes)
    assert "error" not in device.train(plan=PRIVATE, assignment="r/a-3")[0]
    assert state.get_feedback("r", codec, device.shapes) is kept


def test_a_private_plan_that_does_not_fit_gets_nothing_that_is_held(device):
    device.trainer._held = "r/a-0", {"metrics": {}}, b"exact"
    collective = {"collective": "ring", "group": "g", "members": ["pi"], "weighting": "examples", "resend": "r/a-0"}
    header, body = device.train(plan={**PRIVATE, "collective": collective})
    assert (body, "does not go with collectives" in header["error"]) == (b"", True)


def test_a_run_with_an_endless_id_is_refused(device):
    header, body = device.train(run="r" * 257)
    assert (body, "the id of a run may have 256 characters, got 257" in header["error"]) == (b"", True)


@pytest.mark.parametrize("changes", [ASKED, {"clusters": 2}])
def test_a_private_plan_is_no_cover_for_what_has_no_bound(device, changes):
    header, body = device.train(plan=PRIVATE, **changes)
    assert (body, "goes with the training of one whole model" in header["error"]) == (b"", True)


def test_the_owners_limit_holds_over_runs_and_whatever_delta_they_say(tmp_path, shard):
    device = limited(tmp_path, shard, compute_spent(8))
    loose = {**PRIVATE, "privacy": {**PRIVACY, "delta": 0.01, "epsilon": 1000.0}}
    replies = [device.train(plan=loose, run=f"r{number}")[0] for number in range(3)]
    assert ["error" in reply for reply in replies] == [False, False, True]
    assert "the limit of this board's owner is reached" in replies[2]["error"]
    device.trainer._get_max_epsilon = lambda: compute_spent(5)
    answer, _ = device.trainer.train(device.header(**READY, privacy="example"), b"")
    assert (answer["ready"], "limit of this board's owner" in answer["reason"]) == (False, True)


def test_a_board_without_gradients_by_example_is_not_ready_for_a_private_run(own, tmp_path):
    device = Device(tmp_path, {OWN_TASK: "somewhere"}, task=OWN_TASK)
    header = device.header(**READY, layout=model_fingerprint(device.shapes), privacy="example")
    answer, _ = device.trainer.train(header, b"")
    assert (answer["ready"], "has no gradients by example" in answer["reason"]) == (False, True)
