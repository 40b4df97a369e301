"""What a codec is made of: one tensor stage, and at most one value stage behind it.

A tensor stage decides which entries of the tensors travel (`dense`: all of them) and hands those of the
float32 parameters to the value stage, which decides how many bits each one gets. Both are classes, found by
name; a package adds one by the entry point `edgefl.codecs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar, Protocol, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, Tensor, TensorKind, Tensors, TensorSpec


class StageKind(StrEnum):
    TENSORS = "tensors"
    VALUES = "values"


class ValueStage(Protocol):
    """Writes a flat run of float32 values and reads it back; `decode` needs only what was written.

    `|decoded - value| <= relative_error * |value| + absolute_error` for every finite value.
    """

    kind: ClassVar[StageKind]
    relative_error: ClassVar[float]
    absolute_error: ClassVar[float]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for what follows the colon in a spec; an empty text when nothing does."""

    def encode(self, values: Array, rng: Generator) -> Iterable[Array]: ...
    @staticmethod
    def decode(reader: Reader, size: int) -> Array: ...


class TensorStage(Protocol):
    """Writes the shared tensors, in the order of the shapes, and reads them back."""

    kind: ClassVar[StageKind]

    @classmethod
    def parse(cls, argument: str) -> Self:
        """Returns the stage for what follows the colon in a spec; an empty text when nothing does."""

    def encode(self, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator) -> Iterable[Array]: ...
    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]: ...


def no_argument(name: str, argument: str) -> None:
    """Refuses an argument on behalf of a stage that takes none.

    Raises:
        CodecError: there is one.
    """
    if argument:
        raise CodecError(f"codec stage {name!r} takes no argument, got {name}:{argument}")


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
