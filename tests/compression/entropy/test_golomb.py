"""Integers in few bits: streams to the bit, damage, and chunks that agree with plain indexing."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.entropy.golomb import (
    MAX_CLASSES,
    MAX_PARAMETER,
    compute_exp_golomb_cost,
    count_values,
    pack_bits,
    read_bits,
    read_exp_golomb,
    read_narrow_bits,
    read_rice,
    read_rice_sums,
    select_rice_parameter,
    write_exp_golomb,
    write_rice,
)
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array

NUMBERS = strategies.lists(strategies.integers(0, 2**20), min_size=1, max_size=60)


def reader(*parts: Array) -> PayloadReader:
    return PayloadReader(memoryview(b"".join(part.tobytes() for part in parts)))


@settings(deadline=None)
@given(NUMBERS, strategies.integers(0, MAX_PARAMETER))
def test_rice_coded_numbers_come_back_with_any_parameter_that_fits(numbers: list[int], parameter: int) -> None:
    values = np.array(numbers) & ((1 << min(parameter + 6, 20)) - 1)
    again = reader(*write_rice(values, parameter))
    assert read_rice_sums(again, len(values), parameter, 2**40).tolist() == np.cumsum(values).tolist()
    again.require_end()


@given(NUMBERS)
def test_the_chosen_parameter_is_the_cheapest_of_its_neighbours_and_its_cost_is_counted(numbers: list[int]) -> None:
    values = np.array(numbers)
    parameter, cost = select_rice_parameter(*count_values(values))

    def bits(k: int) -> int:
        return int((values >> k).sum()) + len(values) * (k + 1)

    assert cost == bits(parameter) <= min(bits(parameter + 1), bits(max(parameter - 1, 0)))


@given(NUMBERS)
def test_numbers_up_to_a_highest_come_back_with_the_chosen_parameter(numbers: list[int]) -> None:
    values = np.array(numbers)
    parameter, _ = select_rice_parameter(*count_values(values))
    again = reader(*write_rice(values, parameter))
    assert read_rice(again, len(values), parameter, int(values.max())).tolist() == numbers


@given(NUMBERS)
def test_packed_bits_come_back_and_take_no_bit_more(numbers: list[int]) -> None:
    values = np.array(numbers)
    packed = pack_bits(values, 21)
    assert packed.nbytes == (21 * len(values) + 7) // 8
    assert read_bits(reader(packed), len(values), 21).tolist() == numbers


@pytest.mark.parametrize("count", [0, 2**15, 2**15 + 1])
@pytest.mark.parametrize("width", [0, 8, 11])
def test_packed_bits_come_back_however_many_there_are(count: int, width: int) -> None:
    values = np.random.default_rng(1).integers(0, 1 << width, count)
    found = read_narrow_bits(reader(pack_bits(values, width)), count, width)
    assert np.array_equal(found, values)
    assert found.dtype == np.min_scalar_type((1 << width) - 1)


def test_the_streams_are_exactly_as_documented() -> None:
    # 5 = 1 * 4 + 1, 2 = 0 * 4 + 2, 8 = 2 * 4 + 0 in unary, lowest bit first: 01 1 001; remainders 1, 2, 0.
    length, unary, remainders = write_rice(np.array([5, 2, 8]), 2)
    assert (length.tolist(), unary.tolist(), remainders.tolist()) == ([1], [0b100110], [0b010_001])


def test_geometric_numbers_cost_at_most_a_twentieth_of_a_bit_over_their_entropy() -> None:
    chance = 0.01
    values = np.random.default_rng(5).geometric(chance, 100_000) - 1
    entropy = -(chance * np.log2(chance) + (1 - chance) * np.log2(1 - chance)) / chance
    assert (
        sum(part.nbytes for part in write_rice(values, select_rice_parameter(*count_values(values))[0])) * 8 / 100_000
        < entropy + 0.05
    )


@pytest.mark.parametrize("value", [0, 127, 128, 16_383, 16_384, 2**32, 2**63 - 1])
def test_a_varint_comes_back(value: int) -> None:
    assert reader(encode_varint(value)).read_varint(value) == value


@pytest.mark.parametrize("written", [b"\x05", b"\xff" * 12, b"\x80" * 3])
def test_a_varint_over_its_limit_or_without_an_end_is_refused(written: bytes) -> None:
    with pytest.raises(CodecError, match=r"over 4|ends early"):
        PayloadReader(memoryview(written)).read_varint(4)


def test_numbers_that_add_up_to_too_much_are_refused() -> None:
    parts = write_rice(np.array([3, 4]), 1)
    with pytest.raises(CodecError, match="add up to 7, at most 6"):
        read_rice_sums(reader(*parts), 2, 1, 6)
    with pytest.raises(CodecError, match="the number 4, at most 3"):
        read_rice(reader(*parts), 2, 1, 3)


def test_a_unary_stream_longer_than_any_right_one_is_refused_before_it_is_unpacked() -> None:
    with pytest.raises(CodecError, match="number over"):
        read_rice_sums(reader(encode_varint(10_000), np.zeros(10_000, dtype=np.uint8)), 2, 0, 100)
    with pytest.raises(CodecError, match="number over"):
        read_rice(reader(encode_varint(10_000), np.zeros(10_000, dtype=np.uint8)), 100, 0, 2**30)


OF_ANY_CLASS = strategies.integers(0, 31).flatmap(lambda each: strategies.integers(2**each, 2 ** (each + 1) - 1))
EXP_GOLOMB_NUMBERS = strategies.lists(OF_ANY_CLASS, min_size=1, max_size=80)


def packed(values: Array) -> bytes:
    return b"".join(part.tobytes() for part in write_exp_golomb(values))


def unpacked(body: bytes, count: int) -> list[int]:
    reader = PayloadReader(memoryview(body))
    values: list[int] = read_exp_golomb(reader, count).tolist()
    reader.require_end()
    return values


@settings(deadline=None)
@given(EXP_GOLOMB_NUMBERS)
def test_numbers_come_back_and_their_cost_is_counted(numbers: list[int]) -> None:
    body = packed(np.array(numbers))
    assert unpacked(body, len(numbers)) == numbers
    # Each stream ends at a byte; a stream's length takes up to two more.
    assert abs(len(body) * 8 - compute_exp_golomb_cost(*count_values(np.array(numbers)))) < 8 * (MAX_CLASSES + 4)


def test_the_exp_golomb_streams_are_exactly_as_documented() -> None:
    # Classes 2, 0, 2, 1: two first, then zero, one; ranks 0, 1, 0, 2 in unary; low bits of 3, of 5 and 7.
    body = packed(np.array([5, 1, 7, 3]))
    assert list(body) == [3, 2, 0, 1, 1, 0b1001101, 0b1, 0b1011]


def test_clustered_gaps_cost_two_thirds_of_what_rice_takes() -> None:
    # Runs of ten neighbours with a large gap behind.
    values = np.tile(np.array([1] * 9 + [991]), 200)
    assert compute_exp_golomb_cost(*count_values(values)) < 0.35 * select_rice_parameter(*count_values(values - 1))[1]


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
