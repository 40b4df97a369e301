"""Drift: how far newer data is from a reference, column by column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array, Dataset, Task
from edgefl.tasks.analyses.columns import TARGET, select_columns

MAX_BINS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnDrift:
    """How far a column of newer data is from that of a reference.

    Attributes:
        name: of the column.
        num_reference, num_newer: values, with those that are missing.
        psi: population stability index, 0 for equal shares; above 0.25 is commonly called a large change.
        ks: Kolmogorov-Smirnov statistic, 0 to 1; None for classes, and where one side has no value.
    """

    name: str
    num_reference: int
    num_newer: int
    psi: float
    ks: float | None


def measure_drift(
    task: Task, reference: Dataset, newer: Dataset, *, columns: str = "", bins: int = 10
) -> list[ColumnDrift]:
    """Returns the drift of each column, the one with the largest index first.

    Args:
        task: whose data it is; where it says `channels`, a column is a channel and each number in it a value.
        reference: what the data was, such as that of a run's time.
        newer: what it is now.
        columns: names, numbers and ranges as of `edgefl stats`; empty for all, and for the classes.
        bins: cells of equal share in the reference, 2 to `MAX_BINS`.

    Raises:
        ConfigError: there is no such column, or they are too many.
        DataError: a side has no example, or examples are not those of the task.
    """
    if not 2 <= bins <= MAX_BINS:
        raise ConfigError(f"bins must be 2 to {MAX_BINS}, got {bins}")
    for what, data in (("reference", reference), ("newer data", newer)):
        if not len(data):
            raise DataError(f"the {what} must have an example at least, it has none")
    chosen = select_columns(task, columns, by_channel=True, option="--columns")
    found = [
        _describe_values(name, chosen.read(reference, column), chosen.read(newer, column), bins)
        for column, name in enumerate(chosen.names)
    ]
    if chosen.classes and not columns.strip():
        classes = [chosen.count_classes(data) for data in (reference, newer)]
        found.append(_describe_classes(*classes))
    return sorted(found, key=lambda column: -column.psi)


def compute_psi(reference: Array, newer: Array, bins: int = 10) -> float:
    """Returns the population stability index, Σ (q - p) ln(q / p) over cells, of shares p of the reference and q.

    The cells lie between quantiles of the reference. A value that is several of its quantiles has a cell of its own,
    as in columns of few values; so have values that are missing. Shares are (count + 1/2) / (n + cells/2), which
    keeps an empty cell finite.

    Args:
        reference: [n] numbers, n at least 1; what is not finite is missing.
        newer: [m] likewise.
        bins: number of quantiles, and one.

    Source: Siddiqi, Credit Risk Scorecards, 2006, chapter 9; the half by Krichevsky and Trofimov, The performance of
    universal encoding, 1981. The index is the symmetric divergence of Kullback and Leibler, 1951.
    """
    old, new = reference[np.isfinite(reference)], newer[np.isfinite(newer)]
    edges = _find_edges(old, bins)
    counts = [
        np.append(np.bincount(np.searchsorted(edges, values, side="left"), minlength=len(edges) + 1), missing).astype(
            np.int64
        )
        for values, missing in ((old, len(reference) - len(old)), (new, len(newer) - len(new)))
    ]
    is_used = (counts[0] + counts[1]) > 0
    return compute_index(counts[0][is_used], counts[1][is_used])


def compute_index(reference: Array, newer: Array) -> float:
    """Returns the population stability index of two [cells] counts, as `compute_psi`; 0 for one cell."""
    shares = [(counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in (reference, newer)]
    return float(np.sum((shares[1] - shares[0]) * np.log(shares[1] / shares[0])))


def compute_ks(reference: Array, newer: Array) -> float | None:
    """Returns the two-sample statistic D = sup |F(x) - G(x)| of empirical distributions; None where one has no value.

    Args:
        reference: [n] numbers; those that are not finite are left out.
        newer: [m] likewise.

    Source: Smirnov, Table for estimating the goodness of fit of empirical distributions, 1948.
    """
    old, new = (np.sort(values[np.isfinite(values)]) for values in (reference, newer))
    if not len(old) or not len(new):
        return None
    values = np.concatenate([old, new])
    # Both functions are constant between values, so that the supremum is at one.
    shares = [np.searchsorted(side, values, side="right") / len(side) for side in (old, new)]
    return float(np.abs(shares[0] - shares[1]).max())


def _find_edges(values: Array, bins: int) -> Array:
    """Returns the upper ends of all cells but the last, sorted; a cell holds its upper end."""
    if not len(values):
        return np.empty(0)
    quantiles = np.quantile(values, np.arange(1, bins) / bins, method="inverted_cdf")
    distinct, times = np.unique(quantiles, return_counts=True)
    repeated = distinct if len(distinct) < 3 else distinct[times > 1]
    return np.union1d(distinct, np.nextafter(repeated, -np.inf))


def _describe_values(name: str, reference: Array, newer: Array, bins: int) -> ColumnDrift:
    return ColumnDrift(
        name=name,
        num_reference=len(reference),
        num_newer=len(newer),
        psi=compute_psi(reference, newer, bins),
        ks=compute_ks(reference, newer),
    )


def _describe_classes(reference: Array, newer: Array) -> ColumnDrift:
    """Returns the drift of the classes, of [classes] counts; those that neither side has are no cells."""
    is_used = (reference + newer) > 0
    return ColumnDrift(
        name=TARGET,
        num_reference=int(reference.sum()),
        num_newer=int(newer.sum()),
        psi=compute_index(reference[is_used], newer[is_used]),
        ks=None,
    )
