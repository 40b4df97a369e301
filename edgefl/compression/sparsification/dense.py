"""Every entry of every shared tensor (`dense`), in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from numpy.random import Generator

from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    add_tensor_name_to_errors,
    is_lossy,
    read_exact,
    require_no_argument,
    to_spec_array,
)
from edgefl.compression.wire import PayloadReader
from edgefl.core.types import Array, ModelSpec, Tensor, Tensors, TensorSpec


class Dense:
    """All entries in order. Decoded tensors are read-only views of the body where no cast is needed."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        require_no_argument("dense", argument)
        return cls()

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            array = to_spec_array(spec, tensors[spec.name])
            if not is_lossy(spec):
                yield array
                continue
            with add_tensor_name_to_errors(spec):
                yield from values.encode(array, rng)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _decode_tensor(reader, spec, values).reshape(spec.shape) for spec in shapes}


def _decode_tensor(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> Array:
    return values.decode(reader, spec.size) if is_lossy(spec) else read_exact(reader, spec, spec.size)
