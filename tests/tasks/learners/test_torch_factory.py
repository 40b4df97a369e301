"""Any torch module as a model: what is called, what is refused, and that it trains like the built-in ones."""

import subprocess
import sys

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Dataset, TensorKind, TrainConfig
from edgefl.tasks.learners.torch_factory import make_resizing_prepare
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import make_task

torch = pytest.importorskip("torch", reason="needs torch: pip install '.[train]'")

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
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_task(name="own_models:Tiny", task="mnist", **options):
    return make_task(task, {"model": name, **options})


def images(count, seed=0):
    rng = np.random.default_rng(seed)
    return Dataset(inputs=rng.integers(0, 256, (count, 28, 28)).astype(np.uint8), labels=rng.integers(0, 10, count))


def trained(task, data, *, seed=1, **plan):
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
    first = trained(task, data)
    torch.rand(3)
    again = trained(task, data)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert first["last.weight"].any()
    assert not np.array_equal(trained(task, data, seed=2)["last.weight"], first["last.weight"])


def test_a_last_batch_of_one_example_trains_without_statistics_of_its_own(own_module):
    moved = trained(a_task(), images(9))
    assert moved["norm.num_batches_tracked"] == 2
    assert all(np.isfinite(value).all() for value in moved.values())


def test_coloured_images_and_windows_of_motion_fit_a_module_too(own_module):
    task = a_task("own_models:coloured", "fashion-mnist", channels=3, size=32)
    assert {spec.name: spec.shape for spec in task.shapes()}["conv.weight"] == (4, 3, 3, 3)
    assert trained(task, images(4))["conv.weight"].any()
    task = a_task("own_models:motion", "motionsense")
    windows = np.random.default_rng(0).standard_normal((6, 9, 128)).astype(np.float32)
    assert {spec.name: spec.shape for spec in task.shapes()}["3.weight"] == (6, 4)
    assert trained(task, Dataset(inputs=windows, labels=np.arange(6)))["3.weight"].any()


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
        ("own_models:NUMBER", "is called only if"),
        ("own_models:liar", "makes a str, no torch module"),
        ("own_models:broken", "cannot be made: OSError: no weights here"),
        ("own_models:missing", "has no attribute 'missing'"),
        ("no_such_package:model", "No module named 'no_such_package'"),
        ("torch.nn:Module", "cannot be made|does not take inputs"),
        ("os:abort", "must be module:factory of a package that makes torch modules"),
        ("os.path:join", "must be module:factory"),
        ("own_models:", "must be module:factory"),
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
        ("own_models:Tiny", {"size": "large"}, "size of task mnist must be a whole number from 8 to 512"),
        ("own_models:Tiny", {"size": True}, "got True"),
        ("own_models:Tiny", {"init": "adacomp"}, "init of task mnist is for the cnn models and lenet"),
        ("cnn", {"channels": 3}, "channels and size of task mnist are for a model of module:factory"),
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
    command = [sys.executable, "-c", WITHOUT_TORCH]
    assert "[train]'" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.extended
def test_torchvisions_resnet_is_one_line_where_it_is_installed():
    pytest.importorskip("torchvision", reason="needs torchvision: pip install torchvision")
    task = a_task("torchvision.models:resnet18", "fashion-mnist", channels=3)
    assert sum(spec.size for spec in task.shapes() if spec.kind == TensorKind.PARAMETER) == 11_181_642
    assert trained(task, images(5), epochs=None, iterations=1)["fc.weight"].any()
