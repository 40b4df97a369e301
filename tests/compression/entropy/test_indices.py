"""Index sets: they come back, in the smallest form, near their entropy."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.entropy.indices import read_indices, read_mask, write_indices, write_mask
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array


def packed(indices: Array, size: int) -> bytes:
    return b"".join(part.tobytes() for part in write_indices(indices, size))


def unpacked(body: bytes, size: int) -> Array:
    reader = PayloadReader(memoryview(body))
    indices = read_indices(reader, size)
    reader.require_end()
    return indices


@settings(deadline=None)
@given(strategies.integers(1, 3000).flatmap(lambda n: strategies.tuples(
    strategies.just(n), strategies.sets(strategies.integers(0, n - 1)))))  # fmt: skip
def test_every_set_of_indices_comes_back(given_: tuple[int, set[int]]) -> None:
    size, chosen = given_
    indices = np.array(sorted(chosen), dtype=np.int64)
    again = unpacked(packed(indices, size), size)
    assert again.tolist() == indices.tolist()
    assert again.dtype == np.int64


@pytest.mark.parametrize(
    ("indices", "form"),
    [
        ([4711], 0),
        (np.flatnonzero(np.random.default_rng(1).random(10_000) < 0.08), 2 + 3),
        ((np.arange(100)[:, None] * 100 + np.arange(8)).reshape(-1), 64),
        (np.flatnonzero(np.random.default_rng(1).random(10_000) < 0.4), 1),
        (np.setdiff1d(np.arange(10_000), [4711]), 128),
    ],
)
def test_the_smallest_form_is_taken(indices: Array, form: int) -> None:
    body = packed(np.asarray(indices), 10_000)
    assert body[1 if len(indices) < 128 else 2] == form
    # Fixed width takes 14 bits each; length, form and padding come on top.
    assert len(body) <= min(len(indices) * 14, 10_000) / 8 + 4
    assert unpacked(body, 10_000).tolist() == list(indices)


@pytest.mark.parametrize("fraction", [0.0005, 0.01, 0.1])
def test_uniformly_spread_indices_cost_within_five_percent_of_their_entropy(fraction: float) -> None:
    size = 400_000
    indices = np.sort(np.random.default_rng(2).choice(size, int(fraction * size), replace=False))
    entropy = -(fraction * np.log2(fraction) + (1 - fraction) * np.log2(1 - fraction)) * size / 8
    assert entropy * 0.99 < len(packed(indices, size)) < entropy * 1.05


def test_a_set_that_lacks_few_costs_no_more_than_those_few_and_none_and_all_only_their_number() -> None:
    indices = np.arange(0, 30_000, 100)
    others = np.setdiff1d(np.arange(30_000), indices)
    assert len(packed(others, 30_000)) <= len(packed(indices, 30_000)) + 1
    assert len(packed(np.arange(0), 100)) == len(packed(np.arange(100), 100)) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x65", "number over 100"),
        (b"\x02\x00\x81", "ends early"),
        (b"\x02\x80" + bytes(90), "do not ascend"),
        (b"\x02\x01" + b"\xff" * 13, "marks 100 entries, 2 are announced"),
        (b"\x02\x41", "form 65"),
        (b"\x02\x02\x01\x07", "3 unary numbers, 2 are announced"),
        (b"\x02\x02\x0d" + b"\x00" * 12 + b"\x18", "add up to"),
        (b"\x02\x00", "ends early"),
    ],
)
def test_damage_is_named(body: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        unpacked(body, 100)


def test_indices_that_repeat_or_descend_are_refused() -> None:
    # Fixed width, 7 planes of two bits each: 5 and 5, then 5 and 3, then 127 which is no index of 100.
    for pair in ((5, 5), (5, 3), (1, 127)):
        planes = [(value >> bit) & 1 for bit in range(7) for value in pair]
        with pytest.raises(CodecError, match="do not ascend or are not below 100"):
            unpacked(b"\x02\x00" + np.packbits(planes, bitorder="little").tobytes(), 100)


MASKS = {
    "none": np.zeros(100_000, dtype=np.bool_),
    "all": np.ones(100_000, dtype=np.bool_),
    "few": np.random.default_rng(1).random(100_000) < 0.01,
    "a third": np.random.default_rng(2).random(100_000) < 0.33,
    "half": np.random.default_rng(3).random(100_000) < 0.5,
    "most": np.random.default_rng(4).random(100_000) < 0.7,
    "runs": np.arange(100_000) // 500 % 2 == 0,
    "few of few": np.arange(40) == 7,
    "an empty tensor": np.zeros(0, dtype=np.bool_),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_is_written_like_its_indices_and_either_reads_the_other(mask: Array) -> None:
    indices = np.flatnonzero(mask)
    body = b"".join(part.tobytes() for part in write_mask(mask))
    assert body == packed(indices, mask.size)
    assert np.array_equal(unpacked(body, mask.size), indices)
    reader = PayloadReader(memoryview(body))
    assert np.array_equal(read_mask(reader, mask.size), mask)
    reader.require_end()


def test_a_mask_whose_sample_misleads_costs_a_fiftieth_more_than_its_bits_at_the_most() -> None:
    mask = np.zeros(2**20, dtype=np.bool_)
    for begin in range(0, mask.size, mask.size // 16):
        mask[begin : begin + 4096] = np.random.default_rng(begin).random(4096) < 0.5
    assert sum(part.nbytes for part in write_mask(mask)) <= mask.size // 8 + 8


@pytest.mark.parametrize("body", [b"\x02\x01\x01", b"\x02\x81\x0f", b"\x02\x63", b"\x02\x00\xff\xff", b"\x09"])
def test_a_mask_that_cannot_be_is_refused(body: bytes) -> None:
    with pytest.raises(CodecError):
        read_mask(PayloadReader(memoryview(body)), 5)
