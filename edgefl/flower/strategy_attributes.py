"""Persistent attributes of a Flower strategy, as part of a state that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord

from edgefl.core.types import Array

_PLAIN_TYPES = (str, int, float, bool, type(None))


@dataclass(slots=True)
class SavedArrays:
    """An `ArrayRecord` as NumPy arrays."""

    arrays: dict[str, Array]


def export_attributes(strategy: object) -> dict[str, Any]:
    """Returns the attributes that can be saved, settings among them; functions and other objects are skipped."""
    attributes = {name: _to_saved(value) for name, value in vars(strategy).items() if is_plain(value)}
    return {name: value for name, value in attributes.items() if not name.startswith("__")}


def restore_attributes(strategy: object, attributes: Mapping[str, Any]) -> None:
    """Sets saved attributes on a strategy."""
    for name, value in attributes.items():
        setattr(strategy, name, _from_saved(value))


def is_plain(value: object) -> bool:
    """Returns whether a value can be part of a saved state."""
    if isinstance(value, ArrayRecord):
        return all(array.stype == "numpy.ndarray" for array in value.values())
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biuf"
    if type(value) is dict:
        return all(type(key) in {str, int, bool} and is_plain(entry) for key, entry in value.items())
    if type(value) in {list, tuple}:
        return all(is_plain(entry) for entry in value)  # type: ignore[attr-defined] # a list or a tuple
    return type(value) in _PLAIN_TYPES


def _to_saved(value: Any) -> Any:
    """Returns a deep copy of a value, so that the strategy's next step does not change the saved one."""
    if isinstance(value, ArrayRecord):
        return SavedArrays({name: array.numpy() for name, array in value.items()})
    if type(value) is dict:
        return {key: _to_saved(entry) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_to_saved(entry) for entry in value)
    return value


def _from_saved(value: Any) -> Any:
    if isinstance(value, SavedArrays):
        return ArrayRecord({name: FlowerArray(array) for name, array in value.arrays.items()})
    if type(value) is dict:
        return {key: _from_saved(entry) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_from_saved(entry) for entry in value)
    return value
