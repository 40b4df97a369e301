"""The sparse downlink: whoever gets deltas holds the same model as whoever gets everything."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from edgefl.compression.codec import Codec, decode_body, make_codec
from edgefl.compression.delta import apply_delta, encode_delta, parse_downlink_codec
from edgefl.compression.wire import read_frame, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, TensorKind, TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPES: ModelSpec = (
    TensorSpec(name="weight", shape=(20, 30)),
    TensorSpec(name="bias", shape=(20,)),
    TensorSpec(name="scale", shape=()),
    TensorSpec(name="head", shape=(4,), shared=False),
    TensorSpec(name="mean", shape=(20,), kind=TensorKind.BUFFER),
    TensorSpec(name="count", shape=(), dtype="int64", kind=TensorKind.BUFFER),
)
SHARED = [spec for spec in SHAPES if spec.shared]


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def model(seed: int = 1) -> dict[str, Array]:
    """A model whose numbers no release of NumPy computes differently."""
    return {
        spec.name: np.asarray(((np.arange(spec.size) * 37 + seed) % 101 / 7).reshape(spec.shape)).astype(spec.dtype)
        for spec in SHARED
    }


def changed_model(old: dict[str, Array], changed: dict[str, Array]) -> dict[str, Array]:
    new = {name: array.copy() for name, array in old.items()}
    for name, places in changed.items():
        new[name].reshape(-1)[places] += 3
    return new


def places_in(spec: TensorSpec) -> strategies.SearchStrategy[set[int]]:
    return strategies.sets(strategies.integers(0, spec.size - 1), max_size=9)


def whole(codec: Codec, tensors: dict[str, Array]) -> dict[str, Array]:
    """What a device holds that was sent all of a model."""
    decoded = codec.decode(codec.encode(tensors, rng()))
    return {name: tensor for name, tensor in decoded.items() if isinstance(tensor, np.ndarray)}


CHANGED = {"weight": np.array([0, 7, 599]), "scale": np.array([0]), "count": np.array([0])}


@pytest.mark.parametrize("spec", ["dense", "dense|fp16", "dense|bf16", "dense|fp16|zstd", "shuffle"])
@settings(max_examples=15, deadline=None)
@given(data=strategies.data())
def test_a_device_that_was_sent_deltas_holds_what_it_would_hold_after_the_whole_model(
    spec: str, data: strategies.DataObject
) -> None:
    codec, current = make_codec(spec, SHAPES), model()
    held = whole(codec, current)
    for _ in range(2):
        changed = {tensor.name: np.array(sorted(data.draw(places_in(tensor))), dtype=np.int64) for tensor in SHARED}
        current = changed_model(current, changed)
        body = encode_delta(current, changed, SHAPES, spec, rng())
        assert body is not None
        held = apply_delta(held, body, SHAPES)
    sent = whole(codec, current)
    assert {name: array.tobytes() for name, array in held.items()} == {name: sent[name].tobytes() for name in sent}
    assert {name: (array.shape, array.dtype) for name, array in held.items()} == {
        spec.name: (spec.shape, np.dtype(spec.dtype)) for spec in SHARED
    }


def test_a_delta_of_few_entries_is_much_smaller_than_the_model() -> None:
    shapes = (TensorSpec(name="w", shape=(100_000,)),)
    new = {"w": np.random.default_rng(1).normal(size=100_000).astype(np.float32)}
    changed = {"w": np.arange(0, 100_000, 12)}
    body = encode_delta(new, changed, shapes, "dense|fp16", rng())
    assert body is not None
    # 8.3 % changed: 16 bits of value and under 5 of index each, beside 32 bits for every entry.
    assert 400_000 / len(body) > 18


def test_unchanged_tensors_are_the_given_ones_and_indices_may_come_in_any_order_and_twice() -> None:
    held = model()
    for array in held.values():
        array.flags.writeable = False
    body = encode_delta(changed_model(held, CHANGED), CHANGED, SHAPES, "dense", rng())
    assert body is not None
    shuffled = {**CHANGED, "weight": np.array([599, 0, 7, 0], dtype=np.int32)}
    assert encode_delta(changed_model(held, CHANGED), shuffled, SHAPES, "dense", rng()) == body
    new = apply_delta(held, body, SHAPES)
    assert new["bias"] is held["bias"]
    assert new["mean"] is held["mean"]
    assert new["count"] == held["count"] + 3
    assert held["weight"].tobytes() == model()["weight"].tobytes()


def test_there_is_no_delta_when_all_or_most_entries_changed() -> None:
    most = {"weight": np.arange(330), "bias": np.arange(20)}
    assert encode_delta(model(), None, SHAPES, "dense", rng()) is None
    assert encode_delta(model(), most, SHAPES, "dense", rng()) is None
    assert encode_delta(model(), {"weight": np.arange(320)}, SHAPES, "dense", rng()) is not None


def test_there_is_no_delta_where_the_whole_model_is_smaller() -> None:
    shapes = (TensorSpec(name="flags", shape=(64,), dtype="uint8", kind=TensorKind.BUFFER),)
    flags = {"flags": np.arange(64, dtype=np.uint8)}
    assert encode_delta(flags, {"flags": np.arange(0, 64, 2)}, shapes, "dense", rng()) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": np.array([600])}, "'weight': changed indices must lie in 0 to 599"),
        ({"weight": np.array([-1])}, "'weight': changed indices must lie in 0 to 599"),
        ({"head": np.array([0])}, "changed indices name 'head', which the task does not share"),
    ],
)
def test_indices_that_the_task_does_not_have_are_refused(changed: dict[str, Array], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        encode_delta(model(), changed, SHAPES, "dense", rng())


def test_a_model_that_is_not_the_tasks_is_refused() -> None:
    body = encode_delta(model(), {}, SHAPES, "dense", rng())
    assert body is not None
    with pytest.raises(CodecError, match="'bias' must have the shape"):
        apply_delta({**model(), "bias": np.zeros(3, dtype=np.float32)}, body, SHAPES)
    with pytest.raises(CodecError, match="'bias' must have the shape"):
        apply_delta({name: array for name, array in model().items() if name != "bias"}, body, SHAPES)


def test_deltas_and_whole_models_are_not_taken_for_one_another() -> None:
    delta = encode_delta(model(), {}, SHAPES, "dense", rng())
    assert delta is not None
    with pytest.raises(CodecError, match="body is a delta of a model, expected whole tensors"):
        decode_body(delta, SHAPES)
    with pytest.raises(CodecError, match="body holds whole tensors, expected a delta"):
        apply_delta(model(), make_codec("dense", SHAPES).encode(model(), rng()), SHAPES)


def test_a_delta_of_another_epoch_is_refused() -> None:
    body = encode_delta(model(), {}, SHAPES, "dense", rng(), epoch=4)
    assert body is not None
    assert apply_delta(model(), body, SHAPES, epoch=4)
    with pytest.raises(CodecError, match="epoch 4, expected 5"):
        apply_delta(model(), body, SHAPES, epoch=5)


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("delta", (True, "dense")),
        (" delta | bf16 | zstd:9 ", (True, "bf16|zstd:9")),
        ("int8|zstd", (False, "int8|zstd")),
    ],
)
def test_a_line_for_the_downlink_is_taken_apart(spec: str, found: tuple[bool, str]) -> None:
    assert parse_downlink_codec(spec) == found


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("delta|int8", "a delta carries dense, fp16 or bf16 values"),
        ("ef|fp16", r"ef is for \[compression\] up"),
        ("delta|fp17", "unknown stage 'fp17'"),
        ("fp16|delta", "delta stands before the stages"),
        ("topk:0.1|int8", "what does not travel of a model would be zero; topk:0.1 is for"),
        ("dense|qsgd:8|zstd", "come right in the mean of many updates"),
        ("alternating:4:tan:random", "come right in the mean of many updates"),
    ],
)
def test_a_line_that_makes_no_downlink_is_refused(spec: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        parse_downlink_codec(spec)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=strategies.data())
def test_any_damage_under_a_valid_checksum_is_a_codec_error_or_gives_a_model_of_the_task(
    data: strategies.DataObject,
) -> None:
    body = encode_delta(changed_model(model(), CHANGED), CHANGED, SHAPES, "dense|fp16", rng())
    assert body is not None
    frame = read_frame(body)
    payload = bytearray(frame.payload)
    place = strategies.integers(0, len(payload) - 1)
    for at, byte in data.draw(strategies.lists(strategies.tuples(place, strategies.integers(0, 255)), max_size=4)):
        payload[at] = byte
    damaged = bytes(payload[: data.draw(strategies.one_of(strategies.none(), place))])
    resealed = write_frame(frame.stages, frame.num_tensors, [np.frombuffer(damaged, dtype=np.uint8)])
    try:
        new = apply_delta(model(), resealed, SHAPES)
    except CodecError:
        return
    assert {name: array.shape for name, array in new.items()} == {spec.name: spec.shape for spec in SHARED}


def test_the_bytes_are_those_of_the_golden_file() -> None:
    golden = (GOLDEN / "delta+fp16.bin").read_bytes()
    new = changed_model(model(), CHANGED)
    assert encode_delta(new, CHANGED, SHAPES, "fp16", rng()) == golden
    assert read_frame(golden).stages == (11, 2)
    assert apply_delta(model(), golden, SHAPES)["weight"][19, 29] == np.float16(new["weight"][19, 29])
