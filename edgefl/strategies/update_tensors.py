"""Queued updates, and in-place addition of dense and sparse displacements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.core.errors import StrategyError
from edgefl.core.types import Array, SparseTensor, Tensor, Tensors, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedUpdate:
    """An update in the queue, with the facts recorded at its dispatch."""

    assignment_id: str
    device_id: str
    base_version: int
    learning_rate: float
    num_examples: int
    tensors: Tensors


def is_float(tensor: Array) -> bool:
    return tensor.dtype.kind in "fc"


def to_writable(tensor: Tensor) -> Array:
    """Returns a dense, writable tensor."""
    return tensor.dense() if isinstance(tensor, SparseTensor) else np.array(tensor)


def add_in_place(target: Array, tensor: Tensor) -> None:
    """Adds a displacement in place; of a sparse one only its entries."""
    if isinstance(tensor, SparseTensor):
        add_at_indices(target.reshape(-1), tensor.indices, tensor.values)
    else:
        np.add(target, tensor, out=target, casting="unsafe" if tensor.dtype.kind in "iu" else "same_kind")


def add_at_indices(flat: Array, indices: Array | slice, values: Array) -> None:
    """Adds `values` to entries of a flat tensor; the indices are unique."""
    if isinstance(indices, slice):
        add_in_place(flat[indices], values)
    elif flat.dtype == values.dtype:
        np.add.at(flat, indices, values)  # half the time of reading, adding and writing
    else:
        flat[indices] += values


def require_tensor(update: QueuedUpdate | Update, name: str, like: Array) -> Tensor:
    """Returns one tensor of an update.

    Raises:
        StrategyError: it is missing, or has another shape than the model's.
    """
    if name not in update.tensors:
        raise StrategyError(f"update {update.assignment_id} of {update.device_id} has no tensor {name!r}")
    tensor = update.tensors[name]
    if tensor.shape != like.shape:
        raise StrategyError(
            f"update {update.assignment_id} of {update.device_id}: tensor {name!r} has shape {tensor.shape}, "
            f"the model's is {like.shape}"
        )
    return tensor
