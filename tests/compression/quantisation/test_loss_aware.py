"""Levels whose scale is weighted by second moments: which scale, which moments, and what is no body."""

import numpy as np
import pytest

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.entropy.levels import write_levels
from edgefl.compression.error_feedback import ErrorFeedback
from edgefl.compression.quantisation.loss_aware import update_root
from edgefl.compression.wire import write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, TensorSpec

SIZE = 4000
SHAPES: ModelSpec = (TensorSpec(name="w", shape=(SIZE,)),)


def sent(spec: str, values: Array, memory: dict[str, Array] | None = None) -> Array:
    codec = make_codec(spec, SHAPES)
    body = codec.encode({"w": values}, np.random.default_rng(1), memory=memory)
    return np.asarray(codec.decode(body)["w"])


def heavy_tailed(seed: int) -> Array:
    return np.random.default_rng(seed).standard_t(3, SIZE).astype(np.float32)


def curvatures() -> Array:
    """Moments that say nothing about the next values: the first half counts ten thousand times as much."""
    return np.repeat(np.float32([1e4, 1]), SIZE // 2)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_scale_is_the_best_one_for_its_levels_where_errors_count_by_the_root_of_the_moment(bits: int) -> None:
    values = heavy_tailed(1) * np.repeat(np.float32([0.1, 3]), SIZE // 2)
    memory = {"laq/w": curvatures()}
    found = sent(f"ef|laq:{bits}", values, memory).astype(np.float64)
    weights = memory["laq/w"]
    assert (weights * found) @ values / ((weights * found) @ found) == pytest.approx(1, abs=0.1)
    others = sent(f"ef|alternating:{bits}", values)
    assert weights @ np.square(found - values) < weights @ np.square(others - values)
    # What does not count pays for it.
    assert np.square(found - values).sum() > np.square(others - values).sum()


def test_each_value_takes_the_nearest_level() -> None:
    values = heavy_tailed(1)
    found = sent("ef|laq:4", values)
    scale = np.abs(found[found != 0]).min()
    nearest = np.abs(np.abs(values)[:, None] - scale * np.arange(8)).min(axis=1)
    np.testing.assert_allclose(np.abs(found - values), nearest, atol=1e-5)
    assert np.all(found * values >= 0)


def test_the_moment_is_nine_tenths_of_the_last_one_and_a_tenth_of_the_new_square() -> None:
    memory: dict[str, Array] = {}
    moment = np.zeros(SIZE)
    for seed in range(4):
        sent("ef|laq:2", heavy_tailed(seed), memory)
        moment = 0.9 * moment + 0.1 * np.square(heavy_tailed(seed), dtype=np.float64)
    np.testing.assert_allclose(memory["laq/w"], np.sqrt(moment), rtol=1e-5)


def test_moments_of_the_largest_and_of_the_smallest_numbers_are_finite() -> None:
    largest = np.array([3.4e38, -3.4e38, 1e-45, 0], dtype=np.float32)
    assert np.all(np.isfinite(update_root(update_root(None, largest), largest)))
    tiny = np.full(SIZE, 1e-45, dtype=np.float32)
    assert sent("ef|laq:2", tiny).tolist() == tiny.tolist()


@pytest.mark.parametrize("wrong", [np.ones(3, dtype=np.float32), np.ones(SIZE)])
def test_a_moment_of_another_task_counts_as_none(wrong: Array) -> None:
    memory, fresh = {"laq/w": wrong}, dict[str, Array]()
    assert np.array_equal(sent("ef|laq:3", heavy_tailed(1), memory), sent("ef|laq:3", heavy_tailed(1), fresh))
    assert np.array_equal(memory["laq/w"], fresh["laq/w"])


def test_error_feedback_keeps_the_moment_and_sends_all_in_the_end() -> None:
    feedback = ErrorFeedback(make_codec("ef|laq:2", SHAPES))
    total, received = np.zeros(SIZE), np.zeros(SIZE)
    for number in range(60):
        step = heavy_tailed(number)
        body = feedback.encode(str(number), {"w": step}, np.random.default_rng(number))
        total += step
        received += np.asarray(decode_body(body, SHAPES)["w"])
        feedback.record_used([str(number)])
    state = feedback.state()
    assert "memory/laq/w" in state
    np.testing.assert_allclose(received + state["residual/w"], total, atol=1e-3)
    # Behind by a few steps, where nothing sent at all would be behind by sixty.
    assert np.linalg.norm(received - total) < 0.5 * np.linalg.norm(total)


@pytest.mark.parametrize(
    ("bits", "scale", "message"),
    [
        (1, 1.0, "loss-aware levels of 1 bits, 2 to 8 are read"),
        (9, 1.0, "loss-aware levels of 9 bits"),
        (4, np.nan, "the scale nan, expected a finite number"),
        (8, 3.4e38, "laq makes numbers up to 4.318e\\+40, beyond float32"),
    ],
)
def test_levels_that_cannot_be_are_refused(bits: int, scale: float, message: str) -> None:
    levels = write_levels(np.zeros(SIZE, dtype=np.int8), 7)
    parts = [np.array([bits], dtype=np.uint8), np.array([scale], dtype="<f4"), *levels]
    with pytest.raises(CodecError, match=message):
        decode_body(write_frame([23], 1, parts), SHAPES)
