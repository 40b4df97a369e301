"""The stage `delta`: some entries of every shared tensor, of any type, with their present values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.entropy.indices import read_indices, write_indices
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    add_tensor_name_to_errors,
    is_lossy,
    read_exact,
    require_no_argument,
    to_spec_values,
)
from edgefl.compression.wire import PayloadReader
from edgefl.core.errors import CodecError
from edgefl.core.types import Array, ModelSpec, SparseTensor, Tensor, Tensors, TensorSpec


class SparseDelta:
    """Writes and reads `SparseTensor`s, which only `delta.py` makes."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        require_no_argument("delta", argument)
        return cls()

    def encode(self, tensors: Tensors, shapes: ModelSpec, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            sparse = tensors[spec.name]
            if not isinstance(sparse, SparseTensor):
                raise CodecError(f"tensor {spec.name!r}: a delta is made of changed entries, got all of them")
            yield from write_indices(sparse.indices, spec.size)
            sent_values = to_spec_values(spec, sparse.values)
            with add_tensor_name_to_errors(spec):
                yield from values.encode(sent_values, rng) if is_lossy(spec) else (sent_values,)

    @staticmethod
    def decode(reader: PayloadReader, shapes: ModelSpec, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _read_changed(reader, spec, values) for spec in shapes}


def select_changed_entries(spec: TensorSpec, tensor: Array, indices: Array) -> SparseTensor:
    """Returns the entries at flat `indices` (any order, repeats allowed), with their present values.

    Raises:
        CodecError: the tensor's shape is not the task's, or an index is out of range.
    """
    if tensor.shape != spec.shape:
        raise CodecError(f"tensor {spec.name!r} must have the shape {spec.shape}, got {tensor.shape}")
    positions = np.asarray(indices, dtype=np.int64).reshape(-1)
    if np.any(np.diff(positions) <= 0):
        positions = np.unique(positions)
    if positions.size and not 0 <= int(positions[0]) <= int(positions[-1]) < spec.size:
        raise CodecError(f"tensor {spec.name!r}: changed indices must lie in 0 to {spec.size - 1}")
    return SparseTensor(indices=positions, values=tensor.reshape(-1)[positions], shape=spec.shape)


def _read_changed(reader: PayloadReader, spec: TensorSpec, values: type[ValueStage]) -> SparseTensor:
    indices = read_indices(reader, spec.size)
    changed_values = values.decode(reader, indices.size) if is_lossy(spec) else read_exact(reader, spec, indices.size)
    return SparseTensor(indices=indices, values=changed_values, shape=spec.shape)
