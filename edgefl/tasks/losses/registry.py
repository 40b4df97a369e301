"""A loss from how a task says it, and checks of a task's data against its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.heads import Head, describe_loss
from edgefl.core.settings import suggest_name
from edgefl.core.types import Array, Dataset, Task
from edgefl.tasks.losses.class_losses import CrossEntropy
from edgefl.tasks.losses.loss import Loss, to_values
from edgefl.tasks.losses.multi_task import MultiTask, make_head
from edgefl.tasks.losses.torch_only_losses import Contrastive, Ctc, TorchOnlyLoss
from edgefl.tasks.losses.value_losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    ElementLoss,
    Huber,
    Poisson,
    Quantile,
    Reconstruction,
    SquaredError,
)

CLASS_LOSSES = (CrossEntropy.name, SquaredError.name)
"""Losses of the built-in classifiers in NumPy."""
MAX_TIME_S = 2.0**53
"""Up to this float64 has every second, and int64 the number of every period."""
CHECK_ROWS = 65_536
"""Targets that are checked at once: a copy of all would be much of a small board's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLoss(TorchOnlyLoss):
    """A user's loss: a function of torch tensors (outputs, targets) that returns one number for each example."""

    name = "function"

    function: Callable[[Any, Any], Any]

    def convert_targets(self, targets: Array, shape: tuple[int, ...] | None) -> Array:  # noqa: ARG002 as the function likes
        values = to_values(targets, "the loss")
        return targets.astype(np.int64) if targets.dtype.kind in "iub" else values


LossLike = str | Loss | Callable[[Any, Any], Any] | Mapping[str, Any]
"""How a task says its loss: by name, with settings as an object, as a function, or each or a `Head` by name."""

BUILT_IN: Mapping[str, type[Loss]] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            CrossEntropy, BinaryCrossEntropy, SquaredError, AbsoluteError, Huber, Quantile, Poisson, Reconstruction,
            Ctc, Contrastive,
        )
    }
)  # fmt: skip

_NUMBER_SETTINGS = {Huber.name: "delta", Contrastive.name: "temperature"}
"""Losses with one number as setting, and its field."""


def make_loss(loss: LossLike) -> Loss:  # noqa: C901, PLR0911 one line for each way to say it
    """Returns a loss from how a task says it: by a name, with settings as in `huber:2` or `quantile:0.1,0.9`.

    Raises:
        ConfigError: there is no such loss, or it has no such setting.
    """
    if isinstance(loss, Loss):
        return loss
    if not isinstance(loss, str):
        if isinstance(loss, Mapping):
            return _join_losses(loss)
        if callable(loss):
            return FunctionLoss(function=_unbind(loss))
        raise ConfigError(f"loss must be a name or a function of outputs and targets, got {loss!r:.100}")
    name, separator, setting = loss.partition(":")
    if name not in BUILT_IN:
        raise ConfigError(f"there is no loss {name!r:.100}; {suggest_name(name, BUILT_IN)}")
    if not separator:
        return BUILT_IN[name]()
    if name == Reconstruction.name:
        inner = make_loss(setting)
        if not isinstance(inner, ElementLoss) or isinstance(inner, Quantile | Reconstruction):
            raise ConfigError(f"reconstruction takes a loss of single values, such as mae, got {setting!r:.100}")
        return Reconstruction(of=inner)
    numbers = _parse_numbers(loss, setting)
    if name == Quantile.name:
        return Quantile(quantiles=numbers)
    if name in _NUMBER_SETTINGS and len(numbers) == 1:
        return BUILT_IN[name](**{_NUMBER_SETTINGS[name]: numbers[0]})
    raise ConfigError(f"loss {name} has no setting, got {loss!r:.100}")


def _join_losses(losses: Mapping[str, Any]) -> MultiTask:
    """Returns the losses of several targets as one; their outputs lie side by side in this order."""
    made, start = [], 0
    for name, loss in losses.items():
        head = loss if isinstance(loss, Head) else Head(loss=loss)
        try:
            made.append(make_head(name, make_loss(head.loss), head, start))
        except ConfigError as error:
            raise ConfigError(f"loss of {name!r:.70}: {error}") from None
        start = made[-1].columns.stop
    return MultiTask(heads=tuple(made))


def _unbind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function itself where a task's attribute became a method of it, with one parameter too few."""
    if inspect.ismethod(function) and len(inspect.signature(function).parameters) == 1:
        return function.__func__
    return function


def _parse_numbers(loss: str, setting: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in setting.split(","))
    except ValueError:
        raise ConfigError(f"loss {loss!r:.100}: {setting!r:.100} is no list of numbers, such as 0.1,0.9") from None


def find_loss(task: Task) -> Loss | None:
    """Returns a task's loss, its own or its model's; None where a learner of its own alone knows it.

    Raises:
        ConfigError: there is no such loss.
    """
    loss = describe_loss(task) or getattr(getattr(task, "model", None), "loss", None)
    return None if loss is None else make_loss(loss)


def has_classes(task: Task) -> bool:
    """Returns whether a task's model answers with one class for an example, and not with values or several labels."""
    loss = find_loss(task)
    return (
        loss is None
        or isinstance(loss, CrossEntropy)
        or (isinstance(loss, SquaredError) and bool(getattr(task, "labels", ())))
    )


def is_reconstruction(task: Task) -> bool:
    """Returns whether a task's model gives back its own input, so that the data set's targets are not used."""
    return isinstance(find_loss(task), Reconstruction)


def select_targets(loss: Loss, batch: Dataset, features: Array, shape: tuple[int, ...]) -> Array:
    """Returns the targets of a batch for outputs of a shape; of a reconstruction these are the features."""
    return loss.convert_targets(features if isinstance(loss, Reconstruction) else batch.targets, shape)


def check_data(task: Task, data: Dataset) -> None:
    """Checks a task's data against its loss, as far as that is known without computing; see `Dataset` for weights.

    Raises:
        DataError: targets are none for the loss, weights are not finite numbers of at least 0, one an example, or
            times are none of `Dataset`.
        ConfigError: there is no such loss.
    """
    for name in ("inputs", "weights", "groups", "times"):
        part = getattr(data, name)
        if part is not None and len(part) != len(data):
            raise DataError(
                f"task {task.name} reads {len(data)} targets and {len(part)} {name}; there must be as many"
            )
    weights = data.weights
    if weights is not None and not (
        weights.ndim == 1 and weights.dtype.kind in "fiub" and np.isfinite(weights).all() and (weights >= 0).all()
    ):
        raise DataError(
            f"weights of task {task.name} must be finite numbers [n], at least 0, "
            f"got {weights.dtype} {list(weights.shape)}"
        )
    if data.times is not None:
        _check_times(task.name, data.times)
    loss = find_loss(task)
    if loss is None or isinstance(loss, Reconstruction):
        return
    num_outputs = getattr(getattr(task, "model", None), "num_outputs", None)
    try:
        for start in range(0, max(1, len(data)), CHECK_ROWS):
            targets = data.targets[start : start + CHECK_ROWS]
            loss.convert_targets(targets, None if num_outputs is None else (len(targets), num_outputs))
    except TaskError as error:
        raise DataError(f"data of task {task.name}: {error}") from None


def _check_times(task: str, times: Array) -> None:
    is_span = times.ndim == 2 and times.shape[1] == 2
    is_right = times.dtype.kind in "fiu" and (times.ndim == 1 or is_span) and (np.abs(times) < MAX_TIME_S).all()
    if not is_right or (is_span and (times[:, 0] > times[:, 1]).any()):
        raise DataError(
            f"times of task {task} must be seconds since 1970, [n], or [n, 2] from when to when, got {times.dtype} "
            f"{list(times.shape)}{' with others among them' if times.dtype.kind in 'fiu' else ''}"
        )
