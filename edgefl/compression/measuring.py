"""What a codec costs and loses on a given update: bytes, speed, error, and the bits of its places."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec, make_codec
from edgefl.compression.coding.indices import write_indices
from edgefl.compression.decoding import decode_body
from edgefl.compression.feedback import ErrorFeedback, uses_feedback
from edgefl.compression.stages import shared_shapes
from edgefl.types import Array, Shapes, SparseTensor, Tensor, Tensors

DRAWN_DEGREES = 3
DRAWN_SCALE = 1e-3
_DRAWN_VALUES = 1 << 20
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One codec on one update.

    Attributes:
        num_bytes: of the body, header included.
        ratio: bytes of the tensors as they are in memory, to those of the body.
        encode_mb_per_s, decode_mb_per_s: megabytes of those tensors a second, the fastest of several times; decoding
            ends with dense arrays.
        relative_error: Euclidean norm of what decoding gives less what was encoded, to the norm of the latter.
        index_bits, entropy_bits: bits of the places for each entry that travels, and what they would be if the places
            were spread evenly and coded at their entropy; None where no places travel.
    """

    spec: str
    num_bytes: int
    ratio: float
    encode_mb_per_s: float
    decode_mb_per_s: float
    relative_error: float
    index_bits: float | None
    entropy_bits: float | None


def measure(spec: str, update: Tensors, shapes: Shapes, *, clock: Callable[[], float], repeats: int = 5) -> Measured:
    """Returns what a codec does to an update; with `ef`, to the first one of a run.

    Args:
        spec: the codec.
        update: the tensors of `shapes`.
        shapes: of the task.
        clock: seconds, monotone.
        repeats: how often it encodes and decodes.

    Raises:
        CodecError: the codec makes no sense, or cannot carry the update.
    """
    encode = _encoder(make_codec(spec, shapes))
    body = encode(update)
    decoded = decode_body(body, shapes)
    num_dense = sum(tensor.nbytes for tensor in shared_shapes(shapes))
    index_bits, entropy_bits = places_cost(decoded)
    return Measured(
        spec=spec,
        num_bytes=len(body),
        ratio=num_dense / len(body),
        encode_mb_per_s=num_dense / 1e6 / _fastest_s(lambda: encode(update), clock, repeats),
        decode_mb_per_s=num_dense / 1e6 / _fastest_s(lambda: _decoded(body, shapes), clock, repeats),
        relative_error=relative_error(update, decoded),
        index_bits=index_bits,
        entropy_bits=entropy_bits,
    )


def expected_bytes(spec: str, shapes: Shapes) -> int:
    """Returns the bytes of a body for an update that is drawn; see `drawn_update`."""
    return len(_encoder(make_codec(spec, shapes))(drawn_update(shapes, np.random.default_rng(_SEED))))


def drawn_update(shapes: Shapes, rng: Generator) -> dict[str, Array]:
    """Returns an update with tails as heavy as gradients have them: Student's t with 3 degrees of freedom.

    Places of large entries are spread evenly, which they are not in real updates.
    """
    shared = shared_shapes(shapes)
    largest = max((spec.size for spec in shared), default=0)
    values = DRAWN_SCALE * rng.standard_t(DRAWN_DEGREES, size=min(largest, _DRAWN_VALUES))
    update = {}
    for spec in shared:
        # Drawing takes longer than most codecs do: large tensors repeat themselves, each from another place on.
        start = int(rng.integers(max(1, values.size)))
        drawn = np.resize(np.roll(values, -start), spec.size) if spec.size else np.zeros(0)
        update[spec.name] = drawn.reshape(spec.shape).astype(spec.dtype)
    return update


def relative_error(update: Tensors, decoded: Mapping[str, Tensor]) -> float:
    """Returns the norm of the error to that of the update, over all tensors that were decoded; 0 of nothing."""
    largest = max((float(np.max(np.abs(dense(update[name])), initial=0.0)) for name in decoded), default=0.0)
    error = squared = 0.0
    for name, tensor in decoded.items() if largest else ():
        before = dense(update[name]).astype(np.float64) / largest  # the squares of float64 may be beyond it
        error += float(np.square(dense(tensor).astype(np.float64) / largest - before).sum())
        squared += float(np.square(before).sum())
    return math.sqrt(error / squared) if squared else 0.0


def places_cost(decoded: Mapping[str, Tensor]) -> tuple[float | None, float | None]:
    """Returns bits a place: as they travel, and at the entropy of an even spread; None where no places travel."""
    sparse = [tensor for tensor in decoded.values() if isinstance(tensor, SparseTensor)]
    count = sum(tensor.indices.size for tensor in sparse)
    if not count:
        return None, None
    written = entropy = 0.0
    for tensor in sparse:
        size = math.prod(tensor.shape)
        written += 8 * sum(part.nbytes for part in write_indices(tensor.indices, size))
        entropy += _log2_choose(size, tensor.indices.size)
    return written / count, entropy / count


def dense(tensor: Tensor) -> Array:
    return tensor.dense() if isinstance(tensor, SparseTensor) else tensor


def _encoder(codec: Codec) -> Callable[[Tensors], bytes]:
    """Returns the encoding of a device that begins: alike every time it is called."""

    def encode(update: Tensors) -> bytes:
        rng = np.random.default_rng(_SEED)
        if uses_feedback(codec.spec):
            return ErrorFeedback(codec).encode("measured", update, rng)
        return codec.encode(update, rng)

    return encode


def _decoded(body: bytes, shapes: Shapes) -> dict[str, Array]:
    return {name: dense(tensor) for name, tensor in decode_body(body, shapes).items()}


def _fastest_s(work: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        begun_s = clock()
        work()
        seconds.append(clock() - begun_s)
    return max(min(seconds), 1e-9)


def _log2_choose(size: int, count: int) -> float:
    """Returns the bits that tell which `count` of `size` entries are meant, when all choices are as likely."""
    return (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)
