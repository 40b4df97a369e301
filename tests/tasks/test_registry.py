import subprocess
import sys

import numpy as np
import pytest

from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import TrainConfig
from edgefl.tasks.local_algorithms.local_training import train
from edgefl.tasks.registry import BUILT_IN, CONFIGURED, list_task_names, make_task

OWN = """
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.datasets.shards import read_shard
from edgefl import Task
from edgefl.tasks.classification import ClassificationTask

class Gate(ClassificationTask):
    def __init__(self, *, hidden: int = 8):
        super().__init__(
            name="gate", model=Doorbell(hidden=hidden).model, input_shape=(4,), labels=("shut", "open"), defaults={}
        )

class Doorbell(Task):
    name = "doorbell"
    labels = ("nobody", "somebody")
    def __init__(self, *, hidden: int = 8):
        self.model = DenseModel(sizes=(4, hidden, 2), prepare=lambda x: x.astype("float32"))
        self.shapes, self.init, self.learner = self.model.shapes, self.model.init, self.model.learner
    def read(self, path):
        return read_shard(path, self.name)

NUMBER = 3
"""


@pytest.fixture
def own_module(installed):
    return installed({"own_tasks": OWN}, {"edgefl.tasks": {"doorbell": "own_tasks:Doorbell"}})


@pytest.mark.parametrize("name", sorted({*BUILT_IN} - CONFIGURED))
def test_every_built_in_task_keeps_the_contract(name):
    task = make_task(name, {})
    made = [(tensor, value.shape, str(value.dtype)) for tensor, value in task.init(7).items()]
    assert [(spec.name, spec.shape, spec.dtype) for spec in task.shapes()] == made
    assert set(task.defaults) <= {"learning_rate", "batch_size", "epochs"}
    assert (task.name, len(task.labels)) == (name, task.num_classes)
    TrainConfig(**task.defaults)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("svhn", {}, "unknown task 'svhn'; known: .*mnist"),
        ("minst", {}, r"unknown task 'minst' \(did you mean mnist\?\); known: .*mnist"),
        (
            "mnist",
            {"modle": "cnn"},
            r"task\.modle: mnist has no such setting \(did you mean model\?\); known: model, init, norm, ",
        ),
        ("digits", {"model": "cnn"}, "model of task digits must be mlp or logistic, got 'cnn'"),
        ("mnist", {"init": 3}, "task.init must be a text, got 3"),
        ("fashion-mnist", {"model": "vgg"}, "logistic or torchvision:NAME or timm:NAME or module:factory, got 'vgg'"),
        (
            "mnist",
            {"model": "2nn", "init": "adacomp"},
            "init of task mnist is for cnn, .*, lenet, alexnet-small, got",
        ),
        ("mnist", {"model": "resnet32", "norm": "layer"}, "norm of task mnist must be group or batch, got 'layer'"),
        ("cifar-10", {"norm": "batch"}, "norm of task cifar-10 is for resnet18, .*, got 'batch' for cnn"),
        ("cifar-10", {"model": "resnet18-gn", "norm": "batch"}, "got 'batch' for resnet18-gn"),
        ("mnist", {"model": "mlp", "activation": "elu"}, "activation of task mnist must be relu or tanh or .*'elu'"),
        ("mnist", {"model": "mlp", "loss": "hinge"}, "loss of task mnist must be cross-entropy or mse, got 'hinge'"),
        ("mnist", {"activation": "tanh"}, "activation of task mnist is for 2nn, mlp, got 'tanh' for cnn"),
        ("mnist", {"model": "mlp-tanh", "activation": "gelu"}, "got 'gelu' for mlp-tanh"),
        ("cifar-10", {"model": "lenet", "loss": "mse"}, "loss of task cifar-10 is for 2nn, .*, got 'mse' for lenet"),
        ("digits", {"activation": "elu"}, "activation of task digits must be relu"),
        ("cifar-10", {"channels": 3}, "cifar-10 has no such setting"),
        ("cifar-10", {"size": 28}, "channels and size of task cifar-10 are for a model of torchvision"),
        ("fashion-mnist", {"model": "resnet18-gn", "init": "adacomp"}, "got 'adacomp' for resnet18-gn"),
        ("motionsense", {"model": "vgg"}, "must be cnn or mlp or logistic or module:factory, got 'vgg'"),
        ("noop", {"size_bytes": 2}, "size_bytes of task noop must be a whole number of 4 or more, got 2"),
        ("noop", {"size_bytes": "big"}, "got 'big'"),
        ("own_tasks:Missing", {}, "has no attribute 'Missing'"),
        ("no_such_module:Task", {}, "the module no_such_module is not allowed here"),
        ("own_tasks:NUMBER", {}, "is a int; it must be a class that inherits from edgefl.Task"),
        (":Task", {}, "cannot be loaded"),
    ],
)
def test_a_task_or_an_option_that_there_is_not_is_one_clear_line(own_module, name, options, message):
    with pytest.raises((ConfigError, TaskError), match=message):
        make_task(name, options)


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "own_tasks:read_shard", "pathlib:Path"])
def test_what_is_no_class_of_a_task_is_refused_before_it_is_called(own_module, name):
    marker = own_module / "called"
    with pytest.raises(TaskError, match=r"inherits from edgefl\.Task|of Python's own library"):
        make_task(name, {"command" if name == "os:system" else "args": f"touch {marker}"})
    assert not marker.exists()


def test_a_task_that_builds_on_ours_for_classification_is_the_users_own_and_ours_itself_is_none(own_module):
    task = make_task("own_tasks:Gate", {"hidden": 3})
    assert (task.name, task.num_classes, task.shapes()[0].shape) == ("gate", 2, (3, 4))
    with pytest.raises(TaskError, match="ClassificationTask of edgefl"):
        make_task("own_tasks:ClassificationTask", {})


def test_a_task_of_the_users_own_module_or_of_an_installed_package_is_found_and_takes_options(own_module):
    np.savez(own_module / "a.npz", inputs=np.eye(4), labels=np.array([0, 1, 0, 1]))
    assert "doorbell" in list_task_names()
    for name in ("doorbell", "own_tasks:Doorbell"):
        task = make_task(name, {"hidden": 3})
        assert (task.shapes()[0].shape, len(task.read(str(own_module)))) == ((3, 4), 4)


def test_noop_trains_on_nothing_and_moves_nothing():
    task, plan = make_task("noop", {"size_bytes": 400}), TrainConfig(iterations=1)
    learner, rng = task.learner(), np.random.default_rng(0)
    learner.load(task.init(1))
    result = train(learner, task.read(""), plan, rng, clock=lambda: 0.0, on_iteration=lambda *_: False)
    assert (result.displacement["weights"].shape, result.displacement["weights"].any()) == ((100,), False)
    assert learner.evaluate(task.read("anything")) == (0.0, 0.0)


LIGHT = """
import sys, importlib, pkgutil
sys.modules["torch"] = None
import edgefl.tasks
for found in pkgutil.walk_packages(edgefl.tasks.__path__, "edgefl.tasks."):
    if not found.name.startswith("edgefl.tasks.compiler."):  # imported where a task is compiled, with torch and onnx
        importlib.import_module(found.name)
assert not {"sklearn", "scipy", "rich", "sqlalchemy", "fastapi", "pydantic", "flwr"} & set(sys.modules)
from edgefl.core.errors import TaskError
from edgefl.tasks.registry import make_task
for name, options in [("digits", {}), ("mnist", {"model": "logistic"}), ("motionsense", {"model": "mlp"})]:
    make_task(name, options).learner()
task = make_task("mnist", {})
assert sum(value.size for value in task.init(7).values()) == 421_642
try:
    task.learner()
except TaskError as error:
    print(error)
"""


def test_the_room_imports_nothing_heavy_and_without_torch_everything_but_a_torch_learner_works():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False, timeout=60)
    assert "[train]' -c constraints.txt" in done.stdout, done.stderr
