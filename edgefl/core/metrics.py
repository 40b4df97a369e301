"""Metrics: what is measured on a part of the examples adds up to what is measured on all of them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgefl.core.errors import ConfigError, TaskError

log = logging.getLogger(__name__)

Array = NDArray[Any]
Sums = Mapping[str, Array]
"""A metric's sufficient statistic: int64 and float64 arrays by name, which are added entry by entry."""
Direction = Literal["min", "max"]
"""Whether less or more of a metric is better."""
TYPES = ("<i8", "<f8")
"""Types of the arrays of sums, as NumPy writes them: int64 and float64."""
NUMBER_BYTES = 8
MAX_METRICS = 16
MAX_REPLY_METRICS = 32
"""Of a reply of a Flower app, and of a round of one."""
MAX_SUM_BYTES = 1 << 20
"""Maximum bytes of the sums of all metrics of a task."""
MAX_SUM = 2.0**48
"""Maximum of a number in the sums of one device: those of 32,000 devices can be added."""
_MAIN_REPLY_METRICS = frozenset(
    f"{prefix}{word}" for prefix in ("", "eval_", "eval-", "train_", "train-") for word in ("loss", "accuracy")
)
_SumLayout = tuple[str, str, str, tuple[int, ...]]
"""Metric, name, type and shape of one array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyMetrics:
    """What a Flower app's reply says of itself.

    Attributes:
        is_evaluation: it answers an evaluation.
        num_examples: at least 0.
        loss, accuracy: None where it names none.
        values: all of its finite metrics by name, at most `MAX_REPLY_METRICS`.
    """

    is_evaluation: bool
    num_examples: int = 0
    loss: float | None = None
    accuracy: float | None = None
    values: Mapping[str, float] = field(default_factory=dict)


def rank_reply_metric(name: str, count: int = 1) -> tuple[bool, int, str]:
    """Returns a sort key by which losses and accuracies come first, then what most replies have."""
    return name not in _MAIN_REPLY_METRICS, -count, name


class Metric(ABC):
    """A figure of a model's outputs, from sums over any parts of the examples: batches, devices, rounds.

    Attributes:
        direction: whether less (`min`) or more (`max`) is better.
    """

    direction: Direction

    @abstractmethod
    def partial(self, outputs: Array, targets: Array, weights: Array | None = None) -> dict[str, Array]:
        """Returns the sums over some examples, none included.

        Args:
            outputs: [n, outputs, ...] or [n], as the model returns them: logits, or predicted values.
            targets: [n, ...] classes or values.
            weights: [n] non-negative weights of the examples; None for 1 each.

        Returns:
            int64 and float64 arrays, whose names and shapes depend on the number of outputs alone. Those of no
            example are neutral: zeros.

        Raises:
            TaskError: outputs and targets do not fit each other or the metric.
        """

    @abstractmethod
    def combine(self, sums: Sums) -> float:
        """Returns the value on all examples that the sums are of; NaN where there is none, never an infinity."""


def add_sums(first: Sums, second: Sums) -> dict[str, Array]:
    """Returns the sums over the examples of both.

    Raises:
        TaskError: names, shapes or types differ, so they are not of one metric and one model.
    """
    layouts = [{name: (each.dtype.str, each.shape) for name, each in sums.items()} for sums in (first, second)]
    if layouts[0] != layouts[1]:
        raise TaskError(f"sums of a metric must have one layout to be added, got {layouts[0]} and {layouts[1]}")
    return {name: np.asarray(first[name] + second[name]) for name in first}


def compute_sums(
    metrics: Mapping[str, Metric], batches: Iterable[tuple[Array, Array, Array | None]]
) -> dict[str, dict[str, Array]]:
    """Returns each metric's sums over batches of outputs, targets and weights; `metrics` are by name.

    Raises:
        TaskError: a batch does not fit a metric, or sums are no int64 or float64 arrays of one layout.
    """
    totals: dict[str, dict[str, Array]] = {}
    for outputs, targets, weights in batches:
        for name, metric in metrics.items():
            sums = metric.partial(outputs, targets, weights)
            _check_types(name, sums)
            totals[name] = add_sums(totals[name], sums) if name in totals else sums
    return totals


def _check_types(name: str, sums: Mapping[str, object]) -> None:
    for key, value in sums.items():
        if not isinstance(value, np.ndarray) or value.dtype.str not in TYPES:
            found = getattr(value, "dtype", type(value).__name__)
            raise TaskError(f"metric {name}: {key} of its sums must be an array of int64 or float64, got {found}")


@dataclass(frozen=True, slots=True)
class MetricSet:
    """The metrics of a task, and the layout of their sums: arrays in order, 8 bytes a number, little-endian.

    Attributes:
        metrics: by name; the first says which model is the best.
        layout: of the sums of all of them.
        is_of_inputs: the model gives back its own input, which takes the place of a target.
    """

    metrics: Mapping[str, Metric] = field(default_factory=dict)
    layout: tuple[_SumLayout, ...] = ()
    is_of_inputs: bool = False

    def __bool__(self) -> bool:
        return bool(self.metrics)

    @property
    def num_bytes(self) -> int:
        """Bytes of encoded sums."""
        return sum(NUMBER_BYTES * _count_numbers(shape) for *_, shape in self.layout)

    def encode(self, sums: Mapping[str, Sums]) -> bytes:
        """Returns sums for the wire.

        Raises:
            TaskError: they have another layout, so the model has other outputs than its task says.
        """
        found = _list_layout(sums)
        if found != self.layout:
            raise TaskError(
                f"metrics are for sums {_format_layout(self.layout)}, the model makes {_format_layout(found)}; "
                "num_outputs of the task must be the number of the model's outputs"
            )
        return b"".join(sums[name][key].tobytes() for name, key, *_ in self.layout)

    def decode(self, body: bytes) -> dict[str, dict[str, Array]]:
        """Returns sums that a device sent.

        Raises:
            ValueError: they are not as long as the task's metrics say, or hold a number that no device can have.
        """
        if len(body) != self.num_bytes:
            raise ValueError(f"its sums of metrics are {len(body)} bytes, {self.num_bytes} were asked for")
        sums: dict[str, dict[str, Array]] = {name: {} for name in self.metrics}
        start = 0
        for name, key, dtype, shape in self.layout:
            array = np.frombuffer(body, dtype, _count_numbers(shape), start).reshape(shape)
            if not np.all((array >= -MAX_SUM) & (array <= MAX_SUM)):
                raise ValueError(f"its sums of metric {name} hold a number beyond {MAX_SUM:.0f}, or none")
            sums[name][key], start = array, start + array.nbytes
        return sums

    def add(self, bodies: Sequence[bytes]) -> bytes:
        """Returns the sums of all examples that these are of, for the wire.

        Raises:
            ValueError: as `decode`; the same where the numbers of all are beyond what one device can have.
        """
        totals: dict[str, dict[str, Array]] = {}
        for body in bodies:
            sums = self.decode(body)
            totals = {name: add_sums(totals[name], each) for name, each in sums.items()} if totals else sums
        encoded = self.encode(totals) if totals else b""
        if encoded:
            self.decode(encoded)
        return encoded

    def compute_quality(self, values: Mapping[str, float]) -> float | None:
        """Returns the first metric, negative where less is better; None where it has no value."""
        for name, metric in self.metrics.items():
            if name not in values:
                return None
            return values[name] if metric.direction == "max" else -values[name]
        return None

    def combine(self, bodies: Sequence[bytes]) -> dict[str, float]:
        """Returns the metrics, by name, of all examples that these sums are of; those without a value are left out.

        Raises:
            ValueError: as `decode`.
        """
        values = {}
        totals = [self.decode(body) for body in bodies]
        for name, metric in self.metrics.items() if totals else ():
            total: Sums = totals[0][name]
            for more in totals[1:]:
                total = add_sums(total, more[name])
            if isfinite(value := _combine(name, metric, total)):
                values[name] = value
        return values


def _combine(name: str, metric: Metric, sums: Sums) -> float:
    try:
        return float(metric.combine(sums))
    except Exception as error:  # noqa: BLE001 another author's metric meets sums that only a liar has; runs go on
        log.warning("metric %s has no value: %s: %s", name, type(error).__name__, error)
        return nan


NO_METRICS = MetricSet(MappingProxyType({}))


def make_metric_set(metrics: Mapping[str, Metric], num_outputs: int, targets: Array) -> MetricSet:
    """Returns the metrics of a task whose model has so many outputs.

    Args:
        metrics: by name.
        num_outputs: of an example.
        targets: of no example, as the task has them.

    Raises:
        ConfigError: their sums are too many, or a metric cannot do with no example.
    """
    outputs = np.zeros((0, num_outputs), np.float32)
    try:
        layout = _list_layout(compute_sums(metrics, [(outputs, targets, None)]))
    except Exception as error:  # another author's metric may raise anything
        raise ConfigError(f"a metric must return sums of no example: {type(error).__name__}: {error}") from error
    made = MetricSet(metrics, layout)
    if len(metrics) > MAX_METRICS or made.num_bytes > MAX_SUM_BYTES:
        raise ConfigError(
            f"metrics must be at most {MAX_METRICS} with sums of at most {MAX_SUM_BYTES} bytes, got {len(metrics)} "
            f"with {made.num_bytes}"
        )
    return made


def _list_layout(sums: Mapping[str, Sums]) -> tuple[_SumLayout, ...]:
    return tuple(
        (name, key, arrays[key].dtype.str, arrays[key].shape)
        for name, arrays in sums.items()
        for key in sorted(arrays)
    )


def _format_layout(layout: Sequence[_SumLayout]) -> str:
    return ", ".join(f"{name}.{key} {list(shape)}" for name, key, _, shape in layout)


def _count_numbers(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
