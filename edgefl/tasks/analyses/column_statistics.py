"""Statistics of columns and classes: what a board sums for them, and their text as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from edgefl.core.analyses import BoardSums, StatisticsSettings
from edgefl.core.errors import ConfigError
from edgefl.core.types import Array, Dataset, Task, Tensors
from edgefl.tasks.analyses.analysis import Analysis, make_exact_spec, pack_result, read_result
from edgefl.tasks.analyses.columns import select_columns
from edgefl.tasks.analyses.grouping import compute_extremes, count_cells, hide_small_counts
from edgefl.tasks.analyses.moments import MAX_ROWS, MAX_VALUE, SLACK, sum_powers
from edgefl.tasks.analyses.summaries import describe_column, describe_histogram
from edgefl.tasks.metrics.exact_sums import WIDTH, is_carried_on, read_sum

FORMAT_VERSION = 1
MAX_NUMBERS = 1 << 22
"""Numbers in the histograms of a board."""


class ColumnStatistics(Analysis):
    """Statistics of a task's columns in two rounds: the second knows from where to where the histograms go.

    The model is the text of the result; boards are sent the range of each column in it.
    """

    is_of_whole_shard = True
    has_task_model = False

    def __init__(self, task: Task, settings: StatisticsSettings) -> None:
        """Raises ConfigError: the columns are not there or too many, or have too many cells."""
        self._task_name, self._settings = task.name, settings
        self.columns = select_columns(task, settings.columns)
        count, cells = len(self.columns.names), settings.cells
        if count * cells > MAX_NUMBERS:
            raise ConfigError(
                f"strategy.cells must be at most {MAX_NUMBERS // count} for {count} columns, got {cells}; "
                "or name fewer columns"
            )
        self.request_spec = (make_exact_spec("range", count, 2, dtype="float64"),)
        classes = len(self.columns.classes)
        self.sums_spec = (
            make_exact_spec("rows", 1),
            *([make_exact_spec("classes", classes)] if classes else []),
            make_exact_spec("counts", count, 2),
            make_exact_spec("sums", count, 2, WIDTH),
            make_exact_spec("extremes", count, 2, dtype="float64"),
            make_exact_spec("histogram", count, cells),
        )

    def make_model(self) -> dict[str, Array]:
        return pack_result({})

    def make_request(self, model: Tensors) -> dict[str, Array]:
        """Returns the range of each column, [columns, 2]; from 0 to 0 where it is not known yet."""
        ranges = np.zeros(self.request_spec[0].shape)
        for column, found in enumerate(read_result(model).get("columns", ())):
            if found["min"] is not None:
                ranges[column] = found["min"], found["max"]
        return {"range": ranges}

    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:
        """Returns the sums; zeros of a shard, and of a column, of fewer examples than `min_group`."""
        sums = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.sums_spec}
        least, ranges = self._settings.min_group, np.asarray(request["range"])
        classes = self.columns.count_classes(data)
        if len(data) < least:
            return sums
        sums["rows"][0] = len(data)
        if len(classes):
            sums["classes"][:] = hide_small_counts(classes, least)
        for column in range(len(self.columns.names)):
            values = self.columns.read(data, column)
            # What is not finite, or too large, counts as missing: its square has no exact sum.
            ordered = np.sort(values[np.abs(values) < MAX_VALUE])
            if 0 < len(ordered) < least:
                continue
            sums["counts"][column] = len(ordered), len(values) - len(ordered)
            sums["sums"][column] = sum_powers(ordered)
            if len(ordered):
                sums["extremes"][column] = compute_extremes(ordered, least)
                low, high = ranges[column]
                sums["histogram"][column] = count_cells(ordered, low, high, self._settings.cells, least)
        return sums

    def find_fault(self, sums: Tensors) -> str | None:
        arrays = {spec.name: np.asarray(sums[spec.name]) for spec in self.sums_spec}
        whole = [arrays[name] for name in ("rows", "counts", "histogram", "classes") if name in arrays]
        if any(bool(((array < 0) | (array > MAX_ROWS)).any()) for array in whole):
            return f"its statistics count less than 0 or more than {MAX_ROWS} examples"
        if "classes" in arrays and int(arrays["classes"].sum()) > int(arrays["rows"][0]):
            return f"its classes have {int(arrays['classes'].sum())} examples, it has {int(arrays['rows'][0])}"
        if not is_carried_on(arrays["sums"]):
            return "its sums are none of finite numbers"
        columns = range(len(self.columns.names))
        return next(filter(None, (self._find_fault_of_column(arrays, column) for column in columns)), None)

    def _find_fault_of_column(self, sums: Mapping[str, Array], column: int) -> str | None:
        (present, missing), rows, name = (
            map(int, sums["counts"][column]),
            int(sums["rows"][0]),
            self.columns.names[column],
        )
        if present + missing not in (0, rows):
            return f"column {name} has {present} values and lacks {missing}, of {rows} examples"
        if int(sums["histogram"][column].sum()) != present:
            return f"the histogram of column {name} is not of its {present} values"
        if not _fit(present, sums["sums"][column], sums["extremes"][column]):
            return f"sum, squares and extremes of column {name} are those of no {present} values"
        return None

    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:
        """Returns the result, all of these answers; the model only says where the cells of histograms are."""
        has_ranges, ranges = bool(read_result(model)), self.make_request(model)["range"]
        total = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.sums_spec if spec.name != "extremes"}
        columns = len(self.columns.names)
        extremes, num_boards = np.full((columns, 2), np.nan), np.zeros(columns, np.int64)
        rows = []
        for board in boards:
            total = {name: array + np.asarray(board.sums[name]) for name, array in total.items()}
            has_values = np.asarray(board.sums["counts"])[:, 0] > 0
            ends = np.where(has_values[:, None], np.asarray(board.sums["extremes"]), np.nan)
            extremes[:, 0] = np.fmin(extremes[:, 0], ends[:, 0])
            extremes[:, 1] = np.fmax(extremes[:, 1], ends[:, 1])
            num_boards += has_values
            rows.append({"device_id": board.device_id, **self._describe(board.sums, ends)})
        result = {
            "v": FORMAT_VERSION,
            "task": self._task_name,
            "min_group": self._settings.min_group,
            **self._describe(total, extremes),
            "boards": rows,
        }
        for column, found in enumerate(result["columns"]):
            found["boards"] = int(num_boards[column])
            if has_ranges and found["count"]:
                low, high = map(float, ranges[column])
                rank_error = int(num_boards[column]) * (self._settings.min_group - 1)
                found.update(describe_histogram(total["histogram"][column], low, high, rank_error))
        return pack_result(result)

    def _describe(self, sums: Tensors, extremes: Array) -> dict[str, Any]:
        """Returns the figures of one board, or of all."""
        counts, powers = np.asarray(sums["counts"]), np.asarray(sums["sums"])
        found: dict[str, Any] = {"rows": int(np.asarray(sums["rows"])[0])}
        if self.columns.classes:
            counted = map(int, np.asarray(sums["classes"]))
            found["classes"] = dict(zip(self.columns.classes, counted, strict=True))
        found["columns"] = [
            describe_column(name, counts[column], powers[column], extremes[column])
            for column, name in enumerate(self.columns.names)
        ]
        return found


def _fit(count: int, sums: Array, extremes: Array) -> bool:
    """Returns whether some `count` values have these sums, [2, WIDTH], and extremes, [2]."""
    total, squares = read_sum(sums[0]), read_sum(sums[1])
    if total is None or squares is None or not bool((np.abs(extremes) < MAX_VALUE).all()):
        return False
    if not count:
        return total == squares == 0
    low, high = (Fraction(float(end)) for end in extremes)
    mean, slack = total / count, SLACK + max(abs(low), abs(high)) / 10**9
    return low <= high and low - slack <= mean <= high + slack and squares / count + SLACK >= mean * mean
