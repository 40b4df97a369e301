"""Gradient-boosted trees: boards send histograms of gradients over common bins, the coordinator chooses splits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from edgefl.core.analyses import BoardSums, BoostedTreesSettings
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.core.types import Array, Dataset, Task, Tensors
from edgefl.tasks.analyses.analysis import Analysis, make_exact_spec, pack_result, read_result
from edgefl.tasks.analyses.columns import count_targets, list_classes, select_columns
from edgefl.tasks.analyses.grouping import compute_extremes, count_cells
from edgefl.tasks.analyses.moments import MAX_ROWS, MAX_VALUE, check_values
from edgefl.tasks.analyses.trees.ensemble import (
    LOGISTIC,
    SQUARED,
    Trees,
    compute_gradients,
    find_bins,
    to_trees,
)
from edgefl.tasks.analyses.trees.growth import Penalties, choose_edges, grow_level
from edgefl.tasks.analyses.trees.histograms import COUNT, UNIT_BITS, find_level_fault, sum_level, to_whole
from edgefl.tasks.losses.multi_task import MultiTask
from edgefl.tasks.losses.registry import find_loss
from edgefl.tasks.losses.value_losses import BinaryCrossEntropy, Poisson, Reconstruction
from edgefl.tasks.metrics.exact_sums import WIDTH, carry_on, is_carried_on, read_sum, sum_exactly

NUM_CELLS = 1024
"""Of the histogram that the edges of a column's bins are chosen from."""
MAX_NUMBERS = 1 << 22
"""In the histogram of a level."""
MAX_REQUEST_BYTES = 1 << 30
"""To each board over a run: every round sends all trees."""
MAX_LOSS = 1e80
NUM_FIRST_ROUNDS = 2
"""Before trees: for the range of each column, then for its bins."""


class BoostedTrees(Analysis):
    """Trees of a task of values (squared error) or of two classes (logistic loss); no model of a task holds them.

    One round for each level of each tree, after two for the bins.
    """

    is_of_whole_shard = False
    has_task_model = False

    def __init__(self, task: Task, settings: BoostedTreesSettings) -> None:
        """Raises ConfigError: the task has other targets, or its histograms or all requests are too large."""
        self._task_name, self._settings = task.name, settings
        self.columns = select_columns(task, settings.columns)
        self._places = [place for place in self.columns.places if place < self.columns.num_inputs]
        if not self._places:
            raise ConfigError(f"strategy.columns = {settings.columns!r:.60} names no input, which trees need")
        self.objective = _find_objective(task)
        size = (2 ** (settings.depth - 1), len(self._places), settings.bins)
        trees = Trees.create(0, settings.depth)
        if 3 * np.prod(size) > MAX_NUMBERS:
            raise ConfigError(
                f"strategy.depth = {settings.depth}, strategy.bins = {settings.bins} and {size[1]} columns make "
                f"{3 * np.prod(size)} numbers, at most {MAX_NUMBERS} are sent; lower one of them"
            )
        inner, nodes = trees.columns.shape[1], trees.values.shape[1]
        self.request_spec = (
            make_exact_spec("progress", 4),
            make_exact_spec("base", 1, dtype="float64"),
            make_exact_spec("ranges", size[1], 2, dtype="float64"),
            make_exact_spec("edges", size[1], settings.bins - 1, dtype="float64"),
            make_exact_spec("columns", settings.trees, inner),
            make_exact_spec("bins", settings.trees, inner),
            make_exact_spec("values", settings.trees, nodes, dtype="float64"),
        )
        num_bytes = settings.num_rounds * sum(8 * math.prod(spec.shape) for spec in self.request_spec)
        if num_bytes > MAX_REQUEST_BYTES:
            raise ConfigError(
                f"strategy.trees = {settings.trees} and strategy.depth = {settings.depth} send each board all trees "
                f"in {settings.num_rounds} rounds, {num_bytes / 1e9:.1f} GB, at most {MAX_REQUEST_BYTES / 1e9:.1f} "
                "GB are sent; lower one of them"
            )
        self.sums_spec = (
            make_exact_spec("targets", 2, WIDTH),
            make_exact_spec("extremes", size[1] + 1, 2, dtype="float64"),
            make_exact_spec("cells", size[1], NUM_CELLS),
            make_exact_spec("histogram", *size, 3),
            make_exact_spec("loss", WIDTH),
        )

    def make_model(self) -> dict[str, Array]:
        return pack_result({})

    def make_request(self, model: Tensors) -> dict[str, Array]:
        """Returns the trees so far, and in `progress`: first rounds that are done, trees, level of the next, unit."""
        request = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.request_spec}
        if found := read_result(model):
            request["progress"][:] = 1 + bool(found["edges"]), found["num_trees"], found["level"], found["unit"]
            request["base"][0], request["ranges"][:] = found["base"], found["ranges"]
            if found["edges"]:
                request["edges"][:] = found["edges"]
                for name, values in found["trees"].items():
                    request[name][:] = values
        return request

    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:
        """Returns ranges in the first round, cells in the second, else the histogram of a level; the rest is zeros.

        Raises:
            DataError: a value is missing: trees are of complete examples.
        """
        sums = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.sums_spec}
        if len(data) < self._settings.min_group:
            return sums
        values, targets = self._read(data)
        stage, num_trees, level, unit = map(int, np.asarray(request["progress"]))
        ranges = np.asarray(request["ranges"])
        if stage == 0:
            sums["targets"][:] = sum_exactly(np.stack([np.ones(len(targets)), targets], axis=1))
        for column, ordered in enumerate(np.sort(np.column_stack([values, targets]), axis=0).T if stage < 2 else ()):
            if stage == 0:
                sums["extremes"][column] = compute_extremes(ordered, self._settings.min_group)
            elif column < len(ranges):
                low, high = ranges[column]
                sums["cells"][column] = count_cells(ordered, low, high, NUM_CELLS, self._settings.min_group)
        if stage < NUM_FIRST_ROUNDS:
            return sums
        bins, trees = find_bins(values, np.asarray(request["edges"])), _read_trees(request)
        predictions = trees.add_up(bins, num_trees, float(np.asarray(request["base"])[0]))
        first, second, losses = compute_gradients(self.objective, predictions, targets)
        sums["loss"][:] = sum_exactly(np.minimum(losses, MAX_LOSS)[:, None])[0]
        nodes = trees.find_nodes(num_trees, bins, level)
        derivatives = to_whole(first, unit), to_whole(second, self._hessian_exponent)
        shape = (2**level, len(self._places), self._settings.bins)
        sums["histogram"][: 2**level] = sum_level(bins, nodes, derivatives, shape, self._settings.min_group)
        return sums

    def find_fault(self, sums: Tensors) -> str | None:
        arrays = {spec.name: np.asarray(sums[spec.name]) for spec in self.sums_spec}
        cells, extremes = arrays["cells"], arrays["extremes"]
        if bool(((cells < 0) | (cells > MAX_ROWS)).any()):
            return f"a cell must have 0 to {MAX_ROWS} examples"
        if not bool(((np.abs(extremes) < MAX_VALUE) & (extremes[:, :1] <= extremes[:, 1:])).all()):
            return "the range of a column is none"
        if not is_carried_on(arrays["targets"]) or not is_carried_on(arrays["loss"]):
            return "its sums are none of finite numbers"
        fault = self._find_target_fault(arrays)
        return fault or find_level_fault(arrays["histogram"], is_squared=self.objective == SQUARED)

    def _find_target_fault(self, sums: Mapping[str, Array]) -> str | None:
        """Returns why no board can have such a count and sum of targets, which the first round alone has."""
        count, of_targets = map(read_sum, sums["targets"])
        assert count is not None
        assert of_targets is not None
        if count == 0:
            is_empty = not of_targets and not sums["extremes"].any()
            return None if is_empty else "its targets have a sum or a range, and there are none"
        least = self._settings.min_group
        if count.denominator != 1 or not least <= count <= MAX_ROWS:
            return f"the number of its targets must be whole, 0 or {least} to {MAX_ROWS}, got {float(count):.6g}"
        if any(sums[name].any() for name in ("cells", "histogram", "loss")):
            return "its targets are of the first round, and other sums of a later one"
        if self.objective == SQUARED:
            limit = Fraction(MAX_VALUE) * count
            is_possible = -limit <= of_targets <= limit
        else:
            is_possible = of_targets.denominator == 1 and 0 <= of_targets <= count
        return None if is_possible else f"no {int(count)} targets have a sum of {float(of_targets):.6g}"

    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:
        """Returns the result with one step more; raises `RunFailedError` where no board has examples enough."""
        found, total = read_result(model), self._add_up(boards)
        if not found:
            return pack_result(self._start(total))
        if not found["edges"]:
            counts, ranges, num_bins = total["cells"], found["ranges"], self._settings.bins
            edges = [
                choose_edges(counts[column], low, high, num_bins).tolist()
                for column, (low, high) in enumerate(ranges)
            ]
            trees = Trees.create(self._settings.trees, self._settings.depth)
            return pack_result({**found, "edges": edges, "trees": _to_lists(trees)})
        return pack_result({**found, **self._grow(found, total)})

    def _start(self, total: Mapping[str, Array]) -> dict[str, Any]:
        """Returns the result after the first round."""
        count, of_targets = read_sum(total["targets"][0]), read_sum(total["targets"][1])
        if not count or of_targets is None:
            raise RunFailedError(f"no board has strategy.min_group = {self._settings.min_group} examples")
        base, unit = float(of_targets / count), -UNIT_BITS
        if self.objective == SQUARED:
            low, high = total["extremes"][-1]
            unit += int(np.frexp(high - low)[1]) if high > low else 0
        elif not 0 < base < 1:
            raise RunFailedError("all examples of the boards are of one class, which needs no tree")
        else:
            base = float(np.log(base) - np.log1p(-base))
        return {
            "v": 1,
            "task": self._task_name,
            "objective": self.objective,
            "columns": [self.columns.names[self.columns.places.index(place)] for place in self._places],
            "places": self._places,
            "count": int(count),
            "base": base,
            "unit": unit,
            "ranges": total["extremes"][:-1].tolist(),
            "edges": [],
            "num_trees": 0,
            "level": 0,
            "losses": [],
        }

    def _grow(self, found: Mapping[str, Any], total: Mapping[str, Array]) -> dict[str, Any]:
        """Returns what a level more changes in the result."""
        trees, tree, level, settings = to_trees(found), found["num_trees"], found["level"], self._settings
        histogram = total["histogram"][: 2**level]
        count, loss, losses = int(histogram[0, 0, :, COUNT].sum()), read_sum(total["loss"]), found["losses"]
        if level == 0 and (not count or loss is None):
            raise RunFailedError(f"no board has strategy.min_group = {settings.min_group} examples any more")
        scales = np.ldexp(1.0, [found["unit"], self._hessian_exponent])
        penalties = Penalties(
            l2=settings.l2,
            min_gain=settings.min_gain,
            min_child_weight=settings.min_child_weight,
            learning_rate=settings.learning_rate,
        )
        grow_level(trees, tree, level, histogram[..., :COUNT] * scales, penalties)
        is_whole = level + 1 == settings.depth
        return {
            "trees": _to_lists(trees),
            "num_trees": tree + is_whole,
            "level": 0 if is_whole else level + 1,
            "losses": losses if level else [*losses, float((loss or Fraction(0)) / count)],
        }

    def _add_up(self, boards: Iterable[BoardSums]) -> dict[str, Array]:
        total = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in self.sums_spec}
        total["extremes"][:] = np.inf, -np.inf
        for board in boards:
            extremes = np.asarray(board.sums["extremes"])
            for name in ("targets", "cells", "histogram", "loss"):
                total[name] = total[name] + np.asarray(board.sums[name])
            if np.asarray(board.sums["targets"]).any():  # else it has too few examples, or it is another round
                total["extremes"][:, 0] = np.minimum(total["extremes"][:, 0], extremes[:, 0])
                total["extremes"][:, 1] = np.maximum(total["extremes"][:, 1], extremes[:, 1])
        carry_on(total["targets"]), carry_on(total["loss"])
        return total

    @property
    def _hessian_exponent(self) -> int:
        return 0 if self.objective == SQUARED else -UNIT_BITS

    def _read(self, data: Dataset) -> tuple[Array, Array]:
        """Returns the columns, [n, columns], and the targets, [n]."""
        chosen = [self.columns.places.index(place) for place in self._places]
        values = np.stack([self.columns.read(data, column) for column in chosen], axis=1)
        check_values(values, "the columns of trees")
        targets = data.targets.reshape(len(data)).astype(np.float64)
        check_values(targets, "targets")
        if self.objective == LOGISTIC:
            self.columns.count_classes(data)
        return values, targets


def _find_objective(task: Task) -> str:
    """Raises ConfigError: the trees' answer would be none of the task's."""
    classes, loss = list_classes(task), find_loss(task)
    if len(classes) == 2:
        return LOGISTIC
    if isinstance(loss, Poisson | BinaryCrossEntropy | Reconstruction | MultiTask):
        raise ConfigError(
            f"boosted-trees answers with a value of the target; loss {loss.name} of task {task.name} has other "
            "outputs; take mse, mae or huber, or cross-entropy with two labels"
        )
    if not classes and count_targets(task) == 1:
        return SQUARED
    found = f"{len(classes)} classes" if classes else f"{count_targets(task)} values"
    raise ConfigError(f"boosted-trees needs a task of one value or of two classes; that of {task.name} has {found}")


def _read_trees(request: Tensors) -> Trees:
    return Trees(**{name: np.asarray(request[name]) for name in ("columns", "bins", "values")})


def _to_lists(trees: Trees) -> dict[str, Any]:
    return {"columns": trees.columns.tolist(), "bins": trees.bins.tolist(), "values": trees.values.tolist()}
