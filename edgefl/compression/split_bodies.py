"""Bodies of split learning: a batch of activations or of gradients, and an update joined of both sides of the cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec, decode_body, make_codec
from edgefl.compression.registry import parse_spec
from edgefl.core.errors import CodecError
from edgefl.core.protocol import SPLIT_LABEL_BYTES, SPLIT_LOSS_BYTES
from edgefl.core.types import Array, ModelSpec, Tensor, TensorSpec, derive_rng

if TYPE_CHECKING:
    from edgefl.core.config import SplitSection

_NAME = "batch"


class BatchCodec:
    """Encodes and decodes float32 batches [n, *shape]; nothing is remembered from one to the next.

    Args:
        spec: a codec's line, without what stands before the stages.
        shape: of one example.

    Raises:
        CodecError: the line is invalid, or needs memory of earlier batches.
    """

    def __init__(self, spec: str, shape: tuple[int, ...]) -> None:
        if prefix := parse_spec(spec).prefix:
            raise CodecError(
                f"codec {spec!r}: a batch is sent once, and nothing of it is left for the next; leave out {prefix}"
            )
        self._spec, self._shape = spec, shape
        self._codecs: dict[int, Codec] = {}
        self._get_codec(1)

    def encode(self, batch: Array, rng: Generator) -> bytes:
        """Returns a body; raises `CodecError` for a batch that is not finite or beyond the codec's range."""
        return self._get_codec(len(batch)).encode({_NAME: np.asarray(batch, np.float32)}, rng)

    def decode(self, body: bytes | memoryview, num_examples: int) -> Array:
        """Returns the batch in a body of this codec.

        Raises:
            CodecError: the body is damaged, of another shape, or holds a NaN or an infinity.
        """
        tensor = decode_body(body, self._make_shapes(num_examples))[_NAME]
        batch = tensor if isinstance(tensor, np.ndarray) else tensor.dense()
        if not np.isfinite(batch).all():
            raise CodecError("a batch holds a NaN or an infinity")
        return batch

    def _get_codec(self, num_examples: int) -> Codec:
        # An epoch has two sizes of batches: all are full but for its last.
        if num_examples not in self._codecs:
            if len(self._codecs) > 2:
                self._codecs.clear()
            self._codecs[num_examples] = make_codec(self._spec, self._make_shapes(num_examples))
        return self._codecs[num_examples]

    def _make_shapes(self, num_examples: int) -> ModelSpec:
        return (TensorSpec(name=_NAME, shape=(num_examples, *self._shape)),)


class ExchangeSizes:
    """Bytes of the batches of one iteration, by batch size.

    Args:
        section: of the run file.
        activation_shape: of one example.
        num_outputs: of the network.
    """

    def __init__(self, section: SplitSection, activation_shape: tuple[int, ...], num_outputs: int) -> None:
        self._up, self._down = BatchCodec(section.up, activation_shape), BatchCodec(section.down, activation_shape)
        self._outputs = BatchCodec("dense", (num_outputs,)) if section.labels == "device" else None
        self._activation_shape, self._num_outputs = activation_shape, num_outputs
        self._bytes_by_batch_size: dict[int, tuple[int, int]] = {}

    @property
    def num_round_trips(self) -> int:
        return 1 if self._outputs is None else 2

    def count_bytes(self, batch_size: int) -> tuple[int, int]:
        """Returns the bytes up and down of one iteration, of a batch of random numbers."""
        if batch_size not in self._bytes_by_batch_size:
            rng = derive_rng("exchange", batch_size)
            batch = rng.standard_normal((batch_size, *self._activation_shape)).astype(np.float32)
            up, down = len(self._up.encode(batch, rng)), len(self._down.encode(batch, rng))
            if self._outputs is None:
                up, down = up + SPLIT_LABEL_BYTES * batch_size, down + SPLIT_LOSS_BYTES
            else:
                outputs = len(self._outputs.encode(np.zeros((batch_size, self._num_outputs), np.float32), rng))
                up, down = up + outputs, down + outputs
            self._bytes_by_batch_size[batch_size] = up, down
        return self._bytes_by_batch_size[batch_size]


def join_displacements(front_body: bytes, rest: Mapping[str, Array], front: ModelSpec, whole: ModelSpec) -> bytes:
    """Returns the displacement of a whole network as one dense body.

    Args:
        front_body: of the first layers, of any codec.
        rest: of all other layers.
        front: shapes of the first layers.
        whole: shapes of the network.

    Raises:
        CodecError: the body is damaged or of another task.
    """
    decoded: dict[str, Tensor] = {**decode_body(front_body, front), **rest}
    dense = {name: item if isinstance(item, np.ndarray) else item.dense() for name, item in decoded.items()}
    return make_codec("dense", whole).encode(dense, np.random.default_rng(0))
