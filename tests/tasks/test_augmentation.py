"""A task's hook changes what is trained on, repeatably, and nothing that is measured."""

import numpy as np
import pytest

import edgefl
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.extensions import allow_modules
from edgefl.core.types import Dataset, Task, TrainConfig
from edgefl.tasks.augmentation import (
    augment_batches,
    find_augment,
    make_mirroring,
    make_picture_augment,
    make_signal_augment,
)
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchModel
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

PIXELS = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
NAME = "shaken:Shaken"
MODULE = """
import numpy as np
from edgefl.core.types import Dataset, Task
from edgefl.tasks.learners.numpy_learner import DenseModel


class Shaken(Task):
    name = "shaken:Shaken"
    labels = ("low", "high")
    model = DenseModel(sizes=(2, 2))
    seen = []

    def read(self, path):
        rows = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
        return Dataset(inputs=rows, targets=(rows[:, 0] > 0).astype(int))

    def augment(self, inputs, targets, rng):
        self.seen.append(len(inputs))
        inputs += 0.3 * rng.normal(size=inputs.shape)
        return inputs, targets
"""


class Marked(Task):
    """Learns how far its hook has moved the inputs: the target is 1 where they are moved."""

    name = "marked:Marked"
    loss = "mse"
    model = DenseModel(sizes=(1, 1))

    def augment(self, inputs, targets, rng):
        return inputs + 1.0, targets + 5.0


def test_batches_are_changed_and_an_evaluation_is_not():
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    data = Dataset(inputs=np.zeros((20, 1), np.float32), targets=np.zeros(20), weights=np.ones(20))
    in_torch = Marked()
    in_torch.model = TorchModel(build=lambda: __import__("torch").nn.Linear(1, 1))
    for task in (Marked(), in_torch):
        learner = task.learner()
        plan, rng = TrainConfig(epochs=100, batch_size=8, learning_rate=0.1), np.random.default_rng(0)
        train(learner, augment_batches(task, data, rng), plan, rng, clock=lambda: 0.0, on_iteration=lambda *_: False)
        assert learner.logits(np.ones((1, 1), np.float32)) == pytest.approx(5.0, abs=0.01)
        assert learner.evaluate(data)[0] == pytest.approx(float(learner.logits(data.inputs[:1])[0, 0]) ** 2, rel=1e-4)
    assert not data.inputs.any()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, None),
        (np.zeros((2, 1)), "must return a dict of arrays and an array, inputs and targets, got a tuple of 2"),
        ({"a": np.zeros((2, 1))}, r"2 of a \[1\], b \[\], and as many targets, got 2 of a \[1\] and 2"),
        ({"a": np.zeros((2, 1)), "b": np.zeros(3)}, "'b' have 3 rows"),
    ],
)
def test_a_hook_gets_inputs_by_name_as_a_dict_and_returns_one(found, message):
    task = Marked()
    task.augment = lambda inputs, targets, rng: (
        {**inputs, "b": inputs["b"] + 1} if found is None else found,
        targets,
    )
    inputs = {"a": np.zeros((2, 1)), "b": np.zeros(2)}
    data = augment_batches(task, Dataset(inputs=inputs, targets=np.zeros(2)), np.random.default_rng(0))
    if message is None:
        assert data.take(slice(None)).inputs["b"].tolist() == [1.0, 1.0]
    else:
        with pytest.raises(TaskError, match=f"augment of task marked:Marked.*{message}"):
            data.take(slice(None))


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (lambda inputs, targets, rng: inputs, "must return two arrays, inputs and targets, got ndarray"),
        (lambda inputs, targets, rng: (inputs, [1, 2]), "must return two arrays.* got a tuple of 2"),
        (
            lambda inputs, targets, rng: (inputs[:1], targets),
            r"2 of \[1\], and as many targets, got 1 of \[1\] and 2",
        ),
        (lambda inputs, targets, rng: (inputs, targets[:1]), r"got 2 of \[1\] and 1"),
        (lambda inputs, targets, rng: inputs.nothing(), "raised AttributeError: "),
    ],
)
def test_a_hook_that_returns_no_batch_is_one_clear_line(hook, message):
    task = Marked()
    task.augment = hook
    data = augment_batches(task, Dataset(inputs=np.zeros((2, 1)), targets=np.zeros(2)), np.random.default_rng(0))
    with pytest.raises(TaskError, match=f"augment of task marked:Marked .*{message}"):
        data.take(np.arange(2))


def test_what_is_no_hook_is_refused_when_the_task_is_made_and_a_function_may_be_an_attribute():
    class Attribute(Task):
        name = "attribute"
        augment = lambda inputs, targets, rng: (inputs, targets)  # noqa: E731 what is tested

    assert find_augment(Attribute()).__name__ == "<lambda>"
    for wrong in (True, lambda inputs: inputs):
        task = Marked()
        task.augment = wrong
        with pytest.raises(
            ConfigError, match="augment of a task must be a function of inputs, targets and rng, got "
        ):
            find_augment(task)


def test_a_run_repeats_itself_with_its_seed_and_changes_only_what_is_trained_on(tmp_path, monkeypatch):
    (tmp_path / "shaken.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    tables = {"run": {"task": NAME, "rounds": 3, "seed": 5}, "simulation": {"workers": 0}}
    with allow_modules(["shaken"]):
        histories = []
        for seed in (5, 5, 6):
            tables["run"]["seed"] = seed
            result = edgefl.simulate(tables, devices=2, data=tmp_path, root=tmp_path / f"{len(histories)}")
            histories.append([(row["device_id"], row["loss"]) for row in result.updates])
        shaken = make_task(NAME)
        counts = list(type(shaken).seen)
        monkeypatch.delattr(type(shaken), "augment")
        tables["run"]["seed"] = 5
        plain = edgefl.simulate(tables, devices=2, data=tmp_path, root=tmp_path / "plain")
    assert histories[0] == histories[1] != histories[2]
    assert [(row["device_id"], row["loss"]) for row in plain.updates] != histories[0]
    trained = sum(row["num_examples"] for row in plain.updates)
    assert sum(counts) == 3 * trained  # one epoch each: not one example of an evaluation


def test_pictures_are_mirrored_moved_and_dimmed_each_by_itself():
    pixels, targets = np.repeat(PIXELS[:1], 200, axis=0), np.zeros(200)
    (flipped, same), rng = (
        make_picture_augment(flip=True, shift=0, brightness=0)(pixels, targets, np.random.default_rng(0)),
        np.random.default_rng(1),
    )
    is_flipped = (flipped == pixels[..., ::-1]).all((1, 2, 3))
    assert 60 < is_flipped.sum() < 140
    assert (flipped[~is_flipped] == pixels[~is_flipped]).all()
    assert same is targets
    moved, _ = make_picture_augment(flip=False, shift=1, brightness=0)(pixels, targets, rng)
    padded = np.pad(PIXELS[0], ((0, 0), (1, 1), (1, 1)), mode="edge")
    windows = {padded[:, y : y + 4, x : x + 4].tobytes() for y in range(3) for x in range(3)}
    assert {picture.tobytes() for picture in moved} == windows
    dimmed, _ = make_picture_augment(flip=False, shift=0, brightness=0.5)(pixels + np.uint8(200), targets, rng)
    assert dimmed.dtype == np.uint8
    factors = dimmed[:, 0, 0, 0] / 200
    assert (factors.min(), factors.max()) == (pytest.approx(0.5, abs=0.05), 255 / 200)
    assert make_picture_augment(flip=False, shift=0, brightness=0.0) is None


def test_signals_move_in_time_and_get_noise_of_their_own_size():
    rng, signals = np.random.default_rng(0), np.tile(np.arange(1.0, 6.0, dtype=np.float32), (100, 2, 1))
    moved, _ = make_signal_augment(time_shift=1, jitter=0)(signals, np.zeros(100), rng)
    assert {tuple(row) for row in moved[:, 1]} == {(1, 1, 2, 3, 4), (1, 2, 3, 4, 5), (2, 3, 4, 5, 5)}
    assert (moved[:, 0] == moved[:, 1]).all()
    sounds = signals[:, 0].astype(np.int16)
    silent, _ = make_signal_augment(time_shift=1, jitter=0, is_sound=True)(sounds, np.zeros(100), rng)
    assert {tuple(row) for row in silent} == {(0, 1, 2, 3, 4), (1, 2, 3, 4, 5), (2, 3, 4, 5, 0)}
    wide = np.concatenate([signals, 1000 * signals], axis=1)
    noise = make_signal_augment(time_shift=0, jitter=0.1)(wide, np.zeros(100), rng)[0] - wide
    assert noise[:, :2].std() == pytest.approx(0.1 * np.sqrt(2), rel=0.1)
    assert noise[:, 2:].std() == pytest.approx(100 * np.sqrt(2), rel=0.1)
    loud = np.tile(np.array([-32768, 32767], np.int16), (50, 1))
    assert make_signal_augment(time_shift=0, jitter=0.5)(loud, np.zeros(50), rng)[0].dtype == np.int16


def test_options_of_a_run_file_make_the_hook_of_a_configured_task(tmp_path):
    series = {"columns": "x,y", "window": 20, "target": "state", "labels": "calm,shaking"}
    for name, options in (
        ("series", series | {"time_shift": 3}),
        ("audio", {"labels": "yes,no", "jitter": 0.1}),
        ("pictures", {"labels": "cat,dog", "flip": True, "shift": 2, "brightness": 0.2}),
    ):
        assert find_augment(make_task(name, options)) is not None
    assert find_augment(make_task("series", series)) is None
    for name, options, message in (
        ("series", series | {"time_shift": 11}, "task.time_shift must be from 0 to 10, got 11"),
        ("series", series | {"jitter": -0.1}, "task.jitter must be from 0 to 1, got -0.1"),
        (
            "series",
            {"columns": "x", "window": 8, "target": "y", "time_shift": 1},
            "task.time_shift = 1 is for classes",
        ),
        ("audio", {"labels": "yes,no", "time_shift": 0.6}, "task.time_shift must be from 0 to 0.5, got 0.6"),
        ("pictures", {"labels": "cat,dog", "shift": 17}, "task.shift must be from 0 to 16, got 17"),
        ("pictures", {"labels": "cat,dog", "brightness": 2}, "task.brightness must be from 0 to 1, got 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_task(name, options)


def test_half_of_the_pictures_are_mirrored_with_their_maps_and_what_points_to_a_side_is_negated() -> None:
    class Maps(Marked):
        augment = make_mirroring(negated=[-1])

    task, count = Maps(), 200
    pictures = np.arange(count * 6).reshape(count, 1, 2, 3)
    maps = np.repeat(pictures, 2, axis=1)
    data = augment_batches(task, Dataset(inputs=pictures, targets=maps), np.random.default_rng(1))
    batch = data.take(np.arange(count))
    is_mirrored = batch.inputs[:, 0, 0, 0] == pictures[:, 0, 0, 2]
    assert 70 < is_mirrored.sum() < 130
    assert (batch.inputs[is_mirrored] == pictures[is_mirrored, ..., ::-1]).all()
    assert (batch.inputs[~is_mirrored] == pictures[~is_mirrored]).all()
    assert (batch.targets[:, 0] == batch.inputs[:, 0]).all()
    assert (batch.targets[:, 1] == np.where(is_mirrored[:, None, None], -1, 1) * batch.inputs[:, 0]).all()
    of_pixels = augment_batches(task, Dataset(inputs=pictures, targets=pictures[:, 0]), np.random.default_rng(1))
    with pytest.raises(TaskError, match=r"mirrors targets \[n, \(channels,\) height, width\], got \[200, 2, 3\]"):
        of_pixels.take(np.arange(count))
    Maps.augment = make_mirroring()
    whole = augment_batches(task, Dataset(inputs=pictures, targets=pictures[:, 0]), np.random.default_rng(1))
    batch = whole.take(np.arange(count))
    assert (batch.targets == batch.inputs[:, 0]).all()
