"""Rounding to powers of two: which ones, with which chance, and in how many bits."""

import numpy as np
import pytest

from edgefl.compression.quantisation.stochastic_rounding import NaturalCompression, round_exponents
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

REPEATS = 20_000


def body_of(values: Array, seed: int = 1) -> bytes:
    return b"".join(part.tobytes() for part in NaturalCompression().encode(values, np.random.default_rng(seed)))


def decoded(values: Array, seed: int = 1) -> Array:
    reader = PayloadReader(memoryview(body_of(values, seed)))
    found = NaturalCompression.decode(reader, values.size)
    reader.require_end()
    return found


def test_powers_of_two_and_zeros_come_back_as_they_are_at_both_ends_of_the_range() -> None:
    values = np.array([0, 1, -2, 0.5, 2**-126, -(2.0**-127), 2**-149, 2**127, -0.0], dtype=np.float32)
    assert decoded(values).tolist() == values.tolist()


def test_a_value_becomes_one_of_the_two_powers_beside_it() -> None:
    values = np.tile(np.array([3, -5, 0.7, 1e-40, -7e-45], dtype=np.float32), 400)
    below = np.array([2, 4, 0.5, 2.0**-133, 2.0**-147])
    found = np.abs(decoded(values).astype(np.float64)).reshape(-1, 5)
    assert all(set(column) == {low, 2 * low} for column, low in zip(found.T, below, strict=True))
    assert np.array_equal(np.signbit(decoded(values)), values < 0)


@pytest.mark.parametrize("value", [3.0, 1.0 + 2.0**-10, -0.7, 1e-40, 7e-45])
def test_the_chance_of_the_upper_power_is_how_far_the_value_is_on_the_way_to_it(value: float) -> None:
    values = np.full(REPEATS, value, dtype=np.float32)
    mantissa, _ = np.frexp(np.float64(values[0]))
    chance = 2 * abs(mantissa) - 1
    exponents = round_exponents(values, np.random.default_rng(3))
    is_up = exponents - (np.frexp(np.float64(values[0]))[1] - 1 + 149)
    assert set(is_up) <= {0, 1}
    error = np.sqrt(chance * (1 - chance) / REPEATS)
    assert abs(is_up.mean() - chance) <= 5.6 * error + 1e-9


def test_exponents_take_little_more_than_their_entropy() -> None:
    values = (np.random.default_rng(1).standard_normal(100_000) * 1e-3).astype(np.float32)
    _, counts = np.unique(np.frexp(decoded(values))[1], return_counts=True)
    shares = counts / values.size
    entropy = 1 - float(shares @ np.log2(shares))  # and a bit for the sign
    assert entropy < 8 * len(body_of(values)) / values.size < 1.03 * entropy


def test_what_would_round_beyond_single_precision_is_refused() -> None:
    with pytest.raises(CodecError, match=r"natural carries magnitudes up to 1.70141e\+38, got 3e\+38: use dense"):
        body_of(np.array([3e38], dtype=np.float32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x02\x00\x95\x03", "number over 276"),
        (b"\x02\x00\x05\x06", "number over 5"),
        (b"\x02\x00\x05\x05\x04abcd", "cannot be unpacked"),
    ],
)
def test_exponents_that_cannot_be_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        NaturalCompression.decode(PayloadReader(memoryview(body)), 2)
