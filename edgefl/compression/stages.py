"""What a codec is made of: a tensor stage, then at most one value stage, then at most one lossless stage.

A tensor stage decides which entries of the tensors travel (`dense`: all of them) and hands those of the
float32 parameters to the value stage, which decides how many bits each one gets; the lossless stage packs the
result. All are classes, found by name; a package adds one by the entry point `edgefl.codecs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import ClassVar, Protocol, Self, TypeGuard

import numpy as np
from numpy.random import Generator

from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, Tensor, TensorKind, Tensors, TensorSpec

_MOST_DIGITS = 18


class StageKind(StrEnum):
    TENSORS = "tensors"
    VALUES = "values"
    LOSSLESS = "lossless"


class ValueStage(Protocol):
    """Writes float32 values and reads them back as a flat run; `decode` needs only what was written.

    `is_unbiased` says that the mean of many decodings is the value itself, `refuses_non_finite` that NaN and
    infinity are a CodecError and not preserved, `is_contraction` that the (expected) squared error is smaller than
    the squared norm of the values: without that, error feedback piles up noise until it drowns the updates.
    """

    kind: ClassVar[StageKind]
    refuses_non_finite: ClassVar[bool]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for what follows the colon in a spec; an empty text when nothing does."""

    @property
    def is_unbiased(self) -> bool: ...
    @property
    def is_contraction(self) -> bool: ...
    def error_bound(self, values: Array) -> Array:
        """Returns how far each decoded value may be from the finite one that went in, in the shape of `values`.

        For tests, which hold every stage to it; nothing else asks.
        """

    def encode(self, values: Array, rng: Generator) -> Iterable[Array]:
        """Yields the arrays to write.

        `values` has the shape of its tensor where all entries of it travel, else it is flat.
        """

    @staticmethod
    def decode(reader: Reader, size: int) -> Array: ...


class TensorStage(Protocol):
    """Writes the shared tensors, in the order of the shapes, and reads them back.

    `is_unbiased` says that the mean of many decodings is the tensor itself, given an unbiased value stage;
    `is_contraction` as for a value stage.
    """

    kind: ClassVar[StageKind]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for what follows the colon in a spec; an empty text when nothing does."""

    @property
    def is_unbiased(self) -> bool: ...
    @property
    def is_contraction(self) -> bool: ...
    def encode(self, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator) -> Iterable[Array]: ...
    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]: ...


class RememberingStage(TensorStage, Protocol):
    """A tensor stage with `remembers = True`, whose encoder gets better by what it knows of the update before.

    `memory` is one device's in one run, None where nobody keeps it (a codec without `ef`). Keys are the stage's own
    and lead with its name, as codecs change within a run. What is found there may be of another argument or another
    task: what does not fit is taken as absent. Arrays are replaced and never written to, since after an error the
    old ones stay. The decoder knows nothing of it.
    """

    remembers: ClassVar[bool]

    def encode(
        self,
        tensors: Tensors,
        shapes: Shapes,
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
        """Returns the stage for what follows the colon in a spec; an empty text when nothing does."""

    def encode(self, parts: Sequence[Array]) -> Sequence[Array]: ...
    @staticmethod
    def decode(payload: memoryview, max_bytes: int) -> memoryview:
        """Returns the payload; one over `max_bytes` is a CodecError before it is unpacked."""


def does_remember(stage: TensorStage) -> TypeGuard[RememberingStage]:
    """Says whether a tensor stage keeps something from one update to the next."""
    return bool(getattr(stage, "remembers", False))


def no_argument(name: str, argument: str) -> None:
    """Refuses an argument on behalf of a stage that takes none.

    Raises:
        CodecError: there is one.
    """
    if argument:
        raise CodecError(f"codec stage {name!r} takes no argument, got {name}:{argument}")


def whole_number(name: str, argument: str, at_least: int, at_most: int) -> int:
    """Returns the argument of a stage as an integer.

    Raises:
        CodecError: it is none, or out of range.
    """
    is_number = argument.isascii() and argument.isdigit() and len(argument) <= _MOST_DIGITS
    if not (is_number and at_least <= int(argument) <= at_most):
        raise CodecError(
            f"codec stage {name!r} needs a whole number from {at_least} to {at_most}, got {name}:{argument:.40}"
        )
    return int(argument)


def is_lossy(spec: TensorSpec) -> bool:
    """Says whether a value stage may touch the tensor: buffers, integers and float64 always travel exactly."""
    return spec.kind == TensorKind.PARAMETER and spec.dtype == "float32"


def wire_dtype(spec: TensorSpec) -> np.dtype[np.generic]:
    """Returns the little-endian type of a tensor that travels exactly.

    Raises:
        CodecError: the tensor holds neither floats, integers nor truth values.
    """
    try:
        dtype = np.dtype(spec.dtype)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "fiub":
        raise CodecError(f"tensor {spec.name!r} must hold floats, integers or bools, got {spec.dtype}")
    return dtype.newbyteorder("<")


def exact_array(spec: TensorSpec, tensor: Tensor) -> Array:
    """Returns the tensor with the shape and type of its spec; the same memory where that is possible.

    Raises:
        CodecError: the shape differs, or the numbers are of another kind (floats for integers).
    """
    array = tensor.dense() if isinstance(tensor, SparseTensor) else np.asarray(tensor)
    if array.shape != spec.shape:
        raise CodecError(f"tensor {spec.name!r} must have the shape {spec.shape}, got {array.shape}")
    return exact_values(spec, array)


def exact_values(spec: TensorSpec, values: Array) -> Array:
    """Returns numbers of a tensor in the type of its spec; the same memory where that is possible.

    Raises:
        CodecError: the numbers are of another kind (floats for integers).
    """
    dtype = wire_dtype(spec)
    if not np.can_cast(values.dtype, dtype, casting="same_kind"):
        raise CodecError(f"tensor {spec.name!r} must hold {spec.dtype}, got {values.dtype}")
    return values.astype(dtype, copy=False)


def read_exact(reader: Reader, spec: TensorSpec, size: int) -> Array:
    """Returns the next `size` numbers in the type of a tensor that travels exactly, flat."""
    dtype = wire_dtype(spec)
    if dtype.kind == "b":
        # A byte other than 0 and 1 would make a truth value that is neither.
        return np.not_equal(reader.array(np.dtype(np.uint8), size), 0)
    return reader.array(dtype, size)


def largest_magnitude(what: str, values: Array) -> float:
    """Returns the largest |value|, 0 of no values.

    Raises:
        CodecError: one of them is NaN or an infinity, which `what` cannot carry.
    """
    if not values.size:
        return 0.0
    # The extremes tell: NaN passes through both, and no copy of the magnitudes is needed.
    largest = max(-float(values.min()), float(values.max()))
    if not np.isfinite(largest):
        raise CodecError(f"{what} carries finite numbers, got {largest}: the training diverged, or use dense")
    return largest


@contextmanager
def naming(spec: TensorSpec) -> Iterator[None]:
    """Puts the tensor's name before what is wrong with its numbers."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"tensor {spec.name!r}: {error}") from None


def shared_shapes(shapes: Shapes) -> Shapes:
    """Returns the specs of the tensors that travel, in order."""
    return tuple(spec for spec in shapes if spec.shared)
