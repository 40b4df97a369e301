"""Entries at random: what travels of them, and that nothing is lost on average."""

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.quantisation.floats import Float32
from edgefl.compression.sparsification.atomo import read_entries
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, SparseTensor, TensorSpec

G = np.array([0.3, -0.4, 0.5, 0.1], dtype=np.float32)
REPEATS = 20_000
# Four entries of each of five codecs: a false alarm is less likely than one in a million.
STANDARD_ERRORS = 5.6


def body(spec: str, values: Array, seed: int = 1) -> bytes:
    shapes = (TensorSpec(name="w", shape=values.shape),)
    return make_codec(spec, shapes).encode({"w": values}, np.random.default_rng(seed))


def decoded(spec: str, values: Array, seed: int = 1) -> SparseTensor:
    shapes = (TensorSpec(name="w", shape=values.shape),)
    found = make_codec(spec, shapes).decode(body(spec, values, seed))["w"]
    assert isinstance(found, SparseTensor)
    return found


@pytest.mark.parametrize(
    "spec", ["atomo:0.4551", "atomo:0.1234", "atomo:51987", "atomo:0.7123|qsgd:2:1", "atomo:0.9"]
)
def test_the_mean_of_many_draws_is_the_tensor(spec: str) -> None:
    # No budget puts a whole number of marks on a repetition, or each one would be drawn alike.
    found = decoded(spec, np.tile(G, REPEATS)).dense().reshape(REPEATS, 4).astype(np.float64)
    errors = found.std(axis=0) / np.sqrt(REPEATS)
    assert np.all(np.abs(found.mean(axis=0) - G) <= STANDARD_ERRORS * errors + 1e-7)


def test_a_budget_below_one_is_a_share_of_the_entries_and_at_least_one_entry() -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    assert len(decoded("atomo:0.02", values).values) == 20
    assert len(decoded("atomo:20", values).values) == 20
    assert len(decoded("atomo:0.0001", values).values) == 1
    assert decoded("atomo:0.01", G[:1]).values.tolist() == G[:1].tolist()


def test_an_entry_that_chance_has_chosen_comes_back_at_the_level_with_its_sign() -> None:
    values = np.array([0.01, 10, -3, -2, 1], dtype=np.float32)
    level = np.float32(6.01)
    for seed in range(50):
        found = decoded("atomo:2", values, seed)
        assert found.indices[:-1].tolist() in ([1], [0])
        expected = np.where(np.abs(values) > level, values, np.sign(values) * level)[found.indices]
        np.testing.assert_allclose(found.values, expected, rtol=1e-6)


def test_entries_that_are_certain_pass_the_value_stage_and_the_others_need_none() -> None:
    values = np.array([100.3, -50.7, 1, 1, 1, -1], dtype=np.float32)
    found = decoded("atomo:3|int8", values)
    assert found.values[:2].tolist() == [np.float32(100.3), np.float32(np.rint(-50.7 / 100.3 * 127) / 127 * 100.3)]
    assert np.abs(found.values[2:]).tolist() == [4]


def test_with_a_budget_for_all_entries_nothing_is_lost() -> None:
    values = np.random.default_rng(1).standard_normal((5, 7, 3)).astype(np.float32)
    values[0] = 0
    assert np.array_equal(decoded("atomo:105", values).dense(), values)


def test_an_entry_that_chance_has_chosen_takes_about_nine_bits_at_one_in_a_hundred() -> None:
    values = np.random.default_rng(1).laplace(size=100_000).astype(np.float32)
    # 8.08 bits of entropy if places were spread evenly, and a sign.
    assert 8 * len(body("atomo:0.01", values)) / 1000 < 9.5


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b"\x05", "number over 4"),
        (b"\x04\x05", "number over 4"),
        (b"\x04\x00\x00\x00\x80\x7f\x00", "level inf, expected a finite number"),
        (b"\x04\x00\x00\x00\xc0\x7f\x00", "level nan, expected a finite number"),
        (b"\x04\x00\x00\x00\x80\x3f", "ends early"),
        (b"\x04\x04" + bytes(15), "ends early"),
    ],
)
def test_entries_that_cannot_be_are_refused(damaged: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        read_entries(PayloadReader(memoryview(damaged)), 4, Float32)
