"""Mean and scale of each input column over a fleet: exact sums of all boards, and bounds on what one can do."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from edgefl.core.analyses import BoardSums, ColumnScalesSettings
from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Task, Tensors
from edgefl.tasks.analyses.analysis import Analysis, make_exact_spec, pack_result
from edgefl.tasks.analyses.columns import list_input_columns
from edgefl.tasks.analyses.moments import MAX_ROWS, can_be_sums, sum_powers
from edgefl.tasks.analyses.summaries import compute_root
from edgefl.tasks.configured.options import MAX_COLUMNS
from edgefl.tasks.metrics.exact_sums import WIDTH, is_carried_on, read_sum

FORMAT_VERSION = 1
MAX_INPUT = int(np.finfo(np.float32).max)
MAX_RATIO = 10
"""Of a board's spread to the median board's, and of the scale to it either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardColumn:
    """What a board says of a column.

    Attributes:
        count: its values, at least 1.
        mean: of them.
        mean_square: mean of their squares.
    """

    count: int
    mean: Fraction
    mean_square: Fraction

    def measure_spread(self, centre: Fraction) -> float:
        """Returns the root of the mean squared distance from a centre."""
        return compute_root(max(self.mean_square - 2 * centre * self.mean + centre * centre, Fraction(0)))


class ColumnScales(Analysis):
    """Means and scales of a task's input columns, or channels, in one round.

    The sums are those of all examples that boards train on, as exact as of `statistics`; see `pool_boards` for what
    is left out.
    """

    is_of_whole_shard = False
    has_task_model = False

    def __init__(self, task: Task, settings: ColumnScalesSettings) -> None:
        """Raises ConfigError: the task does not say the shape of an example, or has too many columns."""
        self._task_name, self._min_group = task.name, settings.min_group
        self.columns = list_input_columns(task, by_channel=True)
        if (count := len(self.columns.names)) > MAX_COLUMNS:
            raise ConfigError(f"column-scales takes at most {MAX_COLUMNS} columns, task {task.name} has {count}")
        self.request_spec = (make_exact_spec("none", 1),)
        self.sums_spec = (make_exact_spec("counts", count), make_exact_spec("sums", count, 2, WIDTH))

    def make_model(self) -> dict[str, Array]:
        return pack_result({})

    def make_request(self, model: Tensors) -> dict[str, Array]:  # noqa: ARG002 boards need nothing but the question
        return {"none": np.zeros(1, np.int64)}

    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:  # noqa: ARG002 likewise
        """Returns the sums; zeros of a shard, and of a column, of fewer examples than `min_group`."""
        sums = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.sums_spec}
        if len(data) < self._min_group:
            return sums
        for column in range(len(self.columns.names)):
            values = self.columns.read(data, column)
            values = values[np.abs(values) <= MAX_INPUT]
            if len(values) < self._min_group:
                continue
            sums["counts"][column] = len(values)
            sums["sums"][column] = sum_powers(values)
        return sums

    def find_fault(self, sums: Tensors) -> str | None:
        counts, powers = np.asarray(sums["counts"]), np.asarray(sums["sums"])
        if bool(((counts < 0) | (counts > MAX_ROWS)).any()):
            return f"a column must have 0 to {MAX_ROWS} values, got {int(counts.min())} to {int(counts.max())}"
        if not is_carried_on(powers):
            return "its sums are none of finite numbers"
        for name, count, column in zip(self.columns.names, map(int, counts), powers, strict=True):
            total, squares = read_sum(column[0]), read_sum(column[1])
            assert total is not None
            assert squares is not None
            if not can_be_sums(count, total, squares):
                return f"sum and squares of column {name} are those of no {count} values"
            if squares > count * MAX_INPUT**2:
                return (
                    f"a column of inputs has finite numbers of single precision, the squares of {name} add up to more"
                )
        return None

    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:  # noqa: ARG002 one round
        """Returns the result: mean and scale of each column, and the boards that were left out of it."""
        reports: list[dict[str, BoardColumn]] = [{} for _ in self.columns.names]
        for board in boards:
            counts, powers = np.asarray(board.sums["counts"]), np.asarray(board.sums["sums"])
            for column in map(int, np.flatnonzero(counts)):
                reports[column][board.device_id] = _read_column(int(counts[column]), powers[column])
        if not any(reports):
            return pack_result({"v": FORMAT_VERSION, "min_group": self._min_group, "columns": []})
        columns = [
            {"name": name, **pool_boards(found)} for name, found in zip(self.columns.names, reports, strict=True)
        ]
        return pack_result(
            {"v": FORMAT_VERSION, "task": self._task_name, "min_group": self._min_group, "columns": columns}
        )


def pool_boards(boards: Mapping[str, BoardColumn]) -> dict[str, Any]:
    """Returns count, mean and scale of a column over boards, and the names of those that were left out.

    The centre is the median of the boards' means; a board's spread is the root of the mean squared distance of its
    values from there, and the unit is the median of the spreads, of two the larger. Each board has one vote in both,
    whatever it says of its number. A board whose spread is more than `MAX_RATIO` units is left out; of the others all
    values count, exactly. The scale is their standard deviation, over n, at least 1 / `MAX_RATIO` and at most
    `MAX_RATIO` units.

    The mean lies within `MAX_RATIO` units of the centre. Centre and unit lie between those of honest boards, while
    fewer than half of the boards lie. Where more than half have one and the same value, those of others are left out,
    and the scale is 1.

    Args:
        boards: what each says of the column; none for a mean of 0 and a scale of 1.
    """
    if not boards:
        return {"count": 0, "mean": 0.0, "scale": 1.0, "left_out": []}
    centre = statistics.median_low(board.mean for board in boards.values())
    spreads = {name: board.measure_spread(centre) for name, board in boards.items()}
    unit = statistics.median_high(spreads.values())
    kept = [board for name, board in boards.items() if spreads[name] <= MAX_RATIO * unit]
    count = sum(board.count for board in kept)
    mean = sum((board.count * board.mean for board in kept), Fraction(0)) / count
    mean_square = sum((board.count * board.mean_square for board in kept), Fraction(0)) / count
    deviation = compute_root(max(mean_square - mean * mean, Fraction(0)))
    deviation = min(max(deviation, unit / MAX_RATIO), MAX_RATIO * unit)
    return {
        "count": count,
        "mean": float(mean),
        "scale": to_divisor(deviation),
        "left_out": [name for name in boards if spreads[name] > MAX_RATIO * unit],
    }


def to_divisor(deviation: float) -> float:
    """Returns the deviation, or 1 where it is nothing in single precision, in which inputs are divided."""
    return deviation if deviation >= float(np.finfo(np.float32).tiny) else 1.0


def _read_column(count: int, sums: Array) -> BoardColumn:
    total, squares = read_sum(sums[0]), read_sum(sums[1])
    assert total is not None
    assert squares is not None
    return BoardColumn(count=count, mean=total / count, mean_square=squares / count)
