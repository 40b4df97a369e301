"""Interfaces of a codec's stages: a tensor stage, then at most one value and one lossless stage.

A tensor stage selects the entries that travel (`dense`: all of them) and passes those of the float32 parameters to
the value stage, which encodes each in few bits; the lossless stage packs the result. All are classes, found by
name; a package adds one by the entry point `edgefl.codecs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import ClassVar, Protocol, Self, TypeGuard

import numpy as np
from numpy.random import Generator

from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, TensorKind, Tensors, TensorSpec

_MAX_DIGITS = 18


class StageKind(StrEnum):
    TENSORS = "tensors"
    VALUES = "values"
    LOSSLESS = "lossless"


class ValueStage(Protocol):
    """Writes float32 values and reads them back as a flat array; `decode` needs only the written bytes.

    `is_unbiased`: the mean of many decodings is the value itself; `is_finite_only`: NaN and infinity are a
    CodecError and not preserved; `is_contraction`: the (expected) squared error is smaller than
    the squared norm of the values: without that, error feedback piles up noise until it drowns the updates.
    """

    kind: ClassVar[StageKind]
    is_finite_only: ClassVar[bool]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for the argument behind the colon of a spec; an empty text for none."""

    @property
    def is_unbiased(self) -> bool: ...
    @property
    def is_contraction(self) -> bool: ...
    def error_bound(self, values: Array) -> Array:
        """Returns the maximum error of each finite decoded value, in the shape of `values`.

        Used by tests only, for every stage.
        """

    def encode(self, values: Array, rng: Generator) -> Iterable[Array]:
        """Yields the arrays to write.

        `values` has the shape of its tensor where all entries of it travel, else it is flat.
        """

    @staticmethod
    def decode(reader: PayloadReader, size: int) -> Array: ...


class TensorStage(Protocol):
    """Writes the shared tensors, in the order of the shapes, and reads them back.

    `is_unbiased`: the mean of many decodings is the tensor itself, given an unbiased value stage;
    `is_contraction` as for a value stage.
    """

    kind: ClassVar[StageKind]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for the argument behind the colon of a spec; an empty text for none."""

    @property
    def is_unbiased(self) -> bool: ...
    @property
    def is_contraction(self) -> bool: ...
    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterable[Array]: ...
    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]: ...


class StatefulTensorStage(TensorStage, Protocol):
    """A tensor stage with `remembers = True`, whose encoder improves with memory of the last update.

    `memory` is one device's in one run, None where it is not kept (a codec without `ef`). Keys are the stage's own
    and start with its name, as codecs change within a run. Existing entries may be of another argument or another
    task: those that do not fit count as absent. Arrays are replaced and never written to, since after an error the
    old ones stay. The decoder does not use it.
    """

    remembers: ClassVar[bool]

    def encode(
        self,
        tensors: Tensors,
        shapes: ModelSpec,
        values: ValueStage,
        rng: Generator,
        *,
        memory: MutableMapping[str, Array] | None = None,
    ) -> Iterable[Array]: ...


class LosslessStage(Protocol):
    """Packs a payload as a whole. Where that saves nothing the payload travels without this stage."""

    kind: ClassVar[StageKind]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for the argument behind the colon of a spec; an empty text for none."""

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]: ...
    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        """Returns the payload; one over `max_bytes` is a CodecError before it is unpacked."""


def is_stateful_stage(stage: TensorStage) -> TypeGuard[StatefulTensorStage]:
    """Returns whether a tensor stage keeps state between updates."""
    return bool(getattr(stage, "remembers", False))


def require_no_argument(name: str, argument: str) -> None:
    """Rejects an argument of a stage that takes none.

    Raises:
        CodecError: there is one.
    """
    if argument:
        raise CodecError(f"codec stage {name!r} takes no argument, got {name}:{argument}")


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


def to_spec_array(spec: TensorSpec, tensor: Tensor) -> Array:
    """Returns the tensor with the shape and type of its spec; the same memory where that is possible.

    Raises:
        CodecError: the shape differs, or the numbers are of another kind (floats for integers).
    """
    array = tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)
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
