"""The stage `delta`: of every shared tensor some entries, of whatever type, with the values they have now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

import numpy as np
from numpy.random import Generator

from edgefl.compression.coding.indices import read_indices, write_indices
from edgefl.compression.stages import (
    StageKind,
    ValueStage,
    exact_values,
    is_lossy,
    naming,
    no_argument,
    read_exact,
)
from edgefl.compression.wire import Reader
from edgefl.errors import CodecError
from edgefl.types import Array, Shapes, SparseTensor, Tensor, Tensors, TensorSpec


class Changes:
    """Writes `SparseTensor`s and reads them back; see `delta.py`, which alone makes them."""

    kind: ClassVar[StageKind] = StageKind.TENSORS
    is_unbiased: ClassVar[bool] = True
    is_contraction: ClassVar[bool] = True
    codes_indices: ClassVar[bool] = True

    @classmethod
    def parse(cls, argument: str) -> Self:
        no_argument("delta", argument)
        return cls()

    def encode(self, tensors: Tensors, shapes: Shapes, values: ValueStage, rng: Generator) -> Iterator[Array]:
        for spec in shapes:
            changed = tensors[spec.name]
            if not isinstance(changed, SparseTensor):
                raise CodecError(f"tensor {spec.name!r}: a delta is made of changed entries, got all of them")
            yield from write_indices(changed.indices, spec.size)
            kept = exact_values(spec, changed.values)
            with naming(spec):
                yield from values.encode(kept, rng) if is_lossy(spec) else (kept,)

    @staticmethod
    def decode(reader: Reader, shapes: Shapes, values: type[ValueStage]) -> dict[str, Tensor]:
        return {spec.name: _read_changed(reader, spec, values) for spec in shapes}


def changed_entries(spec: TensorSpec, tensor: Array, indices: Array) -> SparseTensor:
    """Returns the entries at flat `indices` (any order, repeats allowed), as they are now.

    Raises:
        CodecError: the tensor's shape is not the task's, or an index is out of range.
    """
    if tensor.shape != spec.shape:
        raise CodecError(f"tensor {spec.name!r} must have the shape {spec.shape}, got {tensor.shape}")
    places = np.asarray(indices, dtype=np.int64).reshape(-1)
    if np.any(np.diff(places) <= 0):
        places = np.unique(places)
    if places.size and not 0 <= int(places[0]) <= int(places[-1]) < spec.size:
        raise CodecError(f"tensor {spec.name!r}: changed indices must lie in 0 to {spec.size - 1}")
    return SparseTensor(indices=places, values=tensor.reshape(-1)[places], shape=spec.shape)


def _read_changed(reader: Reader, spec: TensorSpec, values: type[ValueStage]) -> SparseTensor:
    indices = read_indices(reader, spec.size)
    found = values.decode(reader, indices.size) if is_lossy(spec) else read_exact(reader, spec, indices.size)
    return SparseTensor(indices=indices, values=found, shape=spec.shape)
