"""Columns of a task's examples, by name or number, and the classes of its targets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.extensions import format_name
from edgefl.core.settings import find_similar
from edgefl.core.types import Array, Dataset, Task
from edgefl.tasks.losses.multi_task import MultiTask
from edgefl.tasks.losses.registry import find_loss, has_classes
from edgefl.tasks.losses.value_losses import Quantile, Reconstruction
from edgefl.tasks.stored_arrays import iterate_blocks

MAX_COLUMNS = 1024
MAX_EXAMPLE_NUMBERS = 10_000_000
_RANGE = re.compile(r"(\d{1,9})\s*-\s*(\d{1,9})")
TARGET = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Columns of examples, and where they are.

    Attributes:
        names: of the columns.
        places: of each, its place among the numbers of an example: inputs, then targets where these are values.
        num_inputs, num_targets: columns of an example.
        classes: names of the classes; none where targets are values.
        width: numbers of an example in an input column, more than 1 where columns are channels.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    num_inputs: int
    num_targets: int
    classes: tuple[str, ...]
    width: int = 1

    def read(self, data: Dataset, column: int) -> Array:
        """Returns the values of a column, [n] float64, [n x width] of an input, in which what is missing is NaN.

        Raises:
            DataError: the examples have another shape than the task says.
        """
        place = self.places[column]
        is_input = place < self.num_inputs
        array = data.inputs if is_input else data.targets
        expected = self.num_inputs * self.width if is_input else self.num_targets
        width = self.width if is_input else 1
        start = place * width if is_input else place - self.num_inputs
        found = [np.zeros(0)]
        for block in iterate_blocks(array):
            flat = block.reshape(len(block), -1)
            if flat.shape[1] != expected:
                what = "inputs" if is_input else "targets"
                raise DataError(
                    f"an example must have {expected} {what}, as its task says, the shard has {flat.shape[1]}"
                )
            found.append(flat[:, start : start + width].astype(np.float64).reshape(-1))
        return np.concatenate(found)

    def count_classes(self, data: Dataset) -> Array:
        """Returns the number of examples of each class, [classes] int64; those without a label are of none.

        Raises:
            DataError: a target is none of the classes.
        """
        if not self.classes:
            return np.zeros(0, np.int64)
        unlabelled = data.find_unlabelled()
        targets = data.targets if unlabelled is None else data.targets[~unlabelled]
        if not len(targets):
            return np.zeros(len(self.classes), np.int64)
        if targets.dtype.kind not in "iu" or targets.ndim != 1 or targets.min() < 0:
            raise DataError(f"targets must be numbers of classes, [n] from 0, got {targets.dtype} {targets.shape}")
        if targets.max() >= len(self.classes):
            raise DataError(f"targets must be below {len(self.classes)}, the number of classes, got {targets.max()}")
        return np.bincount(targets, minlength=len(self.classes)).astype(np.int64)


def select_columns(task: Task, text: str, *, by_channel: bool = False, option: str = "strategy.columns") -> Columns:
    """Returns the columns of a task that a text names, all for an empty one.

    Names are those of the task's attribute `columns`, else the inputs' numbers from 0; targets that are values are
    called `target`, or `target-0` and so on.

    Args:
        task: whose examples have the columns.
        text: names, numbers and ranges of numbers.
        by_channel: where the task says `channels`, names along the first axis of an example, these are the columns.
        option: that has the text, for messages.

    Raises:
        ConfigError: the task does not say the shape of an example, there is no such column, or they are too many.
    """
    inputs, classes = list_input_columns(task, by_channel=by_channel), list_classes(task)
    num_targets = 0 if classes else _count_target_values(task)
    names = (*inputs.names, *_name_targets(num_targets))
    chosen = _parse_columns(text, names, option) if text.strip() else range(len(names))
    if not 0 < len(chosen) <= MAX_COLUMNS:
        raise ConfigError(
            f"{option} must be 1 to {MAX_COLUMNS} columns at a time, task {task.name} has {len(chosen)}; "
            f"name some, such as 0-{MAX_COLUMNS - 1}"
        )
    return replace(
        inputs,
        names=tuple(names[place] for place in chosen),
        places=tuple(chosen),
        num_targets=num_targets,
        classes=classes,
    )


def list_input_columns(task: Task, *, by_channel: bool = False) -> Columns:
    """Returns all input columns of a task, by channel as `select_columns`, without targets and classes.

    Raises:
        ConfigError: the task does not say the shape of an example.
    """
    size = count_inputs(task)
    channels = getattr(task, "channels", None) if by_channel else None
    names = _name_inputs(task, size) if channels is None else tuple(map(str, channels))
    return Columns(
        names=names,
        places=tuple(range(len(names))),
        num_inputs=len(names),
        num_targets=0,
        classes=(),
        width=size // len(names),
    )


def count_inputs(task: Task) -> int:
    """Returns the numbers of an example's inputs.

    Raises:
        ConfigError: the task does not say it.
    """
    shape = getattr(task, "input_shape", None)
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ConfigError(
            f"task {task.name} must say the shape of one example: input_shape = (8, 8), got {shape!r:.60}"
        )
    if math.prod(shape) > MAX_EXAMPLE_NUMBERS:
        raise ConfigError(f"an example must have at most {MAX_EXAMPLE_NUMBERS} numbers, got input_shape = {shape!r}")
    return math.prod(shape)


def list_classes(task: Task) -> tuple[str, ...]:
    """Returns the names of a task's classes, their numbers where it has none; nothing where targets are values."""
    if not has_classes(task):
        return ()
    labels = tuple(map(str, getattr(task, "labels", ())))
    return labels or tuple(map(str, range(count_targets(task))))


def count_targets(task: Task) -> int:
    """Returns the numbers of an example's target, or of classes: the task's `num_outputs`, or its model's."""
    of_model = getattr(getattr(task, "model", None), "num_outputs", None)
    found = getattr(task, "num_outputs", None) or of_model or 1
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 1


def _count_target_values(task: Task) -> int:
    """Returns the numbers of values of a target: one for all quantiles, none with several losses."""
    loss, count = find_loss(task), count_targets(task)
    if isinstance(loss, Reconstruction | MultiTask):
        return 0
    return count // len(loss.quantiles) if isinstance(loss, Quantile) else count


def _name_inputs(task: Task, num_inputs: int) -> tuple[str, ...]:
    """Returns the names of the inputs: the task's `columns`, else their numbers from 0.

    Raises:
        ConfigError: `columns` are no such names.
    """
    columns = getattr(task, "columns", None)
    if columns is None:
        return tuple(map(str, range(num_inputs)))
    names = tuple(map(str, columns)) if isinstance(columns, Sequence) and not isinstance(columns, str) else ()
    if len(names) != num_inputs or len(set(names)) < num_inputs:
        raise ConfigError(
            f"task {task.name}: columns must be {num_inputs} different names, one for each number of input_shape, "
            f"got {columns!r:.80}"
        )
    return names


def _name_targets(num_targets: int) -> tuple[str, ...]:
    return (TARGET,) if num_targets == 1 else tuple(f"{TARGET}-{number}" for number in range(num_targets))


def _parse_columns(text: str, names: Sequence[str], option: str) -> list[int]:
    places: dict[int, None] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        found = _RANGE.fullmatch(part)
        if part in names:
            places[names.index(part)] = None
        elif part.isascii() and part.isdigit() and int(part) < len(names):
            places[int(part)] = None
        elif found is not None and int(found[1]) <= int(found[2]) < len(names):
            places |= dict.fromkeys(range(int(found[1]), int(found[2]) + 1))
        else:
            similar = None if part[:1].isdigit() else find_similar(part, names)
            hint = f"did you mean {similar}?" if similar else f"there are {len(names)}, {names[0]} to {names[-1]}"
            raise ConfigError(f"{option}: there is no column {format_name(part)}; {hint}")
    return list(places)
