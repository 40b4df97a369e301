"""Every entry of every shared tensor: exact (`dense`), or parameters rounded to half precision (`dense|fp16`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.stages import StageKind, ValueStage, is_lossy, no_argument, wire_dtype
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, Tensor, Tensors, TensorSpec

_FLOAT32 = np.dtype("<f4")
_FLOAT16 = np.dtype("<f2")


class Float32:
    """The exact value stage, used when a spec names none; it has no number because it never stands in a header."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    relative_error: ClassVar[float] = 0.0
    absolute_error: ClassVar[float] = 0.0

    @classmethod
    def parse(cls, argument: str) -> Self:
        no_argument("fp32", argument)
        return cls()

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 the seam of all value stages
        yield values

    @staticmethod
    def decode(reader: Reader, size: int) -> Array:
        return reader.array(_FLOAT32, size)


class Float16:
    """Rounds to IEEE half precision: 11 significant bits, and steps of 2**-24 below 2**-14."""

    kind: ClassVar[StageKind] = StageKind.VALUES
    relative_error: ClassVar[float] = 2.0**-11
    absolute_error: ClassVar[float] = 2.0**-25

    @classmethod
    def parse(cls, argument: str) -> Self:
        no_argument("fp16", argument)
        return cls()

    def encode(self, values: Array, rng: Generator) -> Iterator[Array]:  # noqa: ARG002 the seam of all value stages
        try:
            with np.errstate(over="raise"):
                yield values.astype(_FLOAT16)
        except FloatingPointError:
            # An infinity in place of a large number would spread through the model unseen.
            largest = np.max(np.abs(values[np.isfinite(values)]))
            raise CodecError(f"fp16 carries magnitudes up to 65504, got {largest:.6g}: use dense") from None

    @staticmethod
    def decode(reader: Reader, size: int) -> Array:
        return reader.array(_FLOAT16, size).astype(np.float32)


class Dense:
    """All entries in order. Decoded tensors are read-only views of the body where no cast is needed."""

    kind: ClassVar[StageKind] = StageKind.TENSORS

    @classmethod
    def parse(cls, argument: str) -> Self:
        no_argument("dense", argument)
        return cls()

    def encode(self, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            array = exact_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            try:
                yield from values.encode(array.reshape(-1), rng)
            except CodecError as error:
                raise CodecError(f"tensor {spec.name!r}: {error}") from None

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _decode_tensor(reader, spec, values) for spec in shapes}


def exact_array(spec: TensorSpec, tensor: Tensor) -> Array:
    """Returns the tensor with the shape and type of its spec; the same memory where that is possible.

    Raises:
        CodecError: the shape differs, or the numbers are of another kind (floats for integers).
    """
    array = tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)
    if array.shape != spec.shape:
        raise CodecError(f"tensor {spec.name!r} must have the shape {spec.shape}, got {array.shape}")
    dtype = wire_dtype(spec)
    if not np.can_cast(array.dtype, dtype, casting="same_kind"):
        raise CodecError(f"tensor {spec.name!r} must hold {spec.dtype}, got {array.dtype}")
    return array.astype(dtype, copy=False)


def _decode_tensor(reader: Reader, spec: TensorSpec, values: type[ValueStage]) -> Array:
    if is_lossy(spec):
        return values.decode(reader, spec.size).reshape(spec.shape)
    dtype = wire_dtype(spec)
    if dtype.kind == "b":
        # A byte other than 0 and 1 would make a truth value that is neither.
        return np.not_equal(reader.array(np.dtype(np.uint8), spec.size), 0).reshape(spec.shape)
    return reader.array(dtype, spec.size).reshape(spec.shape)
