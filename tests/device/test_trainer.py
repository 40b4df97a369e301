"""The trainer on real shards: digits in files, and a small task of a user's own that counts what is done to it."""

import sys
import threading
import time

import numpy as np
import pytest

from edgefl.compression.registry import decode_body, make_codec
from edgefl.device.trainer import AbandonedError, Trainer
from edgefl.tasks.cards import ShardCard
from edgefl.tasks.registry import make_task
from edgefl.tasks.shards import write_shard
from edgefl.tasks.splits import local_split
from edgefl.types import Dataset, derived_rng

OWN = '''
import numpy as np
from edgefl.tasks.noop import NoopTask
from edgefl.types import Dataset, TensorSpec

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

class Personal:
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
        return Dataset(inputs=inputs, labels=np.zeros(40, np.int64))
    def learner(self, *, accelerator="cpu", threads=None):
        return Learner(self._shapes)
'''


def some_digits(count, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset(inputs=rng.integers(0, 17, (count, 8, 8)).astype(np.uint8), labels=rng.integers(0, 10, count))


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "digits.npz"
    write_shard(path, some_digits(120), ShardCard(task="digits"))
    return path


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_trainer_task.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    import own_trainer_task  # noqa: PLC0415 it has just been written

    yield own_trainer_task
    sys.modules.pop("own_trainer_task")


OWN_TASK = "own_trainer_task:Personal"


class Device:
    """A trainer with its shards, and the messages that a coordinator would send."""

    def __init__(self, root, shards, *, role="trainer", options=None, task="digits"):
        self.shards, self.progress, self.task, self.options = dict(shards), [], task, options or {}
        self.trainer = Trainer(
            device_id="pi",
            role=role,
            shards=lambda: self.shards,
            accelerator="cpu",
            threads=1,
            state_dir=root,
            on_progress=lambda *report: self.progress.append(report),
        )

    @property
    def shapes(self):
        return make_task(self.task, self.options).shapes()

    def model(self, value=None):
        task = make_task(self.task, self.options)
        tensors = task.init(1)
        if value is not None:
            tensors = {name: np.full_like(tensor, value) for name, tensor in tensors.items()}
        return make_codec("dense", task.shapes()).encode(tensors, derived_rng(0))

    def header(self, assignment="r/a-1", **changes):
        header = {
            "v": 1, "run": "r", "task": self.task, "options": self.options, "seed": 7, "test_fraction": 0.25,
            "assignment": assignment, "version": 0, "codec": "dense", "settled": [],
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
    assert (header["v"], header["run"], header["assignment"]) == (1, "r", "r/a-1")
    metrics = header["metrics"]
    task = make_task("digits")
    data = task.read(str(shard))
    train, _ = local_split(data, 0.25)
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


def test_the_update_is_encoded_as_it_was_asked_for(device):
    dense, half = device.train()[1], device.train(codec="dense|fp16")[1]
    assert len(half) < 0.6 * len(dense)
    exact, rounded = decode_body(dense, device.shapes), decode_body(half, device.shapes)
    assert all(np.allclose(exact[name], rounded[name], atol=1e-2) for name in exact)


def test_a_trainer_evaluates_on_its_test_split_and_an_evaluator_on_all_it_has(device, tmp_path, shard):
    metrics = device.evaluate()[0]["metrics"]
    data = make_task("digits").read(str(shard))
    _, test = local_split(data, 0.25)
    learner = make_task("digits").learner()
    learner.load(make_task("digits").init(1))
    loss, accuracy = learner.evaluate(test)
    assert metrics == {"num_examples": len(test), "loss": pytest.approx(loss), "accuracy": accuracy}
    judge = Device(tmp_path / "judge", {"digits": str(shard)}, role="evaluator")
    assert judge.evaluate()[0]["metrics"]["num_examples"] == 120
    assert judge.evaluate()[1] == b""


def test_a_board_without_a_test_split_says_so(device):
    header, body = device.evaluate(test_fraction=0.0)
    assert "holds no examples" in header["error"]
    assert body == b""


def test_task_and_shard_stay_warm_between_assignments(own, tmp_path):
    device = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    body = device.model()
    own.made.clear()
    for number in range(3):
        assert "error" not in device.train(body=body, assignment=f"r/{number}")[0]
        assert "error" not in device.evaluate(body=body)[0]
    assert (len(own.made), len(own.read)) == (1, 1)


def test_other_options_are_another_task_and_two_are_kept(own, tmp_path):
    device = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    bodies = {}
    for size in (2, 3, 4):
        device.options = {"size": size}
        bodies[size] = device.model()
    own.made.clear()
    for size, num_made in ((2, 1), (3, 2), (2, 2), (4, 3), (2, 3), (3, 4)):
        assert "error" not in device.train(body=bodies[size], options={"size": size})[0]
        assert len(own.made) == num_made


def test_a_shard_that_grew_is_read_again_and_others_are_not(device, shard):
    stamp = device.trainer.shard_stamps()
    first = device.train()[0]["metrics"]["num_examples"]
    assert device.trainer.shard_stamps() == stamp
    write_shard(shard, some_digits(400, seed=1), ShardCard(task="digits"))
    assert device.trainer.shard_stamps() != stamp
    second = device.train()[0]["metrics"]["num_examples"]
    assert second > 2 * first
    assert device.trainer.examples() == {"digits": 400}


def test_a_folder_that_the_board_collects_into_counts_with_every_file(tmp_path):
    folder = tmp_path / "collected"
    folder.mkdir()
    device = Device(tmp_path, {"digits": str(folder)}, role="evaluator")
    counts = []
    for day in range(3):
        data = some_digits(10 + day, seed=day)
        np.savez(folder / f"day-{day}.npz", inputs=data.inputs, labels=data.labels)
        counts.append(device.evaluate()[0]["metrics"]["num_examples"])
    assert counts == [10, 21, 33]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"task": "mnist"}, "no shard for task 'mnist'"),
        ({"task": "no-such-task"}, "no shard for task 'no-such-task'"),
        ({"task": "os:system", "options": {"command": "touch /tmp/never"}}, "no shard for task 'os:system'"),
        ({"options": {"model": "gpt"}}, "ConfigError"),
        ({"codec": "rar"}, "unknown stage 'rar'"),
        ({"v": 2}, "update it"),
        ({"plan": {"algorithm": "alchemy"}}, "alchemy"),
        ({"plan": {"iterations": None}}, "exactly one of iterations"),
        ({"plan": {"iterations": "many"}}, "TypeError"),
        ({"body": b"junk"}, "CodecError"),
        ({"body": b""}, "CodecError"),
        ({"seed": "x"}, "ValueError"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_answered_and_the_next_assignment_works(device, changes, error):
    header, body = device.train(**changes)
    assert error in header["error"]
    assert (header["assignment"], body) == ("r/a-1", b"")
    assert device.trainer.now is None
    assert "metrics" in device.train()[0]


def test_a_shard_that_is_damaged_foreign_or_gone_is_answered_and_not_counted(device, shard, tmp_path):
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert "DataError" in device.train()[0]["error"]
    assert device.trainer.examples() == {}
    write_shard(shard, some_digits(50), ShardCard(task="mnist"))
    assert "of task mnist" in device.train()[0]["error"]
    shard.unlink()
    assert "DataError" in device.train()[0]["error"]
    device.shards["digits"] = str(tmp_path / "no" / "such" / "place.npz")
    assert "DataError" in device.train()[0]["error"]
    assert device.trainer.examples() == {}
    assert device.trainer.shard_stamps()


def test_a_loader_of_the_users_own_may_raise_anything(own, tmp_path):
    device = Device(tmp_path, {OWN_TASK: "broken"}, task=OWN_TASK)
    assert "KeyError" in device.train()[0]["error"]
    assert device.trainer.examples() == {}


def test_a_model_that_has_diverged_is_said_and_not_sent_as_a_number_that_is_none(device):
    header, _ = device.evaluate(body=device.model(np.nan))
    assert "diverged" in header["error"]


def test_a_loss_that_is_no_number_is_left_out(device):
    header, _ = device.train(body=device.model(np.nan))
    assert header["metrics"]["loss"] is None


def at_iteration(device, number, action):
    """Does something when the trainer has finished so many iterations; watches as a heartbeat would."""

    def watch():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            now = device.trainer.now
            if now is not None and now[2] >= number:
                return action()
            time.sleep(0.001)
        return None

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_recall_ends_after_the_current_iteration_and_sends_what_was_learnt(device):
    thread = at_iteration(device, 5, lambda: device.trainer.recall("r/a-1"))
    header, body = device.train(plan={"iterations": 10_000_000})
    thread.join()
    assert 5 <= header["metrics"]["iterations"] < 10_000_000
    moved = decode_body(body, device.shapes)
    assert any(np.abs(tensor).max() > 0 for tensor in moved.values())


def test_a_recall_that_came_before_the_work_leaves_one_iteration_and_does_not_last(device):
    device.trainer.recall("r/a-1")
    device.trainer.recall("r/other")
    assert device.train()[0]["metrics"]["iterations"] == 1
    assert device.train()[0]["metrics"]["iterations"] == 3


def test_recalls_do_not_gather(device):
    for number in range(1000):
        device.trainer.recall(f"r/{number}")
    device.trainer.recall("r/a-1")
    assert len(device.trainer._recalled) <= 64
    assert "error" in device.train(body=b"junk", plan={"iterations": 5})[0]
    assert device.train()[0]["metrics"]["iterations"] == 3, "a failed assignment's recall has ended with it"


def test_a_task_that_this_board_has_no_shard_for_is_not_even_imported(device, tmp_path, monkeypatch):
    (tmp_path / "evil_task.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w').close()\nclass Task: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    header, body = device.train(body=b"", task="evil_task:Task")
    assert "TaskError: this device has no shard for task 'evil_task:Task'" in header["error"]
    assert body == b""
    assert "evil_task" not in sys.modules
    assert not (tmp_path / "touched").exists()


def test_a_function_is_called_by_no_name_even_with_a_shard(device, tmp_path):
    device.shards["os:system"] = "anywhere"
    header, _ = device.train(body=b"", task="os:system", options={"command": f"touch {tmp_path}/touched"})
    assert "must be a class with a method read" in header["error"]
    assert not (tmp_path / "touched").exists()


def test_abandoning_ends_without_an_answer(device):
    thread = at_iteration(device, 5, device.trainer.abandon)
    with pytest.raises(AbandonedError):
        device.train(plan={"iterations": 10_000_000})
    thread.join()
    assert device.trainer.now is None


def test_the_present_work_can_be_watched(device):
    seen = []
    thread = at_iteration(device, 1, lambda: seen.append(device.trainer.now))
    device.train(plan={"iterations": None, "seconds": 0.3})
    thread.join()
    assert seen[0][:2] == ("r", "r/a-1")
    assert device.trainer.now is None


def test_progress_is_reported_when_asked_and_at_most_ten_times_a_second(device):
    device.train(plan={"iterations": 50})
    assert device.progress == []
    started = time.monotonic()
    header, _ = device.train(plan={"iterations": None, "seconds": 0.55, "report_progress": True})
    elapsed_s = time.monotonic() - started
    assert 2 <= len(device.progress) <= 1 + elapsed_s / 0.1
    assignments, iterations, paces = zip(*device.progress, strict=True)
    assert set(assignments) == {"r/a-1"}
    assert list(iterations) == sorted(set(iterations))
    assert iterations[-1] <= header["metrics"]["iterations"]
    assert all(0 < pace < elapsed_s for pace in paces)


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


def test_another_run_begins_with_tensors_of_its_own(own, tmp_path):
    device = Device(tmp_path, {OWN_TASK: "anywhere"}, task=OWN_TASK)
    body = device.model(0.0)
    device.train(body=body)
    assert device.evaluate(body=body, run="r2")[0]["metrics"]["loss"] == 100.0
    assert device.evaluate(body=body, run="r")[0]["metrics"]["loss"] == 98.5
