"""Sixteen-bit floats at their edges."""

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.wire import read_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, TensorSpec


def rounded(values: list[float]) -> Array:
    shapes = (TensorSpec(name="w", shape=(len(values),)),)
    codec = make_codec("bf16", shapes)
    decoded = codec.decode(codec.encode({"w": np.array(values, dtype=np.float32)}, np.random.default_rng(1)))["w"]
    assert isinstance(decoded, np.ndarray)
    return decoded


def test_bf16_rounds_to_the_nearest_and_ties_to_even() -> None:
    ulp = 2.0**-7
    found = rounded([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp * 0.51, -1 - ulp * 0.49])
    assert found.tolist() == [1, 1 + 2 * ulp, 1 + ulp, -1]


def test_bf16_keeps_nan_infinity_and_the_sign_of_zero() -> None:
    # This NaN has its only fraction bits where bf16 has none.
    odd = np.array([0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    found = rounded([np.inf, -np.inf, -0.0, *odd])
    assert found[:2].tolist() == [np.inf, -np.inf]
    assert np.signbit(found[2])
    assert np.isnan(found[3:]).all()


def test_bf16_refuses_by_name_what_it_would_turn_into_infinity() -> None:
    assert rounded([3.3895e38]).tolist() == [np.float32(3.3895314e38)]
    with pytest.raises(
        CodecError, match=r"tensor 'w': bf16 carries magnitudes up to 3.38953e\+38, got 3.4e\+38: use dense"
    ):
        rounded([-3.4e38])


def test_fp16_rounds_every_number_as_numpy_does() -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    middles = (halves[1:] + halves[:-1]) / 2
    values = np.concatenate(
        [halves, middles, np.nextafter(middles, np.float32(9)), np.nextafter(middles, np.float32(-9))]
    )
    values = np.concatenate([values, [np.inf, -np.inf, 1e-45, -1e-45, 65519.996]]).astype(np.float32)
    shapes = (TensorSpec(name="w", shape=values.shape),)
    body = make_codec("fp16", shapes).encode({"w": values}, np.random.default_rng(1))
    assert read_frame(body).payload == values.astype(np.float16).tobytes()
    decoded = make_codec("fp16", shapes).decode(body)["w"]
    assert isinstance(decoded, np.ndarray)
    assert decoded.tobytes() == values.astype(np.float16).astype(np.float32).tobytes()


@pytest.mark.parametrize("value", [65520, -65520, 1e9, 3.4e38])
def test_fp16_refuses_what_rounds_to_infinity(value: float) -> None:
    shapes = (TensorSpec(name="w", shape=(2,)),)
    with pytest.raises(CodecError, match="fp16 carries magnitudes up to 65504, got"):
        make_codec("fp16", shapes).encode(
            {"w": np.array([value, np.inf], dtype=np.float32)}, np.random.default_rng(1)
        )
