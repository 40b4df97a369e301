"""Exact first and second moments: cross-products of columns, and sums and squares by group of examples."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from edgefl.core.analyses import BoardSums
from edgefl.core.errors import DataError
from edgefl.core.types import Array, ModelSpec, Tensors
from edgefl.tasks.analyses.analysis import make_exact_spec
from edgefl.tasks.analyses.grouping import hide_small_counts
from edgefl.tasks.metrics.exact_sums import WIDTH, carry_on, is_carried_on, read_sum, sum_exactly, sum_products

MAX_VALUE = 2.0**149
"""Products of values below this have exact sums."""
MAX_ROWS = 10**12
MAX_GROUP_NUMBERS = 16_384
"""Groups times columns: 5 MB of sums of a board."""
ROWS_AT_ONCE, VALUES_AT_ONCE = 1024, 1 << 16
SLICE_BITS, NUM_SLICES = 21, 3
"""Products of two slices, added over `ROWS_AT_ONCE` rows, are whole numbers below 2^53: a matrix product is exact."""
SLACK = Fraction(1, 1 << 250)
"""Of sums, which are of whole multiples of 2^-256: what lies below is cut off."""
_ROUNDING = 1e-9


def check_values(values: Array, what: str) -> None:
    """Checks that values have exact sums.

    Raises:
        DataError: one is not finite, or beyond `MAX_VALUE`.
    """
    if not bool((np.abs(values) < MAX_VALUE).all()):
        raise DataError(f"{what} must be finite and below {MAX_VALUE:.0e}, which a sum of all examples needs")


def sum_powers(values: Array) -> Array:
    """Returns the exact sums of [n] values, each below `MAX_VALUE`, and of their squares, [2, WIDTH]."""
    sums = np.zeros((2, WIDTH), np.int64)
    for start in range(0, len(values), VALUES_AT_ONCE):
        part = values[start : start + VALUES_AT_ONCE, None]
        sums += np.concatenate([sum_exactly(part), sum_products(part, part)])
    return carry_on(sums)


def sum_cross_products(left: Array, right: Array) -> Array:
    """Returns the sums over rows of the products of each column of `left` with each of `right`.

    The columns are cut into slices of few bits, whose matrix products are exact, as in Ozaki et al., Error-free
    transformations of matrix multiplication, 2012. What lies below 2^-63 of the largest value that a column has in
    1,024 rows is cut off.

    Args:
        left: [n, p] values, each below `MAX_VALUE`.
        right: [n, q] likewise.

    Returns:
        [p, q, WIDTH] int64.
    """
    columns = left.shape[1], right.shape[1]
    total = np.zeros((columns[0] * columns[1], WIDTH), np.int64)
    for start in range(0, len(left), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        (left_slices, left_powers), (right_slices, right_powers) = _slice(left[rows]), _slice(right[rows])
        powers = left_powers[:, None] + right_powers[None, :]
        parts = [
            np.ldexp(first.T @ second, powers - SLICE_BITS * (2 + i + j))
            for i, first in enumerate(left_slices)
            for j, second in enumerate(right_slices)
        ]
        total += sum_exactly(np.stack(parts).reshape(len(parts), -1))
    return carry_on(total).reshape(*columns, WIDTH)


def _slice(values: Array) -> tuple[list[Array], Array]:
    """Returns slices of whole numbers, the highest first, and the exponent that each column is scaled by."""
    powers = np.frexp(np.abs(values).max(axis=0, initial=0.0))[1]
    rest, slices = np.ldexp(values, -powers), []
    for _ in range(NUM_SLICES):
        rest = np.ldexp(rest, SLICE_BITS)
        slices.append(np.rint(rest))
        rest = rest - slices[-1]
    return slices, powers


def read_matrix(sums: Array) -> Array:
    """Returns the values of exact sums of finite numbers, [..., WIDTH] to an array of fractions [...]."""
    flat = [read_sum(one) for one in sums.reshape(-1, WIDTH)]
    return np.array(flat, dtype=object).reshape(sums.shape[:-1])


def centre_products(products: Array) -> tuple[int, Array, Array]:
    """Returns count, means and centred cross-products, exactly, of columns of which the last is all ones.

    Args:
        products: [p + 1, p + 1] fractions, the sums of the products of the columns.

    Returns:
        The count; [p] means; [p, p] sums of products of the differences from the means. All but the count are
        fractions.
    """
    count = products[-1, -1]
    means = products[-1, :-1] / count
    return int(count), means, products[:-1, :-1] - count * np.outer(means, means)


def list_group_sums(num_groups: int, num_columns: int) -> ModelSpec:
    """Returns the tensors of `sum_groups`."""
    return (
        make_exact_spec("counts", num_groups),
        make_exact_spec("sums", num_groups, num_columns, 2, WIDTH),
    )


def sum_groups(values: Array, groups: Array, num_groups: int, min_group: int) -> dict[str, Array]:
    """Returns the number of examples of each group, and the exact sums of its values and of their squares.

    Args:
        values: [n, columns], each below `MAX_VALUE`.
        groups: [n] the group of each example, below `num_groups`.
        num_groups: at least 1.
        min_group: a group of fewer examples counts as empty, and others until so many are left out together: nobody
            finds the few by subtraction from the sum of all.
    """
    counts = hide_small_counts(np.bincount(groups, minlength=num_groups).astype(np.int64), min_group)
    sums = np.zeros((num_groups, values.shape[1], 2, WIDTH), np.int64)
    for group in np.flatnonzero(counts):
        rows = values[groups == group]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            sums[group, :, 0] += sum_exactly(part)
            sums[group, :, 1] += sum_products(part, part)
    return {"counts": counts, "sums": carry_on(sums)}


def add_groups(boards: Iterable[BoardSums]) -> tuple[Array, Array]:
    """Returns counts and sums of groups over all boards, of which there is one at least."""
    counts, sums = None, None
    for board in boards:
        part, powers = np.asarray(board.sums["counts"]), np.asarray(board.sums["sums"])
        counts = part.copy() if counts is None else counts + part
        sums = powers.copy() if sums is None else sums + powers
    assert counts is not None
    assert sums is not None
    return counts, carry_on(sums)


def find_group_fault(sums: Tensors) -> str | None:
    """Returns why no board can have such sums of groups; None where one can."""
    counts, powers = np.asarray(sums["counts"]), np.asarray(sums["sums"])
    if bool(((counts < 0) | (counts > MAX_ROWS)).any()):
        return f"a group must have 0 to {MAX_ROWS} examples, got {int(counts.min())} to {int(counts.max())}"
    if not is_carried_on(powers):
        return "its sums are none of finite numbers"
    for group, count in enumerate(map(int, counts)):
        values = read_matrix(powers[group])
        if not all(can_be_sums(count, total, squares) for total, squares in values):
            return f"sums and squares of group {group} are those of no {count} values"
    return None


def can_be_sums(count: int, total: Fraction, squares: Fraction) -> bool:
    """Returns whether some values have this count, this sum and this sum of squares."""
    return count * squares + count * count * SLACK >= total * total if count else total == squares == 0


def find_product_fault(sums: Array, *, is_weighted: bool) -> str | None:
    """Returns why no board can have such sums of products, [p, p, WIDTH]; None where one can.

    Args:
        sums: of columns of which the last is all ones.
        is_weighted: examples may have weights; then the number of them need not be whole, and what is cut off
            differs on both sides of the diagonal.
    """
    if not is_carried_on(sums):
        return "its sums are none of finite numbers"
    count = read_sum(sums[-1, -1])
    assert count is not None
    if not count and sums.any():
        return "it has sums of products of no examples"
    if not is_weighted and (count.denominator != 1 or not 0 <= count <= MAX_ROWS):
        return f"the number of its examples must be whole, 0 to {MAX_ROWS}, got {float(count):.6g}"
    if not is_weighted and bool((sums != sums.swapaxes(0, 1)).any()):
        return "its sums of products are not symmetric"
    values = read_matrix(sums).astype(float)
    squares = np.diagonal(values)
    with np.errstate(over="ignore"):
        # By the inequality of Cauchy and Schwarz, but for the rounding of weights and what is cut off.
        most = (1 + _ROUNDING) * np.outer(squares, squares) + float(SLACK)
        is_bounded = bool((squares >= 0).all() and (values * values <= most).all())
    return None if is_bounded else "its sums of products are those of no examples"


def to_fractions(values: Array) -> Array:
    """Returns an array of floats as fractions, exactly."""
    return np.array([Fraction(float(value)) for value in values.reshape(-1)], dtype=object).reshape(values.shape)
