"""States as bytes: tensors in safetensors, the rest as JSON in its metadata; nothing else is read or run.

A state is any nest of dataclasses, dicts, lists, tuples, sets, arrays, `SparseTensor`s, numbers, text, bytes and
enums. Reading makes only dataclasses and enums that the annotations of the expected class name. An array that a state
has in several places is one array afterwards too; a dict or list comes back as several.
"""

from __future__ import annotations

import base64
import json
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from edgefl.errors import JournalError, NotKeptError
from edgefl.storage.formats import check_format
from edgefl.types import Array, LazyTensors, SparseTensor, Tensor, Tensors
from edgefl.untrusted import check_nesting, parse_json

T = TypeVar("T")

FORMAT = 1
_KEY = "edgefl"
_SEQUENCES: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}

_AS_IT_IS: tuple[type[Any], ...] = (type(None), bool, int, str)

_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What a value raises that is whole, but not of the form that is expected."""


def pack_state(state: Any) -> bytes:
    """Returns the bytes of a dataclass.

    Raises:
        NotKeptError: it holds something that would not come back the same, or `unpack_state` would not take it.
    """
    packer, name = _Packer(_classes(type(state))), type(state).__name__
    value = {"v": FORMAT, "state": packer.pack(state, name)}
    try:
        check_nesting(value)
    except ValueError as error:
        raise NotKeptError(f"cannot save a {name}: as JSON {error}") from error
    try:
        return save_safetensors(packer.arrays, metadata={_KEY: json.dumps(value, allow_nan=False)})
    except SafetensorError as error:  # what is no tensor has a place of 100 MB
        raise NotKeptError(f"cannot save a {name}: {error}") from error


def unpack_state(content: bytes, cls: type[T]) -> T:
    """Returns the dataclass in `content`, with arrays that its owner may write to.

    Raises:
        JournalError: the bytes are damaged, or hold another class.
    """
    arrays, value = _open(content)
    unpacker = _Unpacker(arrays, _classes(cls))
    try:
        state = unpacker.unpack(value)
    except _NONSENSE as error:
        raise JournalError(f"the state does not fit {cls.__name__}: {error!r}") from error
    if not isinstance(state, cls):
        raise JournalError(f"a {type(state).__name__} was saved, expected a {cls.__name__}")
    return state


def num_encoded(state: Any) -> int:
    """Returns how many updates a state holds whose tensors are not decoded until somebody asks: `pack_state` does."""
    if isinstance(state, LazyTensors):
        return 1
    if is_dataclass(state):
        return sum(num_encoded(getattr(state, each.name)) for each in fields(state))
    if isinstance(state, Mapping):
        return sum(num_encoded(entry) for entry in state.values())
    return sum(num_encoded(entry) for entry in state) if isinstance(state, list | tuple | deque) else 0


def pack_tensors(tensors: Tensors) -> bytes:
    """Returns the bytes of tensors by name, dense or sparse, in their order."""
    packer = _Packer({})
    named = [[name, packer.pack(tensor, name)] for name, tensor in tensors.items()]
    return save_safetensors(packer.arrays, metadata={_KEY: json.dumps({"v": FORMAT, "state": named})})


def unpack_tensors(content: bytes) -> dict[str, Tensor]:
    """Returns what `pack_tensors` packed.

    Raises:
        JournalError: the bytes are damaged.
    """
    arrays, named = _open(content)
    unpacker = _Unpacker(arrays, {})
    try:
        return {name: cast("Tensor", unpacker.unpack(value)) for name, value in named}
    except _NONSENSE as error:
        raise JournalError(f"the tensors cannot be read: {error!r}") from error


def pack_model(model: Tensors) -> bytes:
    """Returns a plain safetensors file of a model, dense and by name; its metadata keeps the order."""
    dense = {
        name: _contiguous(tensor.dense() if isinstance(tensor, SparseTensor) else tensor)
        for name, tensor in model.items()
    }
    return save_safetensors(dense, metadata={_KEY: json.dumps({"v": FORMAT, "state": list(dense)})})


def unpack_model(content: bytes) -> dict[str, Array]:
    """Returns the tensors of any safetensors file.

    Raises:
        JournalError: the bytes are damaged.
    """
    arrays = _arrays(content)
    order = list(arrays)
    if _KEY in _metadata(content):
        order = _content(content)
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(arrays):
            raise JournalError(
                "the file of tensors is damaged: the order of its tensors is not one of those it holds"
            )
    return {name: _writable(arrays[name]) for name in order}


def _open(content: bytes) -> tuple[dict[str, Array], Any]:
    return _arrays(content), _content(content)


def _arrays(content: bytes) -> dict[str, Array]:
    try:
        return load_safetensors(content)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise JournalError(f"the file of tensors is damaged: {error!r}") from error


def _metadata(content: bytes) -> dict[str, str]:
    # safetensors gives no access to the metadata of bytes: 8 bytes of length, then JSON.
    header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return dict(header.get("__metadata__") or {})


def _content(content: bytes) -> Any:
    try:
        text = parse_json(_metadata(content)[_KEY])
        found, value = text["v"], text["state"]
        check_format("the file of tensors", found, FORMAT)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"the file of tensors is damaged: {error!r}") from error
    return value


def _classes(root: type[Any]) -> Mapping[str, type[Any]]:
    """Returns the dataclasses and enums that the annotations of `root` can reach, by name."""
    return _reached(cast(Hashable, root))


@cache
def _reached(root: Any) -> Mapping[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    expanded: set[type[Any]] = set()
    todo: list[Any] = [root]
    while todo:
        kind = todo.pop()
        todo.extend(get_args(kind))
        is_enum = isinstance(kind, type) and issubclass(kind, Enum)
        if not (is_enum or (isinstance(kind, type) and is_dataclass(kind))) or kind is SparseTensor:
            continue
        known = found.setdefault(kind.__qualname__, kind)
        if known is not kind:
            raise NotKeptError(f"the state has two classes named {kind.__qualname__}; rename one")
        if kind not in expanded and not is_enum:
            expanded.add(kind)
            todo.extend(get_type_hints(kind).values())
    return found


class _Packer:
    def __init__(self, classes: Mapping[str, type[Any]]) -> None:
        self._classes = classes
        self.arrays: dict[str, Array] = {}
        # With the arrays themselves: what is garbage gives its id to another one.
        self._names: dict[int, tuple[str, Array]] = {}

    def pack(self, value: Any, where: str) -> Any:
        # Exact types: one that is derived from them would come back as what it is derived from.
        kind = type(value)
        if kind in _AS_IT_IS:
            return value
        if kind is np.ndarray:
            return {"array": self._add(value, where)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, np.generic):
            return {"scalar": self._add(np.asarray(value), where)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        return self._pack_enum(value, where) if isinstance(value, Enum) else self._pack_container(value, where)

    def _pack_enum(self, value: Enum, where: str) -> Any:
        name = type(value).__qualname__
        if self._classes.get(name) is type(value):
            return {"enum": name, "value": self.pack(value.value, where)}
        if isinstance(value, int | str):  # it is what the annotation says, and equal to what comes back
            return value.value
        raise _refused(value, where)

    def _pack_container(self, value: Any, where: str) -> Any:
        if type(value) is SparseTensor:
            indices, values = self._add(value.indices, where), self._add(value.values, where)
            return {"sparse": [indices, values, list(value.shape)]}
        if type(value) in (dict, LazyTensors):
            return {"map": [[self.pack(k, where), self.pack(v, f"{where}[{k!r}]")] for k, v in value.items()]}
        for name, kind in _SEQUENCES.items():
            if type(value) is kind:
                # Sets have no order of their own; equal states shall give equal bytes.
                entries: Iterable[Any] = sorted(value) if name in {"set", "frozenset"} else value
                packed = {name: [self.pack(entry, f"{where}[{i}]") for i, entry in enumerate(entries)]}
                return {**packed, "maxlen": value.maxlen} if isinstance(value, deque) else packed
        name = type(value).__qualname__
        if (
            self._classes.get(name) is type(value)
            and is_dataclass(value)
            and all(each.init for each in fields(value))
        ):
            entries = {f.name: self.pack(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value)}
            return {"class": name, "fields": entries}
        raise _refused(value, where)

    def _add(self, array: Array, where: str) -> str:
        if id(array) in self._names:
            return self._names[id(array)][0]
        if type(array) is not np.ndarray:
            raise _refused(array, where)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise NotKeptError(f"cannot save {where}: arrays hold numbers of up to 64 bits, this one {array.dtype}")
        name = f"{len(self.arrays):06d}"
        self.arrays[name] = _contiguous(array)
        self._names[id(array)] = name, array
        return name


def _refused(value: object, where: str) -> NotKeptError:
    """Returns what is wrong with a value that would not come back the same, and what would be right."""
    name = type(value).__qualname__
    found = f"cannot save {where}, which is a {name}: "
    if isinstance(value, np.ma.MaskedArray):
        return NotKeptError(f"{found}its mask would be lost; keep data and mask as two arrays")
    if isinstance(value, np.ndarray):
        return NotKeptError(f"{found}it would come back as an ndarray; keep numpy.array(...) of it")
    if isinstance(value, Mapping):
        return NotKeptError(f"{found}it would come back as a dict, if at all; keep dict(...) of it")
    if isinstance(value, Enum):
        return NotKeptError(
            f"{found}it would not come back as one; let the annotation of its field name {name}, or keep its value"
        )
    return NotKeptError(
        f"{found}a state holds numbers, text, bytes, arrays, enums, dicts, lists, tuples, sets, deques, sparse "
        "tensors, and dataclasses that its annotations name"
    )


class _Unpacker:
    def __init__(self, arrays: Mapping[str, Array], classes: Mapping[str, type[Any]]) -> None:
        self._arrays = arrays
        self._classes = classes
        self._made: dict[str, Array] = {}

    def unpack(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        (name, content), *_ = value.items()
        if name in _SEQUENCES:
            entries = (self.unpack(entry) for entry in content)
            return deque(entries, maxlen=value["maxlen"]) if name == "deque" else _SEQUENCES[name](entries)
        readers: dict[str, Callable[[Any], Any]] = {
            "array": self._array,
            "scalar": lambda array: self._array(array)[()],
            "float": float,
            "bytes": base64.b64decode,
            "sparse": self._sparse,
            "map": lambda pairs: {self.unpack(key): self.unpack(entry) for key, entry in pairs},
            "enum": lambda cls: self._classes[cls](self.unpack(value["value"])),
            "class": lambda cls: self._make(cls, value["fields"]),
        }
        return readers[name](content)

    def _make(self, name: str, packed: Mapping[str, Any]) -> Any:
        return self._classes[name](**{key: self.unpack(entry) for key, entry in packed.items()})

    def _sparse(self, content: Any) -> SparseTensor:
        indices, values, shape = content
        return SparseTensor(indices=self._array(indices), values=self._array(values), shape=tuple(shape))

    def _array(self, name: str) -> Array:
        if name not in self._made:
            self._made[name] = _writable(self._arrays[name])
        return self._made[name]


def _contiguous(array: Array) -> Array:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    # order="C" and not ascontiguousarray, which would give a scalar an axis.
    return native if native.flags.c_contiguous else native.copy(order="C")


def _writable(array: Array) -> Array:
    return array if array.flags.writeable else array.copy()
