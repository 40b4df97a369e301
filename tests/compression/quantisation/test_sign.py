"""One bit a value: the two means, and why they are two."""

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.quantisation.rounding import OneBitSgd
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, TensorSpec


def decoded(spec: str, values: Array) -> Array:
    codec = make_codec(spec, (TensorSpec(name="w", shape=values.shape),))
    found = codec.decode(codec.encode({"w": values}, np.random.default_rng(1)))["w"]
    assert isinstance(found, np.ndarray)
    return found


def test_each_side_of_zero_becomes_its_mean_and_a_zero_counts_as_positive() -> None:
    values = np.array([4, 0, 2, -1, -5], dtype=np.float32)
    assert decoded("onebit", values).tolist() == [2, 2, 2, -3, -3]
    assert decoded("onebit", values[:1]).tolist() == [4]
    assert decoded("onebit", values[3:]).tolist() == [-3, -3]


def test_each_bucket_has_means_of_its_own_and_the_last_may_be_shorter() -> None:
    values = np.array([1, 3, -2, 100, 300, -200, -7], dtype=np.float32)
    assert decoded("onebit:3", values).tolist() == [2, 2, -2, 200, 200, -200, -7]


def test_it_takes_one_bit_a_value_and_two_numbers_a_bucket() -> None:
    values = np.linspace(-1, 2, 80_000, dtype=np.float32)
    shapes = (TensorSpec(name="w", shape=values.shape),)
    sizes = [
        len(make_codec(s, shapes).encode({"w": values}, np.random.default_rng(1))) for s in ("onebit", "onebit:500")
    ]
    assert sizes == [32 + 1 + 8 + 10_000, 32 + 2 + 8 * 160 + 10_000]


def test_a_mean_that_is_none_is_refused() -> None:
    with pytest.raises(CodecError, match="mean that is not finite"):
        OneBitSgd.decode(PayloadReader(memoryview(b"\x00\x00\x00\xc0\x7f" + bytes(5))), 4)
