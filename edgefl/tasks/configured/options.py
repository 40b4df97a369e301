"""Options of configured tasks, checked: lists and numbers of a run file, and what a model is to predict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from edgefl.core.errors import ConfigError
from edgefl.core.safe_text import is_safe_text
from edgefl.core.types import Array, Dataset, Scalar, Task
from edgefl.tasks.augmentation import Augment
from edgefl.tasks.classification import TrainableModel
from edgefl.tasks.losses.registry import CLASS_LOSSES, make_loss
from edgefl.tasks.losses.torch_only_losses import TorchOnlyLoss
from edgefl.tasks.losses.value_losses import AbsoluteError, Huber, Quantile, Reconstruction, SquaredError
from edgefl.tasks.metrics.registry import make_metric

Names = str | tuple[str, ...]
"""An option that is a list of names: in a run file a list, or one text with commas."""
Numbers = str | int | float | tuple[float, ...]
"""An option that is a list of numbers, likewise, or one number."""

MAX_COLUMNS, MAX_LABELS, MAX_TARGETS = 4096, 1000, 256
MAX_NAME_CHARS = 100
NORMALISE, FLEET, OF_RUN = "normalise", "fleet", "run:"
"""An option, and its values: the fleet's means and scales, and those of a run by its id."""
NORMALISED_TASKS = frozenset({"series", "table"})
"""Tasks that have it."""
MAX_HIDDEN_LAYERS, MAX_HIDDEN = 4, 4096
MAX_PARAMETERS = 20_000_000
VALUE_METRICS, DISTANCES = ("rmse", "r2"), (SquaredError, AbsoluteError, Huber)
"""Metrics of values where the run file names none and the loss is one of these distances to them."""
_RANGE = re.compile(r"(.*?)(\d{1,6})\.\.(\d{1,6})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a model predicts: one of `labels`, or values, or its own input.

    `loss` is None for the usual one of classes, `metrics` are names and directions, None for none. Of several targets
    with a loss each, losses, their weights and the numbers of outputs are by name.
    """

    labels: tuple[str, ...]
    loss: str | Mapping[str, str] | None
    metrics: Mapping[str, str] | None
    num_outputs: int | Mapping[str, int]
    loss_weights: Mapping[str, float] | None = None

    @property
    def total_outputs(self) -> int:
        """Outputs of an example in all."""
        return self.num_outputs if isinstance(self.num_outputs, int) else sum(self.num_outputs.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredTask(Task):
    """A task whose options say all of it.

    Attributes:
        name: that of the run file, such as `table`.
        model: in NumPy or torch.
        input_shape: of one example as `read` gives it.
        goal: what the model predicts.
        reader: returns the data at a path.
        defaults: of the plan.
        shard_options: those options that decide what `read` returns, for cards of cut shards.
        columns: names of the inputs, where each has one.
        channels: names along the first axis of an example, where it has more axes.
        input_reader: returns the inputs of a file without targets, where they are no numbers in it.
        input_suffixes: of such files, in lower case.
        text_converter: returns the inputs of texts, where examples are texts.
        augment: changes a batch that is trained on; None for no change.
        example_rows: of a table, of which one example is made; 0 where examples are no rows of numbers.
        split_period: of a split by time, None for one by example.
    """

    name: str
    model: TrainableModel
    input_shape: tuple[int, ...]
    goal: Goal
    reader: Callable[[Path], Dataset]
    defaults: Mapping[str, Scalar]
    shard_options: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    channels: tuple[str, ...] | None = None
    input_reader: Callable[[Path], Array] | None = None
    input_suffixes: tuple[str, ...] = ()
    text_converter: Callable[[Sequence[str]], Array] | None = None
    augment: Augment | None = None
    example_rows: int = 0
    split_period: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        return self.goal.labels

    @property
    def loss(self) -> str | Mapping[str, str] | None:
        return self.goal.loss

    @property
    def loss_weights(self) -> Mapping[str, float] | None:
        return self.goal.loss_weights

    @property
    def metrics(self) -> Mapping[str, str] | None:
        return self.goal.metrics

    @property
    def num_outputs(self) -> int | Mapping[str, int]:
        return self.goal.num_outputs

    def read(self, path: str) -> Dataset:
        return self.reader(Path(path))


def split_names(task: str, option: str, value: Names, *, at_most: int, at_least: int = 1) -> tuple[str, ...]:
    """Returns the names of a list; `pixel_0..63` stands for 64 of them.

    Raises:
        ConfigError: too few or too many, a name twice, an empty one, or one that is no line of text.
    """
    names: list[str] = []
    for part in (str(part).strip() for part in (_split(value) if value else ())):
        names += _expand_range(task, option, part, at_most - len(names))
        if len(names) > at_most:
            raise ConfigError(f"task.{option}: task {task} takes at most {at_most} of them")
        if not part or len(part) > MAX_NAME_CHARS or not is_safe_text(part):
            raise ConfigError(
                f"task.{option} must hold names of 1 to {MAX_NAME_CHARS} characters, got {part[:MAX_NAME_CHARS]!a}"
            )
    if len(names) < at_least:
        raise ConfigError(f"task.{option} must name at least {at_least}, got {', '.join(names) or 'none'}")
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ConfigError(f"task.{option} names {twice!r} twice")
    return tuple(names)


def split_numbers(task: str, option: str, value: Numbers, *, count: int, above: float = -np.inf) -> Array:
    """Returns [count] float32; one number stands for all.

    Raises:
        ConfigError: another count, or a number that is not finite or not above `above`.
    """
    parts = _split(value)
    try:
        numbers = np.array([float(part) for part in parts], np.float32)
    except (ValueError, OverflowError):
        raise ConfigError(f"task.{option} must be numbers, got {str(value)[:MAX_NAME_CHARS]!r}") from None
    if len(numbers) not in {1, count}:
        raise ConfigError(f"task.{option}: task {task} takes one number, or {count}, got {len(numbers)}")
    if wrong := [number for number in numbers.tolist() if not (np.isfinite(number) and number > above)]:
        limit = "" if above == -np.inf else f" and above {above:g}"
        raise ConfigError(f"task.{option} must be finite{limit}, got {wrong[0]:g}")
    return np.full(count, numbers[0], np.float32) if len(numbers) == 1 else numbers


def split_sizes(option: str, value: Numbers) -> tuple[int, ...]:
    """Returns the sizes of hidden layers.

    Raises:
        ConfigError: too many, or a size out of range.
    """
    parts = _split(value)
    texts = [str(part).strip() for part in parts]
    sizes = [int(text) for text in texts if re.fullmatch(r"[0-9]{1,6}", text)]
    is_right = len(sizes) == len(texts) <= MAX_HIDDEN_LAYERS and all(1 <= size <= MAX_HIDDEN for size in sizes)
    if not is_right:
        raise ConfigError(
            f"task.{option} must be 1 to {MAX_HIDDEN_LAYERS} whole numbers from 1 to {MAX_HIDDEN}, "
            f"got {str(value)[:MAX_NAME_CHARS]!r}"
        )
    return tuple(sizes)


def check_range(option: str, value: float, low: float, high: float) -> None:
    """Raises a `ConfigError` where a number is out of its range."""
    if not low <= value <= high:
        raise ConfigError(f"task.{option} must be from {low:g} to {high:g}, got {value:g}")


def make_goal(
    task: str, *, labels: Names, loss: Names, metrics: Names, num_values: int = 0, num_inputs: int = 0
) -> Goal:
    """Returns what a task predicts.

    Args:
        task: its name.
        labels: names of classes; empty for values.
        loss: by name; empty for cross-entropy of classes and mse of values.
        metrics: names; empty for `VALUE_METRICS` of values with a distance as loss, else none.
        num_values: values of an example, where it is no class.
        num_inputs: numbers of an example's input, which a reconstruction gives back; 0 where all have classes.

    Raises:
        ConfigError: they do not fit each other, or one does not exist.
    """
    loss = loss if isinstance(loss, str) else ",".join(loss)
    has_classes = labels or not num_inputs
    classes = split_names(task, "labels", labels, at_most=MAX_LABELS, at_least=2) if has_classes else ()
    found = make_loss(loss or ("cross-entropy" if classes else "mse"))
    if isinstance(found, TorchOnlyLoss):
        raise ConfigError(f"task.loss = {loss!r} is for a task of your own, with a network of torch")
    if classes and found.name not in CLASS_LOSSES:
        raise ConfigError(f"task.loss must be {' or '.join(CLASS_LOSSES)} where there are labels, got {loss!r}")
    if not classes and found.name == "cross-entropy":
        raise ConfigError(f"task.labels must name the classes of task {task}: cross-entropy is a loss of classes")
    if isinstance(found, Reconstruction):
        if num_values:
            raise ConfigError("task.target means nothing with a reconstruction, which has none; leave it out")
        return Goal(labels=(), loss=loss, metrics=_find_directions(task, metrics, ()), num_outputs=num_inputs)
    if not classes and not num_values:
        raise ConfigError(f"task.target must name the column that task {task} predicts, or loss be reconstruction")
    num_quantiles = len(found.quantiles) if isinstance(found, Quantile) else 1
    if num_quantiles > 1 and num_values > 1:
        raise ConfigError(
            f"task.loss = {loss!r} has {num_quantiles} quantiles, which are for one target value, got {num_values}"
        )
    names = metrics or (VALUE_METRICS if isinstance(found, DISTANCES) and not classes else ())
    return Goal(
        labels=classes,
        loss=None if classes and not loss else loss or "mse",
        metrics=_find_directions(task, names, classes),
        num_outputs=len(classes) or num_values * num_quantiles,
    )


def check_normalise(value: str) -> None:
    """Checks the option `normalise`.

    Raises:
        ConfigError: it is none of its values.
    """
    is_run = value.startswith(OF_RUN) and len(value) > len(OF_RUN)
    if value not in {"", FLEET} and not is_run:
        raise ConfigError(f'task.{NORMALISE} must be "{FLEET}", or "{OF_RUN}ID" of an earlier run, got {value!r:.60}')


def check_size(task: str, model: TrainableModel) -> None:
    """Checks that a model is one for a board.

    Raises:
        ConfigError: it has too many parameters.
    """
    count = sum(spec.size for spec in model.shapes())
    if count > MAX_PARAMETERS:
        raise ConfigError(
            f"the model of task {task} has {count:,} parameters, at most are {MAX_PARAMETERS:,}; take a smaller "
            "window, size or hidden"
        )


def format_options(**options: object) -> Mapping[str, str]:
    """Returns options as a card has them: a list as one text."""
    return {
        name: ",".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in options.items()
    }


def _split(value: Names | Numbers) -> Sequence[str | float]:
    if isinstance(value, str):
        return value.split(",")
    return (value,) if isinstance(value, int | float) else value


def _expand_range(task: str, option: str, name: str, room: int) -> Sequence[str]:
    match = _RANGE.fullmatch(name)
    if match is None:
        return (name,)
    start, stop = int(match[2]), int(match[3])
    if stop < start:
        raise ConfigError(f"task.{option}: {name!r} must count upwards")
    if stop - start >= room:
        raise ConfigError(f"task.{option}: {name!r} are {stop - start + 1} more; task {task} takes not so many")
    width = len(match[2]) if match[2].startswith("0") else 0
    return [f"{match[1]}{number:0{width}}" for number in range(start, stop + 1)]


def _find_directions(task: str, names: Names, labels: tuple[str, ...]) -> Mapping[str, str] | None:
    if not names:
        return None
    chosen = split_names(task, "metrics", names, at_most=16)
    return MappingProxyType({name: make_metric(name, labels).direction for name in chosen})
