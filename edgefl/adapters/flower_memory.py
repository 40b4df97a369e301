"""What a Flower strategy remembers between its calls, as part of a state that can be saved: its plain attributes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord

from edgefl.types import Array

_PLAIN = (str, int, float, bool, type(None))


@dataclass(slots=True)
class SavedArrays:
    """An `ArrayRecord` as NumPy arrays."""

    arrays: dict[str, Array]


def remember(strategy: object) -> dict[str, Any]:
    """Returns the attributes that can be saved; settings are among them, functions and other objects are not."""
    found = {name: _saved(value) for name, value in vars(strategy).items() if is_plain(value)}
    return {name: value for name, value in found.items() if not name.startswith("__")}


def recall(strategy: object, memory: Mapping[str, Any]) -> None:
    """Gives a strategy back what it remembered."""
    for name, value in memory.items():
        setattr(strategy, name, _restored(value))


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
    return type(value) in _PLAIN


def _saved(value: Any) -> Any:
    """Returns a value in containers of its own, so that the strategy's next step does not change what was saved."""
    if isinstance(value, ArrayRecord):
        return SavedArrays({name: array.numpy() for name, array in value.items()})
    if type(value) is dict:
        return {key: _saved(entry) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_saved(entry) for entry in value)
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, SavedArrays):
        return ArrayRecord({name: FlowerArray(array) for name, array in value.arrays.items()})
    if type(value) is dict:
        return {key: _restored(entry) for key, entry in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_restored(entry) for entry in value)
    return value
