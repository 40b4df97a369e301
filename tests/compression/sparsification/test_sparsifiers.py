"""Selected entries: which ones, ties, and their place on the wire."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.codec import make_codec
from edgefl.compression.sparsification.sparsifiers import count_kept, find_top_k
from edgefl.compression.wire import read_frame, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, TensorSpec

# The tensors of AdaComp's CNN with 421,642 parameters.
CNN_SIZES = (288, 32, 18_432, 64, 401_408, 128, 1280, 10)


def sent(spec: str, values: Array, seed: int = 1) -> SparseTensor:
    shapes: ModelSpec = (TensorSpec(name="w", shape=values.shape),)
    codec = make_codec(spec, shapes)
    decoded = codec.decode(codec.encode({"w": values}, np.random.default_rng(seed)))["w"]
    assert isinstance(decoded, SparseTensor)
    return decoded


def test_adacomp_a1_keeps_the_two_largest_of_five_at_four_tenths_and_at_least_one() -> None:
    values = np.array([0.1, -0.5, 0.3, -0.2, 0.05], dtype=np.float32)
    kept = sent("topk:0.4", values)
    assert (kept.indices.tolist(), kept.values.tolist()) == ([1, 2], [-0.5, np.float32(0.3)])
    assert sent("topk:0.01", values).indices.tolist() == [1]


@pytest.mark.parametrize(
    ("fraction", "kept"), [("0.01", (2, 1, 184, 1, 4014, 1, 12, 1)), ("0.005", (1, 1, 92, 1, 2007, 1, 6, 1))]
)
def test_adacomp_a2_counts_per_tensor_of_the_cnn(fraction: str, kept: tuple[int, ...]) -> None:
    assert tuple(count_kept(Fraction(fraction), size) for size in CNN_SIZES) == kept
    assert sent(f"topk:{fraction}", np.ones(1280, dtype=np.float32)).indices.size == kept[6]


def test_a_fraction_is_what_was_typed_and_not_its_nearest_binary_number() -> None:
    assert int(0.29 * 100) == 28
    assert sent("topk:0.29", np.ones(100, dtype=np.float32)).indices.size == 29


def test_a_fraction_of_one_sends_every_entry_and_no_index() -> None:
    values = np.random.default_rng(2).normal(size=(50, 40)).astype(np.float32)
    shapes = (TensorSpec(name="w", shape=values.shape),)
    body = make_codec("topk:1", shapes).encode({"w": values}, np.random.default_rng(1))
    assert len(body) < len(make_codec("dense", shapes).encode({"w": values}, np.random.default_rng(1))) + 8
    assert sent("topk:1", values).dense().tobytes() == values.tobytes()


def test_a_threshold_keeps_what_reaches_it_and_nothing_where_nothing_does() -> None:
    values = np.array([0.5, -0.25, 0.125, -1], dtype=np.float32)
    assert sent("threshold:0.25", values).indices.tolist() == [0, 1, 3]
    assert sent("threshold:2", values).indices.tolist() == []
    assert sent("threshold:2", values).dense().tolist() == [0, 0, 0, 0]


def test_random_entries_are_other_ones_every_time_and_scaled_by_their_share() -> None:
    values = np.arange(1, 101, dtype=np.float32)
    first, second = sent("randk:0.1", values, seed=1), sent("randk:0.1", values, seed=2)
    assert first.indices.tolist() != second.indices.tolist()
    assert first.values.tolist() == [10 * (index + 1) for index in first.indices]


@pytest.mark.parametrize(("size", "num_parts"), [(17, 3), (2, 5), (1, 1), (8, 8)])
def test_parts_follow_one_another_and_their_sum_is_the_tensor(size: int, num_parts: int) -> None:
    values = np.arange(1, size + 1, dtype=np.float32)
    parts = [sent(f"slice:{part}:{num_parts}", values) for part in range(1, num_parts + 1)]
    assert np.concatenate([part.indices for part in parts]).tolist() == list(range(size))
    assert max(len(part.indices) for part in parts) == -(-size // num_parts)
    assert np.concatenate([part.values for part in parts]).tobytes() == values.tobytes()


def test_a_part_carries_what_the_tensor_does() -> None:
    assert sent("slice:2:2|fp16", np.array([0, 0, 40_000, -65_504], np.float32)).values.tolist() == [40_000, -65_504]


def test_a_part_behind_the_last_one_is_refused() -> None:
    codec = make_codec("slice:1:2", (TensorSpec(name="w", shape=(4,)),))
    frame = read_frame(codec.encode({"w": np.ones(4, dtype=np.float32)}, np.random.default_rng(1)))
    payload = np.frombuffer(frame.payload, dtype=np.uint8).copy()
    payload[0] = 2
    with pytest.raises(CodecError, match="payload holds part 3 of 2"):
        codec.decode(write_frame(frame.stages, frame.num_tensors, [payload]))


def test_every_entry_is_equally_likely_to_be_drawn() -> None:
    counts = np.zeros(20)
    for seed in range(500):
        counts[sent("randk:0.25", np.ones(20, dtype=np.float32), seed).indices] += 1
    # 125 expected each, with a standard deviation of 10.
    assert np.all(np.abs(counts - 125) < 5.6 * 9.7)


def by_sorting(flat: Array, count: int) -> list[int]:
    """What a stable sort by falling magnitude gives."""
    return sorted(np.argsort(-np.abs(flat), kind="stable")[:count].tolist())


def test_keeps_the_largest_by_magnitude_not_by_value() -> None:
    assert find_top_k(np.array([0.1, -0.5, 0.3, -0.2, 0.05], dtype=np.float32), 2).tolist() == [1, 2]


def test_the_lowest_index_wins_among_equals() -> None:
    flat = np.array([1, -2, 2, 0, -2, 2], dtype=np.float32)
    assert find_top_k(flat, 2).tolist() == [1, 2]
    assert find_top_k(flat, 5).tolist() == [0, 1, 2, 4, 5]
    assert find_top_k(np.zeros(5, dtype=np.float32), 3).tolist() == [0, 1, 2]


@settings(deadline=None)
@given(strategies.lists(strategies.integers(-4, 4), max_size=40), strategies.integers(0, 45))
def test_agrees_with_a_sort_where_there_are_many_equals(numbers: list[int], count: int) -> None:
    flat = np.array(numbers, dtype=np.float32)
    assert find_top_k(flat, count).tolist() == by_sorting(flat, count)


@pytest.mark.parametrize("count", [1, 3000, 150_000])
@pytest.mark.parametrize("kind", ["normal", "few values", "sorted", "one large in every sample", "zeros"])
def test_agrees_with_a_sort_where_a_sample_narrows_the_search(kind: str, count: int) -> None:
    rng, size = np.random.default_rng(8), 200_000
    flat = {
        "normal": rng.normal(size=size),
        "few values": rng.integers(-3, 4, size=size),
        "sorted": np.arange(size),
        # The sample takes every 12th entry: it sees the large ones only, and a floor taken from it is too high.
        "one large in every sample": np.where(np.arange(size) % 12 == 0, 100.0, rng.normal(size=size)),
        "zeros": np.zeros(size),
    }[kind].astype(np.float32)
    assert find_top_k(flat, count).tolist() == by_sorting(flat, count)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_have_no_rank_are_refused(value: float) -> None:
    with pytest.raises(CodecError, match="topk carries finite numbers, got"):
        find_top_k(np.array([1, value], dtype=np.float32), 1)
