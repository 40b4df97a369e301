"""Inputs of examples that are several arrays by name: rows are taken of all of them at once."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgefl.core.errors import DataError, TaskError

MAX_ARRAYS = 64
MAX_NAME_LENGTH = 64
_KINDS = {"f": "float", "i": "int", "u": "int", "b": "bool"}
"""By kind of type: a model gets those of one kind as one type."""


class NamedArrays:
    """Arrays [n, ...] by name, as the inputs of a `Dataset`; its length is n, the number of examples.

    Indexed by a name it is that array, by row numbers, a mask or a range it is those rows of all. What only one array
    can do raises a `TaskError`. Names are in alphabetical order, whatever order they were given in.

    Args:
        arrays: of numbers or truth values, as long as each other; names are those of Python's parameters.
        what: they are, for messages.

    Raises:
        DataError: there are none or too many, a name is none of a parameter, one is no array of numbers, or they
            differ in length.
    """

    def __init__(self, arrays: Mapping[str, Any], *, what: str = "inputs") -> None:
        _check_names([*arrays], what)
        for name, array in arrays.items():
            if isinstance(array, Mapping):
                raise DataError(
                    f"{what} {name!r} are a dict themselves; give its arrays names of their own, such as a_b"
                )
            kind = getattr(getattr(array, "dtype", None), "kind", None)
            if kind is None or kind not in "fiub" or not getattr(array, "ndim", 0):
                found = type(array).__name__ if kind is None else f"{array.dtype} {list(array.shape)}"
                raise DataError(f"{what} {name!r} must be an array [n, ...] of numbers, got {found}")
        self._arrays: dict[str, Any] = {name: arrays[name] for name in sorted(arrays)}
        first = next(iter(self._arrays))
        for name, array in self._arrays.items():
            if len(array) != len(self):
                raise DataError(
                    f"{what} {name!r} have {len(array)} rows and {first!r} {len(self)}; there must be as many"
                )

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._arrays[key]
        return self.map(lambda array: array[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __repr__(self) -> str:
        return f"NamedArrays({format_row_shape(self)})"

    def keys(self) -> list[str]:
        """Returns the names."""
        return [*self._arrays]

    def to_dict(self) -> dict[str, Any]:
        """Returns the arrays by name."""
        return {**self._arrays}

    def map(self, function: Callable[[Any], Any]) -> NamedArrays:
        """Returns what a function makes of each array."""
        return NamedArrays({name: function(array) for name, array in self._arrays.items()})

    @property
    def size(self) -> int:
        """Numbers in all arrays."""
        return sum(int(array.size) for array in self._arrays.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(int(array.nbytes) for array in self._arrays.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of one example, at least 1."""
        return max(1, self.nbytes // max(1, len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TaskError(f"inputs are arrays by name ({', '.join(self)}), and what is asked of them takes one array")


def is_parameter(name: object) -> bool:
    """Returns whether an array can have a name: that of a parameter of Python, not too long and without _ first."""
    is_name = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
    return is_name and not str(name).startswith("_") and len(str(name)) <= MAX_NAME_LENGTH


def wrap_inputs(inputs: Any) -> Any:
    """Returns inputs as a `Dataset` has them: a dict of arrays as `NamedArrays`, all else as it is."""
    return NamedArrays(inputs) if isinstance(inputs, Mapping) else inputs


def unwrap_inputs(inputs: Any) -> Any:
    """Returns inputs as functions of a user's own get them: arrays by name as a dict."""
    return inputs.to_dict() if isinstance(inputs, NamedArrays) else inputs


def concatenate_inputs(parts: Sequence[Any]) -> Any:
    """Returns the inputs of all parts in order.

    Raises:
        DataError: they are not of the same names, or arrays of a name differ in kind.
    """
    if not any(isinstance(part, NamedArrays) for part in parts):
        return np.concatenate(parts)
    if len({_list_kinds(part) if isinstance(part, NamedArrays) else () for part in parts}) > 1:
        raise DataError(
            "inputs that are put together must have the same names and types, got "
            f"{' and '.join(sorted({format_rows(part) for part in parts})[:2])}"
        )
    return NamedArrays({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def list_arrays(inputs: Any) -> list[NDArray[Any]]:
    """Returns the arrays of inputs by alphabetical order of their names, or the one that they are."""
    return [*inputs.to_dict().values()] if isinstance(inputs, NamedArrays) else [inputs]


def format_row_shape(inputs: Any) -> str:
    """Returns names and shape of one example, such as `[8, 8]` or `age [], image [8, 8]`, of targets by name too."""
    if not isinstance(inputs, NamedArrays) and not inputs.dtype.names:
        return str([*inputs.shape[1:]])
    names = inputs if isinstance(inputs, NamedArrays) else sorted(inputs.dtype.names)
    return ", ".join(f"{name} {[*inputs[name].shape[1:]]}" for name in names)


def format_rows(inputs: Any) -> str:
    """Returns what examples of one model have in common: `[8, 8]`, or by name `age int [], image float [8, 8]`.

    One array becomes float32, so that its type does not count.
    """
    if not isinstance(inputs, NamedArrays):
        return format_row_shape(inputs)
    return ", ".join(f"{name} {kind} {[*inputs[name].shape[1:]]}" for name, kind in _list_kinds(inputs))


def _list_kinds(inputs: NamedArrays) -> tuple[tuple[str, str], ...]:
    return tuple((name, _KINDS[inputs[name].dtype.kind]) for name in inputs)


def _check_names(names: Sequence[Any], what: str) -> None:
    if not 0 < len(names) <= MAX_ARRAYS:
        raise DataError(f"{what} by name must be 1 to {MAX_ARRAYS} arrays, got {len(names)}")
    for name in names:
        if not is_parameter(name):
            raise DataError(
                f"a name of {what} must be one of a parameter of Python, such as age, of at most {MAX_NAME_LENGTH} "
                f"letters and not with _ first, got {str(name)[: MAX_NAME_LENGTH + 1]!r}"
            )
