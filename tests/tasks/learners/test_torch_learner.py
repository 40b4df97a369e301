"""Torch modules as models: built in, and of a factory named in a run file."""

import importlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from edgefl.core.config import AdaptSection
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.named_arrays import NamedArrays
from edgefl.core.types import Dataset, ExamplePrivacy, TensorKind, TrainConfig
from edgefl.tasks.adaptation.adapted_task import AdaptedTask
from edgefl.tasks.augmentation import AugmentedDataset
from edgefl.tasks.images import cifar10, fashion_mnist, mnist
from edgefl.tasks.learners import torch_learner
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchLearner, make_resizing_prepare, module_shapes
from edgefl.tasks.local_algorithms.example_privacy import (
    ExampleAccount,
    RunAccount,
    iterate_samples,
    try_example_gradients,
)
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.motionsense import motionsense
from edgefl.tasks.preparation import to_features
from edgefl.tasks.registry import make_task

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")


def some_data(n=24, features=6, classes=4):
    rng = np.random.default_rng(0)
    return Dataset(inputs=rng.standard_normal((n, features)).astype(np.float32), targets=rng.integers(0, classes, n))


def trained(learner, data, seed=0, **plan):
    rng = np.random.default_rng(seed)
    return train(learner, data, TrainConfig(**plan), rng, clock=lambda: 0.0, on_iteration=lambda *_: False)


@pytest.fixture
def pair():
    """A logistic regression in NumPy and one in torch, with the same weights."""
    model = DenseModel(sizes=(6, 4), prepare=lambda x: x)
    by_hand, by_torch = model.learner(), TorchLearner(torch.nn.Linear(6, 4), threads=1)
    start = model.init(1)
    by_hand.load(start)
    by_torch.load(dict(zip(["weight", "bias"], start.values(), strict=True)))
    return by_hand, by_torch


def normalised():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 4))


def test_agrees_with_the_numpy_logistic_regression_on_loss_and_gradient(pair):
    by_hand, by_torch = pair
    data = some_data()
    assert by_torch.gradient(data) == pytest.approx(by_hand.gradient(data), rel=1e-5)
    for mine, torchs in zip(by_hand.gradients.values(), by_torch.gradients.values(), strict=True):
        np.testing.assert_allclose(torchs.numpy(), mine, atol=1e-6)
    assert by_torch.evaluate(data) == pytest.approx(by_hand.evaluate(data), rel=1e-5)


@pytest.mark.parametrize("call", ["gradient", "evaluate"])
@pytest.mark.parametrize("labels", [[0.0, 1.5], [0, -1], [0, 4], [0.0, np.nan], [0.0, 1e300]])
def test_labels_that_are_not_the_models_classes_are_refused_in_one_line(pair, labels, call):
    inputs = np.zeros((2, 6), np.float32)
    for learner in pair:
        getattr(learner, call)(Dataset(inputs=inputs, targets=np.array([0.0, 3.0])))
        with pytest.raises(TaskError, match=r"a label is .*; .* must be the whole numbers from 0 to 3 .*4 outputs"):
            getattr(learner, call)(Dataset(inputs=inputs, targets=np.array(labels)))


@pytest.mark.parametrize("algorithm", ["sgd", "gradient"])
def test_the_same_plan_gives_the_same_displacement_in_numpy_and_torch(pair, algorithm):
    plan = {"algorithm": algorithm, "epochs": 3, "batch_size": 5, "learning_rate": 0.1, "momentum": 0.9}
    by_hand, by_torch = (trained(learner, some_data(), 3, weight_decay=0.01, **plan) for learner in pair)
    assert by_hand.loss == pytest.approx(by_torch.loss, rel=1e-5)
    for mine, torchs in zip(by_hand.displacement.values(), by_torch.displacement.values(), strict=True):
        np.testing.assert_allclose(torchs, mine, atol=1e-5)


def test_gradients_stay_the_modules_own_tensors_and_do_not_add_up_over_batches():
    module = torch.nn.Linear(6, 4)
    learner = TorchLearner(module, threads=1)
    learner.gradient(some_data())
    once = learner.gradients["weight"].clone()
    learner.gradient(some_data())
    assert learner.gradients["weight"].data_ptr() == module.weight.grad.data_ptr()
    assert learner.parameters["weight"].data_ptr() == module.weight.data_ptr()
    assert torch.equal(learner.gradients["weight"], once)


def test_takes_read_only_arrays_as_they_come_from_the_network():
    learner = TorchLearner(torch.nn.Linear(1, 2), threads=1)
    learner.load({"bias": np.frombuffer(np.array([1, 2], "<f4").tobytes(), "<f4")})
    assert learner.read()["bias"].tolist() == [1.0, 2.0]


def test_buffers_float_and_integer_are_read_loaded_and_displaced_and_evaluation_changes_none():
    module = normalised()
    kinds = {spec.name: (spec.kind, spec.dtype) for spec in module_shapes(module)}
    assert kinds["0.running_mean"] == (TensorKind.BUFFER, "float32")
    assert kinds["0.num_batches_tracked"] == (TensorKind.BUFFER, "int64")
    learner = TorchLearner(module, threads=1)
    learner.load({"0.num_batches_tracked": np.array(40)})
    before = learner.read()
    learner.evaluate(some_data())
    assert all(np.array_equal(value, before[name]) for name, value in learner.read().items())
    moved = trained(learner, some_data(), iterations=3, batch_size=8, learning_rate=0.1).displacement
    assert list(moved) == [spec.name for spec in module_shapes(module)]
    assert (moved["0.num_batches_tracked"].dtype, moved["0.num_batches_tracked"]) == (np.int64, 3)
    assert learner.read()["0.num_batches_tracked"] == 43
    assert moved["0.running_mean"].any()


IMAGES = np.random.default_rng(0).integers(0, 256, (4, 28, 28)).astype(np.uint8)
PHOTOGRAPHS = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32)).astype(np.uint8)
WINDOWS = np.random.default_rng(0).standard_normal((4, 9, 128)).astype(np.float32)


@pytest.mark.parametrize(
    ("task", "inputs"),
    [
        pytest.param(mnist(), IMAGES, id="cnn"),
        pytest.param(fashion_mnist(), IMAGES, id="cnn-small"),
        pytest.param(cifar10(), PHOTOGRAPHS, id="cifar-10"),
        pytest.param(motionsense(), WINDOWS, id="motionsense"),
    ],
)
def test_a_built_in_network_has_the_tensors_of_its_layout_and_learns_a_batch_by_heart(task, inputs):
    assert module_shapes(task.model.build()) == task.shapes()
    learner, batch = task.learner(threads=1), Dataset(inputs=inputs, targets=np.array([0, 1, 2, 3]))
    learner.load(task.init(7))
    first = learner.gradient(batch)
    trained(learner, batch, iterations=8, batch_size=4, learning_rate=0.01)
    assert learner.evaluate(batch)[0] < first


def test_a_missing_gpu_is_one_clear_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU: run it on one without")
    with pytest.raises(TaskError, match=r"cuda:1 is not here: torch sees 0 CUDA device"):
        mnist().learner(accelerator="cuda:1")


@pytest.mark.parametrize(
    ("plan", "adapt"),
    [
        pytest.param({"algorithm": "decay"}, None, id="decay"),
        pytest.param({"algorithm": "prox", "options": {"mu": 0.1}}, None, id="prox"),
        pytest.param({"algorithm": "adadelta"}, None, id="adadelta"),
        pytest.param({"momentum": 0.9, "weight_decay": 0.01}, None, id="momentum"),
        pytest.param({"personal_lambda": 0.1}, None, id="personal"),
        pytest.param({}, AdaptSection(method="lora", rank=4, targets=("fc*.weight",)), id="lora"),
        pytest.param({}, AdaptSection(method="head"), id="head"),
        pytest.param({}, AdaptSection(method="bitfit"), id="bitfit"),
    ],
)
def test_trains_on_a_gpu_as_on_the_cpu(plan, adapt):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch sees: run it on a machine with one")
    rng = np.random.default_rng(0)
    data = Dataset(inputs=rng.integers(0, 256, (64, 28, 28)).astype(np.uint8), targets=rng.integers(0, 10, 64))
    task = make_task("mnist", {"model": "cnn-small"})
    if adapt is not None:
        task = AdaptedTask(task, adapt, task.init(3))
    learners = [task.learner(accelerator=accelerator, threads=1) for accelerator in ("cpu", "cuda")]
    for learner in learners:
        learner.load(task.init(7))
        trained(learner, data, epochs=1, batch_size=16, learning_rate=0.01, **plan)
    on_cpu, on_gpu = (learner.read() for learner in learners)
    for name, tensor in on_cpu.items():
        np.testing.assert_allclose(on_gpu[name], tensor, atol=1e-3, err_msg=name)
    assert learners[1].evaluate(data) == pytest.approx(learners[0].evaluate(data), rel=1e-3)


OWN = '''
from __future__ import annotations

import pathlib
from torch import nn

class Tiny(nn.Module):
    """Has what makes training delicate: a normalisation with buffers, and dropout."""
    def __init__(self, channels: int = 1, num_classes: int = 1000):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, stride=2)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, num_classes)
    def forward(self, x):
        return self.last(self.drop(self.norm(self.conv(x).mean(dim=(2, 3)))))

def coloured(**options) -> nn.Module:
    return Tiny(3, **options)

def ten() -> Tiny:
    return Tiny(num_classes=10)

def seven() -> Tiny:
    return Tiny(num_classes=7)

def motion(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(9, 4, 5), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, num_classes))

def circular(): ...
circular.__wrapped__ = circular

def silent(**options):
    pathlib.Path("called").touch()

def other() -> pathlib.Path:
    pathlib.Path("called").touch()

def liar() -> nn.Module:
    return "a model"

def broken() -> nn.Module:
    raise OSError("no weights here")

NUMBER = 3
'''


@pytest.fixture
def own_module(installed, tmp_path, monkeypatch):
    installed({"own_models": OWN})
    monkeypatch.setenv("EDGEFL_ALLOW_MODULES", "own_models,torch.nn,no_such_package")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_task(name="own_models:Tiny", task="mnist", **options):
    return make_task(task, {"model": name, **options})


def images(count, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset(inputs=rng.integers(0, 256, (count, 28, 28)).astype(np.uint8), targets=rng.integers(0, 10, count))


def trained_factory_model(task, data, *, seed=1, **plan):
    learner = task.learner(threads=1)
    learner.load(task.init(7))
    plan = TrainConfig(**{"epochs": 1, "batch_size": 4, "learning_rate": 0.1, **plan})
    rng = np.random.default_rng(seed)
    return train(learner, data, plan, rng, clock=lambda: 0.0, on_iteration=lambda *_: False).displacement


@pytest.mark.parametrize("name", ["Tiny", "ten"])
def test_a_class_and_a_function_make_a_model_with_the_tasks_classes(own_module, name):
    task = a_task(f"own_models:{name}")
    found = {spec.name: (spec.shape, spec.kind) for spec in task.shapes()}
    assert found["last.weight"] == ((10, 4), TensorKind.PARAMETER)
    assert found["norm.running_mean"] == ((4,), TensorKind.BUFFER)
    made = [(tensor, value.shape, str(value.dtype)) for tensor, value in task.init(7).items()]
    assert [(spec.name, spec.shape, spec.dtype) for spec in task.shapes()] == made
    assert task.learner(threads=1).evaluate(images(30))[0] > 0


def test_first_weights_are_the_modules_own_depend_on_the_seed_alone_and_leave_torchs_generator(own_module):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (a_task().init(seed) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["conv.weight"], other["conv.weight"])
    assert first["norm.running_var"].tolist() == [1.0] * 4
    assert np.abs(first["conv.weight"]).max() <= 1 / 3


def test_training_with_dropout_depends_on_the_seed_alone(own_module):
    task, data = a_task(), images(12)
    first = trained_factory_model(task, data)
    torch.rand(3)
    again = trained_factory_model(task, data)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert first["last.weight"].any()
    assert not np.array_equal(trained_factory_model(task, data, seed=2)["last.weight"], first["last.weight"])


def test_a_last_batch_of_one_example_trains_without_statistics_of_its_own(own_module):
    moved = trained_factory_model(a_task(), images(9))
    assert moved["norm.num_batches_tracked"] == 2
    assert all(np.isfinite(value).all() for value in moved.values())


def test_coloured_images_and_windows_of_motion_fit_a_module_too(own_module):
    task = a_task("own_models:coloured", "fashion-mnist", channels=3, size=32)
    assert {spec.name: spec.shape for spec in task.shapes()}["conv.weight"] == (4, 3, 3, 3)
    assert trained_factory_model(task, images(4))["conv.weight"].any()
    task = a_task("own_models:motion", "motionsense")
    windows = np.random.default_rng(0).standard_normal((6, 9, 128)).astype(np.float32)
    assert {spec.name: spec.shape for spec in task.shapes()}["3.weight"] == (6, 4)
    assert trained_factory_model(task, Dataset(inputs=windows, targets=np.arange(6)))["3.weight"].any()


def test_images_are_repeated_for_each_channel_and_resized_between_their_neighbours():
    pixels = np.arange(4, dtype=np.float32).reshape(1, 1, 2, 2)
    found = make_resizing_prepare(lambda _: pixels, channels=3, size=4)(pixels)
    assert found.shape == (1, 3, 4, 4)
    assert np.array_equal(found[0, 0], found[0, 2])
    assert found[0, 0, 0].tolist() == [0.0, 0.25, 0.75, 1.0]
    assert np.array_equal(make_resizing_prepare(lambda _: pixels, channels=1, size=2)(pixels), pixels)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_models:coloured", r"does not take inputs of \[1, 28, 28\]: .*; set channels = 3, and size"),
        ("own_models:seven", r"answers two examples with \[2, 7\], it must be \[2, 10\]"),
        ("own_models:silent", "is called only if it is a class of torch modules"),
        ("own_models:other", "is called only if"),
        ("own_models:circular", "is called only if"),
        ("own_models:NUMBER", "is called only if"),
        ("own_models:liar", "makes a str, no torch module"),
        ("own_models:broken", "cannot be made: OSError: no weights here"),
        ("own_models:missing", "has no attribute 'missing'"),
        ("no_such_package:model", "No module named 'no_such_package'"),
        ("torch.nn:Module", "cannot be made|does not take inputs"),
        ("os:abort", "is refused: os is of Python's own library"),
        ("os.path:join", "is refused: os.path is of Python's own library"),
        ("torchvision.models:resnet18", "the module torchvision.models is not allowed here"),
        ("own_models:", "cannot be loaded"),
        (":Tiny", "cannot be loaded"),
    ],
)
def test_what_makes_no_model_for_the_task_is_refused_in_one_clear_line(own_module, name, message):
    with pytest.raises((TaskError, ConfigError), match=message):
        a_task(name).shapes()
    assert not (own_module / "called").exists()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("own_models:Tiny", {"channels": 0}, "channels of task mnist must be a whole number from 1 to 4, got 0"),
        ("own_models:Tiny", {"size": "large"}, "task.size must be a whole number, got 'large'"),
        ("own_models:Tiny", {"size": True}, "got true"),
        ("own_models:Tiny", {"init": "adacomp"}, "init of task mnist is for cnn, "),
        ("cnn", {"channels": 3}, "channels and size of task mnist are for a model of torchvision"),
        ("2nn", {"size": 32}, "channels and size of task mnist are for"),
    ],
)
def test_an_option_that_does_not_fit_is_one_clear_line(own_module, model, options, message):
    with pytest.raises(ConfigError, match=message):
        a_task(model, **options)


WITHOUT_TORCH = """
import sys; sys.modules['torch'] = None
from edgefl.core.errors import TaskError
from edgefl.tasks.registry import make_task
task = make_task('mnist', {'model': 'torchvision.models:resnet18', 'channels': 3})
try:
    task.shapes()
except TaskError as error:
    print(error)
"""


def test_a_task_with_a_module_is_made_without_torch_and_its_shapes_name_the_remedy():
    command = [
        sys.executable,
        "-c",
        "import os; os.environ['EDGEFL_ALLOW_MODULES'] = 'torchvision.models'" + WITHOUT_TORCH,
    ]
    assert "[train]'" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


TORCHVISION = """
import torch

def list_models(module):
    return ["resnet18", "googlenet"]

def get_model(name, *, weights, num_classes, **options):
    assert weights is None and options == ({"aux_logits": False, "init_weights": True} if name == "googlenet" else {})
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, num_classes))

def download(**_):
    raise AssertionError
"""
TIMM = """
import torch

def list_models():
    return ["resnet18", "vit_7b"]

def create_model(name, *, pretrained, num_classes):
    assert pretrained is False
    if name == "vit_7b":
        return torch.nn.Linear(80_000, 90_000)
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, num_classes))
"""


@pytest.fixture
def libraries(installed, monkeypatch):
    """Puts small stand-ins for torchvision and timm in their place; run files may name no module."""
    installed({"torchvision_models": TORCHVISION, "timm_models": TIMM})
    monkeypatch.delenv("EDGEFL_ALLOW_MODULES")
    for name, module in {"torchvision.models": "torchvision_models", "timm": "timm_models"}.items():
        monkeypatch.setitem(sys.modules, name, importlib.import_module(module))


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ("mnist", "torchvision:resnet18"),
        ("cifar-10", "torchvision:resnet18"),
        ("mnist", "torchvision:googlenet"),
        ("mnist", "timm:resnet18"),
    ],
)
def test_a_network_that_a_library_lists_needs_no_permission_and_gets_three_channels(libraries, task, name):
    found = make_task(task, {"model": name})
    assert [spec.shape for spec in found.shapes()] == [(10, 3), (10,)]
    batch = PHOTOGRAPHS if task == "cifar-10" else IMAGES
    assert found.learner(threads=1).logits(batch).shape == (4, 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("torchvision:resnet19", "torchvision has no such network; did you mean resnet18"),
        ("torchvision:download", r"has no such network; torchvision\.models\.list_models\(\) has those"),
        ("torchvision:", "has no such network"),
        ("timm:hf-hub:someone/net", r"timm has no such network; timm\.list_models\(\) has those"),
    ],
)
def test_nothing_else_of_a_library_is_called(libraries, name, message):
    with pytest.raises(ConfigError, match=message):
        make_task("mnist", {"model": name}).shapes()


def test_a_librarys_network_of_too_many_parameters_takes_no_memory_before_it_is_refused(libraries):
    with pytest.raises(TaskError, match="it has 7,200,090,000 parameters, at most are 700,000,000"):
        make_task("mnist", {"model": "timm:vit_7b"}).shapes()


@pytest.mark.parametrize(("library", "module"), [("torchvision", "torchvision.models"), ("timm", "timm")])
def test_a_library_that_is_missing_or_of_another_build_is_one_line_with_the_remedy(monkeypatch, library, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        TaskError, match=rf"needs the {library} of .*, which cannot be imported .*edgefl-fleet\[{library}\]"
    ):
        make_task("mnist", {"model": f"{library}:resnet18"}).shapes()


@pytest.mark.extended
def test_torchvisions_resnet_is_one_line_where_it_is_installed():
    pytest.importorskip("torchvision", reason="needs torchvision: pip install '.[torchvision]'", exc_type=ImportError)
    task = make_task("fashion-mnist", {"model": "torchvision:resnet18"})
    assert sum(spec.size for spec in task.shapes() if spec.kind == TensorKind.PARAMETER) == 11_181_642
    assert trained_factory_model(task, images(5), epochs=None, iterations=1)["fc.weight"].any()


@pytest.mark.extended
def test_a_timm_network_trains_the_last_layer_on_its_own_names_where_it_is_installed():
    pytest.importorskip("timm", reason="needs timm: pip install '.[timm]'", exc_type=ImportError)
    task = make_task("fashion-mnist", {"model": "timm:mobilenetv3_small_050", "size": 32})
    sizes = {spec.name: spec.size for spec in task.shapes() if spec.kind == TensorKind.PARAMETER}
    assert sum(sizes.values()) == 578_474
    assert sizes["classifier.weight"] == 10_240
    assert trained_factory_model(task, images(5), epochs=None, iterations=1)["classifier.weight"].any()


class Joined(torch.nn.Module):
    """Takes a picture, a number and a class, each by name."""

    def __init__(self):
        super().__init__()
        self.picture, self.site, self.head = torch.nn.Linear(6, 3), torch.nn.Embedding(4, 2), torch.nn.Linear(5, 2)

    def forward(self, image, age, site, is_new=None):
        self.types = {"image": image.dtype, "age": age.dtype, "site": site.dtype}
        new = torch.zeros(len(age), 1) if is_new is None else is_new[:, None].float()
        return self.head(torch.cat([self.picture(image.flatten(1)), self.site(site)], 1) + age[:, None] + new)


def some_named_data(n=24):
    rng = np.random.default_rng(0)
    inputs = {"site": rng.integers(0, 4, n, np.uint8), "age": rng.normal(size=n), "image": rng.normal(size=(n, 2, 3))}
    return Dataset(inputs=inputs, targets=(inputs["age"] > 0).astype(int))


def test_inputs_by_name_are_keyword_arguments_of_the_module_and_train_it():
    data, learner = some_named_data(), TorchLearner(Joined(), prepare=to_features, threads=1)
    before = learner.evaluate(data)[0]
    trained(learner, data, epochs=30, batch_size=7, learning_rate=0.1)
    loss, accuracy = learner.evaluate(data)
    assert loss < 0.7 * before
    assert accuracy > 0.8
    assert learner.module.types == {"image": torch.float32, "age": torch.float32, "site": torch.int64}
    inputs = {name: torch.from_numpy(array) for name, array in to_features(data.inputs.to_dict()).items()}
    with torch.no_grad():
        by_torch = learner.module.eval()(**inputs)
    np.testing.assert_array_equal(learner.logits(data.inputs), by_torch.numpy())
    flagged = Dataset(inputs={**data.inputs.to_dict(), "is_new": np.ones(24, bool)}, targets=data.targets)
    learner.check_inputs(flagged.inputs)
    assert not np.array_equal(learner.logits(flagged.inputs), by_torch.numpy())


def test_a_prepare_may_make_of_inputs_by_name_others_or_one_array():
    data = some_named_data()
    halved = TorchLearner(Joined(), prepare=lambda inputs: {**inputs, "age": inputs["age"] / 2}, threads=1)
    plain = TorchLearner(halved.module, threads=1)
    older = Dataset(inputs={**data.inputs.to_dict(), "age": 2 * data.inputs["age"]}, targets=data.targets)
    np.testing.assert_allclose(halved.logits(older.inputs), plain.logits(data.inputs), rtol=1e-6)
    flat = TorchLearner(torch.nn.Linear(6, 2), prepare=lambda inputs: inputs["image"].reshape(-1, 6), threads=1)
    flat.check_inputs(data.inputs)
    assert flat.logits(data.inputs).shape == (24, 2)


@pytest.mark.parametrize(
    ("prepare", "loss", "message"),
    [
        (
            lambda inputs: {**inputs, "years": inputs["age"]},
            "cross-entropy",
            r"named age, image, site, years, and fo.* ",
        ),
        (
            lambda inputs: {"image": inputs["image"]},
            "cross-entropy",
            r"forward of Joined takes \(image, age, site, is_n",
        ),
        (lambda inputs: inputs["weight"], "cross-entropy", "prepare of the task raised KeyError: 'weight' at inputs"),
        (
            lambda inputs: {**inputs, "age": inputs["age"][:0]},
            "cross-entropy",
            "prepare of the task: inputs 'image' h",
        ),
        (to_features, "reconstruction", "loss reconstruction needs one array of inputs, got age, image, site"),
    ],
)
def test_inputs_of_other_names_than_the_module_takes_are_one_clear_line(prepare, loss, message):
    learner = TorchLearner(Joined(), prepare=prepare, threads=1, loss=loss)
    with pytest.raises(TaskError, match=message):
        learner.check_inputs(some_named_data().inputs)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"site": np.zeros(24)},
            r"Joined does not take inputs age float32 \[\], image .*, site float32 \[\]: RuntimeError: E",
        ),
        ({"image": np.zeros((24, 2, 2))}, r"Joined does not take .*image float32 \[2, 2\].*: RuntimeError: "),
        ({"image": np.zeros((24, 2, 3), int)}, r"Joined does not take .*image int64 \[2, 3\].*: RuntimeError: "),
        ({"site": np.full(24, 9)}, "IndexError: index out of range"),
    ],
)
def test_inputs_of_another_type_or_shape_than_the_module_takes_are_one_clear_line(changed, message):
    learner, inputs = TorchLearner(Joined(), threads=1, prepare=to_features), some_named_data().inputs.to_dict()
    learner.check_inputs(NamedArrays(inputs))
    with pytest.raises(TaskError, match=message) as caught:
        learner.check_inputs(NamedArrays({**inputs, **changed}))
    assert "\n" not in str(caught.value)


def test_one_array_of_another_shape_than_the_module_takes_is_one_clear_line():
    learner = TorchLearner(torch.nn.Linear(6, 2), threads=1)
    learner.check_inputs(np.zeros((0, 5)))
    with pytest.raises(TaskError, match=r"Linear does not take inputs float32 \[5\]: RuntimeError: mat1 and mat2"):
        learner.check_inputs(np.zeros((3, 5)))


class Fragile(torch.nn.Module):
    """Fails as it is told, and counts how often it is tried."""

    def __init__(self):
        super().__init__()
        self.layer, self.error, self.num_calls = torch.nn.Linear(6, 2), None, 0

    def forward(self, inputs):
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return self.layer(inputs.reshape(len(inputs), -1))


def test_a_module_is_tried_again_only_on_inputs_of_another_type_or_shape():
    module = Fragile()
    learner = TorchLearner(module, threads=1)
    for inputs, num_calls in (
        (np.zeros((3, 6)), 1),
        (np.ones((9, 6)), 1),
        (np.zeros((3, 2, 3)), 2),
        (np.zeros((3, 2, 3), int), 3),
        (np.zeros((0, 6)), 3),
        (np.zeros((3, 6)), 4),
    ):
        learner.check_inputs(inputs)
        assert module.num_calls == num_calls
    for num_calls in (5, 6):
        with pytest.raises(TaskError, match="Fragile does not take inputs float32 "):
            learner.check_inputs(np.zeros((3, 5)))
        assert module.num_calls == num_calls, "one that failed is tried again"


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_too_little_memory_is_not_said_of_the_inputs(error):
    module = Fragile()
    module.error, learner = error, TorchLearner(module, threads=1)
    with pytest.raises(type(error)):
        learner.check_inputs(np.zeros((3, 6)))
    module.error = None
    learner.check_inputs(np.zeros((3, 6)))


def test_why_a_module_does_not_take_inputs_is_in_the_log(caplog):
    module = Fragile()
    module.error = KeyError("weights")
    with pytest.raises(TaskError, match="KeyError: 'weights'") as caught:
        TorchLearner(module, threads=1).check_inputs(np.zeros((3, 6)))
    assert caught.value.__cause__ is module.error
    assert "in forward" in caplog.text


def sum_one_by_one(learner, data, clip):
    total = {name: np.zeros(tuple(value.shape)) for name, value in learner.gradients.items()}
    for row in range(len(data)):
        learner.gradient(data.take([row]))
        gradient = {name: value.double().numpy().copy() for name, value in learner.gradients.items()}
        norm = np.sqrt(sum(np.square(value).sum() for value in gradient.values()))
        for name, value in gradient.items():
            total[name] += min(1.0, clip / max(1e-30, norm)) * value
    return total


GROUPS = [torch.nn.Unflatten(1, (1, 2, 3)), torch.nn.Conv2d(1, 4, 2), torch.nn.GroupNorm(2, 4), torch.nn.Flatten()]


@pytest.mark.parametrize("weights", [None, np.linspace(0.5, 2.0, 24)])
@pytest.mark.parametrize("values", [8_000_000, 200])
def test_the_clipped_sum_is_that_of_one_example_at_a_time(weights, values, monkeypatch):
    monkeypatch.setattr(torch_learner, "MAX_GRADIENT_VALUES", values)
    torch.manual_seed(0)
    learner = TorchLearner(torch.nn.Sequential(*GROUPS, torch.nn.Linear(8, 4)), threads=1)
    data = replace(some_data(), weights=weights)
    expected = sum_one_by_one(learner, data, 0.7)
    learner.sum_clipped_gradients(data, 0.7)
    for name, value in learner.gradients.items():
        np.testing.assert_allclose(value.numpy(), expected[name], atol=1e-4)


@pytest.mark.parametrize("loss", ["cross-entropy", "mse", lambda outputs, targets: outputs[:, 0] ** 2 * targets])
def test_clipped_sums_in_torch_are_those_by_hand_for_every_loss(pair, loss):
    by_hand, by_torch = pair
    start = by_torch.read()
    by_torch = TorchLearner(torch.nn.Linear(6, 4), threads=1, loss=loss)
    by_torch.load(start)
    data = some_data()
    expected = sum_one_by_one(by_torch, data, 0.1)
    by_torch.sum_clipped_gradients(data, 0.1)
    for name, value in by_torch.gradients.items():
        np.testing.assert_allclose(value.numpy(), expected[name], atol=1e-4)
    if loss == "cross-entropy":
        by_hand.sum_clipped_gradients(data, 0.1)
        for name, value in by_hand.gradients.items():
            np.testing.assert_allclose(value, expected[name.removeprefix("fc1.")], atol=1e-4)


def test_an_example_without_a_finite_gradient_counts_as_none_and_an_empty_batch_as_zero():
    learner, data = TorchLearner(torch.nn.Linear(6, 4), threads=1), some_data()
    data.inputs[3, 2] = np.nan
    learner.sum_clipped_gradients(data, 0.5)
    with_it = {name: value.numpy().copy() for name, value in learner.gradients.items()}
    learner.sum_clipped_gradients(data.take(np.arange(24) != 3), 0.5)
    for name, value in learner.gradients.items():
        np.testing.assert_allclose(value.numpy(), with_it[name], atol=1e-6)
    assert learner.sum_clipped_gradients(data.take(np.arange(0)), 0.5) == 0.0
    assert not any(value.any() for value in learner.gradients.values())


def test_masks_of_dropout_do_not_follow_from_the_seed_under_a_private_plan(monkeypatch):
    sums, inner = [], TorchLearner.sum_clipped_gradients

    def record(learner, batch, clip):
        loss = inner(learner, batch, clip)
        sums.append(np.concatenate([value.numpy().ravel() for value in learner.gradients.values()]))
        return loss

    monkeypatch.setattr(TorchLearner, "sum_clipped_gradients", record)
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4)
    )
    learner, data = TorchLearner(module, threads=1), some_data()
    start = learner.read()
    privacy = ExamplePrivacy(optimizer="sgd", clip=0.5, epsilon=1000.0, delta=1e-5, noise=1.0)
    plan = TrainConfig(algorithm="dp-sgd", iterations=1, batch_size=len(data), privacy=privacy)  # all, in each sample
    for _ in range(2):
        learner.load(start)
        train(
            learner, data, plan, np.random.default_rng(7), clock=lambda: 0.0, on_iteration=lambda *_: False,
            account=RunAccount(account=ExampleAccount(), task="t", run="r"),
        )  # fmt: skip
    assert np.abs(sums[0] - sums[1]).max() > 0.01, "whoever knows the seed knows the masks"


class Counting(torch.nn.Linear):
    """Has a parameter without an axis, and says what it was asked in which mode, outside of gradients."""

    def __init__(self):
        super().__init__(6, 4)
        self.scale, self.tried = torch.nn.Parameter(torch.tensor(1.5)), []

    def forward(self, inputs):
        if not torch.is_grad_enabled():
            self.tried.append((self.training, bool(inputs.any())))
        return self.scale * super().forward(inputs)


def test_no_example_goes_through_the_network_but_for_its_clipped_gradient():
    module, data = Counting(), some_data()
    learner = TorchLearner(module, threads=1)
    expected = sum_one_by_one(learner, data, 0.5)
    learner.sum_clipped_gradients(data, 0.5)
    assert (module.tried, module.training) == ([(False, False)], True)
    assert learner.gradients["scale"].item() == pytest.approx(float(expected["scale"]), abs=1e-4)


def test_the_last_example_changes_the_sum_by_no_more_than_the_clip_where_masks_and_changes_are_random():
    """The others' masks and changes stay, as those of the last are taken last; nothing stays in the network."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4)
    )
    learner = TorchLearner(module, threads=1)

    def sum_of(rows):
        data = some_data().take(rows)
        changed = AugmentedDataset(
            inputs=data.inputs, targets=data.targets, task="t", rng=np.random.default_rng(1),
            augment=lambda inputs, targets, rng: (
                inputs - inputs.mean(axis=0) / 2 + rng.standard_normal(inputs.shape, np.float32), targets
            ),
        )  # fmt: skip
        batch = next(iterate_samples(changed, np.arange(len(data)), 1.0, np.random.default_rng(2)))
        torch.manual_seed(3)
        learner.sum_clipped_gradients(batch, 0.3)
        return np.concatenate([value.double().numpy().ravel() for value in learner.gradients.values()])

    start = learner.read()
    moved = []
    for last in range(24):
        rows = np.roll(np.arange(24), last)
        moved.append(np.linalg.norm(sum_of(rows) - sum_of(rows[:-1])))
    assert 0.29 < max(moved) <= 0.3 + 1e-5
    assert all(np.array_equal(value, start[name]) for name, value in learner.read().items())


class Recurrent(torch.nn.GRU):
    """torch has no rule for many examples of it at a time."""

    def __init__(self):
        super().__init__(2, 4, batch_first=True)

    def forward(self, inputs):
        return super().forward(inputs.reshape(-1, 3, 2))[0][:, -1]


def test_a_model_is_tried_with_zeros_alone_before_a_private_run():
    with pytest.raises(TaskError, match="torch cannot differentiate Recurrent by example"):
        try_example_gradients(TorchLearner(Recurrent(), threads=1), some_data())
    seen = []
    learner = TorchLearner(
        torch.nn.Linear(6, 4), threads=1, prepare=lambda inputs: seen.append(np.array(inputs)) or inputs
    )
    try_example_gradients(learner, some_data())
    assert [(len(inputs), bool(inputs.any())) for inputs in seen] == [(2, False)]


def test_a_learner_of_adapters_has_no_gradients_by_example():
    inner = make_task("digits", {})
    task = AdaptedTask(inner, AdaptSection(frozen=("fc1.*",)), inner.init(7))
    with pytest.raises(TaskError, match=r"AdaptedLearner has no gradients by example.*without \[adapt\]"):
        try_example_gradients(task.learner(threads=1), some_data())


class Branching(torch.nn.Linear):
    """Goes by the numbers of a batch, which are not known where many are computed at a time."""

    def __init__(self):
        super().__init__(6, 4)

    def forward(self, inputs):
        return super().forward(inputs) * (2.0 if float(inputs.sum()) > 0 else 1.0)


@pytest.mark.parametrize(
    ("make", "loss", "line"),
    [
        (normalised, "cross-entropy", "BatchNorm1d mixes the examples of a batch"),
        (
            lambda: torch.nn.Sequential(
                torch.nn.Unflatten(1, (2, 3)), torch.nn.InstanceNorm1d(2, track_running_stats=True)
            ),
            "cross-entropy",
            "Sequential has a buffer, 1.running_mean, which may keep what examples are",
        ),
        (
            lambda: torch.nn.Linear(6, 4),
            "contrastive",
            "needs a loss of one target of an example by itself, got contrast",
        ),
        (Branching, "cross-entropy", "torch cannot differentiate Branching by example"),
    ],
)
def test_what_has_no_gradients_by_example_is_refused_in_one_line(make, loss, line):
    with pytest.raises(TaskError, match=line) as caught:
        TorchLearner(make(), threads=1, loss=loss).sum_clipped_gradients(some_data(), 0.5)
    assert "\n" not in str(caught.value)
