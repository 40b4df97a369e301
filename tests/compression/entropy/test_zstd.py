"""Lossless stages: exact, never larger, and no more memory than the task's tensors can take."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.entropy.zstd import ByteShuffle, Zstd, decompress
from edgefl.compression.sparsification.sparsifiers import Dense
from edgefl.compression.stages import ValueStage
from edgefl.compression.wire import encode_varint, read_frame, write_frame
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, Tensors, TensorSpec

SHAPES = (TensorSpec(name="w", shape=(1000,)),)
SMOOTH = np.linspace(1, 2, 1000, dtype=np.float32)
PARTS = [np.arange(500, dtype="<u2"), SMOOTH, np.zeros(0), np.arange(7, dtype=np.uint8), np.array(5, dtype="<i8")]


@pytest.mark.parametrize("stage", [Zstd(), ByteShuffle()])
def test_a_payload_of_many_widths_comes_back_byte_for_byte(stage: Zstd | ByteShuffle) -> None:
    payload = b"".join(part.tobytes() for part in PARTS)
    (packed,) = stage.encode(PARTS)
    assert packed.nbytes < len(payload)
    assert bytes(stage.decode(memoryview(packed.tobytes()), 10_000)) == payload


def test_shuffling_packs_smooth_numbers_better() -> None:
    sizes = [make_codec(spec, SHAPES).encode({"w": SMOOTH}, np.random.default_rng(1)) for spec in ("zstd", "shuffle")]
    assert len(sizes[1]) < 0.8 * len(sizes[0])


@pytest.mark.parametrize("stage", ["zstd", "shuffle"])
def test_what_cannot_be_packed_travels_as_it_is_without_the_stage_in_its_header(stage: str) -> None:
    noise = {"w": np.frombuffer(np.random.default_rng(1).bytes(4000), dtype=np.float32)}
    body = make_codec(f"dense|{stage}", SHAPES).encode(noise, np.random.default_rng(2))
    assert body == make_codec("dense", SHAPES).encode(noise, np.random.default_rng(2))
    smooth = make_codec(f"dense|{stage}", SHAPES).encode({"w": SMOOTH}, np.random.default_rng(2))
    assert read_frame(smooth).stages == (1, 12 if stage == "zstd" else 13)


class Wordy(Dense):
    """A tensor stage of somebody's own that writes more than a receiver unpacks."""

    def encode(
        self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: np.random.Generator
    ) -> Iterator[Array]:
        yield np.zeros(30_000, dtype=np.uint8)


def test_what_a_receiver_would_not_unpack_is_not_packed() -> None:
    codec = replace(make_codec("dense|zstd", SHAPES), tensor_stage=Wordy())
    assert read_frame(codec.encode({"w": SMOOTH}, np.random.default_rng(1))).stages == (1,)


def bomb(content: bytes) -> bytes:
    """A body whose frame of a few bytes unpacks to `content`."""
    frame = zstandard.ZstdCompressor().compress(content)
    return write_frame([1, 12], 1, [np.frombuffer(frame, dtype=np.uint8)])


def test_a_bomb_is_refused_before_memory_is_taken() -> None:
    body = bomb(bytes(20_000_000))
    assert len(body) < 30_000
    tracemalloc.start()
    with pytest.raises(CodecError, match="unpacks to over 20352 bytes"):
        decode_body(body, SHAPES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (zstandard.ZstdCompressor(write_content_size=False).compress(SMOOTH.tobytes()), "does not state its length"),
        (zstandard.ZstdCompressor().compress(SMOOTH.tobytes()) + b"\0", "cannot be unpacked"),
    ],
)
def test_a_frame_without_its_length_or_with_bytes_behind_it_is_refused(frame: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode_body(write_frame([1, 12], 1, [np.frombuffer(frame, dtype=np.uint8)]), SHAPES)


@pytest.mark.parametrize("behind", [b"garbage", b"\x01\x00\x00more", b""])
def test_an_empty_frame_is_looked_at_to_its_end(behind: bytes) -> None:
    with pytest.raises(CodecError, match="cannot be unpacked"):
        decompress(memoryview(b"\x28\xb5\x2f\xfd\x20\x00" + behind), 100)
    assert decompress(memoryview(zstandard.ZstdCompressor().compress(b"")), 100) == b""


@pytest.mark.parametrize(
    "table",
    [[2**17], [1, 17, 5], [1, 4, 2**30], [2, 4, 1000], [1, 4, 999], [1, 4, 1001], [1, 0, 4000], []],
)
def test_a_table_of_runs_that_does_not_fit_is_refused(table: list[int]) -> None:
    content = b"".join(encode_varint(number).tobytes() for number in table) + SMOOTH.tobytes()
    frame = np.frombuffer(zstandard.ZstdCompressor().compress(content if table else b""), dtype=np.uint8)
    with pytest.raises(CodecError):
        decode_body(write_frame([1, 13], 1, [frame]), SHAPES)
