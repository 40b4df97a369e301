"""One contract for every codec that can be made from the registry."""

import struct
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgefl.compression.registry import STAGES, Codec, decode_body, make_codec, stage_names
from edgefl.compression.wire import BY_NAME, read_frame, write_frame
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, Tensor, TensorKind, Tensors, TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden"
SPECS = ("dense", "dense|fp16")
# Every number that was ever given out. Lines are added here, and none is ever changed or removed.
NUMBERS_GIVEN = {1: "dense", 2: "fp16"}

SHAPES: Shapes = (
    TensorSpec(name="weight", shape=(3, 5)),
    TensorSpec(name="empty", shape=(0, 4)),
    TensorSpec(name="scale", shape=()),
    TensorSpec(name="kernel", shape=(2, 1, 3, 7)),
    TensorSpec(name="head", shape=(4,), shared=False),
    TensorSpec(name="fine", shape=(3,), dtype="float64"),
    TensorSpec(name="mean", shape=(5,), kind=TensorKind.BUFFER),
    TensorSpec(name="flag", shape=(3,), dtype="bool", kind=TensorKind.BUFFER),
    TensorSpec(name="count", shape=(), dtype="int64", kind=TensorKind.BUFFER),
)
LOSSY = ("weight", "scale", "kernel")
SHARED = tuple(spec.name for spec in SHAPES if spec.shared)


def small_tensors() -> dict[str, Array]:
    """Fixed numbers that no release of NumPy computes differently."""
    return {
        "weight": ((np.arange(15, dtype=np.float32) - 7) / np.float32(3)).reshape(3, 5),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "scale": np.array(-0.1, dtype=np.float32),
        "kernel": (np.arange(42, dtype=np.float32) * np.float32(1e-8)).reshape(2, 1, 3, 7),
        "head": np.full(4, 99, dtype=np.float32),
        "fine": np.array([1 / 3, -1e-300, 1e300]),
        "mean": np.array([1e30, -1e-30, 1 / 3, 0, -0.0], dtype=np.float32),
        "flag": np.array([True, False, True]),
        "count": np.array(2**53 + 1, dtype=np.int64),
    }


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.fixture(params=SPECS)
def codec(request: pytest.FixtureRequest) -> Codec:
    return make_codec(request.param, SHAPES)


def arrays(decoded: dict[str, Tensor]) -> dict[str, Array]:
    return {name: t.dense() if isinstance(t, SparseTensor) else t for name, t in decoded.items()}


def decoded_from(codec: Codec, tensors: Tensors) -> dict[str, Array]:
    return arrays(codec.decode(codec.encode(tensors, rng())))


def one(values: Array) -> tuple[Shapes, dict[str, Array]]:
    return (TensorSpec(name="w", shape=values.shape),), {"w": values}


def test_the_specs_under_contract_use_every_stage_of_our_own() -> None:
    assert {name for spec in SPECS for name in spec.split("|")} == set(STAGES)


def test_numbers_once_given_are_never_given_again() -> None:
    assert {number: name for name, (number, _) in STAGES.items()} == NUMBERS_GIVEN
    assert len(NUMBERS_GIVEN) == len(STAGES)
    assert all(0 < number < BY_NAME for number in NUMBERS_GIVEN)


def test_parameters_come_back_within_the_stated_error(codec: Codec) -> None:
    tensors = small_tensors()
    magnitudes = 10.0 ** np.arange(-9, 5, 2)
    tensors["kernel"] = (rng().normal(size=(2, 1, 3, 7)) * magnitudes).astype(np.float32)
    decoded = decoded_from(codec, tensors)
    for name in LOSSY:
        error = np.abs(decoded[name].astype(np.float64) - tensors[name].astype(np.float64))
        bound = codec.values.relative_error * np.abs(tensors[name].astype(np.float64)) + codec.values.absolute_error
        assert np.all(error <= bound), name


def test_buffers_integers_and_doubles_come_back_bit_for_bit(codec: Codec) -> None:
    tensors = small_tensors()
    decoded = decoded_from(codec, tensors)
    for name in set(SHARED) - set(LOSSY):
        assert decoded[name].tobytes() == tensors[name].tobytes(), name


def test_shapes_types_and_order_are_those_of_the_task(codec: Codec) -> None:
    decoded = decoded_from(codec, small_tensors())
    assert tuple(decoded) == SHARED
    for spec in SHAPES:
        if spec.shared:
            assert (decoded[spec.name].shape, decoded[spec.name].dtype) == (spec.shape, np.dtype(spec.dtype))


def test_tensors_that_stay_on_the_board_neither_travel_nor_need_to_be_there(codec: Codec) -> None:
    tensors = small_tensors()
    body = codec.encode(tensors, rng())
    assert np.float32(99).tobytes() not in body
    del tensors["head"]
    assert codec.encode(tensors, rng()) == body


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 3), (7,), (13, 11), (2, 3, 5, 7), (65_537,)])
def test_every_shape_survives_the_round_trip(spec: str, shape: tuple[int, ...]) -> None:
    shapes, tensors = one(np.asarray(rng().normal(size=shape), dtype=np.float32))
    assert decoded_from(make_codec(spec, shapes), tensors)["w"].shape == shape


def test_a_task_without_shared_tensors_has_a_body_too(codec: Codec) -> None:
    nothing = make_codec(codec.spec, (TensorSpec(name="head", shape=(4,), shared=False),))
    assert decoded_from(nothing, {}) == {}


def test_strided_reversed_and_byte_swapped_tensors_give_the_same_bytes(codec: Codec) -> None:
    tensors = small_tensors()
    odd = tensors | {
        "weight": np.asfortranarray(tensors["weight"]),
        "kernel": np.repeat(tensors["kernel"], 2, axis=3)[..., ::2],
        "count": tensors["count"].astype(">i8"),
        "mean": tensors["mean"][::-1].copy()[::-1],
    }
    assert codec.encode(odd, rng()) == codec.encode(tensors, rng())


def test_the_same_seed_gives_the_same_bytes(codec: Codec) -> None:
    assert codec.encode(small_tensors(), rng()) == codec.encode(small_tensors(), rng())


def test_encoding_touches_neither_the_tensors_nor_their_flags(codec: Codec) -> None:
    tensors, before = small_tensors(), small_tensors()
    for array in tensors.values():
        array.flags.writeable = False
    codec.encode(tensors, rng())
    assert all(tensors[name].tobytes() == before[name].tobytes() for name in before)


def test_a_sparse_tensor_is_encoded_like_its_dense_form(codec: Codec) -> None:
    sparse = SparseTensor(indices=np.array([1, 14]), values=np.array([2, -3], dtype=np.float32), shape=(3, 5))
    tensors = small_tensors() | {"weight": sparse}
    assert codec.encode(tensors, rng()) == codec.encode(tensors | {"weight": sparse.dense()}, rng())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((5, 3), dtype=np.float32)}, r"'weight' must have the shape \(3, 5\), got \(5, 3\)"),
        ({"scale": np.zeros(1, dtype=np.float32)}, r"'scale' must have the shape \(\), got \(1,\)"),
        ({"count": np.array(1.0)}, "'count' must hold int64, got float64"),
        ({"weight": np.zeros((3, 5), dtype=object)}, "'weight' must hold float32, got object"),
        ({"bias": np.zeros(3)}, "hold 'bias', unknown to the task"),
    ],
)
def test_a_tensor_that_does_not_fit_its_spec_is_refused(codec: Codec, change: Tensors, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        codec.encode(small_tensors() | change, rng())


def test_a_missing_tensor_is_named(codec: Codec) -> None:
    tensors = small_tensors()
    del tensors["scale"]
    with pytest.raises(CodecError, match="lack 'scale'"):
        codec.encode(tensors, rng())


def test_a_body_of_another_task_is_refused(codec: Codec) -> None:
    body = codec.encode(small_tensors(), rng())
    with pytest.raises(CodecError, match="holds 8 tensors, the task shares 1"):
        decode_body(body, SHAPES[:1])
    wider = (TensorSpec(name="weight", shape=(3, 6)), *SHAPES[1:])
    narrower = (TensorSpec(name="weight", shape=(3, 4)), *SHAPES[1:])
    with pytest.raises(CodecError, match="ends early"):
        decode_body(body, wider)
    with pytest.raises(CodecError, match="bytes too many"):
        decode_body(body, narrower)


def test_a_body_of_another_epoch_is_refused(codec: Codec) -> None:
    body = codec.encode(small_tensors(), rng(), epoch=4)
    assert decode_body(body, SHAPES, epoch=4)
    with pytest.raises(CodecError, match="epoch 4, expected 0"):
        decode_body(body, SHAPES)


def test_every_cut_every_extension_and_every_damaged_byte_is_a_codec_error(codec: Codec) -> None:
    body = codec.encode(small_tensors(), rng())
    broken = [body[:length] for length in range(len(body))]
    broken += [body + b"\x00", b"\x00" + body, body + body]
    broken += [body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :] for at in range(len(body)) for flip in (1, 255)]
    for damaged in broken:
        with pytest.raises(CodecError):
            decode_body(memoryview(damaged), SHAPES)


def test_damage_under_a_valid_checksum_is_a_codec_error_or_gives_the_declared_tensors(codec: Codec) -> None:
    body = codec.encode(small_tensors(), rng())
    for at in range(len(body)):
        for flip in (1, 16, 128, 255):
            damaged = body[:at] + bytes([body[at] ^ flip]) + body[at + 1 :]
            crc = zlib.crc32(damaged[24:], zlib.crc32(damaged[:20]))
            try:
                decoded = decode_body(damaged[:20] + struct.pack("<I", crc) + damaged[24:], SHAPES)
            except CodecError:
                continue
            assert [(name, tensor.shape) for name, tensor in decoded.items()] == [
                (spec.name, spec.shape) for spec in SHAPES if spec.shared
            ]


def test_the_bytes_are_those_of_the_golden_file(codec: Codec) -> None:
    golden = (GOLDEN / f"{codec.spec.replace('|', '+')}.bin").read_bytes()
    assert codec.encode(small_tensors(), rng()) == golden
    decoded = arrays(decode_body(golden, SHAPES))
    np.testing.assert_allclose(decoded["weight"], small_tensors()["weight"], rtol=2**-11)


def test_every_golden_file_belongs_to_a_spec_under_contract() -> None:
    assert {file.stem.replace("+", "|") for file in GOLDEN.glob("*.bin")} == set(SPECS)


def test_any_codec_reads_what_any_other_wrote() -> None:
    body = make_codec("dense|fp16", SHAPES).encode(small_tensors(), rng())
    assert tuple(make_codec("dense", SHAPES).decode(body)) == SHARED


def test_dense_carries_nan_infinity_denormals_and_negative_zero_bit_for_bit() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], dtype=np.float32)
    shapes, tensors = one(values)
    assert decoded_from(make_codec("dense", shapes), tensors)["w"].tobytes() == values.tobytes()


def test_half_precision_keeps_nan_and_infinity_and_rounds_to_nearest() -> None:
    shapes, tensors = one(np.array([np.nan, np.inf, -np.inf, 1 + 2**-11, 1 + 3 * 2**-11, 65504], dtype=np.float32))
    decoded = decoded_from(make_codec("dense|fp16", shapes), tensors)["w"]
    np.testing.assert_array_equal(decoded, [np.nan, np.inf, -np.inf, 1, 1 + 2**-9, 65504])


def test_half_precision_refuses_by_name_what_it_would_turn_into_infinity() -> None:
    shapes, tensors = one(np.array([np.inf, -1e6], dtype=np.float32))
    with pytest.raises(CodecError, match=r"tensor 'w': fp16 carries magnitudes up to 65504, got 1e\+06: use dense"):
        make_codec("dense|fp16", shapes).encode(tensors, rng())


def test_a_truth_value_is_true_or_false_whatever_byte_was_sent() -> None:
    shapes = (TensorSpec(name="flag", shape=(3,), dtype="bool", kind=TensorKind.BUFFER),)
    integers = (TensorSpec(name="flag", shape=(3,), dtype="uint8", kind=TensorKind.BUFFER),)
    body = make_codec("dense", integers).encode({"flag": np.array([0, 1, 2], dtype=np.uint8)}, rng())
    assert arrays(decode_body(body, shapes))["flag"].view(np.uint8).tolist() == [0, 1, 1]


def test_decoding_dense_copies_nothing() -> None:
    body = make_codec("dense", SHAPES).encode(small_tensors(), rng())
    decoded = arrays(decode_body(body, SHAPES))
    assert np.shares_memory(decoded["weight"], np.frombuffer(body, dtype=np.uint8))
    assert not decoded["weight"].flags.writeable


def test_encoding_dense_allocates_little_more_than_the_body() -> None:
    shapes, tensors = one(np.ones(2_000_000, dtype=np.float32))
    codec = make_codec("dense", shapes)
    tracemalloc.start()
    body = codec.encode(tensors, rng())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.05 * len(body)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dnse", "unknown stage 'dnse' in codec 'dnse', did you mean 'dense'\\?; known: dense, fp16"),
        ("", "unknown stage ''"),
        ("dense|", "unknown stage ''"),
        ("dense|zzz", "unknown stage 'zzz' in codec 'dense|zzz'; known: dense, fp16"),
        ("fp16", "must be a tensor stage and at most one value stage behind it, got values"),
        ("fp16|dense", "got values, tensors"),
        ("dense|fp16|fp16", "got tensors, values, values"),
        ("dense:3", "'dense' takes no argument, got dense:3"),
        ("dense|fp16:x", "'fp16' takes no argument, got fp16:x"),
    ],
)
def test_a_spec_that_makes_no_codec_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(CodecError, match=message.replace("|", r"\|")) as caught:
        make_codec(spec, SHAPES)
    assert "\n" not in str(caught.value)


def test_a_spec_may_have_spaces_around_its_bars() -> None:
    assert make_codec(" dense | fp16 ", SHAPES).ids == (1, 2)


def test_a_stage_of_a_later_release_is_named_by_its_number() -> None:
    body = write_frame([1, 777], len(SHARED), [])
    with pytest.raises(CodecError, match="stage number 777, which this edgefl does not know"):
        decode_body(body, SHAPES)


def test_tensors_that_hold_neither_numbers_nor_bools_have_no_codec() -> None:
    shapes = (TensorSpec(name="w", shape=(1,), dtype="object", kind=TensorKind.BUFFER),)
    with pytest.raises(CodecError, match="'w' must hold floats, integers or bools, got object"):
        make_codec("dense", shapes).encode({"w": np.zeros(1, dtype=object)}, rng())


ACME_CODECS = """
import numpy as np

class Steps:
    kind = "values"
    relative_error = 0.0
    absolute_error = 0.5

    def __init__(self, step):
        self.step = step

    @classmethod
    def parse(cls, argument):
        return cls(float(argument))

    def encode(self, values, rng):
        yield np.array([self.step], dtype=np.float32)
        yield np.rint(values / self.step).astype(np.int8)

    @staticmethod
    def decode(reader, size):
        return reader.array(np.dtype("<f4"), 1) * reader.array(np.dtype(np.int8), size)
"""


@pytest.fixture
def acme_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package that has a value stage named acme-steps."""
    metadata = tmp_path / "acme_codecs-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-codecs\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[edgefl.codecs]\nacme-steps = acme_codecs:Steps\n")
    (tmp_path / "acme_codecs.py").write_text(ACME_CODECS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("acme_codecs", None)


@pytest.mark.usefixtures("acme_codecs")
def test_a_stage_of_another_package_is_found_and_travels_by_name() -> None:
    shapes, tensors = one(np.array([1, -2, 0.5], dtype=np.float32))
    assert "acme-steps" in stage_names()
    body = make_codec("dense|acme-steps:0.5", shapes).encode(tensors, rng())
    assert read_frame(body).stages == (1, "acme-steps")
    assert arrays(decode_body(body, shapes))["w"].tolist() == [1, -2, 0.5]


def test_a_body_of_a_package_that_is_not_installed_names_the_stage() -> None:
    body = write_frame([1, "acme-other"], len(SHARED), [])
    with pytest.raises(CodecError, match="'acme-other': install the package"):
        decode_body(body, SHAPES)
