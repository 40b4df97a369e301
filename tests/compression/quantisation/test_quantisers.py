"""Value stages that round: their arithmetic on numbers that can be checked by hand, and their variance."""

import numpy as np
import pytest

from edgefl.compression.codec import make_codec
from edgefl.compression.quantisation.rounding import Int8
from edgefl.compression.quantisation.stochastic_rounding import Qsgd, TernGrad
from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, SparseTensor, TensorSpec

# The vector of ATOMO's T8 and T9.
G = np.array([0.3, -0.4, 0.5, 0.1], dtype=np.float32)
REPEATS = 20_000


def decoded(spec: str, values: Array, seed: int = 1) -> Array:
    shapes = (TensorSpec(name="w", shape=values.shape),)
    codec = make_codec(spec, shapes)
    found = codec.decode(codec.encode({"w": values}, np.random.default_rng(seed)))["w"]
    return found.dense() if isinstance(found, SparseTensor) else found


def draws(spec: str) -> Array:
    """[REPEATS, 4] decodings of G, each of its own bucket."""
    return decoded(spec, np.tile(G, REPEATS)).reshape(-1, 4).astype(np.float64)


def close_to_chances(found: Array, chances: list[float]) -> bool:
    errors = np.sqrt(np.array(chances) * (1 - np.array(chances)) / REPEATS)
    return bool(np.all(np.abs(found.mean(axis=0) - chances) <= 5.6 * errors + 1e-6))


def test_atomo_t8_one_bit_qsgd_keeps_an_entry_with_its_share_of_the_norm() -> None:
    assert close_to_chances(draws("qsgd:1:4") != 0, [0.42008, 0.56011, 0.70014, 0.14003])


def test_atomo_t8_terngrad_keeps_an_entry_with_its_share_of_the_largest() -> None:
    assert close_to_chances(draws("terngrad:inf") != 0, [0.6, 0.8, 1.0, 0.2])


def test_atomo_t9_two_bit_qsgd_rounds_to_the_neighbouring_levels_up_with_the_fraction() -> None:
    norm = 0.714143
    levels = draws("qsgd:2:4") * 3 / norm
    rounded = np.rint(levels)
    assert np.abs(levels - rounded).max() < 1e-5
    assert [sorted(set(column)) for column in rounded.T] == [[1, 2], [-2, -1], [2, 3], [0, 1]]
    assert close_to_chances(np.abs(rounded) - [1, 1, 2, 0], [0.26025, 0.68034, 0.10042, 0.42008])


def test_terngrad_clips_at_two_and_a_half_deviations() -> None:
    values = np.array([100.0] + [1.0] * 99, dtype=np.float32)
    limit = 2.5 * np.sqrt((100**2 + 99) / 100)
    assert decoded("terngrad", values)[0] == pytest.approx(limit)
    assert decoded("terngrad:inf", values)[0] == 100
    assert decoded("terngrad", np.full(3, 7, dtype=np.float32)).tolist() == [7, 7, 7]


def test_each_bucket_has_a_norm_of_its_own_and_the_last_may_be_shorter() -> None:
    values = np.array([1, 0, 0, 1000, 0, 0, 5], dtype=np.float32)
    assert decoded("qsgd:1:3", values).tolist() == values.tolist()


def test_qsgd_refuses_a_norm_beyond_single_precision() -> None:
    with pytest.raises(CodecError, match=r"tensor 'w': qsgd carries norms up to 3.4"):
        decoded("qsgd:4", np.full(4, 3e38, dtype=np.float32))


def test_int8_scales_by_the_largest_and_rounds_to_the_nearest() -> None:
    values = np.array([127, -63.4, 0.6, -0.4, 0], dtype=np.float32)
    assert decoded("int8", values).tolist() == [127, -63, 1, 0, 0]


def test_int8_by_channel_keeps_small_rows_that_a_common_scale_would_lose() -> None:
    values = np.array([[127.0, 64], [0.0127, 0.0064]], dtype=np.float32)
    assert decoded("int8", values)[1].tolist() == [0, 0]
    np.testing.assert_allclose(decoded("int8:channel", values), values, rtol=1e-6)


def test_int8_by_channel_is_one_scale_for_what_has_no_channels() -> None:
    values = np.arange(6, dtype=np.float32)
    shapes = (TensorSpec(name="w", shape=(6,)),)
    bodies = {
        make_codec(spec, shapes).encode({"w": values}, np.random.default_rng(1)) for spec in ("int8", "int8:channel")
    }
    assert len(bodies) == 1


def test_sign_sends_the_mean_magnitude_with_each_sign() -> None:
    assert decoded("sign", np.array([3, -1, 0, -4], dtype=np.float32)).tolist() == [2, -2, 2, -2]


@pytest.mark.parametrize(
    ("stage", "body", "message"),
    [
        (Int8, b"\x00", "0 scales for 4 values"),
        (Int8, b"\x05", "number over 4"),
        (Int8, b"\x01\x00\x00\x80\x7f" + bytes(4), "not finite"),
        (Qsgd, b"\x09\x04", "levels of 9 bits"),
        (Qsgd, b"\x04\x00", "buckets of 0"),
        (Qsgd, b"\x04\x04\x00\x00\xc0\x7f", "norm that is not finite"),
        (TernGrad, b"\x00\x00\x80\x7f\x00", "scale inf, expected a finite number"),
    ],
)
def test_a_scale_that_cannot_be_is_refused(stage: type[ValueStage], body: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        stage.decode(PayloadReader(memoryview(body)), 4)
