"""Updates as vectors that add up: what the members of a collective sum, and the mean in it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.core.types import Array


def pack_update(displacement: Mapping[str, Array], *, weight: float, is_first: bool) -> Array:
    """Returns the vector of one member: its displacement times its weight, and the weight.

    Args:
        displacement: tensors in the order of all members. Half floats are summed as float32, which they overflow.
        weight: above 0.
        is_first: it is the member whose counters count; those of the others are zeros.
    """
    dtype = np.result_type(np.float32, *(tensor.dtype for tensor in displacement.values() if _is_float(tensor)))
    factors = {name: weight if _is_float(tensor) else float(is_first) for name, tensor in displacement.items()}
    parts = [
        np.multiply(tensor.reshape(-1), factors[name], dtype=dtype, casting="unsafe")
        for name, tensor in displacement.items()
    ]
    return np.concatenate([*parts, np.array([weight], dtype)])


def unpack_mean(total: Array, like: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the weighted mean displacement in the sum of all members' vectors, in shapes and types of `like`."""
    mean, start = dict[str, Array](), 0
    for name, tensor in like.items():
        part = total[start : start + tensor.size].reshape(tensor.shape)
        mean[name] = (part / total[-1] if _is_float(tensor) else np.rint(part)).astype(tensor.dtype)
        start += tensor.size
    return mean


def _is_float(tensor: Array) -> bool:
    return bool(tensor.dtype.kind == "f")
