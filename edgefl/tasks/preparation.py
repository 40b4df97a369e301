"""Preparation of raw inputs: what a model computes with, of one array or of arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edgefl.core.errors import DataError, TaskError
from edgefl.core.named_arrays import NamedArrays
from edgefl.core.types import Inputs

Prepare = Callable[[Inputs], Inputs]
"""Turns a batch of a shard's raw inputs into float32 features; raw shards are small and hash the same for ever.

Inputs by name are a dict of arrays, and it returns such a dict or one array.
"""
_FEATURE_TYPES = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.bool_}


def to_features(inputs: Inputs) -> Inputs:
    """Returns inputs as float32, otherwise as they are: the usual `prepare`.

    Of arrays by name whole numbers become int64 and truth values stay, as torch's modules take them.
    """
    if isinstance(inputs, Mapping):
        return {name: array.astype(_FEATURE_TYPES[array.dtype.kind], copy=False) for name, array in inputs.items()}
    return inputs.astype(np.float32, copy=False)


def prepare_inputs(prepare: Prepare, inputs: Inputs) -> Inputs:
    """Returns what a task's `prepare` makes of raw inputs, contiguous: one array of float32, or a dict of arrays.

    Raises:
        TaskError: what it makes is neither, or it raises at inputs by name.
    """
    found = call_prepare(prepare, inputs)
    if not isinstance(found, Mapping):
        return np.ascontiguousarray(found, dtype=np.float32)
    try:
        features = NamedArrays(dict(to_features(NamedArrays(found).to_dict())))
    except DataError as error:
        raise TaskError(f"prepare of the task: {error}") from None
    return {name: np.ascontiguousarray(array) for name, array in features.to_dict().items()}


def call_prepare(prepare: Prepare, inputs: Inputs) -> Inputs:
    """Returns what a task's `prepare` makes of raw inputs; raises a `TaskError` where it raises at inputs by name."""
    if not isinstance(inputs, NamedArrays):
        return prepare(inputs)
    try:
        return prepare(inputs.to_dict())
    except Exception as error:  # a function of the user's own may raise anything at names that it does not know
        raise TaskError(
            f"prepare of the task raised {type(error).__name__}: {error} at inputs named {', '.join(inputs)}"
        ) from error


def check_inputs(learner: object, inputs: Inputs) -> None:
    """Raises a `TaskError` where a learner that can say so does not take raw inputs of these names."""
    check = getattr(learner, "check_inputs", None)
    if check is not None:
        check(inputs)
