"""Models in ONNX: what they answer, what they refuse, and that torch stays out."""

import gzip
import io
import struct
import subprocess
import sys
import wave
from dataclasses import replace

import numpy as np
import onnx
import pytest
from digit_shards import digit_shard
from onnx import TensorProto, helper
from onnx_graphs import CLASSES, constant_model, digits_model, write_model

from edgefl.core.errors import DataError, EdgeflError, UsageError
from edgefl.core.types import Dataset
from edgefl.device.inference.onnx_model import (
    ModelCheckRequest,
    ModelCheckResult,
    OnnxModel,
    check_in_subprocess,
    check_model,
    read_inputs,
    select_check_data,
    softmax,
)
from edgefl.tasks.datasets.central import create_shards
from edgefl.tasks.datasets.shards import split_train_test
from edgefl.tasks.export.model_export import export_onnx
from edgefl.tasks.registry import make_task

TEXTS = {"column": "note", "target": "is", "labels": "a,b", "size": 64}


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
    assert (first["index"], first["class"]) == (3, "3")
    assert first["probability"] == pytest.approx(np.exp(4) / (np.exp(4) + 9), abs=1e-6)
    assert (second["class"], second["index"]) == ("7", 7)
    assert second["probability"] == pytest.approx(np.exp(3) / (np.exp(3) + 9), abs=1e-6)
    assert second["margin"] == pytest.approx((np.exp(3) - 1) / (np.exp(3) + 9), abs=1e-6)


def test_says_what_its_file_says(path):
    constant_model(path, 1, model="ab" * 32, task_options='{"model": "logistic"}')
    model = OnnxModel(path)
    assert (model.model, model.task, model.options) == ("ab" * 32, "digits", {"model": "logistic"})
    assert (model.classes, model.input_shape) == (CLASSES, (8, 8))
    assert [one["index"] for one in model.predict(np.zeros((3, 64)))] == [1, 1, 1], "flat rows are shaped for it"
    constant_model(path, 9, classes='["zero"]')
    assert OnnxModel(path).predict(np.zeros((1, 8, 8)))[0]["class"] == "9"
    assert softmax(np.array([[1000.0, 1000.0]])) == pytest.approx(np.array([[0.5, 0.5]]))


def test_accuracy_is_the_fraction_of_right_answers_over_many_batches(path):
    constant_model(path, 4)
    labels = np.array([4, 4, 4, 5] * 2000)
    assert OnnxModel(path).accuracy(Dataset(inputs=np.ones((8000, 8, 8)), targets=labels)) == 0.75
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
        "from edgefl.device.inference import server;"
        f"OnnxModel(Path({str(path)!r})).predict(numpy.ones((1, 8, 8)));"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "flwr", "fastapi", "sqlalchemy", "onnx", "click", "rich"}


ROWS = np.arange(128, dtype=np.float32).reshape(2, 8, 8)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.fixture
def model(tmp_path):
    constant_model(tmp_path / "model.onnx", 1)
    return OnnxModel(tmp_path / "model.onnx")


def test_npy_and_npz_files_give_their_rows(model, tmp_path):
    np.save(tmp_path / "many.npy", ROWS)
    np.save(tmp_path / "one.npy", ROWS[0])
    np.save(tmp_path / "flat.npy", ROWS.reshape(2, 64))
    assert read_inputs(tmp_path / "flat.npy", model)[0].shape == (2, 64)
    np.savez(tmp_path / "named.npz", inputs=ROWS, labels=np.array([1, 2]))
    np.savez(tmp_path / "bare.npz", x=ROWS)
    for name in ("many.npy", "named.npz", "bare.npz"):
        assert (read_inputs(tmp_path / name, model)[0] == ROWS).all(), name
    assert read_inputs(tmp_path / "one.npy", model)[0].shape == (1, 8, 8)
    labels = read_inputs(tmp_path / "named.npz", model)[1]
    assert labels is not None
    assert labels.tolist() == [1, 2]


@pytest.mark.parametrize("header", ["", ",".join(f"p{number}" for number in range(64)) + "\n"])
def test_a_csv_file_gives_flat_rows_with_or_without_names(model, tmp_path, header):
    lines = "\n".join(",".join(str(value) for value in row) for row in ROWS.reshape(2, 64))
    (tmp_path / "rows.csv").write_text(f"{header}{lines}\n\n")
    rows = read_inputs(tmp_path / "rows.csv", model)[0]
    assert (rows == ROWS.reshape(2, 64)).all()
    assert len(model.predict(rows)) == 2


def test_a_csv_file_of_a_series_is_cut_into_windows_up_to_the_last_whole_one(tmp_path):
    options = {"columns": "x,y", "window": 4, "target": "t", "group": "g", "ahead": 2, "horizon": 3, "means": "1,2"}
    task = make_task("series", options)
    model = task.init(3)
    export_onnx(task, model, tmp_path / "series.onnx", options=options)
    rows = [(i, 10 * i, 0.0, "ab"[i > 8]) for i in range(14)]
    lines = [f"{g},{y},{x}" for x, y, _, g in rows]
    (tmp_path / "new.csv").write_text("\n".join(["g,y,x", *lines]) + "\n")
    found = OnnxModel(tmp_path / "series.onnx")
    inputs, labels = read_inputs(tmp_path / "new.csv", found)
    assert labels is None
    assert inputs[:, 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [9, 10, 11, 12]]
    assert inputs[:, 1].tolist() == [[0, 10, 20, 30], [40, 50, 60, 70], [90, 100, 110, 120]]
    learner = task.learner()
    learner.load(model)
    np.testing.assert_allclose(found.logits(inputs), learner.logits(inputs), atol=1e-4)
    (tmp_path / "new.csv").write_text("y,x\n1,2\n")
    with pytest.raises(DataError, match="has no column 'g'; its columns are y, x"):
        read_inputs(tmp_path / "new.csv", found)
    (tmp_path / "new.csv").write_text("g,y,x\na,1,2\n")
    with pytest.raises(DataError, match="holds no 4 rows of one group for a window"):
        read_inputs(tmp_path / "new.csv", found)


def test_a_csv_file_of_texts_is_hashed_as_the_model_s_task_does_with_classes_and_without(tmp_path):
    task = make_task("text", TEXTS)
    model = task.init(3)
    export_onnx(task, model, tmp_path / "text.onnx", options=TEXTS)
    (tmp_path / "new.csv").write_text('note\n"hot, too hot"\ncold\n')
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "a.csv").write_text('note,is\n"hot, too hot",b\ncold,a\n')
    learner = task.learner()
    learner.load(model)
    found = OnnxModel(tmp_path / "text.onnx")
    for name, labels in (("new.csv", None), ("shard", [1, 0])):
        inputs, targets = read_inputs(tmp_path / name, found)
        assert (None if targets is None else targets.tolist()) == labels
        np.testing.assert_allclose(found.logits(inputs), learner.logits(inputs), atol=1e-5)
        np.testing.assert_array_equal(inputs, task.read(str(tmp_path / "shard")).inputs)
    (tmp_path / "new.csv").write_text("1,2\n")
    with pytest.raises(DataError, match="has no line of column names"):
        read_inputs(tmp_path / "new.csv", found)


def test_a_sound_or_a_picture_is_a_row_as_the_model_s_task_reads_it(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install '.[pictures]'")
    samples = np.random.default_rng(1).normal(0, 3000, 2000).astype("<i2")
    (tmp_path / "audio").mkdir()
    with wave.open(str(tmp_path / "audio" / "new.WAV"), "wb") as file:
        file.setparams((1, 2, 4000, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    (tmp_path / "pictures").mkdir()
    pixels = np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
    image.fromarray(pixels).save(tmp_path / "pictures" / "new.png")
    sound = {"labels": "a,b", "sample_rate": 4000, "seconds": 0.5, "mel_bands": 12}
    picture = {"labels": "a,b", "size": 8}
    for name, options, right in (
        ("audio", sound, samples[None]),
        ("pictures", picture, pixels.transpose(2, 0, 1)[None]),
    ):
        task = make_task(name, options)
        tensors = task.init(3)
        export_onnx(task, tensors, tmp_path / "model.onnx", options=options)
        (file,) = (tmp_path / name).iterdir()
        found, learner = OnnxModel(tmp_path / "model.onnx"), task.learner()
        learner.load(tensors)
        inputs, labels = read_inputs(file, found)
        np.testing.assert_array_equal(inputs, right)
        np.testing.assert_allclose(found.logits(inputs), learner.logits(right), atol=1e-4)
        assert labels is None
    (tmp_path / "new.wav").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"new.wav is none of .npy, .npz"):
        read_inputs(tmp_path / "new.wav", found)


def test_an_idx_file_gives_its_images(model, tmp_path):
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8)
    content = struct.pack(">BBBBIII", 0, 0, 8, 3, *images.shape) + images.tobytes()
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    assert (read_inputs(tmp_path / "t10k-images-idx3-ubyte.gz", model)[0] == images).all()


def test_a_shard_and_a_folder_that_grows_are_read_as_the_task_does(model, tmp_path):
    inputs, labels = read_inputs(digit_shard(tmp_path / "digits.npz", 50), model)
    assert labels is not None
    assert len(inputs) == len(labels) == 50
    folder = tmp_path / "collected"
    folder.mkdir()
    np.savez(folder / "monday.npz", inputs=ROWS.astype(np.uint8), labels=np.array([1, 2]))
    assert len(read_inputs(folder, model)[0]) == 2
    constant_model(tmp_path / "plain.onnx", 1, task="")
    with pytest.raises(UsageError, match="does not say of which task it is"):
        read_inputs(folder, OnnxModel(tmp_path / "plain.onnx"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.npy", None, "there is no"),
        ("a.npy", b"x", "is no .npy array"),
        ("a.npz", b"x", "is no readable .npz file"),
        ("a.csv", b"", "holds no row of numbers"),
        ("a.csv", b"1,2\n3\n", "row 2 has 1 values, the first has 2"),
        ("a.csv", b"1,2\n3,x\n", "row 2 holds 'x', not a number"),
        ("a.csv", b"1,2\n3,nan\n", "row 2 holds 'nan', not a number"),
        ("a.csv", b"\xff\xfe", "cannot be read"),
        ("a.jpg", b"x", "is none of .npy"),
        ("a.npy", npy(np.array([{}], dtype=object)), "is no .npy array"),
        ("a.npz", npz(a=ROWS, b=ROWS), "one array alone"),
    ],
)
def test_a_file_without_rows_is_named_in_one_line(model, tmp_path, name, content, expected):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(EdgeflError) as caught:
        read_inputs(tmp_path / name, model)
    assert expected in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


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
    digits_model(tmp_path / "good.onnx", train.inputs, train.targets)
    digits_model(tmp_path / "bad.onnx", train.inputs, train.targets, sign=-1.0)
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


VALUES_TASK = """
import numpy as np
from edgefl.core.types import Dataset, Task
from edgefl.tasks.learners.numpy_learner import DenseModel

class Yields(Task):
    name = "yields_on_board:Yields"
    loss = "huber"
    input_shape = (3,)
    model = DenseModel(sizes=(3, 1))

    def read(self, path):
        rows = np.load(path)
        return Dataset(inputs=rows[:, :3], targets=rows[:, 3])
"""


def test_a_model_of_values_answers_with_them_and_is_judged_by_its_loss(tmp_path, monkeypatch):
    (tmp_path / "yields_on_board.py").write_text(VALUES_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "yields_on_board")
    inputs = np.random.default_rng(1).normal(size=(50, 3)).astype(np.float32)
    np.save(tmp_path / "rows.npy", np.column_stack([inputs, inputs.sum(axis=1)]))
    task = make_task("yields_on_board:Yields")
    good = {"fc1.weight": np.ones((1, 3), np.float32), "fc1.bias": np.zeros(1, np.float32)}
    export_onnx(task, good, tmp_path / "good.onnx")
    export_onnx(task, {**good, "fc1.bias": np.full(1, 0.5, np.float32)}, tmp_path / "worse.onnx")
    assert OnnxModel(tmp_path / "good.onnx").predict(inputs[:1]) == [
        {"values": [pytest.approx(inputs[0].sum(), abs=1e-5)]}
    ]
    question = ModelCheckRequest(
        path=str(tmp_path / "worse.onnx"), former_path=str(tmp_path / "good.onnx"), task=task.name, options={},
        shard=str(tmp_path / "rows.npy"), role="evaluator", test_fraction=0.2,
    )  # fmt: skip
    assert check_model(question) == ModelCheckResult(
        num_examples=50, loss=pytest.approx(0.125, abs=1e-5), former_loss=pytest.approx(0.0, abs=1e-9)
    )


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
