"""Batches of a cut network through codecs, and updates joined of both sides."""

import numpy as np
import pytest

from edgefl.compression.codec import decode_body, make_codec
from edgefl.compression.split_bodies import BatchCodec, join_displacements
from edgefl.core.errors import CodecError
from edgefl.core.types import TensorSpec

FRONT = (TensorSpec(name="a.weight", shape=(2, 3)), TensorSpec(name="a.bias", shape=(2,)))
WHOLE = (FRONT[0], TensorSpec(name="b.weight", shape=(4,)), FRONT[1])


def rng():
    return np.random.default_rng(1)


@pytest.mark.parametrize("spec", ["dense", "fp16", "int8", "qsgd:8", "topk:0.5|fp16", "dense|zstd"])
@pytest.mark.parametrize("num_examples", [1, 5])
def test_a_batch_comes_back_in_its_shape_and_close(spec, num_examples):
    batch = rng().standard_normal((num_examples, 3, 4)).astype(np.float32)
    codec = BatchCodec(spec, (3, 4))
    decoded = codec.decode(codec.encode(batch, rng()), num_examples)
    assert decoded.shape == batch.shape
    assert np.linalg.norm(decoded - batch) <= 0.5 * np.linalg.norm(batch)


def test_batches_of_many_sizes_cost_no_memory():
    codec = BatchCodec("dense", (2,))
    for num_examples in range(1, 50):
        codec.encode(np.zeros((num_examples, 2), np.float32), rng())
    assert len(codec._codecs) < 5


@pytest.mark.parametrize("spec", ["ef|topk:0.1", "delta|fp16"])
def test_a_codec_that_remembers_the_last_batch_is_refused(spec):
    with pytest.raises(CodecError, match=r"leave out (ef|delta)"):
        BatchCodec(spec, (3,))


@pytest.mark.parametrize(
    ("batch", "num_examples"), [(np.zeros((3, 4)), 2), (np.zeros((2, 5)), 2), (np.full((2, 4), np.nan), 2)]
)
def test_a_batch_of_another_shape_or_without_numbers_is_refused(batch, num_examples):
    body = make_codec("dense", (TensorSpec(name="batch", shape=batch.shape),)).encode(
        {"batch": batch.astype(np.float32)}, rng()
    )
    with pytest.raises(CodecError):
        BatchCodec("dense", (4,)).decode(body, num_examples)


def test_a_joined_update_holds_both_sides_whatever_codec_the_front_had():
    front = {"a.weight": np.array([[0, 0, 5], [0, 0, 0]], np.float32), "a.bias": np.array([0, 7], np.float32)}
    body = make_codec("topk:0.4", FRONT).encode(front, rng())
    joined = decode_body(join_displacements(body, {"b.weight": np.arange(4, dtype=np.float32)}, FRONT, WHOLE), WHOLE)
    np.testing.assert_array_equal(joined["a.weight"], front["a.weight"])
    np.testing.assert_array_equal(joined["a.bias"], front["a.bias"])
    np.testing.assert_array_equal(joined["b.weight"], np.arange(4))
