"""Exported files compute what the task computes, and appear only when they do."""

import hashlib
import json
import logging
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from edgefl.core.errors import DataError, StoreError, TaskError
from edgefl.core.types import Dataset, SparseTensor, Task, derive_rng
from edgefl.device.inference.onnx_model import OnnxModel
from edgefl.tasks.export.model_export import NUM_RANDOM_INPUTS, export_onnx, export_torch
from edgefl.tasks.images import MODELS as IMAGE_MODELS
from edgefl.tasks.learners.numpy_learner import ACTIVATIONS, DenseModel, NumpyLearner
from edgefl.tasks.learners.torch_learner import TorchModel
from edgefl.tasks.onnx_graph import register_node_builder
from edgefl.tasks.registry import BUILT_IN, make_task

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install '.[export]'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install onnxruntime")

DENSE = {"mlp", "mlp-tanh", "logistic", "2nn"}
OPTIONS = {
    "digits": [*({"activation": name, "loss": "mse"} for name in ACTIVATIONS), {"model": "logistic"}],
    "mnist": [{"model": model} for model in IMAGE_MODELS],
    "fashion-mnist": [{"model": "mlp"}],  # the same models, prepared in another way
    "cifar-10": [{"model": "mlp"}, {"model": "cnn"}, {"model": "mobilenet-v2", "norm": "batch"}],
    "motionsense": [{"model": model} for model in ("cnn", "mlp", "logistic")],
    "noop": [{"size_bytes": 400}],
    "audio": [{"labels": "x,y", "sample_rate": 8000, "seconds": 0.2, "mel_bands": 12, "model": "mlp"}],
    "pictures": [{"labels": "x,y", "size": 8, "means": "0.4,0.5,0.6", "scales": 0.3, "model": "mlp"}],
    "series": [
        {"columns": "a,b", "window": 8, "target": "t", "labels": "x,y", "means": "1,2", "model": model}
        for model in ("mlp", "cnn", "gru")
    ],
    "table": [
        {"columns": "a,b,c", "target": "t", "labels": "x,y", "means": "1,2,3", "scales": 4.0, "model": "mlp"},
    ],
    "text": [{"column": "a", "target": "t", "labels": "x,y", "size": 64, "model": "mlp"}],
}


def marks(name, model):
    """Networks of torch take seconds each; those of no other operators than `cnn` run with the slow tests."""
    if name in {"digits", "noop", "table", "text"} or model in DENSE:
        return ()
    return pytest.mark.extended if model in {"cnn", "lenet"} else pytest.mark.slow


CASES = [
    pytest.param(
        name, options, marks=marks(name, options.get("model")), id="-".join([name, *map(str, options.values())])
    )
    for name, each in OPTIONS.items()
    for options in each
]


def real_like(name, num_examples=30):
    """Inputs in the range of a shard: dark and bright pixels, an empty image; motion around its mean."""
    rng = derive_rng(3, name)
    if name == "motionsense":
        return rng.normal(0.0, 1.0, (num_examples, 9, 128)).astype(np.float32)
    tops = {
        "audio": ((1600,), 20_000), "cifar-10": ((3, 32, 32), 255), "digits": ((8, 8), 16), "noop": ((1,), 9),
        "pictures": ((3, 8, 8), 255), "series": ((2, 8), 9), "table": ((3,), 9),
        "text": ((64,), 9),
    }  # fmt: skip
    shape, top = tops.get(name, ((28, 28), 255))
    pixels = rng.integers(0, top, (num_examples, *shape), endpoint=True).astype(np.uint8 if top < 256 else np.int16)
    pixels[0] = 0
    return pixels


def answers(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"inputs": inputs.astype(np.float32)})
    return np.asarray(logits)


def loaded(task):
    """The task's learner with its first model, and the model."""
    learner, model = task.learner(), task.init(7)
    learner.load(model)
    return learner, model


def metadata(path):
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


def test_every_built_in_task_is_tried_below():
    assert set(OPTIONS) == set(BUILT_IN)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_file_answers_as_the_task_does_for_any_number_of_examples(name, options, tmp_path):
    if name not in {"digits", "noop"} and options["model"] not in DENSE:
        pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    task, path, inputs = make_task(name, options), tmp_path / "model.onnx", real_like(name)
    learner, model = loaded(task)
    report = export_onnx(task, model, path, samples=inputs, options=options)
    expected = learner.logits(inputs)
    assert report.max_difference <= report.tolerance
    for count in (1, 2, len(inputs)):
        found = answers(path, inputs[:count])
        assert found.shape == (count, len(task.labels))
        assert np.abs(found - expected[:count]).max() <= report.tolerance
    dims = ", ".join(["n", *map(str, inputs.shape[1:])])
    assert (report.preprocess, report.inputs) == ({}, f"float32 inputs [{dims}]")
    assert list(tmp_path.iterdir()) == [path], "weights lie in the one file"


def test_the_report_and_the_file_s_metadata_say_what_it_is_and_the_same_model_makes_the_same_file(tmp_path):
    task, path, options = make_task("digits", {"model": "logistic"}), tmp_path / "model.onnx", {"model": "logistic"}
    report = export_onnx(task, task.init(7), path, options=options, model_sha256="ab" * 32)
    content = path.read_bytes()
    assert (report.sha256, report.bytes_file) == (hashlib.sha256(content).hexdigest(), len(content))
    assert (report.opset, report.output_name, report.num_classes) == (18, "logits", 10)
    assert (report.num_checked, report.accuracy) == (NUM_RANDOM_INPUTS, None)
    assert (report.is_quantised, report.accuracy_quantised, report.bytes_float32) == (False, None, len(content))
    assert metadata(path) == {
        "edgefl.task": "digits",
        "edgefl.task_options": '{"model": "logistic"}',
        "edgefl.model": "ab" * 32,
        "edgefl.preprocess": "",
        "edgefl.classes": json.dumps(list("0123456789")),
        "edgefl.numbers": "float32",
    }
    assert [entry.version for entry in onnx.load(path).opset_import] == [18]
    assert path.stat().st_mode & 0o777 == 0o644
    again = export_onnx(task, task.init(7), tmp_path / "b.onnx", options=options, model_sha256="ab" * 32)
    assert again.sha256 == report.sha256


@pytest.mark.extended
def test_quantised_weights_are_smaller_their_accuracy_is_told_and_the_exporters_stay_out_of_the_log(
    tmp_path, caplog, capfd
):
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    caplog.set_level(logging.DEBUG)
    task, path, inputs = make_task("motionsense"), tmp_path / "model.onnx", real_like("motionsense", 200)
    learner, model = loaded(task)
    data = Dataset(inputs=inputs, targets=learner.logits(inputs).argmax(axis=1).astype(np.int64))
    report = export_onnx(task, model, path, samples=data, quantise=True)
    assert [record.message for record in caplog.records if record.levelno >= logging.INFO] == []
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("edgefl").isEnabledFor(logging.WARNING), "our own are heard again"
    assert report.bytes_file < 0.5 * report.bytes_float32
    right = (answers(path, inputs).argmax(axis=1) == data.targets).mean()
    assert (report.accuracy, report.accuracy_quantised, right > 0.6) == (1.0, right, True)
    assert metadata(path)["edgefl.numbers"] == "int8"


def test_features_stay_exact_when_weights_are_quantised(tmp_path):
    task, path = make_task("motionsense", {"model": "mlp"}), tmp_path / "model.onnx"
    export_onnx(task, task.init(7), path, samples=real_like("motionsense"), quantise=True)
    kinds = {node.name: node.op_type for node in onnx.load(path).graph.node}
    assert {kind for name, kind in kinds.items() if name.startswith("prepare")} >= {"MatMul", "Log"}
    assert "MatMulInteger" in kinds.values()


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


def as_it_is(rows):
    return rows.astype(np.float32)


def squares(rows):
    return (rows * rows).astype(np.float32)


@register_node_builder(lambda graph, rows: graph.add("Mul", rows, rows))
def drawn_squares(rows):
    return squares(rows)


@register_node_builder(lambda graph, rows: graph.add("Add", rows, graph.add_constant(np.float32(1.0))))
def wrongly_drawn(rows):
    return as_it_is(rows)


ROWS = np.random.default_rng(1).normal(size=(20, 4)).astype(np.float32)


def test_a_whole_test_set_is_checked_in_batches(tmp_path):
    class Counting(NumpyLearner):
        sizes = ()

        def logits(self, inputs):
            self.sizes = (*self.sizes, len(inputs))
            return super().logits(inputs)

    task = OwnTask(as_it_is)
    learner = Counting(task.shapes(), task.prepare)
    task.learner = lambda: learner
    rows = np.resize(ROWS, (1000, 4))
    assert export_onnx(task, task.init(7), tmp_path / "own.onnx", samples=rows).num_checked == 1000
    assert sum(size for size in learner.sizes if size > 1) == 1000
    assert max(learner.sizes) <= 256


@pytest.mark.parametrize(
    ("prepare", "preprocess", "given"),
    [(as_it_is, {}, ROWS), (drawn_squares, {}, ROWS), (squares, {"kind": "task"}, ROWS * ROWS)],
    ids=["as it is", "drawn", "not drawn"],
)
def test_a_task_of_one_s_own_is_exported_and_the_file_says_what_it_takes(prepare, preprocess, given, tmp_path):
    task = OwnTask(prepare)
    learner, model = loaded(task)
    report = export_onnx(task, model, tmp_path / "own.onnx", samples=ROWS)
    np.testing.assert_allclose(answers(tmp_path / "own.onnx", given), learner.logits(ROWS), atol=1e-5)
    assert report.preprocess == preprocess


class OwnHead(OwnTask):
    def __post_init__(self):
        super().__post_init__()
        shapes = self.shapes()
        self.shapes = lambda: tuple(replace(spec, shared=not spec.name.startswith("fc2")) for spec in shapes)


SHARED = {spec.name: np.zeros(spec.shape, np.float32) for spec in OwnHead(as_it_is).shapes() if spec.shared}


class Bare:
    name = "own:Bare"
    shapes = staticmethod(lambda: ())
    learner = staticmethod(object)


DIGITS = make_task("digits")
NANS = {name: np.full_like(tensor, np.nan) for name, tensor in DIGITS.init(7).items()}
WITHOUT_BIAS = {name: tensor for name, tensor in DIGITS.init(7).items() if name != "fc2.bias"}


@pytest.mark.parametrize(
    ("task", "model", "options", "words"),
    [
        (OwnTask(wrongly_drawn), None, {"samples": ROWS}, "does not compute what the task computes.*20 inputs"),
        (DIGITS, NANS, {}, "differ by up to nan"),
        (DIGITS, WITHOUT_BIAS, {}, "lacks tensor 'fc2.bias'"),
        (OwnHead(as_it_is), SHARED, {"samples": ROWS}, "'fc2.weight' of task own:Task stays on each device"),
        (DIGITS, {**DIGITS.init(7), "fc1.bias": np.zeros(3, np.float32)}, {}, "tensor fc1.bias has shape"),
        (DIGITS, {**DIGITS.init(7), "more": np.zeros(3, np.float32)}, {}, "no tensor 'more'"),
        (OwnTask(squares), None, {}, "input_shape"),
        (OwnTask(squares), None, {"samples": ROWS[:0]}, "no inputs"),
        (Bare(), {}, {"samples": ROWS}, "a object has no prepare, logits and draw"),
    ],
)
def test_a_file_that_would_compute_something_else_is_never_there(task, model, options, words, tmp_path):
    with pytest.raises(TaskError, match=words):
        export_onnx(task, task.init(7) if model is None else model, tmp_path / "own.onnx", **options)
    assert list(tmp_path.iterdir()) == []


WIDE = """
import torch
class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.norm = torch.nn.BatchNorm2d(4)
        self.drop = torch.nn.Dropout(0.5)
        self.fc = torch.nn.Linear(4, 10)
    def forward(self, x):
        return self.fc(self.drop(torch.relu(self.norm(self.conv(x)))).mean(dim=(2, 3)))
"""


@pytest.mark.extended
def test_a_module_of_one_s_own_is_resized_and_repeated_in_the_file(installed, tmp_path):
    pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")
    installed({"wide_models": WIDE})
    task = make_task("mnist", {"model": "wide_models:Wide", "channels": 3, "size": 45})
    path, inputs = tmp_path / "wide.onnx", real_like("mnist", 5)
    learner, model = loaded(task)
    report = export_onnx(task, model, path, samples=inputs)
    assert np.abs(answers(path, inputs) - learner.logits(inputs)).max() <= report.tolerance


@pytest.mark.parametrize(
    ("missing", "task", "words"),
    [
        ("torch", "mnist", "[train]'"),
        ("onnx", "digits", "[export]'"),
        ("onnxruntime", "digits", "pip install onnxruntime"),
        ("torch", "digits", ""),
    ],
)
def test_a_missing_package_is_named_with_its_remedy_where_it_is_needed(missing, task, words, tmp_path):
    program = (
        f"import sys; sys.modules[{missing!r}] = None\nfrom pathlib import Path\n"
        "from edgefl.tasks.export.model_export import export_onnx\nfrom edgefl.tasks.registry import make_task\n"
        f"task = make_task({task!r})\nexport_onnx(task, task.init(7), Path('model.onnx'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    if words:
        assert words in done.stderr.splitlines()[-1]
        assert "edgefl.core.errors.TaskError" in done.stderr.splitlines()[-1]
    assert ([path.name for path in tmp_path.iterdir()], done.returncode) == (
        ([], 1) if words else (["model.onnx"], 0)
    )


def test_a_place_that_cannot_be_written_is_one_error(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        export_onnx(DIGITS, DIGITS.init(7), tmp_path / "none" / "model.onnx")


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")


def test_the_file_is_a_state_dict_that_the_task_s_own_module_takes(torch, tmp_path):
    task = make_task("mnist", {"model": "lenet"})
    model, path = task.init(7), tmp_path / "model.pt"
    assert export_torch(model, path) == path.stat().st_size
    state = torch.load(path, weights_only=True)
    assert list(state) == list(model)
    module = task.model.build()
    module.load_state_dict(state)
    for name, tensor in module.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), model[name])


def test_sparse_tensors_numbers_of_every_kind_and_scalars_come_back(torch, tmp_path):
    sparse = SparseTensor(indices=np.array([1]), values=np.array([2.0], np.float32), shape=(3,))
    counter, read_only = np.array(5, np.int64), np.frombuffer(b"\0\0\x80?", np.float32)
    model = {"sparse": sparse, "counter": counter, "read_only": read_only, "odd": np.full(2, np.nan, np.float32)}
    export_torch(model, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["sparse"].tolist() == [0.0, 2.0, 0.0]
    assert (state["counter"].item(), state["counter"].shape, state["counter"].dtype) == (5, (), torch.int64)
    assert state["read_only"].tolist() == [1.0]


@pytest.mark.usefixtures("torch")
def test_a_place_that_cannot_be_written_is_one_error_and_without_torch_the_remedy_is_named(tmp_path):
    with pytest.raises(StoreError, match="cannot be written"):
        export_torch({"w": np.zeros(2, np.float32)}, tmp_path / "none" / "model.pt")
    program = (
        "import sys; sys.modules['torch'] = None\nfrom pathlib import Path\n"
        "from edgefl.tasks.export.model_export import export_torch\nexport_torch({}, Path('model.pt'))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "[train]'" in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.extended
def test_inputs_by_name_are_inputs_of_the_file_in_their_types(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")

    class Joined(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.site, self.head = torch.nn.Embedding(4, 2), torch.nn.Linear(6, 3)

        def forward(self, image, site):
            return self.head(torch.cat([image.flatten(1), self.site(site)], 1))

    class Sites(Task):
        name = "sites:Sites"
        model = TorchModel(build=Joined)

    rng = np.random.default_rng(0)
    inputs = {"site": rng.integers(0, 4, 30, np.int16), "image": rng.normal(size=(30, 2, 2))}
    samples = Dataset(inputs=inputs, targets=rng.integers(0, 3, 30))
    task, path = Sites(), tmp_path / "model.onnx"
    report = export_onnx(task, task.init(1), path, samples=samples)
    assert report.inputs == "float32 image [n, 2, 2], int64 site [n]"
    assert report.accuracy == pytest.approx(np.mean(_run(path, inputs).argmax(axis=1) == samples.targets))
    learner = task.learner()
    learner.load(task.init(1))
    np.testing.assert_allclose(_run(path, inputs), learner.logits(samples.inputs), atol=1e-5)
    with pytest.raises(
        DataError, match=r"one float32 input to run on a board, it takes image of tensor\(float\), site"
    ):
        OnnxModel(path)
    # What a task's own code prepares outside the graph is not in it.
    Sites.model = TorchModel(build=Joined, prepare=lambda each: {"image": each["image"] + 1, "site": each["site"]})
    report = export_onnx(Sites(), task.init(1), path, samples=samples)
    assert report.preprocess == {"kind": "task"}
    with pytest.raises(TaskError, match="does not say the shape of its inputs"):
        export_onnx(Sites(), task.init(1), path)


def _run(path, inputs):
    session = onnxruntime.InferenceSession(str(path))
    return session.run(None, {"image": inputs["image"].astype("f4"), "site": inputs["site"].astype("i8")})[0]
