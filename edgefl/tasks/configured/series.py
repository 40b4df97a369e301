"""`series`: windows of rows of CSV, Parquet or Arrow files; a run file has columns, window and target."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

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
    split_names,
    split_sizes,
)
from edgefl.tasks.configured.table import (
    DEFAULT_HIDDEN,
    MODELS,
    TargetColumns,
    add_time,
    format_targets,
    make_dense_model,
    make_input_scaling,
    make_table_goal,
    make_target_columns,
)
from edgefl.tasks.datasets.table_files import CSV, MAX_CELLS, PARQUET, TablePart, iterate_shard, weigh_weak
from edgefl.tasks.learners import networks
from edgefl.tasks.learners.torch_learner import make_chain_model
from edgefl.tasks.preparation import Prepare
from edgefl.tasks.stored_arrays import BLOCK_BYTES, RowBuffer

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

    def list_starts(self, num_rows: int, groups: Array | None, first: int = 0) -> tuple[Array, int]:
        """Returns the first row of each window, and that of the next one if more rows of the last group follow.

        A shorter remainder of another group is dropped. The first window begins at the row `first`, unless its group
        ends before it.
        """
        changes = [] if groups is None else (np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist()
        edges = [0, *changes, num_rows]
        spans = [np.arange(start or first, stop - self.rows + 1, self.step) for start, stop in pairwise(edges)]
        last = edges[-2] or first
        return np.concatenate(spans), last + self.step * len(spans[-1])

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
        loss: by name; cross-entropy of classes, mse of values, or `reconstruction` without a target. Of several
            targets `age/huber` is that of one.
        loss_weights: of several targets with a loss each, `age/0.5`.
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
        time: as of `table`.
        split_period: likewise; a window that lies in periods of both kinds is neither trained on nor tested on.
        time_shift: most rows by which a window that is trained on is moved, up to half of it; for classes.
        jitter: noise in it, as a part of each column's standard deviation in the window, 0 to 1.
    """
    names = split_names(NAME, "columns", columns, at_most=MAX_COLUMNS)
    windows = _make_windows(len(names), window, step, ahead, horizon)
    targets = make_target_columns(
        NAME, target, labels, group, target_mean, target_scale, inputs=names, loss=loss, is_forecast=ahead > 0
    )
    targets = add_time(targets, time, split_period, inputs=names)
    _check_forecast(targets, horizon)
    _check_augment(targets, window, time_shift, jitter)
    goal = make_table_goal(
        NAME,
        targets,
        loss=loss,
        loss_weights=loss_weights,
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
        input_reader=lambda path: np.asarray(_read_windows(path, names, *_without_targets(targets, windows)).inputs),
        input_suffixes=(CSV, PARQUET),
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
        example_rows=window,
        split_period=split_period or None,
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
    if horizon > 1 and (targets.by_column is not None or not targets.numbers):
        raise ConfigError(
            f"task.horizon of several rows is for targets of values without labels and with one loss, got {horizon}"
        )
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
        sizes = (shape[0] * shape[1], goal.total_outputs)
        return make_dense_model(NAME, model, hidden, activation, sizes=sizes, prepare=prepare)
    if isinstance(goal.loss, str) and goal.loss.startswith("reconstruction"):
        raise ConfigError(f"a reconstruction needs model = mlp or linear, got {model!r}")
    if model == "cnn":
        if hidden != DEFAULT_HIDDEN:
            raise ConfigError(f"task.hidden is for the models mlp and gru, got {model!r}")
        chain = networks.make_motion_cnn(shape[0], goal.total_outputs)
    else:
        units, *more = split_sizes("hidden", hidden)
        if more:
            raise ConfigError(f"task.hidden of the model gru must be one number, got {len(more) + 1}")
        chain = networks.make_gru(shape[0], units, goal.total_outputs)
    network = make_chain_model(chain, prepare)
    check_size(NAME, network)
    return network


def _without_targets(targets: TargetColumns, windows: Windows) -> tuple[TargetColumns, Windows]:
    """Returns how rows are read and cut to predict what comes after them: the last window has no target yet."""
    return replace(targets, columns=(), labels=(), by_column=None, time=""), replace(windows, ahead=0, horizon=1)


def _read_windows(path: Path, columns: tuple[str, ...], targets: TargetColumns, windows: Windows) -> Dataset:
    inputs, found, weak, groups, num_windows = RowBuffer(), list[Array](), list[Array](), list[Array](), 0
    times = list[Array]()
    numbers, is_known = (*columns, *targets.numbers), targets.is_known
    parts = iterate_shard(path, NAME, numbers, targets.texts, keeps_unlabelled=True, has_weak=True, is_known=is_known)
    for _, of_file in itertools.groupby(parts, key=lambda part: part.path):
        cutter = _WindowCutter(len(columns), targets, windows)
        for part in of_file:
            rows, starts = cutter.add(part)
            num_windows += len(starts)
            _check_memory(f"shard {path} of task {NAME}", num_windows, len(columns), targets, windows)
            for block in _iterate_windows(rows.numbers, starts, windows.length):
                inputs.add(block)
            found.append(windows.select_targets(rows.targets, starts))
            if targets.labels:
                weak.append(windows.select_targets(rows.weak, starts))
            if rows.groups is not None:
                groups.append(rows.groups[starts])
            if rows.times is not None:
                times += _find_spans(rows.times, starts, windows.rows)
    if not num_windows:
        raise DataError(f"shard {path} of task {NAME} holds no {windows.rows} rows of one group for a window")
    return Dataset(
        inputs=inputs.finish(),
        targets=np.concatenate(found),
        groups=np.concatenate(groups) if groups else None,
        times=np.concatenate(times) if times else None,
        **weigh_weak(np.concatenate(weak) if weak else None),
    )


def _check_memory(whose: str, num_windows: int, num_columns: int, targets: TargetColumns, windows: Windows) -> None:
    num_values = num_columns * windows.length + len(targets.columns) * windows.horizon
    if num_windows * num_values > MAX_CELLS:
        raise DataError(f"{whose} makes windows of more than {MAX_CELLS:,} numbers; take a larger step")


def _find_spans(times: Array, starts: Array, num_rows: int) -> list[Array]:
    """Returns [n, 2] from when to when windows last, in blocks; a clock may have run backwards in one."""
    windows = np.lib.stride_tricks.sliding_window_view(times, num_rows)
    step = max(1, BLOCK_BYTES // (num_rows * times.itemsize))
    blocks = (windows[starts[first : first + step]] for first in range(0, len(starts), step))
    return [np.stack([block.min(axis=1), block.max(axis=1)], axis=1) for block in blocks]


def _iterate_windows(rows: Array, starts: Array, length: int) -> Iterator[Array]:
    """Yields the windows that begin at rows, [n, columns, length], a block at a time."""
    num_windows = max(1, BLOCK_BYTES // (length * rows.shape[1] * rows.itemsize))
    for first in range(0, len(starts), num_windows):
        view = np.lib.stride_tricks.sliding_window_view(rows, length, axis=0)
        yield view[starts[first : first + num_windows]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of a file: inputs [n, columns], targets [n] or [n, columns], whether it has any, or a weak one; etc."""

    numbers: Array
    targets: Array
    has_target: Array
    weak: Array
    groups: Array | None
    times: Array | None

    def join(self, later: _Rows) -> _Rows:
        pairs = {item.name: (getattr(self, item.name), getattr(later, item.name)) for item in fields(self)}
        joined: dict[str, Any] = {
            name: None if pair[0] is None else np.concatenate(pair) for name, pair in pairs.items()
        }
        return _Rows(**joined)

    def drop(self, count: int) -> _Rows:
        arrays = {item.name: getattr(self, item.name) for item in fields(self)}
        rest: dict[str, Any] = {
            name: None if array is None else array[count:].copy() for name, array in arrays.items()
        }
        return _Rows(**rest)


class _WindowCutter:
    """Cuts the rows of one file into windows as they are read, and keeps those that a later window needs."""

    def __init__(self, num_columns: int, targets: TargetColumns, windows: Windows) -> None:
        self._num_columns, self._targets, self._windows = num_columns, targets, windows
        self._kept: _Rows | None = None
        self._first = 0

    def add(self, part: TablePart) -> tuple[_Rows, Array]:
        """Returns rows, and the numbers of those among them at which the windows begin that these rows complete."""
        rows = self._to_rows(part)
        if self._kept is not None:
            rows = self._kept.join(rows)
        starts, following = self._windows.list_starts(len(rows.numbers), rows.groups, self._first)
        # The last row is kept where a step goes beyond it: it says whether the next one is of the same group.
        num_dropped = min(following, len(rows.numbers) - 1)
        self._kept, self._first = rows.drop(num_dropped), following - num_dropped
        return rows, starts[self._windows.select_targets(rows.has_target, starts)] if self._targets.labels else starts

    def _to_rows(self, part: TablePart) -> _Rows:
        groups, has_target = self._targets.read_groups(part), np.ones(len(part.numbers), bool)
        times = self._targets.read_times(part)
        if self._targets.labels:
            part, has_target = self._targets.fill_unlabelled(part)
        return _Rows(
            numbers=part.numbers[:, : self._num_columns],
            targets=self._targets.read_targets(part, part.numbers[:, self._num_columns :]),
            has_target=has_target,
            weak=np.zeros(len(has_target), bool) if part.weak is None else part.weak,
            groups=groups,
            times=times,
        )
