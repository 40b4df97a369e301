"""Serialisation of states: tensors in safetensors, the rest as JSON in its metadata; no code is run.

A state is any nest of dataclasses, dicts, lists, tuples, sets, arrays, `SparseTensor`s, numbers, text, bytes and
enums. Decoding creates only dataclasses and enums named in the annotations of the expected class. A shared array
stays shared; a shared dict or list is duplicated.
"""

from __future__ import annotations

import base64
import json
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from edgefl.core.errors import JournalError, NotKeptError, StoreTooNewError
from edgefl.core.safe_parsing import check_nesting, parse_json
from edgefl.core.types import Array, LazyTensors, SparseTensor, Tensor, Tensors

T = TypeVar("T")

FORMAT_VERSION = 1
_METADATA_KEY = "edgefl"
_SEQUENCES: dict[str, type[Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}

_JSON_TYPES: tuple[type[Any], ...] = (type(None), bool, int, str)

_MALFORMED_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of an intact value of an unexpected form."""


def check_format_version(what: str, found: object, supported: int) -> None:
    """Checks that a file has this program's format.

    Raises:
        StoreTooNewError: it is newer.
        ValueError: there is no such format, or it is one from before the first release.
    """
    if not isinstance(found, int) or found < supported:
        raise ValueError(f"format {found!r:.40}, this program reads {supported}")
    if found > supported:
        raise StoreTooNewError(
            f"{what} has format {found}, this program reads {supported}: "
            "a newer edgefl wrote it; start a newer edgefl"
        )


def encode_state(state: Any) -> bytes:
    """Returns the bytes of a dataclass.

    Raises:
        NotKeptError: it does not round-trip through `decode_state`.
    """
    packer, name = _StateEncoder(_find_classes(type(state))), type(state).__name__
    value = {"v": FORMAT_VERSION, "state": packer.encode(state, name)}
    try:
        check_nesting(value)
    except ValueError as error:
        raise NotKeptError(f"cannot save a {name}: as JSON {error}") from error
    try:
        return save_safetensors(packer.arrays, metadata={_METADATA_KEY: json.dumps(value, allow_nan=False)})
    except SafetensorError as error:  # the metadata is limited to 100 MB
        raise NotKeptError(f"cannot save a {name}: {error}") from error


def decode_state(content: bytes, cls: type[T]) -> T:
    """Returns the dataclass in `content`, with writable arrays.

    Raises:
        JournalError: the bytes are damaged, or hold another class.
    """
    arrays, value = _read_container(content)
    unpacker = _StateDecoder(arrays, _find_classes(cls))
    try:
        state = unpacker.decode(value)
    except _MALFORMED_ERRORS as error:
        raise JournalError(f"the state does not fit {cls.__name__}: {error!r}") from error
    if not isinstance(state, cls):
        raise JournalError(f"a {type(state).__name__} was saved, expected a {cls.__name__}")
    return state


def count_encoded_updates(state: Any) -> int:
    """Returns the number of updates in a state with tensors still to be decoded, as `encode_state` does."""
    if isinstance(state, LazyTensors):
        return 1
    if is_dataclass(state):
        return sum(count_encoded_updates(getattr(state, item.name)) for item in fields(state))
    if isinstance(state, Mapping):
        return sum(count_encoded_updates(entry) for entry in state.values())
    return sum(count_encoded_updates(entry) for entry in state) if isinstance(state, list | tuple | deque) else 0


def encode_tensors(tensors: Tensors) -> bytes:
    """Returns the bytes of tensors by name, dense or sparse, in their order."""
    packer = _StateEncoder({})
    items = [[name, packer.encode(tensor, name)] for name, tensor in tensors.items()]
    return save_safetensors(
        packer.arrays, metadata={_METADATA_KEY: json.dumps({"v": FORMAT_VERSION, "state": items})}
    )


def decode_tensors(content: bytes) -> dict[str, Tensor]:
    """Returns the tensors packed by `encode_tensors`.

    Raises:
        JournalError: the bytes are damaged.
    """
    arrays, items = _read_container(content)
    unpacker = _StateDecoder(arrays, {})
    try:
        return {name: cast("Tensor", unpacker.decode(value)) for name, value in items}
    except _MALFORMED_ERRORS as error:
        raise JournalError(f"the tensors cannot be read: {error!r}") from error


def encode_model(model: Tensors) -> bytes:
    """Returns a plain safetensors file of a model, dense and by name; its metadata holds the order."""
    dense = {
        name: _make_contiguous(tensor.dense() if isinstance(tensor, SparseTensor) else tensor)
        for name, tensor in model.items()
    }
    return save_safetensors(dense, metadata={_METADATA_KEY: json.dumps({"v": FORMAT_VERSION, "state": list(dense)})})


def decode_model(content: bytes) -> dict[str, Array]:
    """Returns the tensors of any safetensors file.

    Raises:
        JournalError: the bytes are damaged.
    """
    arrays = _read_arrays(content)
    order = list(arrays)
    if _METADATA_KEY in _read_metadata(content):
        order = _read_payload(content)
        if not isinstance(order, list) or sorted(map(str, order)) != sorted(arrays):
            raise JournalError(
                "the file of tensors is damaged: the order of its tensors is not one of those it holds"
            )
    return {name: _make_writable(arrays[name]) for name in order}


def _read_container(content: bytes) -> tuple[dict[str, Array], Any]:
    return _read_arrays(content), _read_payload(content)


def _read_arrays(content: bytes) -> dict[str, Array]:
    try:
        return load_safetensors(content)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise JournalError(f"the file of tensors is damaged: {error!r}") from error


def _read_metadata(content: bytes) -> dict[str, str]:
    # safetensors has no API for the metadata of bytes: 8 bytes of length, then JSON.
    header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return dict(header.get("__metadata__") or {})


def _read_payload(content: bytes) -> Any:
    try:
        text = parse_json(_read_metadata(content)[_METADATA_KEY])
        version, value = text["v"], text["state"]
        check_format_version("the file of tensors", version, FORMAT_VERSION)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(f"the file of tensors is damaged: {error!r}") from error
    return value


def _find_classes(root: type[Any]) -> Mapping[str, type[Any]]:
    """Returns the dataclasses and enums that the annotations of `root` can reach, by name."""
    return _find_classes_cached(cast(Hashable, root))


@cache
def _find_classes_cached(root: Any) -> Mapping[str, type[Any]]:
    classes: dict[str, type[Any]] = {}
    visited: set[type[Any]] = set()
    queue: list[Any] = [root]
    while queue:
        kind = queue.pop()
        queue.extend(get_args(kind))
        is_enum = isinstance(kind, type) and issubclass(kind, Enum)
        if not (is_enum or (isinstance(kind, type) and is_dataclass(kind))) or kind is SparseTensor:
            continue
        existing = classes.setdefault(kind.__qualname__, kind)
        if existing is not kind:
            raise NotKeptError(f"the state has two classes named {kind.__qualname__}; rename one")
        if kind not in visited and not is_enum:
            visited.add(kind)
            queue.extend(get_type_hints(kind).values())
    return classes


class _StateEncoder:
    def __init__(self, classes: Mapping[str, type[Any]]) -> None:
        self._classes = classes
        self.arrays: dict[str, Array] = {}
        # Holds the arrays themselves: the id of a freed array may be reused.
        self._names: dict[int, tuple[str, Array]] = {}

    def encode(self, value: Any, path: str) -> Any:
        # Exact types: a subclass would come back as its base.
        kind = type(value)
        if kind in _JSON_TYPES:
            return value
        if kind is np.ndarray:
            return {"array": self._add_array(value, path)}
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, np.generic):
            return {"scalar": self._add_array(np.asarray(value), path)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        return self._encode_enum(value, path) if isinstance(value, Enum) else self._encode_container(value, path)

    def _encode_enum(self, value: Enum, path: str) -> Any:
        name = type(value).__qualname__
        if self._classes.get(name) is type(value):
            return {"enum": name, "value": self.encode(value.value, path)}
        if isinstance(value, int | str):  # of the annotated type, and equal after decoding
            return value.value
        raise _unsupported_error(value, path)

    def _encode_container(self, value: Any, path: str) -> Any:
        if type(value) is SparseTensor:
            indices, values = self._add_array(value.indices, path), self._add_array(value.values, path)
            return {"sparse": [indices, values, list(value.shape)]}
        if type(value) in (dict, LazyTensors):
            return {"map": [[self.encode(k, path), self.encode(v, f"{path}[{k!r}]")] for k, v in value.items()]}
        for name, kind in _SEQUENCES.items():
            if type(value) is kind:
                # Sets are unordered; equal states must give equal bytes.
                entries: Iterable[Any] = sorted(value) if name in {"set", "frozenset"} else value
                encoded = {name: [self.encode(entry, f"{path}[{i}]") for i, entry in enumerate(entries)]}
                return {**encoded, "maxlen": value.maxlen} if isinstance(value, deque) else encoded
        name = type(value).__qualname__
        if (
            self._classes.get(name) is type(value)
            and is_dataclass(value)
            and all(item.init for item in fields(value))
        ):
            entries = {
                _get_stored_name(f): self.encode(getattr(value, f.name), f"{path}.{f.name}") for f in fields(value)
            }
            return {"class": name, "fields": entries}
        raise _unsupported_error(value, path)

    def _add_array(self, array: Array, path: str) -> str:
        if id(array) in self._names:
            return self._names[id(array)][0]
        if type(array) is not np.ndarray:
            raise _unsupported_error(array, path)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise NotKeptError(f"cannot save {path}: arrays hold numbers of up to 64 bits, this one {array.dtype}")
        name = f"{len(self.arrays):06d}"
        self.arrays[name] = _make_contiguous(array)
        self._names[id(array)] = name, array
        return name


def _get_stored_name(item: Field[Any]) -> str:
    """Returns a field's name in files: its own, unless it was renamed and says `stored_as`."""
    return str(item.metadata.get("stored_as", item.name))


def _unsupported_error(value: object, path: str) -> NotKeptError:
    """Returns the error for a value that does not round-trip, with what would be right."""
    name = type(value).__qualname__
    prefix = f"cannot save {path}, which is a {name}: "
    if isinstance(value, np.ma.MaskedArray):
        return NotKeptError(f"{prefix}its mask would be lost; keep data and mask as two arrays")
    if isinstance(value, np.ndarray):
        return NotKeptError(f"{prefix}it would come back as an ndarray; keep numpy.array(...) of it")
    if isinstance(value, Mapping):
        return NotKeptError(f"{prefix}it would come back as a dict, if at all; keep dict(...) of it")
    if isinstance(value, Enum):
        return NotKeptError(
            f"{prefix}it would not come back as one; let the annotation of its field name {name}, or keep its value"
        )
    return NotKeptError(
        f"{prefix}a state holds numbers, text, bytes, arrays, enums, dicts, lists, tuples, sets, deques, sparse "
        "tensors, and dataclasses that its annotations name"
    )


class _StateDecoder:
    def __init__(self, arrays: Mapping[str, Array], classes: Mapping[str, type[Any]]) -> None:
        self._arrays = arrays
        self._classes = classes
        self._decoded: dict[str, Array] = {}

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        (name, content), *_ = value.items()
        if name in _SEQUENCES:
            entries = (self.decode(entry) for entry in content)
            return deque(entries, maxlen=value["maxlen"]) if name == "deque" else _SEQUENCES[name](entries)
        readers: dict[str, Callable[[Any], Any]] = {
            "array": self._get_array,
            "scalar": lambda array: self._get_array(array)[()],
            "float": float,
            "bytes": base64.b64decode,
            "sparse": self._make_sparse,
            "map": lambda pairs: {self.decode(key): self.decode(entry) for key, entry in pairs},
            "enum": lambda cls: self._classes[cls](self.decode(value["value"])),
            "class": lambda cls: self._make_dataclass(cls, value["fields"]),
        }
        return readers[name](content)

    def _make_dataclass(self, name: str, packed: Mapping[str, Any]) -> Any:
        cls = self._classes[name]
        names = {_get_stored_name(item): item.name for item in fields(cls)}
        return cls(**{names.get(key, key): self.decode(entry) for key, entry in packed.items()})

    def _make_sparse(self, content: Any) -> SparseTensor:
        indices, values, shape = content
        return SparseTensor(indices=self._get_array(indices), values=self._get_array(values), shape=tuple(shape))

    def _get_array(self, name: str) -> Array:
        if name not in self._decoded:
            self._decoded[name] = _make_writable(self._arrays[name])
        return self._decoded[name]


def _make_contiguous(array: Array) -> Array:
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    # order="C" and not ascontiguousarray, which would give a scalar an axis.
    return native if native.flags.c_contiguous else native.copy(order="C")


def _make_writable(array: Array) -> Array:
    return array if array.flags.writeable else array.copy()
