"""Models in ONNX: what they answer, what they refuse, and that torch stays out."""

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_graphs import CLASSES, constant_model, digits_model, write_model

from edgefl.core.errors import DataError
from edgefl.core.types import Dataset
from edgefl.device.inference.onnx_model import OnnxModel, softmax


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


def test_gives_class_name_and_probability_of_every_row(path):
    weight = np.zeros((64, 10), np.float32)
    weight[0, 3], weight[1, 7] = 2.0, 1.0
    write_model(path, weight)
    rows = np.zeros((2, 8, 8), np.uint8)
    rows[0, 0, 0], rows[1, 0, 1] = 2, 3
    first, second = OnnxModel(path).predict(rows)
    assert (first.index, first.name, second.name) == (3, "3", "7")
    assert first.probability == pytest.approx(np.exp(4) / (np.exp(4) + 9))
    assert second.to_json() == {"class": "7", "index": 7, "probability": pytest.approx(np.exp(3) / (np.exp(3) + 9))}


def test_says_what_its_file_says(path):
    constant_model(path, 1, model="ab" * 32, task_options='{"model": "logistic"}')
    model = OnnxModel(path)
    assert (model.model, model.task, model.options) == ("ab" * 32, "digits", {"model": "logistic"})
    assert (model.classes, model.input_shape) == (CLASSES, (8, 8))
    assert [one.index for one in model.predict(np.zeros((3, 64)))] == [1, 1, 1], "flat rows are shaped for it"
    constant_model(path, 9, classes='["zero"]')
    assert OnnxModel(path).predict(np.zeros((1, 8, 8)))[0].name == "9"
    assert softmax(np.array([[1000.0, 1000.0]])) == pytest.approx(np.array([[0.5, 0.5]]))


def test_accuracy_is_the_fraction_of_right_answers_over_many_batches(path):
    constant_model(path, 4)
    labels = np.array([4, 4, 4, 5] * 2000)
    assert OnnxModel(path).accuracy(Dataset(inputs=np.ones((8000, 8, 8)), labels=labels)) == 0.75
    assert len(OnnxModel(path).predict(np.ones((7001, 8, 8)))) == 7001


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (np.zeros((2, 8, 9)), "a row must have shape [8, 8], got [8, 9]"),
        (np.zeros((2, 63)), "a row must have shape [8, 8], got [63]"),
        (np.zeros(64), "a row must have shape [8, 8], got []"),
        (np.zeros((2, 2, 64)), "a row must have shape [8, 8], got [2, 64]"),
        (np.array([["a"] * 64]), "rows must be numbers"),
    ],
)
def test_rows_of_another_shape_are_refused(path, rows, expected):
    constant_model(path, 2)
    with pytest.raises(DataError, match="row") as caught:
        OnnxModel(path).predict(rows)
    assert str(caught.value).startswith(expected)
    write_model(path, np.full((64, 10), np.nan))
    with pytest.raises(DataError, match="has diverged"):
        OnnxModel(path).predict(np.ones((1, 8, 8)))


def test_what_is_no_model_is_refused_in_one_line(path):
    with pytest.raises(DataError, match="there is no model file"):
        OnnxModel(path)
    path.write_bytes(b"no model\nat all")
    with pytest.raises(DataError) as caught:
        OnnxModel(path)
    assert "\n" not in str(caught.value)
    constant_model(path, 1)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="is no model that can be used"):
        OnnxModel(path)


def test_a_model_with_two_inputs_or_a_damaged_note_is_refused(path):
    constant_model(path, 1, classes="[")
    with pytest.raises(DataError, match=r"nonsense in its edgefl\.classes"):
        OnnxModel(path)
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "abc"]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["c"])], "sum", value[:2], value[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    with pytest.raises(DataError, match="must take one float32 input"):
        OnnxModel(path)


def test_running_a_model_imports_neither_torch_nor_a_web_framework(path):
    rng = np.random.default_rng(7)
    digits_model(path, rng.random((50, 8, 8)), rng.integers(0, 10, 50))
    program = (
        "import sys, numpy; from pathlib import Path; from edgefl.device.inference.onnx_model import OnnxModel;"
        "from edgefl.device.inference import inputs, server, model_check;"
        f"OnnxModel(Path({str(path)!r})).predict(numpy.ones((1, 8, 8)));"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "flwr", "fastapi", "sqlalchemy", "onnx", "click", "rich"}
