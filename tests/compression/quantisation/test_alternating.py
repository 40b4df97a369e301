"""A scale and its levels by turns: which levels, which scale, and with which chance."""

import numpy as np
import pytest

from edgefl.compression.quantisation.alternating import Alternating, make_level_table
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array


def body_of(argument: str, values: Array, luck: np.random.Generator | None = None) -> bytes:
    rng = np.random.default_rng(1) if luck is None else luck
    return b"".join(part.tobytes() for part in Alternating.parse(argument).encode(values, rng))


def decode(body: bytes, size: int) -> Array:
    reader = PayloadReader(memoryview(body))
    found = Alternating.decode(reader, size)
    reader.require_end()
    return found


def scale_of(body: bytes) -> float:
    return float(np.frombuffer(body[2:6], dtype="<f4")[0])


def normal(size: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_levels_are_whole_numbers_or_the_tangents_of_the_description() -> None:
    assert make_level_table(4, False).tolist() == list(range(8))
    assert make_level_table(2, True).tolist() == pytest.approx([0, 1])
    table = make_level_table(6, True)
    assert table[[0, 1]].tolist() == pytest.approx([0, 1])
    assert table[-1] == pytest.approx(31 * 4 / np.pi, rel=1e-3)  # about 1.27 times their number
    assert np.all(np.diff(table[1:], 2) > 0)


@pytest.mark.parametrize("argument", ["2", "3", "4:tan", "8", "8:tan"])
def test_values_on_a_grid_come_back_and_the_size_of_the_values_makes_no_difference(argument: str) -> None:
    bits, _, tangent = argument.partition(":")
    table = make_level_table(int(bits), bool(tangent))
    values = (0.25 * np.concatenate([-table[::-1], table])).astype(np.float32)
    np.testing.assert_allclose(decode(body_of(argument, values), values.size), values, rtol=1e-6)
    body, larger = body_of(argument, normal(999)), body_of(argument, normal(999) * np.float32(2.0**40))
    assert (body[:2], body[6:], scale_of(body) * 2.0**40) == (larger[:2], larger[6:], scale_of(larger))


@pytest.mark.parametrize("argument", ["2", "4", "4:tan", "8"])
def test_each_value_takes_the_nearest_level_and_the_scale_is_the_best_for_its_levels(argument: str) -> None:
    values = np.random.default_rng(1).standard_t(3, size=5000).astype(np.float32)
    body = body_of(argument, values)
    found, bits = decode(body, values.size), argument.partition(":")[0]
    levels = scale_of(body) * make_level_table(int(bits), argument.endswith("tan"))
    nearest = np.abs(np.abs(values)[:, None] - levels).min(axis=1)
    np.testing.assert_allclose(np.abs(found - values), nearest, atol=1e-5)
    assert np.all(found * values >= 0)
    # The turns end near the scale of least squares, <found, values> / <found, found> times this one.
    assert found @ values / (found @ found) == pytest.approx(1, abs=0.06)


def test_a_large_value_costs_the_others_less_than_by_steps_of_the_largest() -> None:
    values = np.append(normal(10_000), np.float32(40))
    error = np.square(decode(body_of("4", values), values.size) - values).sum()
    steps = np.square(np.rint(values / 40 * 7) * np.float32(40 / 7) - values).sum()
    assert error < steps / 3


def test_ternary_levels_at_random_have_the_figures_of_tqn_for_normal_values() -> None:
    values = normal(200_000)
    body = body_of("2:random", values)
    found, scale = decode(body, values.size), scale_of(body)
    assert scale == pytest.approx(1.0, abs=0.02)
    assert np.mean(np.abs(values) > scale) == pytest.approx(0.32, abs=0.01)
    assert found @ values / (values @ values) == pytest.approx(0.69, abs=0.01)
    assert set(np.unique(np.abs(found))) == {0, np.float32(scale)}


@pytest.mark.parametrize("argument", ["2:random", "4:random", "4:random:tan"])
def test_the_mean_of_many_draws_is_the_clipped_value_and_the_squared_error_that_of_theory(argument: str) -> None:
    values, luck = np.random.default_rng(1).standard_t(3, size=300).astype(np.float32), np.random.default_rng(7)
    table = make_level_table(int(argument[0]), argument.endswith("tan"))
    gaps, shifts, variances = [], np.zeros(values.size), np.zeros(values.size)
    repeats = 400
    for _ in range(repeats):
        body = body_of(argument, values, luck)
        found, levels = decode(body, values.size).astype(np.float64), scale_of(body) * table
        sizes = np.minimum(np.abs(values, dtype=np.float64), levels[-1])
        below = np.minimum(np.searchsorted(levels, sizes, side="right") - 1, len(levels) - 2)
        variance = (levels[below + 1] - sizes) * (sizes - levels[below])
        clipped = np.copysign(sizes, values)
        gaps.append(np.square(found - values).sum() - (variance + np.square(values - clipped)).sum())
        shifts += found - clipped
        variances += variance
    assert abs(np.mean(gaps)) < 6 * np.std(gaps) / np.sqrt(repeats)
    assert np.all(np.abs(shifts) < 6 * np.sqrt(variances) + 1e-4)


def test_only_levels_at_random_do_not_work_behind_error_feedback() -> None:
    assert Alternating.parse("2").is_contraction
    assert Alternating.parse("8:tan").is_contraction
    assert not Alternating.parse("4:random").is_contraction


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", "needs a whole number from 2 to 8, got alternating:"),
        ("1", "needs a whole number from 2 to 8, got alternating:1"),
        ("4:sin", "takes random and tan, once each, got alternating:4:sin"),
        ("4:tan:tan", "once each, got alternating:4:tan:tan"),
    ],
)
def test_an_argument_that_makes_no_quantiser_is_one_line(argument: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        Alternating.parse(argument)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x01\x00" + bytes(4), "alternating levels of 1 bits and kind 0"),
        (b"\x04\x02" + bytes(4), "alternating levels of 4 bits and kind 2"),
        (b"\x04\x00\x00\x00\xc0\x7f", "the scale nan, expected a finite number"),
        (b"\x08\x01\xff\xff\x7f\x7f", r"the scale 3.4028\d+e\+38 of levels up to 161.\d+, beyond float32"),
    ],
)
def test_levels_that_cannot_be_are_refused(body: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode(body, 2)


def test_what_would_be_beyond_single_precision_is_refused() -> None:
    with pytest.raises(CodecError, match=r"alternating makes numbers up to .*, beyond float32: use dense"):
        body_of("4:tan", np.array([3.4e38, 1e38, 3.3e38], dtype=np.float32))
