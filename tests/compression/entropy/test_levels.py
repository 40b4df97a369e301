"""Signed levels: they come back, cheap where they are small, and damage is found."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.entropy.levels import read_levels, write_levels
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array


def packed(levels: Array, highest: int) -> bytes:
    return b"".join(part.tobytes() for part in write_levels(levels, highest))


@settings(deadline=None)
@given(strategies.sampled_from([1, 2, 3, 15, 126, 127, 255]).flatmap(lambda highest: strategies.tuples(
    strategies.just(highest), strategies.lists(strategies.integers(-highest, highest), max_size=300))))  # fmt: skip
def test_every_run_of_levels_comes_back(given_: tuple[int, list[int]]) -> None:
    highest, levels = given_
    body = packed(np.array(levels, dtype=np.int16), highest)
    reader = PayloadReader(memoryview(body))
    again = read_levels(reader, len(levels), highest)
    reader.require_end()
    assert again.tolist() == levels
    assert again.dtype == np.float32


@pytest.mark.parametrize(("spread", "highest"), [(0.05, 1), (0.3, 3), (0.66, 15), (11, 255)])
def test_levels_of_a_quantised_gradient_cost_little_more_than_their_entropy(spread: float, highest: int) -> None:
    drawn = np.random.default_rng(4).normal(size=100_000) * spread
    levels = np.clip(np.rint(drawn), -highest, highest).astype(np.int16)
    _, counts = np.unique(levels, return_counts=True)
    chances = counts / counts.sum()
    entropy = float(-(chances * np.log2(chances)).sum()) * len(levels) / 8
    assert len(packed(levels, highest)) < entropy * 1.08 + 16


def test_a_level_over_the_highest_is_refused() -> None:
    body = packed(np.array([9, -9], dtype=np.int16), 15)
    with pytest.raises(CodecError, match="the number 7, at most 3"):
        read_levels(PayloadReader(memoryview(body)), 2, 5)


def test_an_unknown_parameter_is_refused() -> None:
    # Two that are not zero, their signs, two that are larger than one, the parameter.
    body = bytearray(packed(np.array([9, -9], dtype=np.int16), 15))
    assert body[:4] == bytes([2, 0b10, 2, 2])
    body[3] = 99
    with pytest.raises(CodecError, match="parameter 99"):
        read_levels(PayloadReader(memoryview(bytes(body))), 2, 15)
