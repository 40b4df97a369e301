import os

import numpy as np

from edgefl.core.types import TensorSpec
from edgefl.device.training.local_tensors import LocalTensors

SHAPES = (
    TensorSpec(name="body", shape=(4,)),
    TensorSpec(name="head.weight", shape=(2, 2), shared=False),
    TensorSpec(name="head.bias", shape=(2,), shared=False),
)


class Learner:
    def __init__(self, value):
        self.value = value

    def read(self):
        return {spec.name: np.full(spec.shape, self.value, np.float32) for spec in SHAPES}


def test_the_newest_comes_back_and_only_what_stays_on_the_board(tmp_path):
    LocalTensors(tmp_path).update("r", SHAPES[:1], Learner(1.0))
    assert list(tmp_path.iterdir()) == [], "a model that is shared whole writes nothing"
    assert LocalTensors(tmp_path).load("r", SHAPES) is None
    for value in (1.0, 3.0):
        LocalTensors(tmp_path).update("r", SHAPES, Learner(value))
    kept = LocalTensors(tmp_path).load("r", SHAPES)
    assert set(kept) == {"head.weight", "head.bias"}
    assert kept["head.weight"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_what_a_training_that_diverged_leaves_is_not_kept(tmp_path):
    for value in (1.0, np.nan):
        LocalTensors(tmp_path).update("r", SHAPES, Learner(value))
    assert LocalTensors(tmp_path).load("r", SHAPES)["head.bias"].tolist() == [1.0, 1.0]


def test_runs_are_kept_apart_whatever_they_are_called(tmp_path):
    LocalTensors(tmp_path).update("r", SHAPES, Learner(1.0))
    LocalTensors(tmp_path).update("../r", SHAPES, Learner(2.0))
    assert LocalTensors(tmp_path).load("r", SHAPES)["head.bias"].tolist() == [1.0, 1.0]
    assert {path.parent for path in tmp_path.rglob("*.npz")} == {tmp_path / "runs"}


def test_only_the_newest_runs_are_kept_whatever_the_clock_says(tmp_path):
    for number in range(6):
        LocalTensors(tmp_path).update(f"r{number}", SHAPES, Learner(1.0))
        os.utime(tmp_path / "runs" / f"r{number}.npz", (1000 + number, 1000 + number))
    assert {path.stem for path in (tmp_path / "runs").iterdir()} == {"r2", "r3", "r4", "r5"}
    for path in (tmp_path / "runs").iterdir():
        os.utime(path, (9e9, 9e9))
    LocalTensors(tmp_path).update("new", SHAPES, Learner(1.0))
    assert LocalTensors(tmp_path).load("new", SHAPES) is not None
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_a_torn_file_counts_as_none_and_flipped_bits_are_noticed_or_harmless(tmp_path):
    LocalTensors(tmp_path).update("r", SHAPES, Learner(1.0))
    (path,) = tmp_path.rglob("*.npz")
    whole = path.read_bytes()
    for cut in (0, 1, 10, 100, -1, -10, -100):
        path.write_bytes(whole[:cut])
        assert LocalTensors(tmp_path).load("r", SHAPES) is None
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        kept = LocalTensors(tmp_path).load("r", SHAPES)
        assert kept is None or kept["head.bias"].tolist() == [1.0, 1.0]


def test_a_task_of_another_shape_begins_anew(tmp_path):
    LocalTensors(tmp_path).update("r", SHAPES, Learner(1.0))
    other = (SHAPES[0], TensorSpec(name="head.weight", shape=(3, 3), shared=False))
    assert LocalTensors(tmp_path).load("r", other) is None
    assert LocalTensors(tmp_path).load("r", (TensorSpec(name="new", shape=(1,), shared=False),)) is None


def test_what_finds_no_room_is_held_in_memory_and_written_once_there_is_some(tmp_path, full_card, caplog):
    residents = LocalTensors(tmp_path)
    residents.update("r", SHAPES, Learner(1.0))
    with full_card():
        for value in (2.0, 3.0, np.nan):
            residents.update("r", SHAPES, Learner(value))
    assert "cannot keep the tensors of run r" in caplog.text
    assert residents.load("r", SHAPES)["head.bias"].tolist() == [3.0, 3.0]
    assert LocalTensors(tmp_path).load("r", SHAPES)["head.bias"].tolist() == [1.0, 1.0]
    residents.update("s", SHAPES, Learner(4.0))
    for run, value in (("r", 3.0), ("s", 4.0)):
        assert LocalTensors(tmp_path).load(run, SHAPES)["head.bias"].tolist() == [value] * 2
