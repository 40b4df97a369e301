"""One evaluation of a model: loss, accuracy, and the sums of the metrics that its task declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.extensions import format_name
from edgefl.core.metrics import MAX_METRICS, NO_METRICS, Array, Metric, MetricSet, Sums, compute_sums, make_metric_set
from edgefl.core.protocol import finite_or_none
from edgefl.core.types import Dataset, Learner, Task
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.registry import find_loss, is_reconstruction
from edgefl.tasks.losses.torch_only_losses import TorchOnlyLoss
from edgefl.tasks.losses.value_losses import Quantile
from edgefl.tasks.metrics.registry import make_metric

BATCH_SIZE = 1024
MAX_OUTPUTS = 1_000_000
PERSONAL = "personal-"
"""Before the name of a metric, of the device's personal copy of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss and accuracy of a model, None where targets are no classes, and the encoded sums of its task's metrics."""

    loss: float
    accuracy: float | None
    sums: bytes = b""


def make_task_metrics(task: Task, *, has_personal: bool = False) -> MetricSet:
    """Returns the metrics of a task's attribute `metrics`, names with `min` or `max`; none where it has no such.

    Where devices have personal copies of the model, each metric stands there a second time for those, and a task with
    labels that declares none has the accuracy.

    The model has as many outputs as the task says (`num_outputs`), else as it has `labels`, else as `DenseModel` has,
    else one.

    Raises:
        ConfigError: a metric is unknown, has another direction or none, or is of other outputs than the model's; or
            there is none for personal copies.
    """
    declared = getattr(task, "metrics", None)
    if has_personal and declared is None:
        if not getattr(task, "labels", ()):
            raise ConfigError(
                f"task {task.name} declares no metrics, and has no classes whose accuracy could be told of personal "
                'copies; declare some, such as metrics = {"rmse": "min"}, or leave strategy.personal_lambda out, and '
                "personal_mixture"
            )
        declared = {"accuracy": "max"}
    if declared is None:
        return NO_METRICS
    if not isinstance(declared, Mapping) or not 0 < len(declared) <= MAX_METRICS:
        raise ConfigError(
            f"task {task.name}: metrics must be 1 to {MAX_METRICS} names with min or max, got {declared!r:.80}"
        )
    labels = tuple(getattr(task, "labels", ()))
    metrics = {}
    for name, direction in declared.items():
        metrics[name] = make_metric(str(name), labels)
        if direction != metrics[name].direction:
            raise ConfigError(
                f"task {task.name}: metric {format_name(str(name))} must have the direction "
                f"{metrics[name].direction!r}, got {direction!r:.40}"
            )
    of_model = getattr(getattr(task, "model", None), "num_outputs", None)
    num_outputs = getattr(task, "num_outputs", None) or len(labels) or of_model or 1
    if not isinstance(num_outputs, int) or not 1 <= num_outputs <= MAX_OUTPUTS:
        raise ConfigError(f"task {task.name}: num_outputs must be 1 to {MAX_OUTPUTS}, got {num_outputs!r:.40}")
    if has_personal:
        metrics |= {f"{PERSONAL}{name}": metric for name, metric in metrics.items()}
    loss = find_loss(task)
    is_single = bool(labels) or (isinstance(loss, Quantile) and len(loss.quantiles) == num_outputs > 1)
    made = make_metric_set(metrics, num_outputs, has_single_targets=is_single)
    if loss is not None and not labels and _trains_values(loss, num_outputs):
        _check_values(task, metrics, loss, (1,) if is_single else (1, num_outputs), num_outputs)
    return replace(made, is_of_inputs=is_reconstruction(task))


def _trains_values(loss: Loss, num_outputs: int) -> bool:
    """Returns whether targets are numbers, and cannot be classes; those of a function may be anything."""
    if isinstance(loss, TorchOnlyLoss):
        return False
    try:
        loss.convert_targets(np.full(1, 0.5, np.float32), None)
    except TaskError:
        return False
    if num_outputs == 1:
        return True
    try:
        loss.convert_targets(np.zeros(1, np.int64), (1, num_outputs))
    except TaskError:
        return True
    return False


def _check_values(
    task: Task, metrics: Mapping[str, Metric], loss: Loss, target_shape: tuple[int, ...], num_outputs: int
) -> None:
    """Raises a `ConfigError` where a metric is not of numbers, which the task trains."""
    for name, metric in metrics.items():
        try:
            metric.partial(np.zeros((1, num_outputs), np.float32), np.full(target_shape, 0.5, np.float32))
        except TaskError as error:
            raise ConfigError(
                f"task {task.name}: metric {format_name(name)} is none of values, which loss {loss.name} trains: "
                f"{error}; take some such as rmse, mae or r2"
            ) from error


def evaluate(
    learner: Learner, data: Dataset, metrics: MetricSet, personal: Mapping[str, Array] | None = None
) -> Evaluation:
    """Returns the evaluation of a loaded model, and the sums of a personal copy where there is one.

    The learner holds that copy afterwards.

    Raises:
        DataError: the model has diverged.
        TaskError: the learner has no outputs to measure, or they do not fit the metrics.
    """
    loss, accuracy = learner.evaluate(data)
    if not np.isfinite(loss):
        raise DataError(f"the model's loss on the test data is {loss}: it has diverged")
    sums = {}
    if metrics:
        names = [name for name in metrics.metrics if personal is None or not is_personal(name)]
        shared = replace(metrics, metrics={name: metrics.metrics[name] for name in names})
        sums = dict(measure(learner, data, shared))
        if personal is not None:
            learner.load(personal)
            sums |= {f"{PERSONAL}{name}": found for name, found in measure(learner, data, shared).items()}
    encoded = metrics.encode(sums) if metrics else b""
    return Evaluation(loss=float(loss), accuracy=finite_or_none(float(accuracy)), sums=encoded)


def is_personal(name: str) -> bool:
    """Returns whether a metric is that of a personal copy, by its name."""
    return name.startswith(PERSONAL)


def measure(learner: Any, data: Dataset, metrics: MetricSet) -> Mapping[str, Sums]:
    """Returns the sums over the examples, by metric; raises `TaskError` as `evaluate`."""
    if not callable(getattr(learner, "logits", None)):
        raise TaskError(f"{type(learner).__name__} has no function logits(inputs), which metrics need")

    def predict(rows: slice) -> tuple[Array, Array, Array | None]:
        with np.errstate(over="ignore", invalid="ignore"):  # of a model that has diverged
            outputs = learner.logits(data.inputs[rows])
        if metrics.is_of_inputs:
            targets = learner.prepare(data.inputs[rows]).reshape(outputs.shape)
        else:
            targets = data.targets[rows]
        if targets.ndim == 1 < outputs.ndim and outputs.shape[1] == 1:
            targets = targets[:, None]
        return outputs, targets, None if data.weights is None else data.weights[rows]

    starts = range(0, len(data), BATCH_SIZE)
    return compute_sums(metrics.metrics, (predict(slice(start, start + BATCH_SIZE)) for start in starts))
