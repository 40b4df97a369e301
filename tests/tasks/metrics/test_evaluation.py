"""A task that declares metrics: boards send sums, and what the history has is of all examples together."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn import metrics as sklearn_metrics

import edgefl
from edgefl.compression.codec import make_codec
from edgefl.coordinator.execution.headers import parse_evaluate_result
from edgefl.core.config import parse_run
from edgefl.core.errors import ConfigError, TaskError
from edgefl.core.types import Dataset, EvaluateInstruction, derive_rng
from edgefl.device.training.trainer import DeviceTrainer
from edgefl.engine.assembly.build import build_run
from edgefl.tasks.datasets.shards import split_train_test
from edgefl.tasks.metrics.evaluation import evaluate, make_task_metrics
from edgefl.tasks.registry import make_task

LINES = """
import numpy as np
from edgefl import Task
from edgefl.core.types import Dataset, TensorSpec

class LineLearner:
    def __init__(self):
        self.parameters = {"slope": np.zeros(1, np.float32), "offset": np.zeros(1, np.float32)}
        self.gradients = {name: np.zeros(1, np.float32) for name in self.parameters}
    def load(self, tensors):
        for name, value in tensors.items():
            self.parameters[name][...] = value
    def read(self):
        return {name: value.copy() for name, value in self.parameters.items()}
    def logits(self, inputs):
        return inputs * self.parameters["slope"] + self.parameters["offset"]
    def gradient(self, batch):
        error = self.logits(batch.inputs)[:, 0] - batch.targets
        self.gradients["slope"][...] = 2 * np.mean(error * batch.inputs[:, 0])
        self.gradients["offset"][...] = 2 * np.mean(error)
        return float(np.mean(error**2))
    def evaluate(self, data):
        return float(np.mean((self.logits(data.inputs)[:, 0] - data.targets) ** 2)), 0.0

class Lines(Task):
    name = "lines"
    metrics = {"rmse": "min", "r2": "max"}
    defaults = {"learning_rate": 0.1, "batch_size": 10, "iterations": 5}
    def shapes(self):
        return (TensorSpec(name="slope", shape=(1,)), TensorSpec(name="offset", shape=(1,)))
    def init(self, seed):
        return {"slope": np.zeros(1, np.float32), "offset": np.zeros(1, np.float32)}
    def read(self, path):
        with np.load(path) as shard:
            return Dataset(inputs=shard["x"], targets=shard["y"])
    def learner(self, *, accelerator="cpu", threads=None):
        return LineLearner()
"""


@pytest.fixture
def lines(installed, tmp_path):
    """A task of a regression with shards of ten boards of unequal size, whose targets differ."""
    installed({"lines": LINES})
    shards = []
    for board in range(10):
        rng = np.random.default_rng(board)
        inputs = rng.normal(size=(20 + 15 * board, 1)).astype(np.float32)
        shards.append(tmp_path / f"board-{board}.npz")
        np.savez(shards[-1], x=inputs, y=2 * inputs[:, 0] + board + rng.normal(size=len(inputs)))
    return shards


def test_metrics_over_boards_are_those_of_their_pooled_test_data(lines, tmp_path):
    tables = {"run": {"task": "lines:Lines", "rounds": 2, "evaluate_on": "devices", "local_test_fraction": 0.3}}
    result = edgefl.simulate(tables, devices=lines, root=tmp_path / "root", allow_modules=["lines"])
    model = load_file(result.model)
    tests = [split_train_test(read(path), 0.3)[1] for path in lines]
    pooled = [np.concatenate([getattr(test, name) for test in tests]) for name in ("inputs", "targets")]
    predicted = (pooled[0] * model["slope"] + model["offset"])[:, 0]
    expected = {
        "rmse": sklearn_metrics.root_mean_squared_error(pooled[1], predicted),
        "r2": sklearn_metrics.r2_score(pooled[1], predicted),
    }
    assert result.rounds[-1]["metrics"] == pytest.approx(expected, abs=1e-6)  # outputs are of float32
    assert {name: result.metrics[name] for name in expected} == result.rounds[-1]["metrics"]
    assert str(result).endswith(f", rmse {result.metrics['rmse']:.4f}, r2 {result.metrics['r2']:.4f}")
    rows = [row for row in result.evaluations if row["round"] == 2]
    assert len(rows) == 10
    assert all(row["metrics"].keys() <= {"rmse", "r2"} for row in rows)
    mean = np.average([row["metrics"]["rmse"] for row in rows], weights=[row["num_examples"] for row in rows])
    assert abs(mean - expected["rmse"]) > 0.01, "the mean of the boards' values is something else"
    assert json.loads(json.dumps(rows[0]["metrics"])) == rows[0]["metrics"]


@pytest.mark.parametrize("until", ["rmse <= 2", "r2 >= 0.1"])
def test_a_run_ends_when_a_metric_is_reached_in_its_direction(lines, tmp_path, until):
    run = {"task": "lines:Lines", "evaluate_on": "devices", "local_test_fraction": 0.3, "rounds": 30}
    tables = {"run": {**run, "until": until}, "strategy": {"name": "fedavg", "learning_rate": 0.01}}
    result = edgefl.simulate(tables, devices=lines[:4], root=tmp_path / "root", allow_modules=["lines"])
    name, sign, limit = until.split()
    assert result.reason == f"{name} reached {limit}"
    by_round = {}
    for row in result.evaluations:
        by_round.setdefault(row["round"], []).append(row["metrics"][name])
    medians = [np.median(by_round[number]) for number in sorted(by_round)]
    assert [value <= float(limit) if sign == "<=" else value >= float(limit) for value in medians] == [
        *[False] * (len(medians) - 1), True,
    ]  # fmt: skip
    assert len(medians) > 1


@pytest.mark.parametrize(
    ("until", "said"),
    [
        ("rmse", "run.until must be a metric, <= or >=, and a number, such as 'rmse <= 14.5', got 'rmse'"),
        ("rmse <= 1.2.3", "run.until must be a metric"),
        ("rmse < 3", "run.until must be a metric"),
        ("rmse <= inf", "run.until must be a metric"),
        ("rmse >= 3", "run.until: rmse gets better as it falls, got >="),
        ("r2 <= 0.5", "run.until: r2 gets better as it rises, got <="),
        ("f1 >= 0.5", "run.until: the task declares no metric 'f1', only rmse, r2, accuracy"),
        ("accuracy >= 1.5", "run.until: an accuracy must lie above 0 and at most at 1, got 1.5"),
    ],
)
def test_a_goal_that_cannot_be_meant_is_one_line_before_the_first_round(lines, until, said):
    with pytest.raises(ConfigError) as refused:
        build_run(parse_run({"run": {"task": "lines:Lines", "until": until}}), "r")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_accuracy_may_be_given_in_both_forms_and_once(lines):
    goals = [
        build_run(parse_run({"run": {"task": "digits", **rule}}), "r").goal
        for rule in ({"until": "accuracy >= 0.9"}, {"accuracy": 0.9})
    ]
    assert goals[0] == goals[1]
    assert goals[0].rounds is None
    with pytest.raises(ConfigError, match=r"run\.accuracy = 0\.9 are one rule; give one"):
        build_run(parse_run({"run": {"task": "digits", "until": "accuracy >= 0.8", "accuracy": 0.9}}), "r")


def test_a_board_answers_an_evaluation_with_sums_that_the_coordinator_reads(lines, tmp_path):
    task = make_task("lines:Lines")
    trainer = DeviceTrainer(
        device_id="pi", role="evaluator", shards=lambda: {"lines:Lines": str(lines[3])}, accelerator="cpu", threads=1,
        state_dir=tmp_path / "state", on_progress=lambda *_: None,
    )  # fmt: skip
    asked = {
        "v": 2, "run": "r", "task": "lines:Lines", "options": {}, "seed": 1, "test_fraction": 0.0,
        "assignment": "r/e", "version": 0, "codec": "dense",
    }  # fmt: skip
    model = make_codec("dense", task.shapes()).encode(task.init(1), derive_rng(0))
    header, body = trainer.evaluate(asked, model)
    trainer.close()
    instruction = EvaluateInstruction(assignment_id="e", device_id="pi", version=0, round=0)
    result = parse_evaluate_result(instruction, header["metrics"], "evaluator", body, make_task_metrics(task))
    assert result.metrics["rmse"] == pytest.approx(np.sqrt(np.mean(read(lines[3]).targets ** 2)))
    assert make_task_metrics(task).combine([result.sums, result.sums]) == result.metrics
    with pytest.raises(ValueError, match="were asked for"):
        parse_evaluate_result(instruction, header["metrics"], "evaluator", body[8:], make_task_metrics(task))
    with pytest.raises(ValueError, match="0 were asked for"):
        parse_evaluate_result(instruction, header["metrics"], "evaluator", body)


def test_worker_processes_return_the_sums_that_training_in_this_process_does(lines, tmp_path):
    tables = {"run": {"task": "lines:Lines", "rounds": 1, "evaluate_on": "devices"}}
    results = [
        edgefl.simulate(
            {**tables, "simulation": {"workers": workers}}, devices=lines[5:], root=tmp_path / str(workers),
            allow_modules=["lines"],
        )
        for workers in (0, 2)
    ]  # fmt: skip
    values = [[row["metrics"] for row in result.evaluations] for result in results]
    assert values[0] == values[1]
    assert values[0][0].keys() == {"rmse", "r2"}


def read(path):
    with np.load(path) as shard:
        return Dataset(inputs=shard["x"], targets=shard["y"])


class Shell:
    name = "shell"


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"rmsd": "min"}, "unknown metric 'rmsd' (did you mean rmse?)"),
        ({"rmse": "max"}, "metric 'rmse' must have the direction 'min', got 'max'"),
        ({"rmse": None}, "metric 'rmse' must have the direction 'min', got None"),
        (["rmse"], "metrics must be 1 to 16 names with min or max, got ['rmse']"),
        ({}, "metrics must be 1 to 16 names"),
        ({"f1:7": "max"}, "a metric must return sums of no example: TaskError: a metric is of class 7"),
    ],
)
def test_what_a_task_declares_wrongly_is_one_line(declared, said):
    shell = Shell()
    shell.metrics = declared
    with pytest.raises(ConfigError) as refused:
        make_task_metrics(shell)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("loss", ["huber", "mse", "poisson"])
@pytest.mark.parametrize("name", ["accuracy", "f1-macro", "auroc", "log-loss"])
def test_a_metric_of_classes_is_refused_where_values_are_trained(name, loss):
    shell = Shell()
    shell.loss, shell.metrics = loss, {name: "min" if name == "log-loss" else "max"}
    with pytest.raises(ConfigError, match=f"task shell: metric '{name}' is none of values, which loss {loss}.* take"):
        make_task_metrics(shell)


@pytest.mark.parametrize(
    ("loss", "num_outputs", "name"),
    [("huber", 1, "rmse"), ("huber", 3, "r2"), ("mse", 3, "accuracy"), ("cross-entropy", 3, "f1-macro"),
     ("binary-cross-entropy", 3, "f1-micro"), ("poisson", 1, "mae"), (lambda outputs, targets: outputs, 1, "auroc")],
)  # fmt: skip
def test_a_metric_that_fits_what_is_trained_is_taken(loss, num_outputs, name):
    shell = Shell()
    shell.loss, shell.metrics, shell.num_outputs = (
        loss,
        {name: "min" if name in {"rmse", "mae"} else "max"},
        num_outputs,
    )
    assert list(make_task_metrics(shell).metrics) == [name]


def test_a_task_without_metrics_has_none_and_a_learner_without_outputs_can_have_none():
    class Learner:
        def evaluate(self, data):
            return 0.5, 0.25

    data = Dataset(inputs=np.zeros((3, 1), np.float32), targets=np.zeros(3))
    assert not make_task_metrics(Shell())
    found = evaluate(Learner(), data, make_task_metrics(Shell()))
    assert (found.loss, found.accuracy, found.sums) == (0.5, 0.25, b"")
    shell = Shell()
    shell.metrics = {"rmse": "min"}
    with pytest.raises(TaskError, match=r"Learner has no function logits\(inputs\), which metrics need"):
        evaluate(Learner(), data, make_task_metrics(shell))
