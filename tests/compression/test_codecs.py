"""One contract for every codec that can be made from the registry."""

import hashlib
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from codec_examples import (
    BYTES_MAY_DIFFER,
    EXAMPLES,
    GOLDEN,
    LOSSY,
    REFUSE_HUGE,
    SHAPES,
    SHARED,
    arrays,
    assert_well_formed,
    encoded,
    error_bound,
    for_large,
    golden_file,
    part_for,
    rng,
    small_tensors,
    stages_of,
)

from edgefl.compression.codec import Codec, decode_body, make_codec
from edgefl.compression.registry import LAYERS, LAYERS_ID, STAGES, list_stage_names, list_stages
from edgefl.compression.sparsification.atomo import Atomo, AtomoDct
from edgefl.compression.sparsification.atomo_svd import AtomoSvd
from edgefl.compression.sparsification.sparsifiers import Dense, RandK, Slice, Threshold, TopK
from edgefl.compression.wire import NAMED_STAGE_ID, encode_varint, read_frame, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, TensorKind, Tensors, TensorSpec


def is_unbiased(spec: str) -> bool:
    return make_codec(spec, SHAPES).is_unbiased


UNBIASED = tuple(spec for spec in EXAMPLES if is_unbiased(spec))


@pytest.fixture(params=EXAMPLES)
def codec(request: pytest.FixtureRequest) -> Codec:
    return make_codec(request.param, SHAPES)


def decoded_from(codec: Codec, tensors: Tensors) -> dict[str, Array]:
    return arrays(codec.decode(codec.encode(tensors, rng())))


def one(values: Array) -> tuple[ModelSpec, dict[str, Array]]:
    return (TensorSpec(name="w", shape=values.shape),), {"w": values}


def test_the_specs_under_contract_use_every_stage_of_our_own() -> None:
    used = {name for spec in EXAMPLES for name in stages_of(spec)}
    assert any(";" in spec for spec in EXAMPLES)
    # A delta is made of a model and not of an update: tests/compression/test_delta.py.
    assert used - {"ef", "rice"} | {"delta"} == set(STAGES), "describe the stage with an example"


def stages_in_name(file: Path) -> list[str]:
    """The stages that the name of a golden file has, in the order of the header."""
    if "_" in file.stem:
        return ["layers"]
    names = [re.split(r"-(?=\d|inf|channel)", part)[0] for part in file.stem.removeprefix("ef+").split("+")]
    return [name for name in names if name != "rice"]


def test_numbers_once_given_are_never_given_again() -> None:
    frozen = set()
    for file in GOLDEN.glob("*.bin"):
        # A stage that packs is left out where it saves nothing.
        frozen |= set(zip(read_frame(memoryview(file.read_bytes())).stages, stages_in_name(file), strict=False))
    assert frozen == {(LAYERS_ID, LAYERS), *((number, name) for name, (number, _) in STAGES.items())}
    assert all(0 < number < NAMED_STAGE_ID for number, _ in frozen)


def test_parameters_come_back_within_the_stated_error_and_the_rest_bit_for_bit(codec: Codec) -> None:
    tensors = small_tensors()
    magnitudes = 10.0 ** np.arange(-9, 5, 2)
    tensors["kernel"] = (rng().normal(size=(2, 1, 3, 7)) * magnitudes).astype(np.float32)
    for array in tensors.values():
        array.flags.writeable = False
    decoded = codec.decode(codec.encode(tensors, rng()))
    assert tuple(decoded) == SHARED
    for spec in SHAPES:
        found = arrays(decoded).get(spec.name)
        assert spec.shared is (found is not None)
        assert found is None or (found.shape, found.dtype) == (spec.shape, np.dtype(spec.dtype))
    for name in LOSSY:
        assert_within_the_error(codec, name, decoded[name], tensors[name])
    for name in set(SHARED) - set(LOSSY):
        assert arrays(decoded)[name].tobytes() == tensors[name].tobytes(), name
    for name, tensor in decoded.items():
        stage = part_for(codec, name).tensor_stage
        # Where triples are larger or worse a tensor is written whole, or as entries; cosines have an entry each.
        assert isinstance(stage, AtomoSvd | AtomoDct) or isinstance(tensor, SparseTensor) == (
            name in (*LOSSY, "empty") and isinstance(stage, Atomo | TopK | Threshold | RandK | Slice)
        )
        if isinstance(tensor, SparseTensor):
            assert_well_formed(tensor)


DTYPES = ("float16", "float64", "int8", "uint8", "int16", "uint32", "int32", "uint64", "bool")


def test_what_is_no_float32_comes_back_bit_for_bit_as_parameter_and_as_buffer(codec: Codec) -> None:
    shapes = tuple(
        TensorSpec(name=f"w{kind}{dtype}", shape=(3, 4), dtype=dtype, kind=kind)
        for kind in TensorKind
        for dtype in DTYPES
    )
    tensors = {one.name: np.arange(-6, 6).reshape(3, 4).astype(one.dtype) for one in shapes}
    decoded = decoded_from(make_codec(codec.spec, shapes), tensors)
    for one in shapes:
        assert (decoded[one.name].dtype, decoded[one.name].tobytes()) == (one.dtype, tensors[one.name].tobytes())


def assert_within_the_error(codec: Codec, name: str, decoded: Tensor, tensor: Array) -> None:
    part = part_for(codec, name)
    if not isinstance(part.tensor_stage, Dense | TopK | Threshold | RandK | Slice):
        # Its entries are not those that went in, and how far off they may be is a matter of its own tests.
        assert np.all(np.isfinite(arrays({name: decoded})[name])), name
        return
    found, sent = travelled(part, decoded, tensor)
    error = np.abs(found.astype(np.float64) - sent.astype(np.float64))
    assert np.all(error <= error_bound(part.value_stage, sent)), name


def travelled(part: Codec, decoded: Tensor, tensor: Array) -> tuple[Array, Array]:
    """The decoded entries that travelled, and what the value stage was given for them."""
    if not isinstance(decoded, SparseTensor):
        assert isinstance(part.tensor_stage, Dense)
        return decoded, tensor
    sent = tensor.reshape(-1)[decoded.indices]
    stage, scale = part.tensor_stage, 1.0
    if isinstance(stage, RandK) and len(sent):
        scale = tensor.size / len(sent)
    return decoded.values, sent * np.float32(scale)


HOSTILE = {
    "nothing but zeros": np.zeros(15, dtype=np.float32),
    "nothing but negative zeros": np.full(15, -0.0, dtype=np.float32),
    "denormal numbers": np.linspace(-4e-45, 4e-45, 15, dtype=np.float32),
    "the smallest normal number": np.full(15, np.finfo(np.float32).tiny),
    "one huge number": np.array([3.4e38] + [1e-3] * 14, dtype=np.float32),
    "huge numbers": np.array([3.4e38, -3.4e38] * 7 + [0], dtype=np.float32),
}


def test_extreme_numbers_are_within_the_error_or_refused_by_name(codec: Codec) -> None:
    for name, values in HOSTILE.items():
        tensors = small_tensors() | {"weight": values.reshape(3, 5)}
        try:
            body = codec.encode(tensors, rng())
        except CodecError as refused:
            is_allowed = np.abs(values).max() > 1e38 and codec.spec.startswith(REFUSE_HUGE)
            if not is_allowed or not str(refused).startswith("tensor 'weight': "):
                raise AssertionError(name) from refused
            continue
        with np.errstate(over="raise", invalid="raise"):
            decoded = codec.decode(body)["weight"]
        assert_within_the_error(codec, "weight", decoded, tensors["weight"])


def test_a_number_that_is_none_is_refused_by_name_or_preserved_as_the_stages_say(codec: Codec) -> None:
    part = part_for(codec, "weight")
    for value in (np.nan, np.inf, -np.inf):
        tensors = small_tensors()
        tensors["weight"][1, 2] = value
        if part.value_stage.is_finite_only or not isinstance(part.tensor_stage, Dense):
            with pytest.raises(CodecError, match=r"tensor 'weight': .* carries finite numbers, got"):
                codec.encode(tensors, rng())
        else:
            np.testing.assert_array_equal(decoded_from(codec, tensors)["weight"][1, 2], np.float32(value))


@pytest.mark.extended
@pytest.mark.parametrize("spec", UNBIASED)
def test_the_mean_of_many_draws_of_every_unbiased_example_is_the_tensor(spec: str) -> None:
    num_draws = 1000
    values = np.array([[0.3, -0.4, 0.1], [0.2, 0.05, -0.3]], dtype=np.float32)
    # Each tensor of a body is a draw of its own.
    shapes = tuple(TensorSpec(name=f"w{number}", shape=(2, 3)) for number in range(500))
    tensors, codec, luck = {one.name: values for one in shapes}, make_codec(spec, shapes), rng()
    total, squares = np.zeros((2, 3)), np.zeros((2, 3))
    for _ in range(num_draws // len(shapes)):
        for drawn in arrays(codec.decode(codec.encode(tensors, luck))).values():
            total += drawn
            squares += np.square(drawn, dtype=np.float64)
    mean = total / num_draws
    error = np.sqrt(np.maximum(squares / num_draws - mean**2, 0) / num_draws)
    # One false alarm in a million runs over all the entries of all the examples.
    widths = NormalDist().inv_cdf(1 - 1e-6 / (2 * values.size * len(UNBIASED)))
    assert np.all(np.abs(mean - values) <= widths * error + 1e-6)


def test_tensors_that_stay_on_the_board_neither_travel_nor_need_to_be_there(codec: Codec) -> None:
    tensors = small_tensors()
    body = codec.encode(tensors, rng())
    assert np.float32(99).tobytes() not in body
    del tensors["head"]
    assert codec.encode(tensors, rng()) == body


def test_every_shape_survives_the_round_trip_and_no_tensor_at_all(codec: Codec) -> None:
    sizes = ((), (0,), (1,), (0, 3), (7,), (13, 11), (2, 3, 5, 7), (65_537,))
    shapes = tuple(TensorSpec(name=f"w{place}", shape=shape) for place, shape in enumerate(sizes))
    tensors = {one.name: np.asarray(rng().normal(size=one.shape), dtype=np.float32) for one in shapes}
    decoded = decoded_from(make_codec(codec.spec, shapes), tensors)
    assert [decoded[one.name].shape for one in shapes] == list(sizes)
    nothing = make_codec(codec.spec, (TensorSpec(name="head", shape=(4,), shared=False),))
    assert decoded_from(nothing, {}) == {}


def test_strided_reversed_byte_swapped_and_sparse_tensors_give_the_same_bytes(codec: Codec) -> None:
    sparse = SparseTensor(indices=np.array([1, 14]), values=np.array([2, -3], dtype=np.float32), shape=(3, 5))
    tensors = small_tensors()
    odd = {
        "kernel": np.repeat(tensors["kernel"], 2, axis=3)[..., ::2],
        "count": tensors["count"].astype(">i8"),
        "mean": tensors["mean"][::-1].copy()[::-1],
    }
    for weight, same in ((np.asfortranarray(tensors["weight"]), tensors["weight"]), (sparse, sparse.dense())):
        meant = {**tensors, "weight": same}
        assert codec.encode({**meant, **odd, "weight": weight}, rng()) == codec.encode(meant, rng())


HASH_BODIES = """
import hashlib, sys
sys.path[:0] = sys.argv[1:]
from codec_examples import EXAMPLES, encoded
print(*(hashlib.sha256(encoded(spec)).hexdigest() for spec in EXAMPLES))
"""


def test_the_same_seed_gives_the_same_bytes_in_another_process() -> None:
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    found = [
        subprocess.run(
            [sys.executable, "-c", HASH_BODIES, *paths],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    here = [hashlib.sha256(encoded(spec)).hexdigest() for spec in EXAMPLES]
    assert found == [here, here]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": np.zeros((5, 3), dtype=np.float32)}, r"'weight' must have the shape \(3, 5\), got \(5, 3\)"),
        ({"count": np.array(1.0)}, "'count' must hold int64, got float64"),
        ({"bias": np.zeros(3)}, "hold 'bias', unknown to the task"),
        ({"scale": None}, "lack 'scale'"),
    ],
)
def test_a_tensor_that_does_not_fit_its_spec_is_refused(change: Tensors, message: str) -> None:
    tensors = {name: tensor for name, tensor in {**small_tensors(), **change}.items() if tensor is not None}
    with pytest.raises(CodecError, match=message):
        make_codec("dense", SHAPES).encode(tensors, rng())


@pytest.mark.parametrize(
    ("shapes", "epoch", "message"),
    [
        (SHAPES[:1], 4, "holds 8 tensors, the task shares 1"),
        ((TensorSpec(name="weight", shape=(3, 6)), *SHAPES[1:]), 4, "ends early"),
        ((TensorSpec(name="weight", shape=(3, 4)), *SHAPES[1:]), 4, "bytes too many"),
        (SHAPES, 0, "epoch 4, expected 0"),
    ],
)
def test_a_body_of_another_task_or_epoch_is_refused(shapes: ModelSpec, epoch: int, message: str) -> None:
    body = make_codec("dense|fp16", SHAPES).encode(small_tensors(), rng(), epoch=4)
    assert decode_body(body, SHAPES, epoch=4)
    with pytest.raises(CodecError, match=message):
        decode_body(body, shapes, epoch=epoch)


def test_the_bytes_are_those_of_the_golden_file(codec: Codec) -> None:
    golden = golden_file(codec.spec).read_bytes()
    encoded = codec.encode(small_tensors(), rng())
    assert encoded == golden or any(name in codec.spec for name in BYTES_MAY_DIFFER)
    decoded = decode_body(golden, SHAPES)
    for name in LOSSY:
        assert_within_the_error(codec, name, decoded[name], small_tensors()[name])
    for name in set(SHARED) - set(LOSSY):
        assert arrays(decoded)[name].tobytes() == small_tensors()[name].tobytes(), name


def test_every_golden_file_belongs_to_a_spec_under_contract() -> None:
    deltas = set(GOLDEN.glob("delta*.bin"))
    assert deltas
    assert set(GOLDEN.glob("*.bin")) - deltas == {golden_file(spec) for spec in EXAMPLES}


def test_dense_carries_nan_infinity_denormals_and_negative_zero_bit_for_bit() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38], dtype=np.float32)
    shapes, tensors = one(values)
    assert decoded_from(make_codec("dense", shapes), tensors)["w"].tobytes() == values.tobytes()


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


@pytest.mark.extended
@pytest.mark.parametrize("spec", [for_large(spec) for spec in EXAMPLES])
def test_a_large_tensor_takes_at_most_three_times_its_memory_more_each_way(spec: str) -> None:
    shapes, tensors = one(rng().standard_t(3, size=(4000, 250)).astype(np.float32))
    codec, allowed = make_codec(spec, shapes), 3 * tensors["w"].nbytes + 2**21
    np.unique(np.arange(2))  # imports modules of its own at the first time
    tracemalloc.start()
    try:
        body = codec.encode(tensors, rng())
        before, most_to_encode = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        codec.decode(body)
        most_to_decode = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert most_to_encode <= allowed
    assert most_to_decode <= allowed


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dnse", "unknown stage 'dnse' in codec 'dnse', did you mean 'dense'\\?; known: alternating, "),
        ("fp16|dense", "got tensors, values, tensors"),
        ("dense|fp16|fp16", "got tensors, values, values"),
        ("zstd|shuffle", "got tensors, lossless, lossless"),
        ("dense|rice", "rice codes places, so a stage such as topk or qsgd must stand before it"),
        ("topk:0.1|rice|rice", "rice stands at most once and takes no argument"),
        ("topk:0.1|rice:3", "rice stands at most once and takes no argument"),
        ("topk:0.1|ef", "ef stands before the stages, once and without an argument"),
        ("ef:2|topk:0.1", "ef stands before the stages"),
        ("ef|ef|topk:0.1", "ef stands before the stages"),
        ("slice:0:2", "'slice' needs a whole number from 1 to 2, got slice:0"),
        ("slice:3:2", "'slice' needs a whole number from 1 to 2, got slice:3"),
        ("slice:1:257", "'slice count' needs a whole number from 1 to 256, got slice count:257"),
        ("ef|slice:1:2", "the error of a draw can be larger than the update, and ef would pile it up"),
        ("ef|randk:0.1", "the error of a draw can be larger than the update, and ef would pile it up"),
        ("ef|topk:0.1|terngrad", "the error of a draw can be larger than the update"),
        ("delta|fp16", "delta is for [compression] down, where the device holds a model already"),
        ("topk:0", "'topk' needs a fraction over 0 and at most 1, got topk:0"),
        ("topk:1.5", "got topk:1.5"),
        ("topk:nan", "got topk:nan"),
        ("randk:1e-999999999", "got randk:1e-999999999"),
        ("threshold:inf", "got threshold:inf"),
        ("threshold:1e300", "float32 has, 1.4e-45 to 3.4e\\+38, got threshold:1e300"),
        ("threshold:1e-50", "got threshold:1e-50"),
        ("qsgd:" + "9" * 5000, "'qsgd' needs a whole number from 1 to 8, got qsgd:9999"),
        ("qsgd:4:0", "'qsgd bucket' needs a whole number from 1 to 1048576, got qsgd bucket:0"),
        ("ef|", "a stage is missing"),
        ("auto", "auto chooses among codecs in a run"),
        ("int8:row", "takes no argument or 'channel', got int8:row"),
        ("terngrad:0.5", "clips at 1 or more deviations, or inf, got terngrad:0.5"),
        ("dense|fp16:x", "'fp16' takes no argument, got fp16:x"),
        ("onebit:1", "needs a whole number from 2 to 1048576, got onebit:1"),
        ("zstd:22", "'zstd' needs a whole number from 1 to 19, got zstd:22"),
        ("atomo:0", "'atomo' needs a number over 0, got atomo:0"),
        ("atomo:inf", "got atomo:inf"),
        ("atomo-svd:1:rows", "'atomo-svd' makes matrices by one of kernel, out, atomo, got 'rows'"),
        ("lss:7", "'lss' needs a whole number from 1 to 6, got lss:7"),
        ("lss:2:0", "'lss' needs buckets for a fraction over 0 and at most 1, got 0"),
        ("lss:2:nan", "got nan"),
        ("lss:2:hash:hash", "'lss' takes a fraction, hash, keep and raw, once each, got lss:2:hash:hash"),
        ("lss:2:0.1:0.2", "once each, got lss:2:0.1:0.2"),
        ("lss:2:keep", "needs error feedback to keep what it leaves out: write ef|lss:2:keep, for [compression] up"),
        ("powersgd:2", "needs error feedback to keep what it leaves out: write ef|powersgd:2, for [compression] up"),
        ("laq:4", "needs error feedback to keep what it leaves out: write ef|laq:4, for [compression] up"),
        ("ef|laq:1", "'laq' needs a whole number from 2 to 8, got laq:1"),
        ("ef|powersgd", "'powersgd' needs a whole number from 1 to 4096, got powersgd:"),
    ],
)
def test_a_spec_that_makes_no_codec_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(CodecError, match=message.replace("|", r"\|").replace("[", r"\[")) as caught:
        make_codec(spec, SHAPES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (" dense | fp16 ", "dense|fp16"),
        ("fp16", "dense|fp16"),
        ("qsgd:4|rice", "dense|qsgd:4"),
        ("zstd", "dense|zstd"),
        ("topk:0.2|int8", "topk:0.2|int8|rice"),
        ("ef|topk:0.2|int8", "topk:0.2|int8"),
        ("ef|fp16", "dense|fp16"),
        ("topk:2e-1", "topk:0.20"),
    ],
)
def test_what_is_left_out_of_a_spec_or_makes_no_difference_gives_the_same_bytes(typed: str, meant: str) -> None:
    bodies = [make_codec(spec, SHAPES).encode(small_tensors(), rng()) for spec in (typed, meant)]
    assert bodies[0] == bodies[1]


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
    is_unbiased = False
    is_contraction = True
    is_finite_only = False

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
        return reader.read_array(np.dtype("<f4"), 1) * reader.read_array(np.dtype(np.int8), size)
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
    assert "acme-steps" in list_stage_names()
    body = make_codec("dense|acme-steps:0.5", shapes).encode(tensors, rng())
    assert read_frame(body).stages == (1, "acme-steps")
    assert arrays(decode_body(body, shapes))["w"].tolist() == [1, -2, 0.5]


def test_a_package_that_cannot_be_imported_costs_its_own_stage_alone(acme_codecs: None, tmp_path: Path) -> None:
    (tmp_path / "acme_codecs.py").write_text("raise ImportError('libacme is missing')")
    message = "'acme-steps' cannot be imported: ImportError: libacme is missing"
    with pytest.raises(CodecError, match=message):
        make_codec("acme-steps:0.5", SHAPES)
    with pytest.raises(CodecError, match=message):
        decode_body(write_frame([1, "acme-steps"], len(SHARED), []), SHAPES)
    (row,) = [row for row in list_stages() if row.name == "acme-steps"]
    assert message in row.summary.replace("codec stage ", "")
    assert len(list_stages()) > 10


def test_an_int8_step_that_nobody_writes_is_damage() -> None:
    shapes, _ = one(np.zeros(2, dtype=np.float32))
    parts = [encode_varint(1), np.full(1, 3.4028235e38, dtype="<f4"), np.array([-128, 1], dtype=np.int8)]
    with pytest.raises(CodecError, match="holds the step -128, at least -127 is right"):
        decode_body(write_frame([1, 4], 1, parts), shapes)


def test_a_body_of_a_package_that_is_not_installed_names_the_stage() -> None:
    body = write_frame([1, "acme-other"], len(SHARED), [])
    with pytest.raises(CodecError, match="'acme-other': install the package"):
        decode_body(body, SHAPES)
