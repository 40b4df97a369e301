"""An update that waits for its turn, and how a displacement, dense or sparse, is added in place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgefl.errors import StrategyError
from edgefl.types import Array, SparseTensor, Tensor, Tensors, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An update that waits for its turn, with what was noted when its work was given out."""

    assignment_id: str
    device_id: str
    base_version: int
    learning_rate: float
    num_examples: int
    tensors: Tensors


def is_float(tensor: Array) -> bool:
    return tensor.dtype.kind in "fc"


def owned(tensor: Tensor) -> Array:
    """Returns a dense tensor that may be written to."""
    return tensor.dense() if isinstance(tensor, SparseTensor) else np.array(tensor)


def add(target: Array, tensor: Tensor) -> None:
    """Adds a displacement in place; of a sparse one only the entries that it has."""
    if isinstance(tensor, SparseTensor):
        add_at(target.reshape(-1), tensor.indices, tensor.values)
    else:
        np.add(target, tensor, out=target, casting="unsafe" if tensor.dtype.kind in "iu" else "same_kind")


def add_at(flat: Array, entries: Array | slice, values: Array) -> None:
    """Adds `values` to those entries of a flat tensor, of which none is named twice."""
    if isinstance(entries, slice):
        add(flat[entries], values)
    elif flat.dtype == values.dtype:
        np.add.at(flat, entries, values)  # half the time of reading, adding and writing
    else:
        flat[entries] += values


def checked(arrival: Arrival | Update, name: str, like: Array) -> Tensor:
    """Returns one tensor of an update.

    Raises:
        StrategyError: it is missing, or has another shape than the model's.
    """
    if name not in arrival.tensors:
        raise StrategyError(f"update {arrival.assignment_id} of {arrival.device_id} has no tensor {name!r}")
    tensor = arrival.tensors[name]
    if tensor.shape != like.shape:
        raise StrategyError(
            f"update {arrival.assignment_id} of {arrival.device_id}: tensor {name!r} has shape {tensor.shape}, "
            f"the model's is {like.shape}"
        )
    return tensor
