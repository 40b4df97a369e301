"""Judging a model on a board's own data, in a child process that may die of it."""

from dataclasses import replace

import pytest
from onnx_graphs import constant_model, digits_model

from edgefl.core.errors import DataError, EdgeflError
from edgefl.device.inference.model_check import ModelCheckRequest, check_in_subprocess, check_model, select_check_data
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.datasets.shards import split_train_test
from edgefl.tasks.registry import make_task


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    return create_shards("digits", "iid", 2, tmp_path_factory.mktemp("digits"))[0]


@pytest.fixture(scope="module")
def data(shard):
    return make_task("digits").read(str(shard))


@pytest.fixture(scope="module")
def question(shard, data, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("models")
    train = split_train_test(data, 0.2)[0]
    digits_model(tmp_path / "good.onnx", train.inputs, train.labels)
    digits_model(tmp_path / "bad.onnx", train.inputs, train.labels, sign=-1.0)
    return ModelCheckRequest(
        path=str(tmp_path / "good.onnx"), former_path=str(tmp_path / "bad.onnx"), task="digits", options={},
        shard=str(shard), role="trainer", test_fraction=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("is_confined", [False, True])
def test_both_models_are_judged_on_the_test_part_in_a_child(question, data, is_confined, tmp_path):
    scores = check_in_subprocess(replace(question, state_dir=str(tmp_path) if is_confined else None))
    assert scores == check_model(question)
    assert scores.accuracy > 0.8
    assert scores.former_accuracy is not None
    assert scores.former_accuracy < 0.1
    assert scores.num_examples == len(split_train_test(data, 0.2)[1])


def test_an_evaluator_judges_on_all_of_its_data_and_a_trainer_without_test_rows_too(question, data):
    assert len(select_check_data(data, replace(question, role="evaluator"))) == len(data)
    assert len(select_check_data(data, replace(question, test_fraction=0.0))) == len(data)


def test_a_model_before_that_is_gone_or_damaged_has_no_accuracy(question, tmp_path):
    (tmp_path / "damaged.onnx").write_bytes(b"x")
    for former in (None, str(tmp_path / "gone.onnx"), str(tmp_path / "damaged.onnx")):
        assert check_model(replace(question, former_path=former)).former_accuracy is None


def test_what_cannot_be_judged_is_one_line(question, tmp_path):
    constant_model(tmp_path / "other.onnx", 1, task="mnist")
    changes = [
        ({"shard": "/nowhere.npz"}, "/nowhere.npz"),
        ({"path": "/nowhere.onnx"}, "there is no model file"),
        ({"path": str(tmp_path / "other.onnx")}, "the model is of task mnist, not of digits"),
        ({"task": "mnist"}, "is of task digits, this is task mnist"),
        ({"options": {"model": "x"}}, "model of task digits must be"),
    ]
    for change, expected in changes:
        with pytest.raises(EdgeflError, match=expected):
            check_model(replace(question, **change))
    with pytest.raises(DataError, match=r"^[^\n]*/nowhere\.npz[^\n]*$"):
        check_in_subprocess(replace(question, shard="/nowhere.npz"))
    with pytest.raises(DataError, match=r"took more than 0\.05 s"):
        check_in_subprocess(question, timeout_s=0.05)


def test_a_child_that_dies_is_a_reason_and_no_crash(question, tmp_path, monkeypatch):
    (tmp_path / "dying_task.py").write_text("import os\nos.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "dying_task")
    with pytest.raises(DataError, match="checking the model ended with code -6"):
        check_in_subprocess(replace(question, task="dying_task:Task"))
