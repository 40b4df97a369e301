"""Numbers of very unequal size: they come back, cheaper than with Rice where they cluster, and damage is found."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.entropy.exp_golomb import (
    MAX_CLASSES,
    count_exp_golomb_bits,
    read_exp_golomb,
    write_exp_golomb,
)
from edgefl.compression.entropy.golomb_rice import select_rice_parameter
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

OF_ANY_CLASS = strategies.integers(0, 31).flatmap(lambda each: strategies.integers(2**each, 2 ** (each + 1) - 1))
NUMBERS = strategies.lists(OF_ANY_CLASS, min_size=1, max_size=80)


def packed(values: Array) -> bytes:
    return b"".join(part.tobytes() for part in write_exp_golomb(values))


def unpacked(body: bytes, count: int) -> list[int]:
    reader = PayloadReader(memoryview(body))
    values: list[int] = read_exp_golomb(reader, count).tolist()
    reader.require_end()
    return values


@settings(deadline=None)
@given(NUMBERS)
def test_numbers_come_back_and_their_cost_is_counted(numbers: list[int]) -> None:
    body = packed(np.array(numbers))
    assert unpacked(body, len(numbers)) == numbers
    # Each stream ends at a byte; a stream's length takes up to two more.
    assert abs(len(body) * 8 - count_exp_golomb_bits(np.array(numbers))) < 8 * (MAX_CLASSES + 4)


def test_the_streams_are_exactly_as_documented() -> None:
    # Classes 2, 0, 2, 1: two first, then zero, one; ranks 0, 1, 0, 2 in unary; low bits of 3, of 5 and 7.
    body = packed(np.array([5, 1, 7, 3]))
    assert list(body) == [3, 2, 0, 1, 1, 0b1001101, 0b1, 0b1011]


def test_clustered_gaps_cost_two_thirds_of_what_rice_takes() -> None:
    # Runs of ten neighbours with a large gap behind.
    values = np.tile(np.array([1] * 9 + [991]), 200)
    assert count_exp_golomb_bits(values) < 0.35 * select_rice_parameter(values - 1)[1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x02\x03\x03\x01\x03", "expected different ones"),
        (b"\x01\x20\x01\x01", "expected different ones below 32"),
        (b"\x21", "number over 32"),
        (b"\x01\x00\x09", "number over"),
        (b"\x01\x00\x01\x05", "class number 1 of 1"),
        (b"\x02\x00\x01\x01\x07", "3 unary numbers, 2 are announced"),
        (b"\x00\x00", "0 unary numbers"),
        (b"\x02\x05\x01\x01\x03", "ends early"),
    ],
)
def test_damage_is_named(body: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        unpacked(body, 2)
