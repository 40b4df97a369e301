"""Every entry of every shared tensor (`dense`), in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from numpy.random import Generator

from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    exact_array,
    is_lossy,
    naming,
    no_argument,
    read_exact,
)
from edgefl.compression.wire import Reader
from edgefl.types import Array, Shapes, Tensor, Tensors, TensorSpec


class Dense:
    """All entries in order. Decoded tensors are read-only views of the body where no cast is needed."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True

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
            with naming(spec):
                yield from values.encode(array, rng)

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _decode_tensor(reader, spec, values).reshape(spec.shape) for spec in shapes}


def _decode_tensor(reader: Reader, spec: TensorSpec, values: type[ValueStage]) -> Array:
    return values.decode(reader, spec.size) if is_lossy(spec) else read_exact(reader, spec, spec.size)
