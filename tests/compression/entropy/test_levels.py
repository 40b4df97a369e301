"""Labels and levels near their entropy: round trips, sizes and damage."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.entropy.levels import count_labels, read_labels, read_levels, write_labels, write_levels
from edgefl.compression.entropy.zstd import compress
from edgefl.compression.wire import PayloadReader, encode_varint
from edgefl.core.errors import CodecError
from edgefl.core.types import Array


def body_of(labels: Array) -> bytes:
    return b"".join(part.tobytes() for part in write_labels(labels))


def read_back(labels: Array, highest: int) -> Array:
    reader = PayloadReader(memoryview(body_of(labels)))
    found = read_labels(reader, labels.size, highest)
    reader.require_end()
    return found


def drawn(shares: list[float], size: int) -> Array:
    return np.random.default_rng(5).choice(len(shares), size, p=shares).astype(np.uint8)


@pytest.mark.parametrize("size", [1, 9, 70_001])
@pytest.mark.parametrize("shares", [[0, 1.0], [0.475, 0.475, 0.025, 0.025], [0.01] * 100])
def test_labels_come_back(shares: list[float], size: int) -> None:
    labels = drawn(shares, size)
    assert np.array_equal(read_back(labels, 99), labels)


def test_labels_beyond_a_byte_and_none_at_all_come_back() -> None:
    labels = np.array([276, 0, 300, 276], dtype=np.int16)
    assert read_back(labels, 300).tolist() == labels.tolist()
    assert read_back(np.zeros(0, dtype=np.uint8), 9).size == 0
    assert count_labels(np.array([2, 0, 2], dtype=np.uint8), 4).tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("shares", [[0.475, 0.475, 0.025, 0.025], [0.9, 0.1], [0.125] * 8])
def test_they_take_little_more_than_their_entropy(shares: list[float]) -> None:
    labels = drawn(shares, 200_000)
    entropy = -sum(share * np.log2(share) for share in shares)
    assert 8 * len(body_of(labels)) / labels.size < 1.05 * entropy


def framed(highest: int, content: bytes) -> bytes:
    frame = compress(content, 1)
    return b"".join(part.tobytes() for part in (encode_varint(highest), encode_varint(frame.size), frame))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x08", "number over 7"),
        (b"\x02\x00", "cannot be unpacked"),
        (b"\x02\x04abcd", "cannot be unpacked"),
        (framed(2, b"\x01"), "holds 1 bytes of labels, 2 are announced"),
        (framed(2, b"\x01\x01\x01"), "unpacks to over 2 bytes"),
        (framed(2, b"\x01\xf3"), "holds the labels 243, at most 242 is right"),
        (framed(2, b"\x01\x01")[:-1], "ends"),
    ],
)
def test_what_cannot_be_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        read_labels(PayloadReader(memoryview(body)), 6, 7)


def test_a_frame_that_would_grow_is_refused_before_it_takes_memory() -> None:
    body = framed(1, bytes(20_000_000))
    tracemalloc.start()
    with pytest.raises(CodecError, match="unpacks to over"):
        read_labels(PayloadReader(memoryview(body)), 1_000_000, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


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
