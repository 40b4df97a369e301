"""Several targets of an example: each has outputs, a loss, a weight and metrics of its own; one model learns all."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from sklearn import metrics as sklearn_metrics

import edgefl
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.types import Dataset, Task
from edgefl.device.inference.onnx_model import OnnxModel
from edgefl.engine.assembly.build import build_run
from edgefl.tasks.analyses.registry import make_analysis
from edgefl.tasks.compiler.compilation import compile_task
from edgefl.tasks.datasets.central import create_shards, load_central_data
from edgefl.tasks.datasets.shards import check_shard, load_task_data, split_train_test
from edgefl.tasks.export.model_export import export_onnx
from edgefl.tasks.learners.numpy_learner import DenseModel
from edgefl.tasks.learners.torch_learner import TorchModel
from edgefl.tasks.losses.registry import check_data, find_loss
from edgefl.tasks.metrics.evaluation import evaluate, make_task_metrics
from edgefl.tasks.registry import make_task

RNG = np.random.default_rng(3)
INPUTS = RNG.normal(size=(300, 4)).astype(np.float32)
TARGETS = {
    "activity": np.argmax(INPUTS[:, :3], axis=1).astype(np.uint8),
    "age": INPUTS @ np.array([1.0, -2.0, 0.5, 1.0], np.float32) + 3.0,
    "sizes": np.stack([INPUTS[:, 0], INPUTS[:, 3] - 1.0], axis=1),
}
MODULE = """
import numpy as np
from edgefl import Task
from edgefl.core.types import Dataset
from edgefl.tasks.learners.numpy_learner import DenseModel

class People(Task):
    name = "walkers:People"
    loss = {"activity": "cross-entropy", "age": "huber"}
    loss_weights = {"age": 0.5}
    num_outputs = {"activity": 3}
    metrics = {"age/rmse": "min", "activity/f1-macro": "max"}
    defaults = {"learning_rate": 0.3, "batch_size": 16, "epochs": 5.0}
    model = DenseModel(sizes=(4, 4))
    def read(self, path):
        rows = np.load(path)
        return Dataset(inputs=rows[:, :4], targets={"age": rows[:, 5], "activity": rows[:, 4].astype(np.int64)})
"""


class People(Task):
    name = "people:People"
    loss = {"activity": "cross-entropy", "age": "huber", "sizes": "mae"}  # noqa: RUF012 as a user writes it
    loss_weights = {"age": 0.5, "sizes": 2}  # noqa: RUF012 likewise
    num_outputs = {"activity": 3, "sizes": 2}  # noqa: RUF012 likewise
    metrics = {"activity/accuracy": "max", "age/mae": "min", "sizes/r2": "max"}  # noqa: RUF012 likewise
    input_shape = (4,)
    model = DenseModel(sizes=(4, 6))


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(4, size) for name, size in SIZES.items()})

    def forward(self, x):
        outputs = {name: head(x) for name, head in reversed(self.heads.items())}
        return {**outputs, "age": outputs["age"][:, 0]}


SIZES = {"activity": 3, "age": 1, "sizes": 2}


class TorchPeople(People):
    model = TorchModel(build=Network)


def some_data(rows=slice(None)):
    weights = np.linspace(0.0, 2.0, len(INPUTS))
    return Dataset(inputs=INPUTS, targets=TARGETS, weights=weights).take(rows)


def copy_to_torch(dense):
    """Returns a learner in torch with the weights of one in NumPy, whose outputs lie side by side."""
    learner, weights, start = TorchPeople().learner(), dense.read(), 0
    for name, size in SIZES.items():
        part = slice(start, start + size)
        learner.load({f"heads.{name}.{one}": weights[f"fc1.{one}"][part] for one in ("weight", "bias")})
        start += size
    return learner


def test_losses_and_gradients_are_the_weighted_sum_of_each_in_numpy_and_torch():
    dense, data = People().learner(), some_data()
    dense.load(People().init(1))
    network = copy_to_torch(dense)
    outputs = torch.from_numpy(dense.logits(INPUTS)).requires_grad_()
    functional, labels = torch.nn.functional, torch.from_numpy(TARGETS["activity"].astype(np.int64))
    losses = (
        functional.cross_entropy(outputs[:, :3], labels, reduction="none")
        + 0.5 * functional.huber_loss(outputs[:, 3], torch.from_numpy(TARGETS["age"]), reduction="none")
        + 2.0 * (outputs[:, 4:] - torch.from_numpy(TARGETS["sizes"])).abs().mean(dim=1)
    )
    expected = (losses * torch.from_numpy(data.weights)).mean()
    slopes = torch.autograd.grad(expected, outputs)[0].numpy().sum(axis=0)
    np.testing.assert_allclose(network.logits(INPUTS), outputs.detach(), atol=1e-6)
    for learner in (dense, network):
        assert learner.gradient(data) == pytest.approx(expected.item(), rel=1e-5)
        assert learner.evaluate(data)[0] == pytest.approx(expected.item(), rel=1e-5)
        biases = [gradient for name, gradient in learner.gradients.items() if name.endswith("bias")]
        np.testing.assert_allclose(np.concatenate([np.asarray(one) for one in biases]), slopes, atol=1e-5)


def test_each_metric_is_that_of_its_target_over_all_parts_of_the_examples():
    learner, metrics, data = People().learner(), make_task_metrics(People()), some_data()
    learner.load(People().init(1))
    bodies = [evaluate(learner, some_data(rows), metrics).sums for rows in (slice(70), slice(70, 300))]
    outputs, weights = learner.logits(INPUTS), data.weights
    assert metrics.combine(bodies) == pytest.approx(
        {
            "activity/accuracy": np.average(outputs[:, :3].argmax(1) == TARGETS["activity"], weights=weights),
            "age/mae": sklearn_metrics.mean_absolute_error(TARGETS["age"], outputs[:, 3], sample_weight=weights),
            "sizes/r2": sklearn_metrics.r2_score(TARGETS["sizes"], outputs[:, 4:], sample_weight=weights),
        },
        abs=1e-9,
    )
    assert evaluate(learner, data, metrics).accuracy is None


@pytest.fixture
def boards(installed, tmp_path):
    installed({"walkers": MODULE})
    paths = [tmp_path / f"{board}.npy" for board in range(3)]
    for board, path in enumerate(paths):
        np.save(path, np.column_stack([INPUTS, TARGETS["activity"], TARGETS["age"]])[board::3])
    return paths


@pytest.mark.parametrize("workers", [0, 2])
def test_boards_train_on_several_targets_and_their_metrics_are_those_of_all_test_data(boards, tmp_path, workers):
    run = {"task": "walkers:People", "rounds": 6, "evaluate_on": "devices", "local_test_fraction": 0.3}
    tables = {"run": run, "simulation": {"workers": workers}}
    result = edgefl.simulate(tables, devices=boards, root=tmp_path / "root", allow_modules=["walkers"])
    learner, task = make_task("walkers:People").learner(), make_task("walkers:People")
    learner.load(load_file(result.model))
    pooled = Dataset.concatenate([split_train_test(load_task_data(task, path), 0.3)[1] for path in boards])
    outputs = learner.logits(pooled.inputs)
    expected = {
        "age/rmse": sklearn_metrics.root_mean_squared_error(pooled.targets["age"], outputs[:, 3]),
        "activity/f1-macro": sklearn_metrics.f1_score(
            pooled.targets["activity"], outputs[:, :3].argmax(1), average="macro"
        ),
    }
    assert result.rounds[-1]["metrics"] == pytest.approx(expected, abs=1e-6)  # targets are of float64
    assert expected["age/rmse"] < 0.1
    assert expected["activity/f1-macro"] > 0.85


def test_a_run_ends_by_the_metric_of_one_target(boards, tmp_path):
    run = {"task": "walkers:People", "rounds": 40, "until": "age/rmse <= 0.2", "evaluate_on": "devices"}
    tables = {"run": run | {"local_test_fraction": 0.3}}
    result = edgefl.simulate(tables, devices=boards, root=tmp_path / "root", allow_modules=["walkers"])
    assert result.reason == "age/rmse reached 0.2"


def test_shards_are_cut_by_the_first_loss_and_read_back_as_they_were(installed, tmp_path):
    installed({"walkers": MODULE})
    np.save(tmp_path / "all.npy", np.column_stack([INPUTS, TARGETS["activity"], TARGETS["age"]]))
    paths = create_shards("walkers:People", "labels:1", 3, tmp_path / "shards", tmp_path / "all.npy")
    task, central = make_task("walkers:People"), load_central_data("walkers:People", tmp_path / "all.npy")
    parts = [load_task_data(task, path) for path in paths]
    np.testing.assert_array_equal(central.classes, central.train.targets["activity"])
    assert [len(np.unique(part.targets["activity"])) for part in parts] == [1, 1, 1]
    ages = np.concatenate([part.targets["age"] for part in parts])
    np.testing.assert_array_equal(np.sort(ages), np.sort(central.train.targets["age"]))
    report = check_shard(task, str(paths[0]))
    assert (report.counts, report.target_range, report.num_examples) == ({}, None, len(parts[0]))


def test_an_exported_file_has_the_outputs_of_all_targets_side_by_side(tmp_path):
    task, learner = TorchPeople(), TorchPeople().learner()
    learner.load(task.init(2))
    report = export_onnx(task, learner.read(), tmp_path / "model.onnx", samples=some_data())
    assert (report.num_classes, report.accuracy) == (6, None)
    model, data = OnnxModel(tmp_path / "model.onnx"), Dataset(inputs=INPUTS, targets=TARGETS)
    np.testing.assert_allclose(model.logits(INPUTS), learner.logits(INPUTS), atol=1e-5)
    assert model.loss(data, find_loss(task)) == pytest.approx(learner.evaluate(data)[0], rel=1e-5)


def test_a_loss_of_ones_own_for_one_target_gets_its_own_types():
    def focal(outputs, targets):
        found = torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (1 - (-found).exp()) ** 2 * found

    task, data = TorchPeople(), some_data()
    task.loss = {**People.loss, "activity": focal}
    assert task.learner().gradient(data) > 0.0
    task.model = People.model
    with pytest.raises(ConfigError, match="loss multi-task needs a model of torch"):
        task.learner()


@pytest.mark.parametrize(
    ("shape", "own"),
    [
        ((300,), lambda outputs, targets: torch.nn.functional.l1_loss(outputs, targets, reduction="none")),
        ((300, 1), lambda outputs, targets: ((outputs - targets) ** 2).mean(dim=1)),
    ],
)
def test_a_loss_of_ones_own_for_one_value_is_that_of_this_target_alone(shape, own):
    class One(Network):
        def forward(self, x):
            return super().forward(x)["age"].reshape(-1, *shape[1:])

    age = TARGETS["age"].reshape(shape)
    several, alone = TorchPeople(), TorchPeople()
    several.loss = {**People.loss, "age": own}
    several.loss_weights = {"activity": 0, "sizes": 0}
    alone.loss, alone.loss_weights, alone.num_outputs, alone.model = own, None, None, TorchModel(build=One)
    ours, theirs = several.learner(), alone.learner()
    theirs.load(ours.read())
    data = some_data()
    by_name = Dataset(inputs=data.inputs, targets={**TARGETS, "age": age}, weights=data.weights)
    expected = theirs.gradient(Dataset(inputs=data.inputs, targets=age, weights=data.weights))
    assert ours.gradient(by_name) == pytest.approx(expected, rel=1e-6)
    for part in ("weight", "bias"):
        ages = (learner.gradients[f"heads.age.{part}"] for learner in (ours, theirs))
        np.testing.assert_allclose(*ages, atol=1e-6)
    assert ours.gradient(by_name.take(slice(7, 8))) > 0.0  # one example, in the midst of others


def test_equal_targets_have_equal_bytes_whatever_was_in_memory_before():
    found = set()
    for turn in range(2):
        junk = [np.full(num_bytes, turn + 1, np.uint8) for num_bytes in range(300 * 21, 300 * 33, 300)]
        del junk
        data = Dataset(inputs=INPUTS, targets=TARGETS)
        parts = [data, data.take(data.targets["activity"] < 2), Dataset.concatenate([data, data])]
        found.add(b"".join(part.targets.tobytes() for part in parts))
    assert len(found) == 1


def test_losses_by_name_may_be_those_of_the_model():
    task = People()
    task.loss, task.model = None, DenseModel(sizes=(4, 6), loss=People.loss)
    task_learner, learner = task.learner(), People().learner()
    for one in (task_learner, learner):
        one.load(People().init(1))
    assert find_loss(task) == find_loss(People())
    assert task_learner.gradient(some_data()) == learner.gradient(some_data())


def test_a_task_with_one_loss_may_have_weights_of_its_own():
    task = type("Older", (People,), {"loss": "mse", "loss_weights": [1, 2], "num_outputs": 6})()
    assert find_loss(task).name == "mse"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {**People.loss, "age": "hubr"}}, "loss of 'age': there is no loss 'hubr'; did you mean huber"),
        ({"loss": {**People.loss, "age": "ctc"}}, "loss of 'age': ctc cannot be one of several"),
        ({"loss": {}}, "losses by name must be 1 to 64, got 0"),
        ({"loss": {"my age": "mse"}, "loss_weights": None, "num_outputs": None}, "name of a parameter of Python"),
        ({"loss": {"class": "mse"}, "loss_weights": None, "num_outputs": None}, "a target needs the name of"),
        ({"loss": {"a" * 65: "mse"}, "loss_weights": None, "num_outputs": None}, "of at most 64 letters in ASCII"),
        ({"num_outputs": {"sizes": 2}}, "cross-entropy needs two outputs or more, got 1; say the number of classes"),
        ({"num_outputs": {"activity": 2.5}}, "num_outputs['activity'] must be from 1 to 1,000,000, got 2.5"),
        ({"num_outputs": 6}, "num_outputs must be by the names of the losses, activity, age, sizes, got 6"),
        ({"loss_weights": {"height": 1}}, "loss_weights name 'height'; the losses are of activity, age, sizes"),
        ({"loss_weights": {"age": -1}}, "loss_weights['age'] must be finite and at least 0, got -1"),
        ({"loss": "mse", "num_outputs": 1}, "loss_weights are for several losses by name, and its loss is 'mse'"),
        ({"loss": "mse", "loss_weights": None}, "num_outputs by name are for several losses by name"),
        ({"labels": ("walk", "run", "sit")}, "labels are of one target, and it has losses of activity, age, sizes"),
        ({"metrics": {"mae": "min"}}, "metric 'mae' must be that of one target, such as activity/mae; targets are"),
        ({"metrics": {"weight/mae": "min"}}, "metric 'weight/mae' must be that of one target"),
        ({"metrics": {"age/mad": "min"}}, "unknown metric 'mad' (did you mean mae?)"),
        ({"metrics": {"age/mae": "max"}}, "metric 'age/mae' must have the direction 'min', got 'max'"),
        ({"metrics": {"age/accuracy": "max"}}, "metric 'age/accuracy' is none of values, which loss huber trains"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes, message):
    task = type("Changed", (People,), changes)()
    with pytest.raises(ConfigError) as refused:
        find_loss(task), make_task_metrics(task)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("written", "changed", "message"),
    [
        ('"age/rmse"', '"height/rmse"', "task walkers:People: metric 'height/rmse' must be that of one target"),
        ('"huber"}', '"hubber"}', "loss of 'age': there is no loss 'hubber'"),
        ('{"activity": 3}', "{}", "cross-entropy needs two outputs or more"),
    ],
)
def test_a_run_of_such_a_task_is_refused_before_its_first_round(installed, written, changed, message):
    installed({"walkers": MODULE.replace(written, changed)})
    with pytest.raises(ConfigError) as refused:
        build_run(parse_run({"run": {"task": "walkers:People"}}), "r")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            TARGETS["age"],
            r"targets must be a dict of arrays, one for each loss \(activity, age, sizes\), got float32",
        ),
        ({"age": TARGETS["age"], "sizes": TARGETS["sizes"]}, "one for each loss .*, got age, sizes"),
        ({**TARGETS, "age": np.where(INPUTS[:, 0] > 2, np.nan, 1.0)}, "targets 'age': .* must be finite, got nan"),
        ({**TARGETS, "activity": TARGETS["activity"] + 1}, "targets 'activity': a label is 3"),
        ({**TARGETS, "sizes": TARGETS["age"]}, r"targets 'sizes': .*\[n\].* must be \[n, 2\]"),
    ],
)
def test_targets_that_are_none_for_their_loss_are_refused_when_a_board_reads_them(targets, message):
    with pytest.raises(DataError, match=message):
        check_data(People(), Dataset(inputs=INPUTS, targets=targets))


def test_targets_by_name_are_arrays_of_one_length_with_names_of_parameters():
    for wrong, message in (
        ({"age": np.zeros(3), "size": np.zeros(2)}, "targets 'size' have 2 rows and 'age' 3"),
        ({"my age": np.zeros(3)}, "a name of targets must be one of a parameter"),
        ({"größe": np.zeros(3)}, "a name of targets must be in ASCII"),
        ({"age": np.array(["a"])}, "targets 'age' must be an array"),
    ):
        with pytest.raises(DataError, match=message):
            Dataset(inputs=np.zeros((3, 1)), targets=wrong)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda x: {"age": x[:, 0]}, "must return outputs by the names of the losses .*, got age"),
        (
            lambda x: {"activity": x, "age": x[:, 0], "sizes": x[:, :2]},
            r"outputs 'activity' .* \[n, 3\], got \[n, 4\]",
        ),
    ],
)
def test_outputs_of_a_network_that_fit_no_loss_are_refused_when_it_is_tried(outputs, message):
    class Other(torch.nn.Linear):
        def forward(self, x):
            return outputs(x)

    task = TorchPeople()
    task.model = TorchModel(build=lambda: Other(4, 1))
    with pytest.raises(TaskError, match=message):
        task.learner().check_inputs(INPUTS)


def test_what_takes_one_target_says_so():
    with pytest.raises(TaskError, match="has losses of activity, age, sizes, and a compiled task has one"):
        compile_task(TorchPeople(), name="people", batch_size=4, data=some_data())
    task = People()
    for name in ("linear-regression", "naive-bayes", "boosted-trees"):
        with pytest.raises(ConfigError, match=name):
            make_analysis(task, name, {})
