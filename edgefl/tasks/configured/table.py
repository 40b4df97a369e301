"""`table`: rows of CSV, Parquet or Arrow files; columns, and a class or values to predict, stand in the run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgefl.core.errors import ConfigError, DataError, TaskError
from edgefl.core.heads import SEPARATOR, join_targets
from edgefl.core.types import Array, Dataset, Scalar, concatenate_masks
from edgefl.tasks.classification import validate_choice
from edgefl.tasks.configured.options import (
    MAX_COLUMNS,
    MAX_LABELS,
    MAX_TARGETS,
    ConfiguredTask,
    Goal,
    Names,
    Numbers,
    check_normalise,
    check_size,
    format_options,
    make_goal,
    split_names,
    split_numbers,
    split_sizes,
)
from edgefl.tasks.configured.several_targets import has_several, make_goal_of_several, split_labels
from edgefl.tasks.datasets.table_files import TablePart, iterate_shard, weigh_weak
from edgefl.tasks.learners.numpy_learner import ACTIVATIONS, DenseModel
from edgefl.tasks.onnx_graph import OnnxGraph, register_node_builder
from edgefl.tasks.preparation import Prepare
from edgefl.tasks.stored_arrays import RowBuffer

NAME = "table"
LINEAR_MODELS = ("linear", "logistic")
MODELS = ("mlp", *LINEAR_MODELS)
"""Models in NumPy; the last two are names of one."""
DEFAULT_HIDDEN = 32
MAX_GROUP_CHARS = 256
DATE_DIGITS = 8
MAX_TIME_S = 1e11
"""Since 1970: what is more is in milliseconds."""
CLASS_DEFAULTS: Mapping[str, Scalar] = {"learning_rate": 0.1, "batch_size": 16, "epochs": 1.0}
VALUE_DEFAULTS: Mapping[str, Scalar] = {"learning_rate": 0.03, "batch_size": 16, "epochs": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetColumns:
    """Columns of what is predicted, and of whom or what a row comes from.

    Values become (value - mean) / scale, by column. A class is the label in its column, or where no label is a
    number, the label's number from 0. `by_column` has the labels of each of several targets with a loss each, none
    for values.
    """

    columns: tuple[str, ...]
    labels: tuple[str, ...]
    by_column: Mapping[str, tuple[str, ...]] | None = None
    group: str
    time: str = ""
    mean: tuple[float, ...]
    scale: tuple[float, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        return tuple(name for name in self.columns if name not in self.classes)

    @property
    def classes(self) -> tuple[str, ...]:
        """Those of the columns that hold classes."""
        if self.by_column is None:
            return self.columns if self.labels else ()
        return tuple(name for name in self.columns if self.by_column[name])

    @property
    def texts(self) -> tuple[str, ...]:
        return (*self.classes, *filter(None, (self.time, self.group)))

    def is_known(self, label: str) -> bool:
        """Returns whether a class has this label, or there are no classes."""
        return not self.labels or make_label_finder(self.labels)(label) is not None

    def read_targets(self, part: TablePart, values: Array) -> Array:
        """Returns [n] or [n, columns] targets of a file's rows, or by name; `values` are those of `numbers`."""
        if self.labels:
            return self._read_labels(part, 0, self.labels)
        if not self.columns:
            return np.zeros(len(values), np.float32)
        targets: Array = (values - np.array(self.mean, np.float32)) / np.array(self.scale, np.float32)
        if self.by_column is not None:
            of_classes = {
                name: self._read_labels(part, i, self.by_column[name]) for i, name in enumerate(self.classes)
            }
            return join_targets({**of_classes, **dict(zip(self.numbers, targets.T, strict=True))})
        return targets[:, 0] if len(self.columns) == 1 else targets

    def _read_labels(self, part: TablePart, place: int, labels: tuple[str, ...]) -> Array:
        whose = f"{part.path}: column {self.classes[place]!r}"
        return read_labels(part.texts[place], labels, whose, first_row=part.first_row)

    def fill_unlabelled(self, part: TablePart) -> tuple[TablePart, Array]:
        """Returns rows with a label in each, the first where they have none, and [n] whether they have one."""
        has_label = np.array([bool(cell) for cell in part.texts[0]], bool)
        filled = tuple(cell or self.labels[0] for cell in part.texts[0])
        return replace(part, texts=(filled, *part.texts[1:])), has_label

    def read_groups(self, part: TablePart) -> Array | None:
        """Returns [n] groups of a file's rows, None where no column says it."""
        if not self.group:
            return None
        if (longest := max(map(len, part.texts[-1]), default=0)) > MAX_GROUP_CHARS:  # each takes as much room
            raise DataError(
                f"{part.path}: column {self.group!r} must name groups in at most {MAX_GROUP_CHARS} characters, one "
                f"has {longest}"
            )
        return np.array(part.texts[-1], dtype=object).astype(str)

    def read_times(self, part: TablePart) -> Array | None:
        """Returns [n] seconds since 1970 at which a file's rows were taken, None where no column says it."""
        if not self.time:
            return None
        try:
            return np.array([parse_time(cell) for cell in part.texts[len(self.classes)]], np.float64)
        except ValueError:
            raise DataError(
                f"{part.path}: column {self.time!r} must hold seconds since 1970, or dates and times such as "
                "2026-11-30 12:00:00, and holds something else"
            ) from None


def table(  # noqa: PLR0913 one keyword for each option of a run file
    *,
    columns: Names,
    target: Names = "",
    labels: Names = "",
    loss: Names = "",
    loss_weights: Names = "",
    metrics: Names = "",
    model: str = "mlp",
    hidden: Numbers = DEFAULT_HIDDEN,
    activation: str = "relu",
    means: Numbers = 0.0,
    scales: Numbers = 1.0,
    normalise: str = "",
    target_mean: Numbers = 0.0,
    target_scale: Numbers = 1.0,
    group: str = "",
    time: str = "",
    split_period: str = "",
    missing: Literal["refuse", "drop"] = "refuse",
) -> ConfiguredTask:
    """Returns the task.

    Args:
        columns: that are the model's inputs; `pixel_0..63` stands for 64 of them.
        target: column of the class, or columns of the values.
        labels: names of the classes; none for values. Of several targets `sex/f,sex/m` are those of one.
        loss: by name; cross-entropy of classes, mse of values, or `reconstruction` without a target. Of several
            targets `age/huber` is that of one.
        loss_weights: of several targets with a loss each, `age/0.5`; 1 for those not named.
        metrics: by name; rmse and r2 of values. Of several targets with a loss each `age/mae`.
        model: mlp, or linear, which is called logistic as well.
        hidden: sizes of the hidden layers of mlp.
        activation: between layers: relu, tanh, sigmoid or gelu.
        means: an input is (value - mean) / scale; a number for each column, or one for all.
        scales: above 0, likewise.
        normalise: "fleet" for means and scales of all boards' examples, or "run:ID" for those of an earlier run.
        target_mean: a target is (value - target_mean) / target_scale; a number for each column, or one for all.
        target_scale: above 0, likewise.
        group: column of whom a row comes from, for natural shards.
        time: column of when a row was taken: seconds since 1970, or dates and times, of UTC where they say no zone.
        split_period: a time such as 1d; whole periods of that length are kept for testing.
        missing: whether a row with an empty cell is an error or left out.
    """
    names = split_names(NAME, "columns", columns, at_most=MAX_COLUMNS)
    targets = make_target_columns(NAME, target, labels, group, target_mean, target_scale, inputs=names, loss=loss)
    targets = add_time(targets, time, split_period, inputs=names)
    goal = make_table_goal(
        NAME,
        targets,
        loss=loss,
        loss_weights=loss_weights,
        metrics=metrics,
        num_inputs=len(names),
        num_values=len(targets.numbers),
    )
    prepare = make_input_scaling(NAME, (len(names),), means=means, scales=scales, normalise=normalise)
    dense = make_dense_model(NAME, model, hidden, activation, sizes=(len(names), goal.total_outputs), prepare=prepare)
    return ConfiguredTask(
        name=NAME,
        model=dense,
        input_shape=(len(names),),
        goal=goal,
        reader=lambda path: _read_rows(path, names, targets, drops_missing=missing == "drop"),
        defaults=CLASS_DEFAULTS if goal.labels else VALUE_DEFAULTS,
        shard_options=format_options(columns=names, **format_targets(targets)),
        columns=names,
        example_rows=1,
        split_period=split_period or None,
    )


def make_target_columns(  # noqa: PLR0913 one for each option
    task: str,
    target: Names,
    labels: Names,
    group: str,
    mean: Numbers,
    scale: Numbers,
    *,
    inputs: tuple[str, ...],
    loss: Names | None = None,
    is_forecast: bool = False,
) -> TargetColumns:
    """Returns the columns of targets, checked; a forecast's may be inputs, which are those of earlier rows.

    Several have a loss each where `labels` or `loss` say of which one they are; never with a `loss` of None.

    Raises:
        ConfigError: a class has not one column, a target is an input, or mean and scale make no sense.
    """
    columns = split_names(task, "target", target, at_most=MAX_TARGETS) if target else ()
    is_several = loss is not None and has_several(columns, labels, loss)
    by_column = split_labels(task, labels, columns) if is_several else None
    is_single = bool(labels) and by_column is None
    classes = split_names(task, "labels", labels, at_most=MAX_LABELS, at_least=2) if is_single else ()
    if classes and len(columns) != 1:
        raise ConfigError(f"task.target must name the one column of the labels, got {', '.join(columns) or 'none'}")
    if both := [name for name in (*(() if is_forecast else columns), group) if name in inputs]:
        raise ConfigError(f"task.columns must not name {both[0]!r}, which is the target or the group")
    if group:
        split_names(task, "group", (group,), at_most=1)
    if classes and (mean, scale) != (0.0, 1.0):
        raise ConfigError("task.target_mean and target_scale mean nothing with labels; leave them out")
    count = sum(not by_column[name] for name in columns) if by_column else len(columns)
    means = split_numbers(task, "target_mean", mean, count=max(1, count))
    scales = split_numbers(task, "target_scale", scale, count=max(1, count), above=0.0)
    return TargetColumns(
        columns=columns,
        labels=classes,
        by_column=by_column,
        group=group,
        mean=tuple(means[:count].tolist()) if by_column else tuple(means.tolist()),
        scale=tuple(scales[:count].tolist()) if by_column else tuple(scales.tolist()),
    )


def add_time(targets: TargetColumns, time: str, split_period: str, *, inputs: tuple[str, ...]) -> TargetColumns:
    """Returns the columns with that of times; raises a `ConfigError` where it and the period do not fit together."""
    if bool(time) != bool(split_period):
        raise ConfigError(
            f"task.split_period = {split_period!r:.40} needs task.time, the column of when a row was taken"
            if split_period
            else f"task.time = {time!r:.100} is for a split by time: say split_period, such as 1d, or leave it out"
        )
    if time:
        split_names("table", "time", (time,), at_most=1)
    if time and time in {*inputs, *targets.columns, targets.group}:
        raise ConfigError(
            f"task.time must name a column of its own, and {time!r:.100} is an input, a target or the group"
        )
    return replace(targets, time=time)


def make_table_goal(
    task: str, targets: TargetColumns, *, loss: Names, loss_weights: Names, metrics: Names, **counts: int
) -> Goal:
    """Returns what a model of rows predicts; `counts` and what it raises are as of `make_goal`."""
    if targets.by_column is not None:
        return make_goal_of_several(task, targets.by_column, loss=loss, weights=loss_weights, metrics=metrics)
    if loss_weights:
        raise ConfigError("task.loss_weights are of several targets with a loss each, such as loss = age/huber")
    return make_goal(task, labels=targets.labels, loss=loss, metrics=metrics, **counts)


def format_targets(targets: TargetColumns) -> dict[str, object]:
    """Returns the options of targets for the card of a cut shard."""
    return {
        "target": targets.columns,
        **({"time": targets.time} if targets.time else {}),
        "labels": targets.labels
        or tuple(f"{name}{SEPARATOR}{one}" for name, own in (targets.by_column or {}).items() for one in own),
        # One number where it is that of all columns, as on cards from when there was one for all.
        **{
            name: numbers[:1] if len(set(numbers)) == 1 else numbers
            for name, numbers in (("target_mean", targets.mean), ("target_scale", targets.scale))
        },
    }


def make_dense_model(
    task: str, model: str, hidden: Numbers, activation: str, *, sizes: tuple[int, int], prepare: Prepare
) -> DenseModel:
    """Returns a model in NumPy; `sizes` are its numbers of inputs and outputs.

    Raises:
        ConfigError: there is no such model, or it is too large.
    """
    is_linear = validate_choice(task, "model", model, MODELS) in LINEAR_MODELS
    if is_linear and hidden != DEFAULT_HIDDEN:
        raise ConfigError(f"task.hidden is for the model mlp, got {model!r}")
    dense = DenseModel(
        sizes=(sizes[0], *(() if is_linear else split_sizes("hidden", hidden)), sizes[1]),
        prepare=prepare,
        activation=validate_choice(task, "activation", activation, tuple(ACTIVATIONS)),
    )
    check_size(task, dense)
    return dense


def make_input_scaling(
    task: str, shape: tuple[int, ...], *, means: Numbers, scales: Numbers, normalise: str
) -> Prepare:
    """Returns a `prepare` of inputs by these options of a task.

    With `normalise` it raises a `TaskError` where it is used: a run has the numbers in its place where it begins.

    Args:
        task: its name.
        shape: of means and scales, [columns] or [columns, 1, ...].
        means: as of `table`.
        scales: likewise.
        normalise: likewise.

    Raises:
        ConfigError: they make no sense, or contradict each other.
    """
    check_normalise(normalise)
    if not normalise:
        return make_standardisation(
            split_numbers(task, "means", means, count=shape[0]).reshape(shape),
            split_numbers(task, "scales", scales, count=shape[0], above=0.0).reshape(shape),
        )
    if (means, scales) != (0.0, 1.0):
        raise ConfigError(f"task.means and task.scales are found by normalise = {normalise!r}; leave them out")

    def refuse(_inputs: Array) -> Array:
        raise TaskError(
            f"task.normalise = {normalise!r} has no means and scales here; a run of a fleet, or a simulation, finds "
            "them"
        )

    return refuse


def make_standardisation(means: Array, scales: Array) -> Prepare:
    """Returns a `prepare` to (value - mean) / scale; both broadcast over an example."""

    def draw(graph: OnnxGraph, value: str) -> str:
        centred = graph.add("Sub", value, graph.add_constant(means))
        return graph.add("Div", centred, graph.add_constant(scales))

    @register_node_builder(draw)
    def standardise(inputs: Array) -> Array:
        return (inputs.astype(np.float32) - means) / scales

    return standardise


def read_labels(cells: tuple[str, ...], labels: tuple[str, ...], whose: str, *, first_row: int = 1) -> Array:
    """Returns [n] int32 numbers of the labels in cells, of which the first is in row `first_row`.

    Raises:
        DataError: a cell is none of them.
    """
    find, classes = make_label_finder(labels), np.empty(len(cells), np.int32)
    for place, cell in enumerate(cells):
        if (found := find(cell)) is None:
            # Errors reach the coordinator, cells must not.
            raise DataError(
                f"{whose} must hold one of {', '.join(labels[:12])}; row {first_row + place} holds something else"
            )
        classes[place] = found
    return classes


def make_label_finder(labels: tuple[str, ...]) -> Callable[[str], int | None]:
    """Returns a function from a cell to the number of its label; None where it is none of them."""
    numbers = {label: index for index, label in enumerate(labels)}
    by_number = numbers if any(map(_to_whole_number, labels)) else {str(index): index for index in range(len(labels))}
    return lambda cell: numbers.get(cell, by_number.get(_to_whole_number(cell)))


def parse_time(text: str) -> float:
    """Returns seconds since 1970 of a number or a date and time (ISO 8601; UTC without a zone), or a `ValueError`.

    A number of eight digits is a date, such as 20261130.
    """
    try:
        seconds = float(text if len(text) != DATE_DIGITS or not text.isdecimal() else "a date")
    except ValueError:
        found = datetime.fromisoformat(text)
        seconds = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    if not abs(seconds) <= MAX_TIME_S:  # also a NaN
        raise ValueError(f"a time is in seconds, at most {MAX_TIME_S:g}; milliseconds have to be divided by 1000")
    return seconds


def _to_whole_number(cell: str) -> str:
    """Returns `1` for `1`, `1.0` and `1.00`; empty for what is no whole number."""
    try:
        value = float(cell)
    except ValueError:
        return ""
    return str(int(value)) if abs(value) < MAX_COLUMNS and value.is_integer() else ""


def _read_rows(path: Path, columns: tuple[str, ...], targets: TargetColumns, *, drops_missing: bool) -> Dataset:
    inputs, found, groups, weak = RowBuffer(), list[Array](), list[Array](), list[Array | None]()
    times = list[Array]()
    numbers = (*columns, *targets.numbers)
    options: dict[str, Any] = {"drops_missing": drops_missing, "has_weak": True, "is_known": targets.is_known}
    for part in iterate_shard(path, NAME, numbers, targets.texts, **options):
        inputs.add(part.numbers[:, : len(columns)])
        found.append(targets.read_targets(part, part.numbers[:, len(columns) :]))
        weak.append(part.weak)
        if (group := targets.read_groups(part)) is not None:
            groups.append(group)
        if (seconds := targets.read_times(part)) is not None:
            times.append(seconds)
    return Dataset(
        inputs=inputs.finish(),
        targets=np.concatenate(found),
        groups=np.concatenate(groups) if groups else None,
        times=np.concatenate(times) if times else None,
        **weigh_weak(concatenate_masks(weak, list(map(len, found)))),
    )
