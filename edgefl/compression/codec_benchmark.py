"""What a codec costs on an update (bytes, speed, error, bits of indices), and codecs worth measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from edgefl.compression.codec import Codec, decode_body, make_codec
from edgefl.compression.entropy.indices import write_indices
from edgefl.compression.error_feedback import ErrorFeedback, has_error_feedback
from edgefl.compression.registry import (
    STAGE_DESCRIPTIONS,
    list_stages,
)
from edgefl.compression.stages import select_shared_tensors, to_dense
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, Tensors

STUDENT_T_DEGREES = 3
RANDOM_UPDATE_SCALE = 1e-3
_MAX_RANDOM_VALUES = 1 << 20
_SEED = 7

LARGE_ENTRY_FRACTION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecBenchmark:
    """Measurements of one codec on one update.

    Attributes:
        num_bytes: of the body, header included.
        ratio: bytes of the tensors in memory, to those of the body.
        encode_mb_per_s, decode_mb_per_s: megabytes of those tensors a second, the fastest of several times; decoding
            ends with dense arrays.
        relative_error: Euclidean norm of the decoding error, to the norm of the update.
        index_bits, entropy_bits: bits of the index per sent entry, and its bits at the entropy of evenly spread
            indices; None where no indices travel.
    """

    spec: str
    num_bytes: int
    ratio: float
    encode_mb_per_s: float
    decode_mb_per_s: float
    relative_error: float
    index_bits: float | None
    entropy_bits: float | None


def measure_codec(
    spec: str, update: Tensors, shapes: ModelSpec, *, clock: Callable[[], float], repeats: int = 5
) -> CodecBenchmark:
    """Measures a codec on an update; with `ef`, on the first one of a run.

    Args:
        spec: the codec.
        update: the tensors of `shapes`.
        shapes: of the task.
        clock: seconds, monotone.
        repeats: number of encodings and decodings.

    Raises:
        CodecError: the codec is invalid, or cannot encode the update.
    """
    encode = _make_encoder(make_codec(spec, shapes))
    body = encode(update)
    decoded = decode_body(body, shapes)
    num_dense = sum(tensor.nbytes for tensor in select_shared_tensors(shapes))
    index_bits, entropy_bits = compute_index_cost(decoded)
    return CodecBenchmark(
        spec=spec,
        num_bytes=len(body),
        ratio=num_dense / len(body),
        encode_mb_per_s=num_dense / 1e6 / _measure_fastest_s(lambda: encode(update), clock, repeats),
        decode_mb_per_s=num_dense
        / 1e6
        / _measure_fastest_s(
            lambda: [to_dense(tensor) for tensor in decode_body(body, shapes).values()], clock, repeats
        ),
        relative_error=compute_relative_error(update, decoded),
        index_bits=index_bits,
        entropy_bits=entropy_bits,
    )


def compute_expected_bytes(spec: str, shapes: ModelSpec) -> int:
    """Returns the size of a body for a random update; see `make_random_update`."""
    return len(_make_encoder(make_codec(spec, shapes))(make_random_update(shapes, np.random.default_rng(_SEED))))


def make_random_update(shapes: ModelSpec, rng: Generator) -> dict[str, Array]:
    """Returns a random update with heavy tails like gradients': Student's t with 3 degrees of freedom.

    Large entries are spread evenly, unlike those of real updates.
    """
    shared = select_shared_tensors(shapes)
    largest = max((spec.size for spec in shared), default=0)
    values = RANDOM_UPDATE_SCALE * rng.standard_t(STUDENT_T_DEGREES, size=min(largest, _MAX_RANDOM_VALUES))
    update = {}
    for spec in shared:
        # Sampling takes longer than most codecs: large tensors repeat the same values, each from another offset.
        start = int(rng.integers(max(1, values.size)))
        samples = np.resize(np.roll(values, -start), spec.size) if spec.size else np.zeros(0)
        update[spec.name] = samples.reshape(spec.shape).astype(spec.dtype)
    return update


def compute_relative_error(update: Tensors, decoded: Mapping[str, Tensor]) -> float:
    """Returns the error's norm relative to the update's, over all decoded tensors; 0 of nothing."""
    largest = max((float(np.max(np.abs(to_dense(update[name])), initial=0.0)) for name in decoded), default=0.0)
    error = squared = 0.0
    for name, tensor in decoded.items() if largest else ():
        original = to_dense(update[name]).astype(np.float64) / largest  # squares of float64 may overflow
        error += float(np.square(to_dense(tensor).astype(np.float64) / largest - original).sum())
        squared += float(np.square(original).sum())
    return math.sqrt(error / squared) if squared else 0.0


def compute_index_cost(decoded: Mapping[str, Tensor]) -> tuple[float | None, float | None]:
    """Returns bits per index: as sent, and at the entropy of an even spread; None without indices."""
    sparse = [tensor for tensor in decoded.values() if isinstance(tensor, SparseTensor)]
    count = sum(tensor.indices.size for tensor in sparse)
    if not count:
        return None, None
    written = entropy = 0.0
    for tensor in sparse:
        size = math.prod(tensor.shape)
        written += 8 * sum(part.nbytes for part in write_indices(tensor.indices, size))
        entropy += _compute_log2_choose(size, tensor.indices.size)
    return written / count, entropy / count


def _make_encoder(codec: Codec) -> Callable[[Tensors], bytes]:
    """Returns the encoder of a new device, with equal results at every call."""

    def encode(update: Tensors) -> bytes:
        rng = np.random.default_rng(_SEED)
        if has_error_feedback(codec.spec):
            return ErrorFeedback(codec).encode("measured", update, rng)
        return codec.encode(update, rng)

    return encode


def _measure_fastest_s(work: Callable[[], object], clock: Callable[[], float], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started_s = clock()
        work()
        seconds.append(clock() - started_s)
    return max(min(seconds), 1e-9)


def _compute_log2_choose(size: int, count: int) -> float:
    """Returns the bits of a uniform choice of `count` among `size` entries."""
    return (math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)) / math.log(2)


def make_example_specs(update: Tensors) -> list[str]:
    """Returns a line or more for every stage, with an argument that suits the update."""
    lines: list[str] = []
    for row in list_stages():
        entry = STAGE_DESCRIPTIONS.get(row.name)
        if row.name == "threshold":
            lines.append(f"threshold:{_compute_large_magnitude(update):.3g}")
        elif entry is not None:
            lines += entry.example_specs
        elif _is_valid_spec(row.name):
            lines.append(row.name)
    return list(dict.fromkeys(lines))


def _is_valid_spec(spec: str) -> bool:
    try:
        make_codec(spec, ())
    except CodecError:
        return False
    return True


def _compute_large_magnitude(update: Tensors) -> float:
    """Returns the magnitude that one entry in a hundred exceeds."""
    magnitudes = [
        np.abs(to_dense(tensor)).reshape(-1) for tensor in update.values() if to_dense(tensor).dtype == np.float32
    ]
    values = np.concatenate(magnitudes) if magnitudes else np.zeros(0)
    return max(float(np.quantile(values, 1 - LARGE_ENTRY_FRACTION)), 1e-30) if values.size else 1.0
