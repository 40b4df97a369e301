"""Updates as vectors of 32-bit words that add up without overflow.

A vector holds the weight of its update, then the entries of its tensors of floats: each is clipped to ±clip, times
weight over the largest weight, and rounded to one of `count_levels` steps on either side of 0.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgefl.core.errors import DataError, SecureAggregationError
from edgefl.core.types import NOT_FINITE, Array

MAX_TOTAL = 2**31 - 1
WORD_BYTES = 4


def count_levels(num_members: int) -> int:
    """Returns the steps on either side of 0 with which the sum of so many vectors fits into 32 bits."""
    return MAX_TOTAL // num_members


def is_summed(tensor: Array) -> bool:
    """Returns whether a tensor is part of a vector: one of floats; counters stay as they are."""
    return tensor.dtype.kind == "f"


def count_words(model: Mapping[str, Array]) -> int:
    """Returns the length of a model's vector."""
    return 1 + sum(tensor.size for tensor in model.values() if is_summed(tensor))


def encode_vector(
    update: Mapping[str, Array], *, weight: int, max_weight: int, clip: float, num_members: int
) -> Array:
    """Returns the vector [words] of uint32 of an update.

    Args:
        update: displacements by name, in the order of the model.
        weight: of the update in the mean, from 1; above `max_weight` it counts as that.
        max_weight: the largest weight.
        clip: c; entries lie in [-c, c] after it.
        num_members: boards whose vectors may be added.

    Raises:
        DataError: an entry is NaN or infinite.
        SecureAggregationError: the weights of so many boards do not fit.
    """
    if not 1 <= max_weight <= MAX_TOTAL // num_members:
        raise SecureAggregationError(
            f"the largest weight of {num_members} boards must lie in 1 to {MAX_TOTAL // num_members}, "
            f"got {max_weight}"
        )
    weight = min(max(1, weight), max_weight)
    scale = count_levels(num_members) * (weight / max_weight) / clip
    words, start = np.empty(count_words(update), np.int32), 1
    words[0] = weight
    for tensor in update.values():
        if is_summed(tensor):
            flat = np.clip(tensor.reshape(-1).astype(np.float64), -clip, clip)
            if not np.isfinite(flat).all():
                raise DataError(NOT_FINITE)
            flat *= scale
            words[start : start + flat.size] = np.rint(flat, out=flat)
            start += flat.size
    return words.view(np.uint32)


def decode_mean(
    total: Array, model: Mapping[str, Array], *, num_added: int, max_weight: int, clip: float, num_members: int
) -> dict[str, Array]:
    """Returns the weighted mean of the updates in a sum of vectors, by tensor of the model; counters are left out.

    Args:
        total: [words] uint32, the sum.
        model: shapes and dtypes of the tensors.
        num_added: vectors in the sum.
        max_weight: as in `encode_vector`.
        clip: likewise.
        num_members: likewise.

    Raises:
        SecureAggregationError: no boards that keep to the protocol can have this sum.
    """
    words, levels = total.view(np.int32), count_levels(num_members)
    weight = int(words[0])
    largest = int(np.abs(words[1:].astype(np.int64)).max(initial=0))
    if not num_added <= weight <= num_added * max_weight or largest > levels * weight / max_weight + num_added:
        raise SecureAggregationError(
            f"the sum of {num_added} updates is out of range (weight {weight}, largest entry {largest}): a board did "
            "not keep to the protocol"
        )
    scale, start = clip * max_weight / (levels * weight), 1
    mean: dict[str, Array] = {}
    for name, tensor in model.items():
        if is_summed(tensor):
            part = words[start : start + tensor.size]
            mean[name] = (part * scale).astype(tensor.dtype).reshape(tensor.shape)
            start += tensor.size
    return mean
