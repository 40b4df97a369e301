"""One line or more for every stage of the registry, and a small task: what the contract of all codecs is run on.

A new stage is taken up by itself, with the examples by which the registry describes it. This writes its golden files:

    PYTHONPATH=tests python tests/codec_examples.py
"""

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.compression.codec import Codec, PerLayerStage, make_codec
from edgefl.compression.quantisation.rounding import BFloat16, Float16, Float32, Int8, OneBitSgd, ScaledSign
from edgefl.compression.quantisation.stochastic_rounding import NaturalCompression, Qsgd, TernGrad
from edgefl.compression.registry import STAGE_DESCRIPTIONS, STAGES
from edgefl.compression.stages import ValueStage
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, TensorKind, TensorSpec

GOLDEN = Path(__file__).parent / "golden"

_CHOSEN = (
    "dense",
    "dense|fp16",
    "dense|bf16",
    "dense|int8",
    "dense|int8:channel",
    "dense|qsgd:4",
    "dense|qsgd:1:8",
    "dense|qsgd:8",
    "dense|terngrad",
    "dense|terngrad:inf",
    "dense|sign",
    "dense|natural",
    "dense|alternating:4",
    "dense|alternating:2:random",
    "dense|alternating:8:random:tan",
    "dense|onebit",
    "dense|onebit:4",
    "lss:1",
    "lss:2:0.3|int8",
    "lss:1:0.3:hash",
    "ef|lss:2:keep:raw",
    "atomo:0.3",
    "atomo:4|int8",
    "atomo-svd:1",
    "atomo-svd:1.5:out|fp16",
    "atomo-svd:1:atomo|qsgd:4:16",
    "atomo-auto:1",
    "atomo-dct:0.3",
    "atomo-dct:4|int8",
    "ef|laq:4",
    "ef|laq:2|fp16",
    "ef|powersgd:1",
    "ef|powersgd:2:out|int8|zstd",
    "topk:0.2",
    "topk:0.2|int8|rice",
    "threshold:1e-9|fp16",
    "randk:0.5",
    "randk:0.5|qsgd:2",
    "dense|fp16|zstd",
    "dense|shuffle:19",
    "ef|topk:1|bf16|shuffle",
    "topk:0.2|int8; w* = fp16",
)


def stages_of(spec: str) -> set[str]:
    """The names of the stages in a line, those of its layers included."""
    lines = [line.rpartition("=")[2] for line in spec.split(";")]
    return {part.strip().partition(":")[0] for line in lines for part in line.split("|")}


def _described() -> Iterator[str]:
    """The registry's own examples of the stages that no line above uses."""
    used = {name for spec in _CHOSEN for name in stages_of(spec)}
    for name in STAGES.keys() - used:
        yield from STAGE_DESCRIPTIONS[name].example_specs if name in STAGE_DESCRIPTIONS else ()


EXAMPLES = (*_CHOSEN, *sorted(_described()))
"""Every tensor that tests encode with them has a name that begins with w, or one does at least."""

BYTES_MAY_DIFFER = (
    "atomo",
    "powersgd",
    "lss",
    "natural",
    "alternating",
    "laq",
    "qsgd",
    "terngrad",
    "randk",
    "zstd",
    "shuffle",
)
"""What other releases of NumPy draw and compute, and what Zstandard packs, may differ; what they read may not."""

REFUSE_HUGE = (
    "dense|fp16",
    "dense|bf16",
    "threshold:1e-9|fp16",
    "randk",
    "slice:1:2|fp16",
    "ef|topk:1|bf16",
    "dense|natural",
    "dense|alternating",
    "dense|qsgd",
    "topk:0.2|int8;",
    "atomo",
    "ef|powersgd",
    "ef|laq",
)
"""Beginnings of lines that may refuse the largest numbers of float32; the others carry them."""

FOR_LARGE = {
    "topk:1|": "topk:0.01|",
    "topk:0.2": "topk:0.01",
    "threshold:1e-9": "threshold:10",
    "randk:0.5": "randk:0.05",
    "atomo:0.3": "atomo:0.05",
    "atomo-dct:0.3": "atomo-dct:0.05",
    "onebit:4": "onebit:512",
    "shuffle:19": "shuffle",
}

SHAPES: ModelSpec = (
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
CRC_OFFSET = 20


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


def encoded(spec: str) -> bytes:
    """The body of the small tensors, alike every time."""
    codec = make_codec(spec, SHAPES)
    return codec.encode(small_tensors(), rng(), memory={} if spec.startswith("ef|") else None)


def part_for(codec: Codec, name: str) -> Codec:
    """The codec that a tensor goes through: the codec itself, or that of its layer."""
    if not isinstance(codec.tensor_stage, PerLayerStage):
        return codec
    (found,) = [group for group in codec.tensor_stage.groups if name in {spec.name for spec in group.shapes}]
    return found


def error_bound(stage: ValueStage, values: Array) -> Array:
    """The largest error that each decoded value may have, in the shape of `values`."""
    sizes: Array = np.abs(values, dtype=np.float64)
    bound: Array = np.broadcast_to(ERROR_BOUNDS.get(type(stage), _largest_bound)(stage, sizes, values), values.shape)
    return bound


def _largest_bound(_stage: Any, sizes: Array, _values: Array) -> Array:
    """No value becomes larger than the largest, or more wrong than that."""
    return np.asarray(sizes.max(initial=0) * (1 + 2.0**-20) + 2.0**-149)


def _int8_bound(stage: Any, sizes: Array, values: Array) -> Array:
    axis = tuple(range(1, values.ndim)) if stage.per_channel and values.ndim > 1 else None
    # Two roundings of float32 come on top of half a step.
    return np.asarray(sizes.max(axis=axis, initial=0, keepdims=True)) * (0.5 / 127 + 2.0**-22) + 2.0**-149


def _sign_bound(_stage: Any, sizes: Array, _values: Array) -> Array:
    scale = sizes.mean() if sizes.size else 0.0
    return np.abs(sizes - scale) + scale * 2.0**-20 + 2.0**-149


def _onebit_bound(stage: Any, _sizes: Array, values: Array) -> Array:
    """Each value becomes the mean of those of its bucket on its side of zero."""
    flat, means = values.reshape(-1).astype(np.float64), np.zeros(values.size)
    for start in range(0, flat.size, stage.bucket or max(1, flat.size)):
        rows = slice(start, start + stage.bucket if stage.bucket else flat.size)
        for side in (flat[rows] < 0, flat[rows] >= 0):
            means[rows][side] = flat[rows][side].mean() if side.any() else 0.0
    return (np.abs(flat - means) + np.abs(means) * 2.0**-20 + 2.0**-149).reshape(values.shape)


def _qsgd_bound(stage: Any, sizes: Array, _values: Array) -> Array:
    """Random rounding moves a value by less than one level of its bucket."""
    flat = sizes.reshape(-1)
    norms = [np.linalg.norm(flat[start : start + stage.bucket]) for start in range(0, flat.size, stage.bucket)]
    steps = np.repeat(norms, stage.bucket)[: flat.size] / (2**stage.bits - 1)
    return np.asarray(steps * (1 + 2.0**-20) + 2.0**-149).reshape(sizes.shape)


def _terngrad_bound(stage: Any, sizes: Array, _values: Array) -> Array:
    largest = sizes.max(initial=0)
    scale = largest if stage.is_unbiased else min(largest, stage.clip * np.sqrt(np.square(sizes).mean()))
    return np.maximum(sizes, scale) * (1 + 2.0**-20)


ERROR_BOUNDS: dict[type, Callable[[Any, Array, Array], Array]] = {
    Float32: lambda _stage, sizes, _values: np.zeros(sizes.shape),
    Float16: lambda _stage, sizes, _values: sizes * 2.0**-11 + 2.0**-25,
    BFloat16: lambda _stage, sizes, _values: sizes * 2.0**-8 + 2.0**-134,
    Int8: _int8_bound,
    ScaledSign: _sign_bound,
    OneBitSgd: _onebit_bound,
    Qsgd: _qsgd_bound,
    TernGrad: _terngrad_bound,
    NaturalCompression: lambda _stage, sizes, _values: sizes,
}
"""By value stage, from the stage, the magnitudes and the values; one without a line is held to the loosest."""


def arrays(decoded: dict[str, Tensor]) -> dict[str, Array]:
    return {name: t.dense() if isinstance(t, SparseTensor) else t for name, t in decoded.items()}


def sealed(damaged: bytes) -> bytes:
    """The body with the checksum that its bytes should have, so that damage gets to the decoders."""
    crc = zlib.crc32(damaged[CRC_OFFSET + 4 :], zlib.crc32(damaged[:CRC_OFFSET]))
    return damaged[:CRC_OFFSET] + struct.pack("<I", crc) + damaged[CRC_OFFSET + 4 :]


def for_large(spec: str) -> str:
    """The line as one would write it for a large tensor: what leaves nothing out is no way to send little of it."""
    for small, large in FOR_LARGE.items():
        spec = spec.replace(small, large)
    return spec


def golden_file(spec: str) -> Path:
    name = spec.replace("|", "+").replace(":", "-").replace("; ", "_").replace(" = ", "-").replace("*", "X")
    return GOLDEN / f"{name}.bin"


def write_golden_file(spec: str) -> None:
    """Freezes the bytes of a new example. A file that is there stays: what was once sent is read for ever."""
    if not golden_file(spec).exists():
        golden_file(spec).write_bytes(encoded(spec))


def assert_declared(decoded: dict[str, Tensor], shapes: ModelSpec = SHAPES) -> None:
    """What any decoder may give back, however its body was damaged."""
    expected = [(spec.name, spec.shape, np.dtype(spec.dtype)) for spec in shapes if spec.shared]
    for (name, shape, dtype), (found_name, tensor) in zip(expected, decoded.items(), strict=True):
        assert found_name == name
        assert tensor.shape == shape
        values = tensor.values if isinstance(tensor, SparseTensor) else tensor
        assert values.dtype == dtype
        if isinstance(tensor, SparseTensor):
            assert_well_formed(tensor)


def assert_well_formed(tensor: SparseTensor) -> None:
    assert tensor.indices.dtype == np.int64
    assert tensor.indices.shape == tensor.values.shape
    assert np.all(np.diff(tensor.indices) > 0)
    assert np.all((tensor.indices >= 0) & (tensor.indices < np.prod(tensor.shape)))


if __name__ == "__main__":
    for example in EXAMPLES:
        write_golden_file(example)
