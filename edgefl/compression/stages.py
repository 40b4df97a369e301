"""Interfaces of a codec's stages: a tensor stage, then at most one value and one lossless stage.

A tensor stage selects the entries that travel (`dense`: all of them) and passes those of the float32 parameters to
the value stage, which encodes each in few bits; the lossless stage packs the result. All are classes, found by
name; a package adds one by the entry point `edgefl.codecs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, TensorKind, Tensors, TensorSpec

FLOAT32 = np.dtype("<f4")
UNEXPECTED_SCALE = "the scale {}, expected a finite number"
_MAX_DIGITS = 18


class StageKind(StrEnum):
    TENSORS = "tensors"
    VALUES = "values"
    LOSSLESS = "lossless"


class Stage(Protocol):
    """A class of stages, by the name in a spec."""

    kind: ClassVar[StageKind]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for the argument behind the colon of a spec; an empty text for none."""


class LossyStage(Stage, Protocol):
    """A stage that may alter values.

    `is_unbiased`: the mean of many decodings is the value itself; `is_contraction`: the (expected) squared error is
    smaller than the squared norm of the values: without that, error feedback piles up noise until it drowns the
    updates.
    """

    @property
    def is_unbiased(self) -> bool: ...
    @property
    def is_contraction(self) -> bool: ...


class ValueStage(LossyStage, Protocol):
    """Writes float32 values and reads them back as a flat array; `decode` needs only the written bytes.

    `is_finite_only`: NaN and infinity are a CodecError and not preserved.
    """

    is_finite_only: ClassVar[bool]

    def encode(self, values: Array, rng: Generator) -> Iterable[Array]:
        """Yields the arrays to write.

        `values` has the shape of its tensor where all entries of it travel, else it is flat.
        """

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array:
        """Returns `size` values, flat; bytes that are no such values are a CodecError."""


class TensorStage(LossyStage, Protocol):
    """Writes the shared tensors, in the order of the shapes, and reads them back; unbiased given unbiased values.

    A stage with `remembers = True` encodes better with memory of the last update: its `encode` takes a keyword
    `memory` as well, a dict of one device in one run, None where it is not kept (a codec without `ef`). Keys are the
    stage's own and start with its name, as codecs change within a run. Existing entries may be of another argument or
    another task: those that do not fit count as absent. Arrays are replaced and never written to, since after an
    error the old ones stay. The decoder does not use it.
    """

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterable[Array]:
        """Yields the arrays to write; float32 parameters pass through `values`."""

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        """Returns the tensors, dense or sparse; bytes that are no such tensors are a CodecError."""


class LosslessStage(Stage, Protocol):
    """Packs a payload as a whole. Where that saves nothing the payload travels without this stage."""

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]:
        """Returns the packed payload, whose arrays follow each other."""

    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        """Returns the payload; one over `max_bytes` is a CodecError before it is unpacked."""


def is_stateful_stage(stage: TensorStage) -> bool:
    """Returns whether a tensor stage keeps state between updates."""
    return bool(getattr(stage, "remembers", False))


class StageWithoutArgument:
    """Base of stages that are nothing but a name in a spec."""

    __slots__ = ()

    name: ClassVar[str]

    @classmethod
    def parse(cls, argument: str) -> Self:
        if argument:
            raise CodecError(f"codec stage {cls.name!r} takes no argument, got {cls.name}:{argument}")
        return cls()


class FiniteValueStage:
    """Base of value stages that reject NaN and infinity."""

    __slots__ = ()

    kind: ClassVar[StageKind] = StageKind.VALUES
    is_finite_only: ClassVar[bool] = True


class EachTensorStage:
    """Base of tensor stages that encode each float32 parameter alone; all other tensors travel whole and exactly."""

    __slots__ = ()

    kind: ClassVar[StageKind] = StageKind.TENSORS

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        return encode_lossy_tensors(tensors, shapes, lambda spec, array: self.encode_tensor(spec, array, values, rng))

    @classmethod
    def decode(cls, reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        return {
            spec.name: cls.decode_tensor(reader, spec, values) if is_lossy(spec) else read_exact_tensor(reader, spec)
            for spec in shapes
        }

    def encode_tensor(self, spec: TensorSpec, array: Array, values: ValueStage, rng: Generator) -> Iterable[Array]:
        """Yields the arrays to write for a float32 parameter."""
        raise NotImplementedError

    @staticmethod
    def decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Tensor:
        """Returns the parameter that `encode_tensor` wrote."""
        raise NotImplementedError


def encode_lossy_tensors(
    tensors: Tensors, shapes: ModelSpec, encode: Callable[[TensorSpec, Array], Iterable[Array]]
) -> Iterator[Array]:
    """Yields what `encode` writes for each float32 parameter, and the other tensors as they are, in order."""
    for spec in shapes:
        array = to_spec_array(spec, tensors[spec.name])
        if is_lossy(spec):
            with add_tensor_name_to_errors(spec):
                yield from encode(spec, array)
        else:
            yield array


def parse_int_argument(name: str, argument: str, minimum: int, maximum: int) -> int:
    """Returns the argument of a stage as an integer.

    Raises:
        CodecError: it is no integer, or out of range.
    """
    is_number = argument.isascii() and argument.isdigit() and len(argument) <= _MAX_DIGITS
    if not (is_number and minimum <= int(argument) <= maximum):
        raise CodecError(
            f"codec stage {name!r} needs a whole number from {minimum} to {maximum}, got {name}:{argument:.40}"
        )
    return int(argument)


def parse_decimal_argument(name: str, argument: str, minimum: Decimal, maximum: Decimal, needed: str) -> Decimal:
    """Returns the argument of a stage as the exact number typed; `needed` describes the right ones.

    Raises:
        CodecError: it is no number, or out of range.
    """
    try:
        number = Decimal(argument)
        is_right = minimum <= number <= maximum
    except InvalidOperation:  # the comparison rejects a NaN
        is_right = False
    if not is_right:
        raise CodecError(f"codec stage {name!r} needs {needed}, got {name}:{argument}")
    return number


def is_lossy(spec: TensorSpec) -> bool:
    """Returns whether a value stage may alter the tensor: buffers, integers and float64 are always exact."""
    return spec.kind == TensorKind.PARAMETER and spec.dtype == "float32"


def get_wire_dtype(spec: TensorSpec) -> np.dtype[np.generic]:
    """Returns the little-endian type of a tensor that travels exactly.

    Raises:
        CodecError: the tensor holds neither floats, integers nor booleans.
    """
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise CodecError(f"tensor {spec.name!r} must hold floats, integers or bools, got {spec.dtype}")
    return dtype.newbyteorder("<")


def to_dense(tensor: Tensor) -> Array:
    return tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)


def to_spec_array(spec: TensorSpec, tensor: Tensor) -> Array:
    """Returns the tensor with the shape and type of its spec; the same memory where that is possible.

    Raises:
        CodecError: the shape differs, or the numbers are of another kind (floats for integers).
    """
    array = to_dense(tensor)
    if array.shape != spec.shape:
        raise CodecError(f"tensor {spec.name!r} must have the shape {spec.shape}, got {array.shape}")
    return to_spec_values(spec, array)


def to_spec_values(spec: TensorSpec, values: Array) -> Array:
    """Returns numbers of a tensor in the type of its spec; the same memory where that is possible.

    Raises:
        CodecError: the numbers are of another kind (floats for integers).
    """
    dtype = get_wire_dtype(spec)
    if not np.can_cast(values.dtype, dtype, casting="same_kind"):
        raise CodecError(f"tensor {spec.name!r} must hold {spec.dtype}, got {values.dtype}")
    return values.astype(dtype, copy=False)


def read_exact(reader: PayloadReader, spec: TensorSpec, size: int) -> Array:
    """Returns the next `size` numbers in the type of a tensor that travels exactly, flat."""
    dtype = get_wire_dtype(spec)
    if dtype.kind == "b":
        # A byte other than 0 and 1 would make an invalid boolean.
        return np.not_equal(reader.read_array(np.dtype(np.uint8), size), 0)
    return reader.read_array(dtype, size)


def read_exact_tensor(reader: PayloadReader, spec: TensorSpec) -> Array:
    return read_exact(reader, spec, spec.size).reshape(spec.shape)


def read_finite(reader: PayloadReader, size: int, unexpected: str) -> Array:
    """Returns the next `size` float32 numbers.

    Raises:
        CodecError: one is NaN or infinite; `unexpected` says what that is, with braces for the number.
    """
    numbers = reader.read_array(FLOAT32, size)
    is_wrong = ~np.isfinite(numbers)
    if np.any(is_wrong):
        raise CodecError(f"payload holds {unexpected.format(numbers[is_wrong][0])}")
    return numbers


def compute_max_magnitude(stage_name: str, values: Array) -> float:
    """Returns the largest |value|, 0 of no values.

    Raises:
        CodecError: one of them is NaN or an infinity, which `stage_name` cannot encode.
    """
    if not values.size:
        return 0.0
    # The extremes suffice: NaN passes through both, and no copy of the magnitudes is needed.
    largest = max(-float(values.min()), float(values.max()))
    if not np.isfinite(largest):
        raise CodecError(f"{stage_name} carries finite numbers, got {largest}: the training diverged, or use dense")
    return largest


@contextmanager
def add_tensor_name_to_errors(spec: TensorSpec) -> Iterator[None]:
    """Prefixes errors about the numbers with the tensor's name."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"tensor {spec.name!r}: {error}") from None


def select_shared_tensors(shapes: ModelSpec) -> ModelSpec:
    """Returns the specs of the tensors that travel, in order."""
    return tuple(spec for spec in shapes if spec.shared)
