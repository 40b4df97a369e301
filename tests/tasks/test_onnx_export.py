"""Every task's model as an ONNX file: it computes what the task computes, and nothing is left where it would not."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from edgefl.errors import StoreError, TaskError
from edgefl.tasks.images import MODELS as IMAGE_MODELS
from edgefl.tasks.numpy_learner import DenseModel, NumpyLearner
from edgefl.tasks.onnx_export import NUM_MADE_UP, export_onnx
from edgefl.tasks.onnx_steps import drawn_as
from edgefl.tasks.registry import BUILT_IN, make_task
from edgefl.types import Dataset, derived_rng

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

OPTIONS = {
    "digits": [{"model": "mlp"}, {"model": "logistic"}],
    "mnist": [{"model": model} for model in IMAGE_MODELS],
    "fashion-mnist": [{"model": "cnn-small"}, {"model": "mlp"}],  # the same models, prepared in another way
    "motionsense": [{"model": model} for model in ("cnn", "mlp", "logistic")],
    "noop": [{"size_bytes": 400}],
}
CASES = [
    pytest.param(name, options, marks=[pytest.mark.slow] if options.get("model") == "resnet18-gn" else [])
    for name, each in OPTIONS.items()
    for options in each
]


def real_like(name, num_examples=30):
    """Inputs in the range of a shard: dark and bright pixels, an empty image; motion around its mean."""
    rng = derived_rng(3, name)
    if name == "motionsense":
        return rng.normal(0.0, 1.0, (num_examples, 9, 128)).astype(np.float32)
    shape, top = {"digits": ((8, 8), 16), "noop": ((1,), 9)}.get(name, ((28, 28), 255))
    pixels = rng.integers(0, top, (num_examples, *shape), endpoint=True).astype(np.uint8)
    pixels[0] = 0
    return pixels


def answers(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"inputs": inputs.astype(np.float32)})
    return np.asarray(logits)


def test_every_built_in_task_is_tried_below():
    assert set(OPTIONS) == set(BUILT_IN)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_file_answers_as_the_task_does_for_any_number_of_examples(name, options, tmp_path):
    if options.get("model") not in {"mlp", "logistic", "2nn"} and name not in {"digits", "noop"}:
        pytest.importorskip("torch")
    task = make_task(name, options)
    model, path, inputs = task.init(7), tmp_path / "model.onnx", real_like(name)
    report = export_onnx(task, model, path, samples=inputs, options=options)
    learner = task.learner()
    learner.load(model)
    expected = learner.logits(inputs)
    assert report.max_difference <= report.tolerance
    for count in (1, 2, len(inputs)):
        found = answers(path, inputs[:count])
        assert found.shape == (count, len(task.labels))
        assert np.abs(found - expected[:count]).max() <= report.tolerance
    assert report.preprocess == {}
    assert report.input_shape == (None, *inputs.shape[1:])
    assert list(tmp_path.iterdir()) == [path], "weights lie in the one file"


def test_the_report_and_the_file_s_metadata_say_what_it_is(tmp_path):
    task, path = make_task("digits", {"model": "logistic"}), tmp_path / "model.onnx"
    report = export_onnx(task, task.init(7), path, options={"model": "logistic"}, model_sha256="ab" * 32)
    content = path.read_bytes()
    assert (report.sha256, report.bytes_file) == (hashlib.sha256(content).hexdigest(), len(content))
    assert (report.opset, report.input_name, report.output_name, report.num_classes) == (18, "inputs", "logits", 10)
    assert (report.num_checked, report.is_made_up, report.accuracy) == (NUM_MADE_UP, True, None)
    assert (report.is_quantised, report.accuracy_quantised, report.bytes_float32) == (False, None, len(content))
    made = onnx.load(path)
    assert {entry.key: entry.value for entry in made.metadata_props} == {
        "edgefl.task": "digits",
        "edgefl.task_options": '{"model": "logistic"}',
        "edgefl.model": "ab" * 32,
        "edgefl.preprocess": "",
        "edgefl.classes": json.dumps(list("0123456789")),
        "edgefl.numbers": "float32",
    }
    assert [entry.version for entry in made.opset_import] == [18]
    assert path.stat().st_mode & 0o777 == 0o644


def test_the_same_model_makes_the_same_file(tmp_path):
    task = make_task("digits")
    first, second = (export_onnx(task, task.init(7), tmp_path / name) for name in ("a.onnx", "b.onnx"))
    assert first.sha256 == second.sha256


@pytest.mark.parametrize("name", ["mnist", "motionsense"])
def test_quantised_weights_are_smaller_and_the_accuracy_with_them_is_told(name, tmp_path):
    pytest.importorskip("torch")
    task = make_task(name)
    inputs, model, path = real_like(name, 200), task.init(7), tmp_path / "model.onnx"
    learner = task.learner()
    learner.load(model)
    data = Dataset(inputs=inputs, labels=learner.logits(inputs).argmax(axis=1).astype(np.int64))
    report = export_onnx(task, model, path, samples=data, quantise=True)
    assert report.bytes_file < 0.5 * report.bytes_float32
    assert report.accuracy == 1.0
    assert report.accuracy_quantised == (answers(path, inputs).argmax(axis=1) == data.labels).mean()
    assert report.accuracy_quantised > 0.6
    numbers = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert numbers["edgefl.numbers"] == "int8"


def test_features_stay_exact_when_weights_are_quantised(tmp_path):
    task = make_task("motionsense", {"model": "mlp"})
    path = tmp_path / "model.onnx"
    export_onnx(task, task.init(7), path, samples=real_like("motionsense"), quantise=True)
    kinds = {node.name: node.op_type for node in onnx.load(path).graph.node}
    assert {kind for name, kind in kinds.items() if name.startswith("prepare")} >= {"MatMul", "Log"}
    assert "MatMulInteger" in kinds.values()


def test_what_exporters_say_about_themselves_stays_out_of_the_log(tmp_path, caplog, capfd):
    pytest.importorskip("torch")
    caplog.set_level(logging.DEBUG)
    task = make_task("mnist", {"model": "lenet"})
    export_onnx(task, task.init(7), tmp_path / "model.onnx", quantise=True)
    assert [record.message for record in caplog.records if record.levelno >= logging.INFO] == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("edgefl").isEnabledFor(logging.WARNING), "our own are heard again"


@dataclass
class OwnTask:
    """Four numbers in, two classes out; as a user would write it."""

    prepare: Any
    name: str = "own:Task"

    def __post_init__(self):
        model = DenseModel(sizes=(4, 3, 2), prepare=self.prepare)
        self.shapes, self.init, self.learner = model.shapes, model.init, model.learner

    def read(self, path):
        raise NotImplementedError


def squares(rows):
    return (rows * rows).astype(np.float32)


@drawn_as(lambda graph, rows: graph.add("Mul", rows, rows))
def drawn_squares(rows):
    return (rows * rows).astype(np.float32)


def plus_one(graph, rows):
    return graph.add("Add", rows, graph.constant(np.float32(1.0)))


@drawn_as(plus_one)
def wrongly_drawn(rows):
    return rows.astype(np.float32)


ROWS = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)


class Counting(NumpyLearner):
    """Notes how many examples it is given at once."""

    sizes: tuple[int, ...] = ()

    def logits(self, inputs):
        self.sizes = (*self.sizes, len(inputs))
        return super().logits(inputs)


def test_a_whole_test_set_is_checked_in_batches(tmp_path):
    task = OwnTask(lambda rows: rows.astype(np.float32))
    learner = Counting(task.shapes(), task.prepare)
    task.learner = lambda: learner
    rows = np.resize(ROWS, (1000, 4))
    assert export_onnx(task, task.init(7), tmp_path / "own.onnx", samples=rows).num_checked == 1000
    assert sum(size for size in learner.sizes if size > 1) == 1000
    assert max(learner.sizes) <= 256


@pytest.mark.parametrize(
    ("prepare", "preprocess", "given"),
    [
        (lambda rows: rows.astype(np.float32), {}, ROWS),
        (drawn_squares, {}, ROWS),
        (squares, {"kind": "task"}, ROWS * ROWS),
    ],
    ids=["as it is", "drawn", "not drawn"],
)
def test_a_task_of_one_s_own_is_exported_and_the_file_says_what_it_takes(prepare, preprocess, given, tmp_path):
    task = OwnTask(prepare)
    report = export_onnx(task, task.init(7), tmp_path / "own.onnx", samples=ROWS)
    learner = task.learner()
    learner.load(task.init(7))
    np.testing.assert_allclose(answers(tmp_path / "own.onnx", given), learner.logits(ROWS), atol=1e-5)
    assert report.preprocess == preprocess


def test_a_file_that_computes_something_else_is_never_there(tmp_path):
    task = OwnTask(wrongly_drawn)
    with pytest.raises(
        TaskError, match=r"does not compute what the task computes: logits differ by up to .*20 inputs"
    ):
        export_onnx(task, task.init(7), tmp_path / "own.onnx", samples=ROWS)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_numbers_that_are_none_is_refused(tmp_path):
    task = make_task("digits")
    model = {name: np.full_like(tensor, np.nan) for name, tensor in task.init(7).items()}
    with pytest.raises(TaskError, match="differ by up to nan"):
        export_onnx(task, model, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc2.bias": None}, "lacks tensor 'fc2.bias'"),
        ({"fc1.bias": np.zeros(3, np.float32)}, "tensor fc1.bias has shape"),
        ({"more": np.zeros(3, np.float32)}, "no tensor 'more'"),
    ],
)
def test_a_model_of_another_task_is_refused(change, words, tmp_path):
    task = make_task("digits")
    model = {name: tensor for name, tensor in {**task.init(7), **change}.items() if tensor is not None}
    with pytest.raises(TaskError, match=words):
        export_onnx(task, model, tmp_path / "model.onnx")


def test_a_task_that_does_not_say_its_shape_needs_real_inputs(tmp_path):
    task = OwnTask(squares)
    with pytest.raises(TaskError, match="input_shape"):
        export_onnx(task, task.init(7), tmp_path / "own.onnx")
    with pytest.raises(TaskError, match="no inputs"):
        export_onnx(task, task.init(7), tmp_path / "own.onnx", samples=ROWS[:0])


def test_a_learner_that_cannot_draw_itself_is_named(tmp_path):
    class Bare:
        name = "own:Bare"
        shapes = staticmethod(lambda: ())
        learner = staticmethod(object)

    task = Bare()
    with pytest.raises(TaskError, match="a object has no prepare, logits and draw"):
        export_onnx(task, {}, tmp_path / "own.onnx", samples=ROWS)


def test_a_place_that_cannot_be_written_is_one_error(tmp_path):
    task = make_task("digits")
    with pytest.raises(StoreError, match="cannot be written"):
        export_onnx(task, task.init(7), tmp_path / "none" / "model.onnx")


def test_a_module_of_one_s_own_is_resized_and_repeated_in_the_file(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    source = (
        "import torch\n"
        "class Wide(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv = torch.nn.Conv2d(3, 4, 3)\n"
        "        self.norm = torch.nn.BatchNorm2d(4)\n"
        "        self.drop = torch.nn.Dropout(0.5)\n"
        "        self.fc = torch.nn.Linear(4, 10)\n"
        "    def forward(self, x):\n"
        "        return self.fc(self.drop(torch.relu(self.norm(self.conv(x)))).mean(dim=(2, 3)))\n"
    )
    (tmp_path / "wide_models.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = {"model": "wide_models:Wide", "channels": 3, "size": 45}
    task = make_task("mnist", options)
    path, inputs = tmp_path / "wide.onnx", real_like("mnist", 5)
    report = export_onnx(task, task.init(7), path, samples=inputs)
    learner = task.learner()
    learner.load(task.init(7))
    assert np.abs(answers(path, inputs) - learner.logits(inputs)).max() <= report.tolerance
    sys.modules.pop("wide_models", None)


@pytest.fixture
def exporting():
    def export(path, missing, task="digits"):
        program = (
            f"import sys; sys.modules[{missing!r}] = None\n"
            "from pathlib import Path\n"
            "from edgefl.tasks.onnx_export import export_onnx\n"
            "from edgefl.tasks.registry import make_task\n"
            f"task = make_task({task!r})\n"
            f"export_onnx(task, task.init(7), Path({str(path)!r}))\n"
        )
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )

    return export


def test_a_numpy_task_is_exported_without_torch(exporting, tmp_path):
    done = exporting(tmp_path / "model.onnx", "torch")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("missing", "task", "words"),
    [
        ("torch", "mnist", "pip install 'edgefl[train]'"),
        ("onnx", "digits", "pip install 'edgefl[export]'"),
        ("onnxruntime", "digits", "pip install onnxruntime"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(exporting, missing, task, words, tmp_path):
    done = exporting(tmp_path / "model.onnx", missing, task)
    assert words in done.stderr.splitlines()[-1]
    assert "edgefl.errors.TaskError" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
