"""Sums of floating-point numbers without rounding: whole numbers of a tiny unit, in limbs of 32 bits.

The order of additions cannot matter, nor an offset that all values share, because nothing is rounded away. Source of
the idea: Kulisch, Computer Arithmetic and Validity, 2008, chapter 8 (the long accumulator).
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from edgefl.core.types import Array

LIMB_BITS = 32
NUM_LIMBS = 18
UNIT_EXPONENT = -256
"""Values are cut to whole multiples of 2^-256, about 1e-77."""
MAX_EXPONENT = 300
"""Values of 2^300 and more, about 2e90, count as not finite."""
WIDTH = NUM_LIMBS + 1
"""int64 numbers of a sum: its limbs, lowest first, and how many values were not finite."""
_MANTISSA_BITS = 53
_LIMB_MASK = np.uint64((1 << LIMB_BITS) - 1)
_SPLIT_FACTOR = float(2**27 + 1)


def sum_exactly(values: Array) -> Array:
    """Returns the sums over the first axis, [n, columns] to [columns, WIDTH] int64; add such arrays to add up."""
    columns = values.shape[1]
    sums = np.zeros((columns, WIDTH), np.int64)
    fits = np.abs(values) < 2.0**MAX_EXPONENT  # False for NaN too
    sums[:, NUM_LIMBS] = len(values) - fits.sum(axis=0)
    fractions, exponents = np.frexp(np.where(fits, values, 0.0))
    mantissas = np.abs(np.ldexp(fractions, _MANTISSA_BITS)).astype(np.uint64)
    shifts = exponents.astype(np.int64) - _MANTISSA_BITS - UNIT_EXPONENT
    mantissas >>= np.clip(-shifts, 0, 63).astype(np.uint64)
    index, shift = np.divmod(np.maximum(shifts, 0), LIMB_BITS)
    low = (mantissas & _LIMB_MASK) << shift.astype(np.uint64)
    high = (mantissas >> np.uint64(LIMB_BITS)) << shift.astype(np.uint64)
    signs = np.where(values < 0, -1, 1)
    column = np.broadcast_to(np.arange(columns), values.shape)
    parts = (low & _LIMB_MASK, (low >> np.uint64(LIMB_BITS)) + (high & _LIMB_MASK), high >> np.uint64(LIMB_BITS))
    for offset, part in enumerate(parts):
        np.add.at(sums, (column, index + offset), part.astype(np.int64) * signs)
    return carry_on(sums)


def carry_on(sums: Array) -> Array:
    """Carries on in place and returns sums, [..., WIDTH]: limbs are below 2^32, so that 2^31 of them can be added."""
    for limb in range(NUM_LIMBS - 1):
        carry = sums[..., limb] >> LIMB_BITS
        sums[..., limb] -= carry << LIMB_BITS
        sums[..., limb + 1] += carry
    return sums


def is_carried_on(sums: Array) -> bool:
    """Returns whether all sums, [..., WIDTH], are of finite values and as `carry_on` leaves them."""
    lower, top = sums[..., : NUM_LIMBS - 1], sums[..., NUM_LIMBS - 1]
    is_finite = not sums[..., NUM_LIMBS].any()
    is_low = bool(((lower >= 0) & (lower < 1 << LIMB_BITS)).all())
    return is_finite and is_low and bool((np.abs(top >> 1) < 1 << (LIMB_BITS - 1)).all())


def sum_products(*factors: Array) -> Array:
    """Returns the exact sums of the products of two or three arrays, [n, columns] each; as `sum_exactly`.

    Of three factors the product of the first two is exact, and its product with the third to 2^-104 of itself.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product, error = _multiply(factors[0], factors[1])
        terms = [product, error]
        for factor in factors[2:]:
            terms = [*_multiply(product, factor), error * factor]
    return sum_exactly(np.concatenate(terms))


def read_sum(sum_limbs: Array) -> Fraction | None:
    """Returns the value of one sum, [WIDTH]; None where it is of values that were not finite."""
    if sum_limbs[NUM_LIMBS]:
        return None
    units = sum(int(limb) << (LIMB_BITS * index) for index, limb in enumerate(sum_limbs[:NUM_LIMBS]))
    return Fraction(units, 1 << -UNIT_EXPONENT)


def _multiply(first: Array, second: Array) -> tuple[Array, Array]:
    """Returns the products, and what rounding took from them.

    Source: Dekker, A floating-point technique for extending the available precision, 1971, sections 4 and 5.
    """
    product = first * second
    (first_high, first_low), (second_high, second_low) = _split(first), _split(second)
    error = first_high * second_high - product + first_high * second_low + first_low * second_high
    return product, error + first_low * second_low


def _split(values: Array) -> tuple[Array, Array]:
    """Returns high and low halves of the mantissas."""
    scaled = _SPLIT_FACTOR * values
    high = scaled - (scaled - values)
    return high, values - high
