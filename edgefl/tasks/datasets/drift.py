"""Drift: how far newer data is from a reference, column by column, and of all columns at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import ConfigError, DataError
from edgefl.core.types import Array, Dataset, Task, Tensors, derive_rng
from edgefl.tasks.analyses.columns import TARGET, Columns, select_columns

MAX_BINS = 1000
JOINT = "joint"
"""Name of the drift of all columns at once."""
FEATURES = "features"
"""Name of the drift of what a model's last layer gets."""
MAX_JOINT_EXAMPLES, MAX_JOINT_NUMBERS = 500, 1_000_000
"""Of each side that are compared at once."""
NUM_PERMUTATIONS = 499
ROUNDING = 1e-12
"""Estimates, and squared distances as parts of the squares, that differ by less are equal but for rounding."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JointDrift:
    """How far examples of newer data are from those of a reference, by all columns, or by a model's features.

    Attributes:
        num_reference, num_newer: examples that were compared.
        mmd: squared maximum mean discrepancy, 0 on average where nothing changed; None where a side has one example.
        p_value: share of divisions of these examples by chance whose estimate is as large, 1/500 to 1.
    """

    num_reference: int
    num_newer: int
    mmd: float | None = None
    p_value: float | None = None


def measure_drift(
    task: Task, reference: Dataset, newer: Dataset, *, columns: str = "", bins: int = 10, min_labelled: int = 1
) -> list[ColumnDrift]:
    """Returns the drift of each column, the one with the largest index first.

    Args:
        task: whose data it is; where it says `channels`, a column is a channel and each number in it a value.
        reference: what the data was, such as that of a run's time.
        newer: what it is now.
        columns: names, numbers and ranges as of `edgefl stats`; empty for all, and for the classes.
        bins: cells of equal share in the reference, 2 to `MAX_BINS`.
        min_labelled: the classes are left out where a side has fewer examples with a label, and others without.

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
        sides = zip(classes, (reference, newer), strict=True)
        if all(counts.sum() >= min(min_labelled, len(data)) for counts, data in sides):
            found.append(_describe_classes(*classes))
    return sorted(found, key=lambda column: -column.psi)


def measure_joint_drift(
    task: Task,
    reference: Dataset,
    newer: Dataset,
    *,
    columns: str = "",
    max_examples: int = MAX_JOINT_EXAMPLES,
    max_numbers: int = MAX_JOINT_NUMBERS,
) -> JointDrift:
    """Returns the drift of all columns at once, on samples of at most so many examples; as `measure_drift`.

    It finds what no column shows by itself, such as two that no longer go together. Each column counts in deviations
    of both sides together. A missing value is the mean, and that it is missing is a column of its own.
    """
    chosen = select_columns(task, columns, by_channel=True, option="--columns")
    sides = [_read_sample(chosen, data, max_examples, max_numbers) for data in (reference, newer)]
    return _compare_samples(*sides)


def measure_feature_drift(
    task: Task,
    model: Tensors,
    reference: Dataset,
    newer: Dataset,
    *,
    max_examples: int = MAX_JOINT_EXAMPLES,
    max_numbers: int = MAX_JOINT_NUMBERS,
) -> JointDrift:
    """Returns the drift of what the last layer of a model gets, on samples of at most so many examples.

    It finds changes that matter to the model, and none that it does not see, such as brighter pictures to one that
    was trained with all kinds of light.

    Args:
        task: whose data it is.
        model: of the task, all of its tensors.
        reference: as of `measure_drift`.
        newer: likewise.
        max_examples: of each side.
        max_numbers: of each side's features; of wide ones fewer examples are compared, 2 at least.

    Raises:
        ConfigError: the network cannot be cut before its last layer.
        TaskError, TensorError: the model is not one of the task.
        DataError: a side has no example.
    """
    for what, data in (("reference", reference), ("newer data", newer)):
        if not len(data):
            raise DataError(f"the {what} must have an example at least, it has none")
    compute = _load_features(task, model)
    width = max(1, compute(reference.take(slice(1))).shape[1])
    count = min(max_examples, max(2, max_numbers // width))
    return _compare_samples(*(compute(_take_sample(data, count)) for data in (reference, newer)))


def _load_features(task: Task, model: Tensors) -> Callable[[Dataset], Array]:
    """Returns what computes from n examples what the last layer gets, [n, size]."""
    from edgefl.core.config import AdaptSection  # noqa: PLC0415 a device without it saves its memory
    from edgefl.tasks.adaptation.adapted_learner import AdaptedLearner  # noqa: PLC0415 a board's start is light
    from edgefl.tasks.adaptation.parts import select_parts  # noqa: PLC0415 likewise

    learner, parts = task.learner(), select_parts(AdaptSection(method="head"), task.shapes())
    learner.load(model)
    base = {spec.name: np.asarray(model[spec.name]) for spec in parts.frozen}
    adapted = AdaptedLearner(learner, parts, base)

    def compute(data: Dataset) -> Array:
        found = adapted.make_features(data)
        if found is data or not isinstance(found.inputs, np.ndarray):
            raise ConfigError(
                f"task {task.name}: its network cannot be cut before its last layer, so there are no features to "
                "compare"
            )
        return found.inputs.reshape(len(data), -1)

    return compute


def _compare_samples(reference: Array, newer: Array) -> JointDrift:
    """Returns the drift of [m, columns] examples to [n, columns] ones."""
    sizes = {"num_reference": len(reference), "num_newer": len(newer)}
    if min(sizes.values()) < 2:
        return JointDrift(**sizes)
    both = _standardise(np.concatenate([reference, newer]))
    mmd, p_value = compute_mmd(both[: len(reference)], both[len(reference) :])
    return JointDrift(**sizes, mmd=mmd, p_value=p_value)


def compute_mmd(reference: Array, newer: Array) -> tuple[float, float]:
    """Returns the unbiased estimate of the squared maximum mean discrepancy, and its p-value by permutations.

    The kernel is exp(-d²/2s²), s the median distance of two examples of both sides, of those apart if it is 0. The
    estimate is below 0 about as often as above where nothing changed.

    Args:
        reference: [m, columns] finite numbers, m at least 2.
        newer: [n, columns] likewise.

    Source: Gretton et al., A kernel two-sample test, JMLR 2012, equation 3; the median in section 8.
    """
    examples, num_reference = np.concatenate([reference, newer]), len(reference)
    kernel = _compute_kernel(examples)
    is_reference = np.zeros((1 + NUM_PERMUTATIONS, len(examples)))
    is_reference[:, :num_reference] = 1
    is_reference[1:] = derive_rng("drift", "permutations").permuted(is_reference[1:], axis=1)
    found = _estimate_mmd(kernel, is_reference)
    return float(found[0]), float(np.mean(found >= found[0] - ROUNDING))


def _estimate_mmd(kernel: Array, is_reference: Array) -> Array:
    """Returns the estimate of each of [k, examples] divisions, of a kernel [examples, examples] with diagonal 0."""
    sums = is_reference @ kernel
    within, crossing = (sums * is_reference).sum(axis=1), (sums * (1 - is_reference)).sum(axis=1)
    other = kernel.sum() - within - 2 * crossing
    m = is_reference[0].sum()
    n = len(kernel) - m
    estimates: Array = within / (m * (m - 1)) + other / (n * (n - 1)) - 2 * crossing / (m * n)
    return estimates


def _compute_kernel(examples: Array) -> Array:
    """Returns [n, n] values of the kernel, 0 on the diagonal."""
    examples = examples - examples.mean(axis=0)
    squares = np.square(examples).sum(axis=1)
    sums = squares[:, None] + squares
    distances = sums - 2 * examples @ examples.T
    distances[distances < ROUNDING * sums] = 0  # what rounding leaves between equal examples is no distance
    pairs = distances[np.triu_indices(len(examples), 1)]
    if not np.median(pairs) and pairs.any():
        pairs = pairs[pairs > 0]
    kernel: Array = np.exp(-distances / (2 * np.median(np.sqrt(pairs)) ** 2 or 1))
    np.fill_diagonal(kernel, 0)
    return kernel


def _read_sample(chosen: Columns, data: Dataset, max_examples: int, max_numbers: int) -> Array:
    """Returns [n, numbers] of some examples, the same for as many."""
    width = chosen.width * len(chosen.names)
    taken = _take_sample(data, min(max_examples, max(2, max_numbers // width)))
    columns = [chosen.read(taken, column).reshape(len(taken), -1) for column in range(len(chosen.names))]
    return np.concatenate(columns, axis=1)


def _take_sample(data: Dataset, max_examples: int) -> Dataset:
    """Returns some examples, the same for as many."""
    size = min(len(data), max_examples)
    return data.take(np.sort(derive_rng("drift", "sample").choice(len(data), size, replace=False)))


def _standardise(values: Array) -> Array:
    """Returns columns with mean 0 and deviation 1, a constant one as 0, and those that say what is missing."""
    is_there = np.isfinite(values)
    is_missing = ~is_there[:, ~is_there.all(axis=0)]
    columns = np.concatenate([np.where(is_there, values, 0), is_missing], axis=1)
    is_there = np.concatenate([is_there, np.ones_like(is_missing)], axis=1)
    columns /= np.maximum(np.abs(columns).max(axis=0), np.finfo(np.float64).tiny)  # so that squares are finite
    count = np.maximum(1, is_there.sum(axis=0))
    columns = np.where(is_there, columns - columns.sum(axis=0) / count, 0)
    deviation = np.sqrt(np.square(columns).sum(axis=0) / count)
    found: Array = columns / np.where(deviation > 0, deviation, np.inf)
    return found


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
