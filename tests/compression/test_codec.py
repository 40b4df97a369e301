"""A codec for each layer: who goes through which, what travels, and what a decoder refuses."""

from collections.abc import Callable

import numpy as np
import pytest

from edgefl.compression.codec import Codec, PerLayerStage, assign_codecs, decode_body, make_codec
from edgefl.compression.entropy.indices import write_indices
from edgefl.compression.error_feedback import ErrorFeedback
from edgefl.compression.registry import LAYERS_ID, STAGES, format_with_layers, parse_spec
from edgefl.compression.wire import encode_varint, write_frame
from edgefl.core.config import RunConfig, parse_run
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, TensorKind, TensorSpec
from edgefl.engine.assembly.build import build_run

SHAPES: ModelSpec = (
    TensorSpec(name="0.weight", shape=(20, 50)),
    TensorSpec(name="0.bias", shape=(20,)),
    TensorSpec(name="2.weight", shape=(10, 20)),
    TensorSpec(name="2.bias", shape=(10,)),
    TensorSpec(name="count", shape=(), dtype="int64", kind=TensorKind.BUFFER),
    TensorSpec(name="head", shape=(4,), shared=False),
)
LINE = "topk:0.1|int8; *.bias = dense; 2.* = fp16"


def rng(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def update(seed: int = 3) -> dict[str, Array]:
    return {spec.name: rng(seed).normal(size=spec.shape).astype(spec.dtype) for spec in SHAPES}


def lines(codec: Codec) -> dict[str, str]:
    assert isinstance(codec.tensor_stage, PerLayerStage)
    return {spec.name: group.spec for group in codec.tensor_stage.groups for spec in group.shapes}


def test_the_first_pattern_that_matches_counts_and_the_rest_goes_through_the_first_codec() -> None:
    assert lines(make_codec(LINE, SHAPES)) == {
        "0.weight": "topk:0.1|int8",
        "0.bias": "dense",
        "2.weight": "fp16",
        "2.bias": "dense",
        "count": "topk:0.1|int8",
    }
    assert lines(make_codec("dense; 2.* = fp16; *.bias = int8", SHAPES))["2.bias"] == "fp16"
    same = make_codec("fp16; *.bias = dense; 0.* = fp16; count = dense", SHAPES).tensor_stage
    assert isinstance(same, PerLayerStage)
    names = [tuple(spec.name for spec in group.shapes) for group in same.groups]
    assert names == [("0.weight", "2.weight"), ("0.bias", "2.bias", "count")]


def test_patterns_have_the_wildcards_of_file_names_and_mind_upper_case() -> None:
    shapes = (TensorSpec(name="a1", shape=(2,)), TensorSpec(name="A1", shape=(2,)), TensorSpec(name="b22", shape=()))
    assert {line: [spec.name for spec in found] for line, found in assign_codecs(
        shapes, "dense", [("a?", "fp16"), ("[bc]*", "int8")]
    ).items()} == {"dense": ["A1"], "fp16": ["a1"], "int8": ["b22"]}  # fmt: skip


def test_each_tensor_comes_back_as_its_own_codec_makes_it_in_the_order_of_the_task() -> None:
    sent = update()
    decoded = decode_body(make_codec(LINE, SHAPES).encode(sent, rng()), SHAPES)
    assert list(decoded) == ["0.weight", "0.bias", "2.weight", "2.bias", "count"]
    assert isinstance(decoded["0.weight"], SparseTensor)
    assert decoded["0.weight"].indices.size == 100
    assert np.array_equal(decoded["0.bias"], sent["0.bias"])
    assert np.array_equal(decoded["2.weight"], sent["2.weight"].astype(np.float16).astype(np.float32))
    assert decoded["count"] == sent["count"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dense; *.bia = fp16", r"no tensor of the task matches the pattern '\*.bia'; known: '0.weight', '0.bias',"),
        ("dense; *.bia = fp16", r"; nearest: '2.bias', '0.bias'"),
        (
            "dense; * = fp16; *.bias = int8",
            r"all tensors that the pattern '\*.bias' matches have a codec by one before",
        ),
        ("dense; * = ef|fp16", "ef stands once, before the whole line, got 'ef|fp16'"),
        ("dense; * = delta|fp16", "delta stands once, before the whole line"),
        ("dense; *", r"behind a semicolon stands PATTERN = CODEC, got '\*'"),
        ("dense;", "stands PATTERN = CODEC, got ''"),
        ("dense; a* = fp16; a* = int8", r"the pattern 'a\*' has two codecs"),
        ("dense; * = fp61", "unknown stage 'fp61' in codec 'fp61', did you mean 'fp16'"),
        ("dense; * = layers", r"'layers' is not typed.*\[compression.layers\]"),
        ("ef|dense; *.bias = randk:0.1", "codec 'randk:0.1': the error of a draw can be larger than the update"),
    ],
)
def test_a_line_that_makes_no_codec_says_why(line: str, message: str) -> None:
    with pytest.raises(CodecError, match=message.replace("|", r"\|")) as caught:
        make_codec(line, SHAPES)
    assert "\n" not in str(caught.value)


def test_a_task_of_many_tensors_is_not_listed_whole() -> None:
    shapes = tuple(TensorSpec(name=f"layer{n}", shape=(1,)) for n in range(100))
    with pytest.raises(CodecError, match=r"'layer23' and 76 more$"):
        make_codec("dense; zzz = fp16", shapes)


def test_the_parts_of_a_line_make_the_line_again() -> None:
    layers = {"*.bias": "dense", "0.*": "topk:0.1|int8"}
    line = format_with_layers("ef|fp16", layers)
    assert line == "ef|fp16; *.bias = dense; 0.* = topk:0.1|int8"
    split = parse_spec(line)
    assert (split.prefix, split.default_line, dict(split.layers)) == ("ef", "fp16", layers)
    assert split.line == line.removeprefix("ef|")


def test_what_all_groups_are_is_what_the_codec_is() -> None:
    def stage(line: str) -> PerLayerStage:
        found = make_codec(line, SHAPES).tensor_stage
        assert isinstance(found, PerLayerStage)
        return found

    assert stage("dense; *.bias = qsgd:4").is_unbiased
    assert not stage("dense; *.bias = sign").is_unbiased
    assert stage("topk:0.1; *.bias = sign").is_contraction
    assert not stage("topk:0.1; *.bias = randk:0.1").is_contraction


def dense_body(*specs: TensorSpec) -> bytes:
    sent = update()
    return make_codec("dense", specs).encode({spec.name: sent[spec.name] for spec in specs}, rng())


def payload(*groups: tuple[list[int], bytes]) -> list[Array]:
    parts = [encode_varint(len(groups))]
    for places, body in groups:
        parts += [*write_indices(np.array(places, dtype=np.int64), 5), encode_varint(len(body))]
        parts.append(np.frombuffer(body, dtype=np.uint8))
    return parts


W0, B0, W2, B2, N = SHAPES[:5]
REST = [1, 2, 3, 4], dense_body(B0, W2, B2, N)
FIRST = [0], dense_body(W0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda: payload(FIRST), "holds no group with '0.bias', '2.weight', '2.bias', 'count'"),
        (lambda: payload(FIRST, FIRST, REST), "holds '0.weight' twice"),
        (lambda: payload(FIRST, REST, ([0, 1], dense_body(W0, B0))), "holds '0.weight', '0.bias' twice"),
        (lambda: payload(FIRST, ([], dense_body()), REST), "holds an empty group"),
        (lambda: [*payload(FIRST, REST), encode_varint(0)], "1 bytes too many"),
        (lambda: [encode_varint(1), encode_varint(6)], "number over 5"),
        (lambda: [encode_varint(1), encode_varint(5), encode_varint(1 << 20)], "ends early"),
        (
            lambda: [encode_varint(1), encode_varint(1), np.array([0, 7], dtype=np.uint8), encode_varint(0)],
            "do not ascend or are not below",
        ),
        (lambda: payload(FIRST, ([1, 2, 3, 4], FIRST[1])), "body holds 1 tensors, the task shares 4"),
        (lambda: payload(FIRST, ([1, 2, 3, 4], REST[1][:-1] + b"x")), "body is damaged: checksum"),
    ],
)
def test_groups_that_do_not_have_every_tensor_once_are_refused(
    parts: Callable[[], list[Array]], message: str
) -> None:
    assert decode_body(write_frame((LAYERS_ID,), 5, payload(FIRST, REST)), SHAPES)
    with pytest.raises(CodecError, match=message):
        decode_body(write_frame((LAYERS_ID,), 5, parts()), SHAPES)


def test_layers_deltas_and_epochs_inside_layers_are_refused() -> None:
    inner = write_frame((LAYERS_ID,), 1, [encode_varint(1), encode_varint(1), encode_varint(len(FIRST[1])),
                                                  *payload()[:0],
                                                  np.frombuffer(FIRST[1], dtype=np.uint8)])  # fmt: skip
    assert decode_body(inner, (W0,))
    delta = write_frame((STAGES["delta"][0],), 1, [encode_varint(0)])
    of_an_epoch = make_codec("dense", (W0,)).encode({"0.weight": update()["0.weight"]}, rng(), epoch=2)
    for body, message in ((inner, "holds layers or a delta"), (delta, "a delta within"), (of_an_epoch, "epoch 2")):
        with pytest.raises(CodecError, match=message):
            decode_body(write_frame((LAYERS_ID,), 5, payload(([0], body), REST)), SHAPES)


def run_file(**compression: object) -> RunConfig:
    return parse_run({"run": {"task": "digits"}, "compression": compression})


def test_the_layers_of_a_run_file_travel_in_every_assignment() -> None:
    assembled = build_run(run_file(up="ef|topk:0.1", layers={"*bias": "fp16"}), "run-1")
    assert assembled.strategy.rules.codec == "ef|topk:0.1; *bias = fp16"
    chosen = build_run(run_file(up="auto:fp16,topk:0.1", layers={"*bias": "dense"}), "run-1")
    assert chosen.strategy.rules.codec == "fp16; *bias = dense"
    for wrong, message in (
        ({"layers": {"*bia": "fp16"}}, r"no tensor of the task matches the pattern '\*bia'; known: "),
        ({"down": "fp16; *bias = dense"}, "a model goes down by one"),
    ):
        with pytest.raises(CodecError, match=message):
            build_run(run_file(**wrong), "run-1")


def test_what_a_stage_of_a_group_remembers_is_kept_with_the_residual() -> None:
    kept = ErrorFeedback(make_codec("ef|powersgd:1; *.bias = dense", SHAPES))
    kept.encode("a1", update(1), rng())
    remembered = {name for name in kept.state() if name.startswith("memory/")}
    assert len(remembered) == 2
    assert all(any(name.endswith(one) for one in ("0.weight", "2.weight")) for name in remembered)
