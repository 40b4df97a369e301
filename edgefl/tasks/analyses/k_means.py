"""k-means by Lloyd's algorithm: each round a board sums, exactly, over its examples that are nearest to each centre.

Source: Lloyd, Least squares quantization in PCM, 1982. The first round finds mean and deviation of the columns, from
which the first centres are sampled: no example is a centre.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from edgefl.core.analyses import BoardSums, KMeansSettings
from edgefl.core.errors import ConfigError, RunFailedError
from edgefl.core.types import Array, Dataset, Task, Tensors, derive_rng
from edgefl.tasks.analyses.analysis import Analysis, make_exact_spec, pack_result, read_result
from edgefl.tasks.analyses.columns import select_columns
from edgefl.tasks.analyses.moments import (
    MAX_GROUP_NUMBERS,
    add_groups,
    check_values,
    find_group_fault,
    list_group_sums,
    read_matrix,
    sum_groups,
    to_fractions,
)
from edgefl.tasks.analyses.summaries import compute_root

ROWS_AT_ONCE = 4096


class KMeans(Analysis):
    """Centres of clusters of a task's columns; no model of a task holds them."""

    is_of_whole_shard = True
    has_task_model = False

    def __init__(self, task: Task, settings: KMeansSettings) -> None:
        """Raises ConfigError: the columns are not there, or too many."""
        self._task_name, self._settings = task.name, settings
        self.columns = select_columns(task, settings.columns)
        count = len(self.columns.names)
        if count * settings.clusters > MAX_GROUP_NUMBERS:
            raise ConfigError(
                f"strategy.clusters must be at most {MAX_GROUP_NUMBERS // count} for {count} columns, got "
                f"{settings.clusters}"
            )
        self.request_spec = (make_exact_spec("centres", settings.clusters, count, dtype="float64"),)
        self.sums_spec = list_group_sums(settings.clusters, count)

    def make_model(self) -> dict[str, Array]:
        return pack_result({})

    def make_request(self, model: Tensors) -> dict[str, Array]:
        """Returns the centres; all at zero, where every example is nearest to the first, before the first round."""
        found = read_result(model)
        centres = np.zeros(self.request_spec[0].shape)
        if found:
            centres[:] = found["centres"]
        return {"centres": centres}

    def measure(self, request: Tensors, data: Dataset) -> dict[str, Array]:
        """Returns count, sums and squares of the examples of each cluster.

        Raises:
            DataError: a value is missing: clusters are of complete examples.
        """
        columns = [self.columns.read(data, column) for column in range(len(self.columns.names))]
        values = np.stack(columns, axis=1) if columns else np.zeros((0, 0))
        check_values(values, "the columns of a cluster")
        centres = np.asarray(request["centres"])
        return sum_groups(values, find_nearest(values, centres), len(centres), self._settings.min_group)

    def find_fault(self, sums: Tensors) -> str | None:
        return find_group_fault(sums)

    def solve(self, model: Tensors, boards: Iterable[BoardSums]) -> dict[str, Array]:
        """Returns the next centres; raises `RunFailedError` where no board has a cluster of `min_group` examples."""
        counts, sums = add_groups(boards)
        if not counts.any():
            raise RunFailedError(
                f"no board has a cluster of strategy.min_group = {self._settings.min_group} examples"
            )
        values, former = read_matrix(sums), read_result(model)
        if not former:
            centres = sample_centres(
                int(counts.sum()), values.sum(axis=0), self._settings.clusters, self._settings.seed
            )
            return self._pack(centres, counts=None, inertia=None)
        centres = np.array(former["centres"])
        inertia = compute_inertia(counts, values, centres)
        for cluster in np.flatnonzero(counts):  # one without an example stays where it is
            centres[cluster] = (values[cluster, :, 0] / int(counts[cluster])).astype(float)
        return self._pack(centres, counts=counts.tolist(), inertia=inertia)

    def _pack(self, centres: Array, **found: Any) -> dict[str, Array]:
        names = {"v": 1, "task": self._task_name, "columns": list(self.columns.names)}
        return pack_result({**names, "centres": centres.tolist(), **found})


def find_nearest(values: Array, centres: Array) -> Array:
    """Returns the number of the nearest centre of each row, the first of equals; [n] from [n, d] and [k, d]."""
    nearest = np.zeros(len(values), np.int64)
    offset = centres.mean(axis=0)  # distances keep their digits where all lie far from zero
    moved = centres - offset
    squares = (moved * moved).sum(axis=1)
    for start in range(0, len(values), ROWS_AT_ONCE):
        part = values[start : start + ROWS_AT_ONCE] - offset
        nearest[start : start + ROWS_AT_ONCE] = np.argmin(squares - 2.0 * part @ moved.T, axis=1)
    return nearest


def sample_centres(count: int, sums: Array, num_clusters: int, seed: int) -> Array:
    """Returns centres from a normal distribution with the columns' means and deviations, [clusters, columns].

    Args:
        count: of all examples.
        sums: [columns, 2] fractions, the sums of values and of their squares.
        num_clusters: how many.
        seed: of the sample.
    """
    means = sums[:, 0] / count
    deviations = [compute_root(max(Fraction(0), one)) for one in sums[:, 1] / count - means * means]
    sample = derive_rng(seed, "centres").standard_normal((num_clusters, len(sums)))
    centres: Array = means.astype(float) + sample * np.array(deviations)
    return centres


def compute_inertia(counts: Array, values: Array, centres: Array) -> float:
    """Returns the sum of squared distances to the centres that the examples were nearest to.

    Args:
        counts: [clusters] examples.
        values: [clusters, columns, 2] fractions, sums of values and of their squares.
        centres: [clusters, columns].
    """
    places = to_fractions(centres)
    of_cluster = np.array([int(count) for count in counts], object)[:, None]
    distances = values[..., 1] - 2 * places * values[..., 0] + of_cluster * places * places
    return float(distances.sum())
