"""`series`: windows of rows of CSV or Parquet files, as of sensors; a run file has columns, window and target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array, Dataset, Scalar
from edgefl.tasks.augmentation import make_signal_augment
from edgefl.tasks.classification import TrainableModel, validate_choice
from edgefl.tasks.configured.options import (
    MAX_COLUMNS,
    ConfiguredTask,
    Goal,
    Names,
    Numbers,
    check_range,
    check_size,
    format_options,
    make_goal,
    split_names,
    split_sizes,
)
from edgefl.tasks.configured.table import (
    DEFAULT_HIDDEN,
    MODELS,
    TargetColumns,
    format_targets,
    make_dense_model,
    make_input_scaling,
    make_target_columns,
)
from edgefl.tasks.datasets.table_files import MAX_CELLS, TablePart, read_table
from edgefl.tasks.learners import networks
from edgefl.tasks.learners.torch_learner import make_chain_model
from edgefl.tasks.preparation import Prepare

NAME = "series"
NETWORKS = ("cnn", "gru")
"""Networks of torch; the others are in NumPy."""
MIN_WINDOW, MAX_WINDOW, MAX_AHEAD = 4, 4096, 100_000
MAX_FORECAST = 1024
"""Values of an example's target: those of all its rows."""
MAX_WINDOW_CELLS = 1_000_000
DEFAULTS: Mapping[str, Scalar] = {"learning_rate": 0.05, "batch_size": 16, "epochs": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How rows are cut: a window of so many rows begins every `step` rows, and never spans two files or groups.

    Its target is that of the row `ahead` rows after its last one, and of the rows that follow that, `horizon` in all.
    """

    length: int
    step: int
    ahead: int
    horizon: int

    @property
    def rows(self) -> int:
        """How many rows have a part in an example, from its window's first one to its target's last one."""
        return self.length + self.ahead + self.horizon - 1

    def list_starts(self, num_rows: int, groups: Array | None) -> Array:
        """Returns the first row of each window of a file; a shorter remainder of a group is dropped."""
        changes = [] if groups is None else (np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist()
        edges = [0, *changes, num_rows]
        spans = [np.arange(start, stop - self.rows + 1, self.step) for start, stop in pairwise(edges)]
        return np.concatenate(spans)

    def select_targets(self, by_row: Array, starts: Array) -> Array:
        """Returns the targets of windows, of [rows] or [rows, columns] targets of rows.

        They are [n] or [n, columns], and with a horizon [n, columns * horizon]: each column's in the order of time.
        """
        first = starts + self.length + self.ahead - 1
        if self.horizon > 1:
            later = by_row.reshape(len(by_row), -1)[first[:, None] + np.arange(self.horizon)]
            return np.ascontiguousarray(later.transpose(0, 2, 1)).reshape(
                len(starts), later.shape[1] * later.shape[2]
            )
        targets: Array = by_row[first]
        return targets


def series(  # noqa: PLR0913 one keyword for each option of a run file
    *,
    columns: Names,
    window: int,
    step: int = 0,
    ahead: int = 0,
    horizon: int = 1,
    target: Names = "",
    labels: Names = "",
    loss: str = "",
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
    time_shift: int = 0,
    jitter: float = 0.0,
) -> ConfiguredTask:
    """Returns the task.

    Args:
        columns: that are the model's inputs, as of `table`.
        window: rows of an example.
        step: rows from the beginning of a window to that of the next; 0 for the window's own length.
        ahead: rows after the last one of a window to that of its target.
        horizon: rows that the target has from there on, each column's values in the order of time.
        target: column of the class, or columns of the values.
        labels: names of the classes; none for values.
        loss: by name; cross-entropy of classes, mse of values, or `reconstruction` without a target.
        metrics: by name; rmse and r2 of values.
        model: mlp or linear in NumPy, cnn or gru in torch.
        hidden: sizes of the hidden layers of mlp, or that of gru.
        activation: between layers of mlp: relu, tanh, sigmoid or gelu.
        means: an input is (value - mean) / scale; a number for each column, or one for all.
        scales: above 0, likewise.
        normalise: as of `table`; each number of a window counts.
        target_mean: a target is (value - target_mean) / target_scale; a number for each column, or one for all.
        target_scale: above 0, likewise.
        group: column of what a row is part of, such as a recording, in which windows stay; for natural shards.
        time_shift: most rows by which a window that is trained on is moved, up to half of it; for classes.
        jitter: noise in it, as a part of each column's standard deviation in the window, 0 to 1.
    """
    names = split_names(NAME, "columns", columns, at_most=MAX_COLUMNS)
    windows = _make_windows(len(names), window, step, ahead, horizon)
    targets = make_target_columns(
        NAME, target, labels, group, target_mean, target_scale, inputs=names, is_forecast=ahead > 0
    )
    _check_forecast(targets, horizon)
    _check_augment(targets, window, time_shift, jitter)
    goal = make_goal(
        NAME,
        labels=targets.labels,
        loss=loss,
        metrics=metrics,
        num_inputs=len(names) * window,
        num_values=len(targets.numbers) * horizon,
    )
    prepare = make_input_scaling(NAME, (len(names), 1), means=means, scales=scales, normalise=normalise)
    return ConfiguredTask(
        name=NAME,
        model=_make_model(model, (len(names), window), goal, prepare, hidden=hidden, activation=activation),
        input_shape=(len(names), window),
        goal=goal,
        reader=lambda path: _read_windows(path, names, targets, windows),
        defaults=DEFAULTS,
        shard_options=format_options(
            columns=names,
            window=window,
            step=windows.step,
            ahead=ahead,
            **({"horizon": horizon} if horizon > 1 else {}),
            **format_targets(targets),
        ),
        channels=names,
        augment=make_signal_augment(time_shift=time_shift, jitter=jitter),
    )


def _make_windows(num_columns: int, window: int, step: int, ahead: int, horizon: int) -> Windows:
    check_range("window", window, MIN_WINDOW, MAX_WINDOW)
    check_range("step", step, 0, MAX_WINDOW)
    check_range("ahead", ahead, 0, MAX_AHEAD)
    check_range("horizon", horizon, 1, MAX_FORECAST)
    if window * num_columns > MAX_WINDOW_CELLS:
        raise ConfigError(
            f"task.window = {window} of {num_columns} columns are {window * num_columns:,} numbers, at most are "
            f"{MAX_WINDOW_CELLS:,}"
        )
    return Windows(length=window, step=step or window, ahead=ahead, horizon=horizon)


def _check_forecast(targets: TargetColumns, horizon: int) -> None:
    """Raises a `ConfigError` where a horizon of several rows is not one of values, or they are too many."""
    if horizon > 1 and not targets.numbers:
        raise ConfigError(f"task.horizon of several rows is for a target of values without labels, got {horizon}")
    if (count := len(targets.numbers) * horizon) > MAX_FORECAST:
        raise ConfigError(
            f"task.horizon = {horizon} of {len(targets.numbers)} target columns are {count:,} values, at most are "
            f"{MAX_FORECAST:,}"
        )


def _check_augment(targets: TargetColumns, window: int, time_shift: int, jitter: float) -> None:
    check_range("time_shift", time_shift, 0, window // 2)
    check_range("jitter", jitter, 0.0, 1.0)
    if time_shift and targets.numbers:
        raise ConfigError(
            f"task.time_shift = {time_shift} is for classes: a value belongs to the rows of its window; leave it out"
        )


def _make_model(
    model: str, shape: tuple[int, int], goal: Goal, prepare: Prepare, *, hidden: Numbers, activation: str
) -> TrainableModel:
    if validate_choice(NAME, "model", model, (*MODELS, *NETWORKS)) in MODELS:
        sizes = (shape[0] * shape[1], goal.num_outputs)
        return make_dense_model(NAME, model, hidden, activation, sizes=sizes, prepare=prepare)
    if (goal.loss or "").startswith("reconstruction"):
        raise ConfigError(f"a reconstruction needs model = mlp or linear, got {model!r}")
    if model == "cnn":
        if hidden != DEFAULT_HIDDEN:
            raise ConfigError(f"task.hidden is for the models mlp and gru, got {model!r}")
        chain = networks.make_motion_cnn(shape[0], goal.num_outputs)
    else:
        units, *more = split_sizes("hidden", hidden)
        if more:
            raise ConfigError(f"task.hidden of the model gru must be one number, got {len(more) + 1}")
        chain = networks.make_gru(shape[0], units, goal.num_outputs)
    network = make_chain_model(chain, prepare)
    check_size(NAME, network)
    return network


def _read_windows(path: Path, columns: tuple[str, ...], targets: TargetColumns, windows: Windows) -> Dataset:
    parts, num_windows = [], 0
    numbers, is_known = (*columns, *targets.numbers), targets.is_known
    for part in read_table(path, NAME, numbers, targets.texts, keeps_unlabelled=True, is_known=is_known):
        parts.append(_cut_windows(part, len(columns), targets, windows))
        num_windows += len(parts[-1])
        _check_memory(f"shard {path} of task {NAME}", num_windows, len(columns), targets, windows)
    if not num_windows:
        raise DataError(f"shard {path} of task {NAME} holds no {windows.rows} rows of one group for a window")
    return Dataset.concatenate(parts)


def _check_memory(whose: str, num_windows: int, num_columns: int, targets: TargetColumns, windows: Windows) -> None:
    num_values = num_columns * windows.length + len(targets.columns) * windows.horizon
    if num_windows * num_values > MAX_CELLS:
        raise DataError(f"{whose} makes windows of more than {MAX_CELLS:,} numbers; take a larger step")


def _cut_windows(part: TablePart, num_columns: int, targets: TargetColumns, windows: Windows) -> Dataset:
    """Returns the windows of a file, [n, columns, length]."""
    rows, groups = part.numbers[:, :num_columns], targets.read_groups(part)
    starts = windows.list_starts(len(rows), groups)
    if targets.labels:
        part, has_label = targets.fill_unlabelled(part)
        starts = starts[windows.select_targets(has_label, starts)]
    by_row = targets.read_targets(part, part.numbers[:, num_columns:])
    _check_memory(str(part.path), len(starts), num_columns, targets, windows)
    inputs = np.empty((0, num_columns, windows.length), np.float32)
    if len(starts):
        inputs = np.lib.stride_tricks.sliding_window_view(rows, windows.length, axis=0)[starts]
    return Dataset(
        inputs=inputs,
        targets=windows.select_targets(by_row, starts),
        groups=None if groups is None else groups[starts],
    )
