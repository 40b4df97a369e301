"""Shamir's secret sharing over a prime field that holds 256-bit keys.

Source: Shamir, How to Share a Secret, Communications of the ACM 22(11), 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from edgefl.core.errors import SecureAggregationError

PRIME = 2**256 + 297
"""The smallest prime above 2^256."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def split_secret(secret: bytes, points: Sequence[int], threshold: int) -> list[bytes]:
    """Returns the share of each point; any `threshold` of them give the secret, fewer say nothing about it.

    Args:
        secret: `SECRET_BYTES` bytes.
        points: different numbers from 1.
        threshold: from 1 to the number of points.
    """
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_evaluate(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in points]


def _evaluate(coefficients: Sequence[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


def compute_lagrange(points: Sequence[int]) -> list[int]:
    """Returns the factors of the shares at these points, whose weighted sum is the secret."""
    factors = []
    for point in points:
        numerator = denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - point) % PRIME
        factors.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return factors


def combine_shares(shares: Sequence[bytes], factors: Sequence[int]) -> bytes:
    """Returns the secret of some shares, with the factors of their points.

    Raises:
        SecureAggregationError: they give none of `SECRET_BYTES` bytes.
    """
    value = sum(int.from_bytes(share, "big") * factor for share, factor in zip(shares, factors, strict=True)) % PRIME
    if value >= 2 ** (8 * SECRET_BYTES):
        raise SecureAggregationError("shares of a secret do not fit together: a board gave out a wrong one")
    return value.to_bytes(SECRET_BYTES, "big")
