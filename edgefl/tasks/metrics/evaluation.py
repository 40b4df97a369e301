"""One evaluation of a model: loss, accuracy, and the sums of the metrics that its task declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.extensions import format_name
from edgefl.core.heads import SEPARATOR, join_targets
from edgefl.core.metrics import (
    MAX_METRICS,
    NO_METRICS,
    Array,
    Direction,
    Metric,
    MetricSet,
    Sums,
    compute_sums,
    make_metric_set,
)
from edgefl.core.protocol import finite_or_none
from edgefl.core.types import Dataset, Learner, Task
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.loss import Loss
from edgefl.tasks.losses.multi_task import LossHead, MultiTask
from edgefl.tasks.losses.registry import find_loss, is_reconstruction
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
    else one. Of several losses each metric is that of one target, such as `age/mae`.

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
        metrics[name] = make_metric_of(task, str(name))
        if direction != metrics[name].direction:
            raise ConfigError(
                f"task {task.name}: metric {format_name(str(name))} must have the direction "
                f"{metrics[name].direction!r}, got {direction!r:.40}"
            )
    num_outputs, targets = _describe_outputs(task, metrics, labels)
    if has_personal:
        metrics |= {f"{PERSONAL}{name}": metric for name, metric in metrics.items()}
    return replace(make_metric_set(metrics, num_outputs, targets), is_of_inputs=is_reconstruction(task))


def _describe_outputs(task: Task, metrics: Mapping[str, Metric], labels: Sequence[str]) -> tuple[int, Array]:
    """Returns the number of a model's outputs, and the targets of no example; checks the metrics against the loss."""
    loss = find_loss(task)
    if isinstance(loss, MultiTask):
        targets = {head.name: _make_no_targets(head.loss, head.num_outputs) for head in loss.heads}
        for head in loss.heads:
            own = {name: one for name, one in metrics.items() if isinstance(one, HeadMetric) and one.head == head}
            of_head = {name: one.metric for name, one in own.items()}
            _check_values(task, of_head, head.loss, targets[head.name], head.num_outputs)
        return loss.num_outputs, join_targets(targets)
    num_outputs = _count_outputs(task, labels)
    no_targets = np.zeros(0, np.int64) if labels else _make_no_targets(loss, num_outputs)
    if loss is not None and not labels:
        _check_values(task, metrics, loss, no_targets, num_outputs)
    return num_outputs, no_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMetric(Metric):
    """A metric of one of several targets, and of the outputs that are for it."""

    head: LossHead
    metric: Metric
    direction: Direction

    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        if self.head.name not in (targets.dtype.names or ()):
            raise TaskError(f"a metric is of the target {self.head.name!r}, and the data has none of that name")
        own = targets[self.head.name]
        if own.ndim == self.head.num_outputs == 1:
            own = own[:, None]
        return self.metric.partial(outputs[:, self.head.columns], own, weights)

    def combine(self, sums: Sums) -> float:
        return self.metric.combine(sums)


def make_metric_of(task: Task, name: str) -> Metric:
    """Returns the metric of that name for a task: of several losses `TARGET/METRIC`, such as `age/mae`.

    Raises:
        ConfigError: there is no such metric, or no such target.
    """
    loss = find_loss(task)
    if not isinstance(loss, MultiTask):
        return make_metric(name, getattr(task, "labels", ()))
    target, _, metric = name.partition(SEPARATOR)
    head = loss.find_head(target)
    if head is None or not metric:
        raise ConfigError(
            f"task {task.name}: metric {format_name(name)} must be that of one target, such as "
            f"{loss.heads[0].name}{SEPARATOR}{metric or target or 'mae'}; targets are {loss.list_names()}"
        )
    made = make_metric(metric)
    return HeadMetric(head=head, metric=made, direction=made.direction)


def _make_no_targets(loss: Loss | None, num_outputs: int) -> Array:
    """Returns the targets of no example: one each for classes and the quantiles of a value, else one an output."""
    is_single = isinstance(loss, CrossEntropy) or (
        isinstance(loss, Quantile) and len(loss.quantiles) == num_outputs > 1
    )
    return np.zeros(0, np.int64) if is_single else np.zeros((0, num_outputs), np.float32)


def _count_outputs(task: Task, labels: Sequence[str]) -> int:
    of_model = getattr(getattr(task, "model", None), "num_outputs", None)
    found = getattr(task, "num_outputs", None) or len(labels) or of_model or 1
    if not isinstance(found, int) or not 1 <= found <= MAX_OUTPUTS:
        raise ConfigError(f"task {task.name}: num_outputs must be 1 to {MAX_OUTPUTS}, got {found!r:.40}")
    return found


def _trains_values(loss: Loss, num_outputs: int) -> bool:
    """Returns whether targets are numbers, and cannot be classes; those of a function may be anything."""
    if loss.needs_torch:
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


def _check_values(task: Task, metrics: Mapping[str, Metric], loss: Loss, no_targets: Array, num_outputs: int) -> None:
    """Raises a `ConfigError` where a metric is not of numbers, which the task trains."""
    values = np.full((1, *no_targets.shape[1:]), 0.5, np.float32)
    for name, metric in metrics.items() if _trains_values(loss, num_outputs) else ():
        try:
            metric.partial(np.zeros((1, num_outputs), np.float32), values)
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
