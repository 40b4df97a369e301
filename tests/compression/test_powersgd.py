"""Power iteration over the updates: it finds the largest singular vectors, and never loses more than there is."""

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.wire import read_frame, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, TensorSpec

WHOLE, VECTORS, EXACT = 0, 2, 128


def one(values: Array) -> ModelSpec:
    return (TensorSpec(name="w", shape=values.shape),)


def low_rank(rows: int, columns: int, rank: int, seed: int = 1) -> Array:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((rows, rank)), rng.standard_normal((rank, columns))
    return (left * 2.0 ** -np.arange(rank) @ right).astype(np.float32)


def sent(spec: str, values: Array, memory: dict[str, Array], seed: int = 1) -> Array:
    codec = make_codec(spec, one(values))
    found = codec.decode(codec.encode({"w": values}, np.random.default_rng(seed), memory=memory))["w"]
    assert not isinstance(found, SparseTensor)
    return found


def form(spec: str, values: Array) -> int:
    return read_frame(make_codec(spec, one(values)).encode({"w": values}, np.random.default_rng(1))).payload[0]


def lost(found: Array, values: Array) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - values))


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (8, 6, 3, 5), (10, 4, 9)])
def test_repeated_updates_come_close_to_the_best_matrix_of_that_rank(shape: tuple[int, ...]) -> None:
    values = low_rank(shape[0], int(np.prod(shape[1:])), 8).reshape(shape)
    memory: dict[str, Array] = {}
    errors = [lost(sent("ef|powersgd:3:out", values, memory), values) for _ in range(12)]
    singular = np.linalg.svd(values.reshape(shape[0], -1), compute_uv=False)
    best = float(np.sqrt(np.square(singular[3:]).sum()))
    assert errors[-1] < errors[0]
    assert best * 0.999 < errors[-1] < best * 1.02


def test_a_matrix_of_the_rank_comes_back_at_once() -> None:
    values = low_rank(40, 30, 2)
    np.testing.assert_allclose(sent("ef|powersgd:2", values, {}), values, atol=1e-5)


@pytest.mark.parametrize("stage", ["", "|fp16", "|int8", "|sign", "|qsgd:4:64"])
@pytest.mark.parametrize("seed", range(2))
def test_the_error_is_never_larger_than_the_update(stage: str, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((24, 20)).astype(np.float32)
    memory: dict[str, Array] = {}
    for _ in range(4):
        assert lost(sent(f"ef|powersgd:2{stage}", values, memory, seed), values) < np.linalg.norm(values)


def test_what_is_left_behind_is_tall_vectors_by_the_name_of_the_tensor() -> None:
    values = low_rank(40, 30, 5)
    memory: dict[str, Array] = {"powersgd/other": np.ones(3)}
    sent("ef|powersgd:2", values, memory)
    assert set(memory) == {"powersgd/other", "powersgd/w"}
    assert memory["powersgd/w"].shape == (2, 30)


def test_memory_of_another_rank_or_shape_is_as_good_as_none() -> None:
    values = low_rank(40, 30, 5)
    fresh = sent("ef|powersgd:2", values, {})
    for strange in (np.ones((3, 30), dtype=np.float32), np.ones((2, 31), dtype=np.float32), np.ones((2, 30))):
        assert np.array_equal(sent("ef|powersgd:2", values, {"powersgd/w": strange}), fresh)


@pytest.mark.parametrize("kept", ["zeros", "one that the matrix has nothing of"])
def test_vectors_that_find_nothing_are_drawn_again(kept: str) -> None:
    values = np.zeros((20, 16), dtype=np.float32)
    values[10:, :8] = low_rank(10, 8, 3)
    memory = {"powersgd/w": np.zeros((2, 16), dtype=np.float32)}
    if kept != "zeros":
        memory["powersgd/w"][:, 12:] = 1
    assert lost(sent("ef|powersgd:2", values, memory), values) < 0.9 * np.linalg.norm(values)


def test_a_matrix_of_zeros_takes_two_bytes_and_leaves_the_memory_alone() -> None:
    zeros, memory = np.zeros((20, 16), dtype=np.float32), {"powersgd/w": np.ones((2, 16), dtype=np.float32)}
    codec = make_codec("ef|powersgd:2", one(zeros))
    body = codec.encode({"w": zeros}, np.random.default_rng(1), memory=memory)
    assert len(read_frame(body).payload) == 2
    assert np.array_equal(memory["powersgd/w"], np.ones((2, 16)))
    assert np.array_equal(sent("ef|powersgd:2", zeros, {}), zeros)


def test_vectors_of_which_a_value_stage_leaves_too_little_pass_none() -> None:
    values = np.random.default_rng(1).standard_normal((24, 20)).astype(np.float32)
    assert form("ef|powersgd:2", values) == VECTORS
    assert form("ef|powersgd:2:out|int8", values) == VECTORS + 1
    # One bit for each of 8 vectors of 24 numbers: they are not orthonormal any more.
    assert form("ef|powersgd:8|sign", values) == VECTORS + EXACT


@pytest.mark.parametrize("shape", [(), (0,), (9,), (1, 50), (3, 3), (0, 4)])
def test_what_vectors_would_not_make_smaller_travels_whole(shape: tuple[int, ...]) -> None:
    values = np.asarray(np.random.default_rng(1).standard_normal(shape), dtype=np.float32)
    assert form("ef|powersgd:2", values) == WHOLE
    assert np.array_equal(sent("ef|powersgd:2", values, {}), values)


@pytest.mark.parametrize("scale", [1e-45, 1e29])
def test_the_smallest_and_the_largest_numbers_have_vectors_too(scale: float) -> None:
    values = (np.sign(low_rank(20, 16, 5)) * scale).astype(np.float32)
    memory: dict[str, Array] = {}
    for _ in range(3):
        assert np.all(np.isfinite(sent("ef|powersgd:2", values, memory)))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\x01", "form 1, which this edgefl does not know"),
        (b"\x05", "form 5, which"),
        (b"\x80", "form 128, which"),
        (b"\x02\x09", "number over 8"),
        (b"\x02\x05", "5 pairs of vectors for a matrix of 9 x 8"),
        (b"\x02\x01" + b"\x00\x00\xc0\x7f" * 17, "vector that is not finite"),
        (b"\x02\x02" + bytes(4 * 18) + b"\xff\xff\x7f\x7f" * 16, "beyond float32"),
    ],
)
def test_vectors_that_cannot_be_are_refused(payload: bytes, message: str) -> None:
    shapes = (TensorSpec(name="w", shape=(9, 8)),)
    codec = make_codec("ef|powersgd:1", shapes)
    body = write_frame(codec.stage_ids, 1, [np.frombuffer(payload, dtype=np.uint8)])
    with pytest.raises(CodecError, match=message):
        codec.decode(body)
