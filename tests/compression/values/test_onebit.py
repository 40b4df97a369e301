"""One bit a value: the two means, and why they are two."""

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.feedback import ErrorFeedback
from edgefl.compression.values.onebit import OneBit
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, TensorSpec


def decoded(spec: str, values: Array) -> Array:
    codec = make_codec(spec, (TensorSpec(name="w", shape=values.shape),))
    found = codec.decode(codec.encode({"w": values}, np.random.default_rng(1)))["w"]
    assert isinstance(found, np.ndarray)
    return found


def test_each_side_of_zero_becomes_its_mean_and_a_zero_counts_as_positive() -> None:
    values = np.array([4, 0, 2, -1, -5], dtype=np.float32)
    assert decoded("onebit", values).tolist() == [2, 2, 2, -3, -3]


def test_a_tensor_of_one_sign_needs_no_other_side() -> None:
    assert decoded("onebit", np.array([1, 3], dtype=np.float32)).tolist() == [2, 2]
    assert decoded("onebit", np.array([-1, -3], dtype=np.float32)).tolist() == [-2, -2]


def test_each_bucket_has_means_of_its_own_and_the_last_may_be_shorter() -> None:
    values = np.array([1, 3, -2, 100, 300, -200, -7], dtype=np.float32)
    assert decoded("onebit:3", values).tolist() == [2, 2, -2, 200, 200, -200, -7]


def test_two_means_are_nearer_than_one_scale_where_a_tensor_leans_to_a_side() -> None:
    drawn = np.random.default_rng(2).standard_normal(4096)
    values = np.where(drawn > 0, 3 * drawn, drawn).astype(np.float32)
    errors = {spec: float(np.square(decoded(spec, values) - values).sum()) for spec in ("onebit", "sign")}
    assert errors["onebit"] < 0.85 * errors["sign"]


def test_it_takes_one_bit_a_value_and_two_numbers_a_bucket() -> None:
    values = np.linspace(-1, 2, 80_000, dtype=np.float32)
    shapes = (TensorSpec(name="w", shape=values.shape),)
    sizes = [
        len(make_codec(s, shapes).encode({"w": values}, np.random.default_rng(1))) for s in ("onebit", "onebit:500")
    ]
    assert sizes == [32 + 1 + 8 + 10_000, 32 + 2 + 8 * 160 + 10_000]


def test_behind_error_feedback_nothing_is_lost() -> None:
    rng = np.random.default_rng(4)
    shapes = (TensorSpec(name="w", shape=(50,)),)
    codec = make_codec("ef|onebit:16", shapes)
    feedback, sent, meant = ErrorFeedback(codec), np.zeros(50), np.zeros(50)
    for step in range(40):
        displacement = rng.standard_normal(50).astype(np.float32)
        found = codec.decode(feedback.encode(f"a{step}", {"w": displacement}, rng))["w"]
        assert isinstance(found, np.ndarray)
        feedback.settle([f"a{step}"])
        sent, meant = sent + found, meant + displacement
    np.testing.assert_allclose(sent + feedback.state()["residual/w"], meant, atol=1e-4)
    assert np.linalg.norm(sent - meant) < np.linalg.norm(meant)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("onebit:1", "needs a whole number from 2 to 1048576, got onebit:1"), ("onebit:x", "got onebit:x")],
)
def test_a_bucket_that_makes_no_sense_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        make_codec(spec, ())


def test_a_mean_that_is_none_is_refused() -> None:
    with pytest.raises(CodecError, match="mean that is not finite"):
        OneBit.decode(Reader(memoryview(b"\x00\x00\x00\xc0\x7f" + bytes(5))), 4)
