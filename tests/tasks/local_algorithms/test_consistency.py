"""Consistency: steps against numbers worked out by hand, and which examples come where."""

import numpy as np
import pytest

import edgefl
from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.types import Dataset, TrainConfig
from edgefl.system.row_labels import WEAK_WEIGHT, LabelKind, LabelLine, append_row_labels
from edgefl.tasks.augmentation import augment_batches, augment_strongly
from edgefl.tasks.datasets.shards import drop_unlabelled, split_train_test
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task


class Learner:
    """One weight; the gradient is the mean target, by weights, and an example's first pixel says how sure it is."""

    def __init__(self):
        self.parameters, self.gradients = {"w": np.zeros(1)}, {"w": np.zeros(1)}
        self.batches, self.asked = [], []

    def load(self, tensors):
        self.parameters["w"][...] = tensors["w"]

    def read(self):
        return {"w": self.parameters["w"].copy()}

    def logits(self, inputs):
        self.asked.append(inputs)
        margins = inputs[:, 0, 0, 0] / 10.0
        return np.stack([np.zeros_like(margins), margins, np.zeros_like(margins)], axis=1)

    def gradient(self, batch):
        self.batches.append(batch)
        weights = np.ones(len(batch)) if batch.weights is None else batch.weights
        self.gradients["w"][...] = float((batch.targets * weights).mean())
        return 0.0


def _data(levels, num_labelled):
    """Returns pictures of one level each, the first of which have class 2, the others no label."""
    is_labelled = np.arange(len(levels)) < num_labelled
    inputs = np.broadcast_to(np.array(levels, np.uint8)[:, None, None, None], (len(levels), 1, 8, 8)).copy()
    return Dataset(
        inputs=inputs, targets=np.where(is_labelled, 2, 0), weak=~is_labelled, weights=is_labelled.astype(np.float32)
    )


def _train(data, learner, **plan):
    settings = {
        "iterations": 1,
        "batch_size": 4,
        "learning_rate": 0.1,
        "consistency_weight": 3.0,
        "consistency_threshold": 0.95,
        **plan,
    }
    return train(
        learner, data, TrainConfig(**settings), np.random.default_rng(5), clock=lambda: 0.0,
        on_iteration=lambda *_: False,
    )  # fmt: skip


def test_a_step_is_along_the_labelled_gradient_and_the_weighted_one_of_what_the_model_is_sure_of():
    learner = Learner()
    # exp(10) / (exp(10) + 2) is above 0.95, exp(1) / (exp(1) + 2) below.
    result = _train(_data([1, 2, 100, 100, 100, 10], 2), learner)
    labelled, unlabelled = learner.batches
    assert labelled.targets.tolist() == [2, 2]
    assert sorted(zip(unlabelled.targets.tolist(), unlabelled.weights.tolist(), strict=True)) == [
        (1, 0.0), (1, 1.0), (1, 1.0), (1, 1.0),
    ]  # fmt: skip
    # 2 of the labelled, and 3 times 3/4: all four count in the mean.
    assert result.displacement["w"] == pytest.approx([-0.1 * (2 + 3.0 * 0.75)])
    (views,) = learner.asked
    assert sorted(views[:, 0, 0, 0].tolist()) == [10, 100, 100, 100]
    assert unlabelled.inputs.shape == views.shape
    assert not np.array_equal(unlabelled.inputs, views)


def test_where_the_model_is_sure_of_nothing_a_step_is_that_of_the_labelled_alone():
    learner = Learner()
    assert _train(_data([1, 10, 10], 1), learner).displacement["w"] == pytest.approx([-0.2])
    assert len(learner.batches) == 1
    assert _train(_data([1, 10, 10], 1), Learner(), consistency_threshold=0.5).displacement["w"] == pytest.approx(
        [-0.1 * (2 + 3.0)]
    )


def test_each_example_with_and_without_a_label_comes_once_an_epoch_of_its_own():
    learner = Learner()
    _train(_data([*range(10), *range(100, 110)], 10), learner, iterations=5, batch_size=2)
    seen = [level for batch in learner.batches if batch.weights is not None and batch.weak is not None
            for level in batch.inputs[:, 0, 0, 0].tolist()]  # fmt: skip
    assert sorted(seen) == list(range(10))
    assert sorted(level for views in learner.asked for level in views[:, 0, 0, 0].tolist()) == list(range(100, 110))


def test_a_shard_whose_examples_all_have_labels_trains_as_without_consistency():
    data = Dataset(inputs=_data([100] * 6, 6).inputs, targets=np.full(6, 2))
    learner = Learner()
    _train(data, learner)
    assert (len(learner.batches), learner.asked) == (1, [])
    assert data.find_unlabelled() is None
    weak = Dataset(inputs=data.inputs, targets=data.targets, weak=np.ones(6, bool), weights=np.full(6, 0.5))
    assert weak.find_unlabelled() is None


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match=r"2 of 3 examples have no label.*set both or neither"):
        _train(_data([1, 2, 3], 1), Learner(), consistency_weight=None)
    with pytest.raises(DataError, match="none of the 3 examples in the training part of the shard has a label"):
        _train(_data([1, 2, 3], 0), Learner())
    silent = Learner()
    silent.logits = None
    with pytest.raises(ConfigError, match=r"needs a model in NumPy or torch"):
        _train(_data([1, 2], 1), silent)
    with pytest.raises(ConfigError, match=r"consistency_weight does not go with personal copies"):
        _train(_data([1, 2], 1), Learner(), personal_lambda=1.0)
    with pytest.raises(TaskError, match="for pictures, sounds and series"):
        augment_strongly(np.zeros((3, 5), np.float32), np.random.default_rng(1))


@pytest.mark.parametrize(
    ("shape", "dtype", "top"),
    [((20, 3, 16, 16), np.uint8, 255), ((20, 16, 16), np.uint8, 255), ((20, 2, 40), np.float32, 5),
     ((20, 400), np.int16, 9000), ((20, 1, 16, 16), np.float32, 1)],
)  # fmt: skip
def test_the_second_view_has_the_same_form_and_other_values_of_each_example(shape, dtype, top):
    inputs = (np.random.default_rng(2).random(shape) * top).astype(dtype)
    before = inputs.copy()
    found = augment_strongly(inputs, np.random.default_rng(3))
    assert (found.shape, found.dtype) == (shape, dtype)
    np.testing.assert_array_equal(inputs, before)
    assert all(not np.array_equal(one, other) for one, other in zip(inputs, found, strict=True))
    assert np.isfinite(found.astype(float)).all()
    again = augment_strongly(inputs, np.random.default_rng(3))
    np.testing.assert_array_equal(found, again)


def test_a_block_of_each_picture_is_its_mean():
    inputs = np.random.default_rng(2).random((50, 1, 16, 16)).astype(np.float32)
    found = augment_strongly(inputs, np.random.default_rng(3))
    counts = [max(np.unique(one, return_counts=True)[1]) for one in found]
    assert max(counts) >= 16  # 4 x 4 pixels where none of it is beyond the edge
    assert min(counts) >= 1


def _write_pictures(folder):
    """Writes a shard of twelve pictures with a class and eight without."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install -e '.[pictures]'")
    luck = np.random.default_rng(4)
    for name, num, low in (("dark", 6, 0), ("bright", 6, 128), (".unlabelled", 8, 100)):
        (folder / name).mkdir(parents=True)
        for place in range(num):
            picture = image.fromarray(luck.integers(low, low + 128, (16, 16), np.uint8))
            picture.save(folder / name / f"20260101T00000{place}.000-{place:016x}.png")


@pytest.mark.parametrize("model", ["linear", "cnn-small"])
def test_files_without_a_class_are_read_for_it_and_change_the_model_of_either_backend(tmp_path, model):
    if model != "linear":
        pytest.importorskip("torch", reason="PyTorch is not installed: pip install -e '.[torch]'")
    _write_pictures(tmp_path)
    line = LabelLine(since_s=1767225600.0, until_s=1767225600.0, label="bright", kind=LabelKind.WEAK)
    append_row_labels(tmp_path, [line])
    options = {"labels": "dark,bright", "size": 16, "channels": 1, "model": model}
    data = make_task("pictures", {**options, "unlabelled": True}).read(str(tmp_path))
    assert data.weights.tolist() == [1.0] * 12 + [WEAK_WEIGHT] + [0.0] * 7
    assert data.find_unlabelled().tolist() == [False] * 13 + [True] * 7
    assert not split_train_test(data, 0.5)[1].weak.any()
    assert len(drop_unlabelled(data)) == 13
    shifting = make_task("pictures", {**options, "shift": 2})
    changed = augment_batches(shifting, data, np.random.default_rng(1))
    assert changed.find_unlabelled().tolist() == data.find_unlabelled().tolist()
    task = make_task("pictures", options)
    assert len(task.read(str(tmp_path))) == 13
    moves = []
    for weight in (1e-9, 1.0):
        learner = task.learner(threads=1)
        learner.load(task.init(1))
        plan = {"iterations": 3, "consistency_weight": weight, "consistency_threshold": 0.0}
        moves.append(_train(data, learner, **plan).displacement)
    assert all(np.isfinite(move).all() for move in moves[1].values())
    assert max(abs(moves[0][name] - moves[1][name]).max() for name in moves[0]) > 1e-4


def test_worker_processes_train_on_them_as_this_one_does_and_no_scheme_of_labels_cuts_them(tmp_path):
    _write_pictures(tmp_path / "data")

    def simulate(workers, scheme="iid"):
        config = {
            "run": {"task": "pictures", "rounds": 2, "seed": 3, "evaluate_on": "none"},
            "task": {
                "labels": ["dark", "bright"], "size": 16, "channels": 1, "model": "linear", "unlabelled": True,
            },
            "strategy": {"iterations": 3, "consistency_weight": 1.0, "consistency_threshold": 0.0},
            "simulation": {"workers": workers},
        }  # fmt: skip
        folder = tmp_path / f"{scheme}-{workers}"
        return edgefl.simulate(config, devices=2, scheme=scheme, data=tmp_path / "data", root=folder)

    losses = [[row["loss"] for row in simulate(workers).updates] for workers in (0, 1)]
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]
    with pytest.raises(ConfigError, match=r"scheme dirichlet goes by labels, which 8 of .* cut by iid or contiguous"):
        simulate(0, "dirichlet:0.5")
