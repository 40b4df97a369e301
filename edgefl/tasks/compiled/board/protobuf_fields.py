"""Fields of a protobuf message of ONNX: bounded in number, and each known, or the message is refused.

Source: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.safe_text import escape_text

MAX_FIELDS = 200_000
"""Of one message."""
MAX_NUMBERS = 4096
"""Of a list; longer tensors have their values as raw bytes."""
MAX_NAME_BYTES = 2_000

Fields = dict[str, Any]

_REPEATED = frozenset({
    "opsets", "texts", "nodes", "constants", "inputs", "outputs", "infos", "attributes", "floats", "numbers",
    "strings", "dims", "numbers32", "doubles", "external", "sizes",
})  # fmt: skip
"""Names of fields that may be there several times."""
_NUMBERS = frozenset({"ir", "kind", "number", "location", "version", "size"})
"""Names of fields that are numbers; others are views of bytes."""
_FORBIDDEN = {
    ("model", 20): "training information", ("model", 25): "functions", ("graph", 14): "quantisation annotations",
    ("graph", 15): "sparse tensors", ("attribute", 21): "attributes of functions",
    ("attribute", 10): "lists of tensors",
    ("attribute", 11): "lists of graphs", ("attribute", 22): "sparse tensors", ("attribute", 23): "sparse tensors",
}  # fmt: skip
_FORMATS = {"floats": ("<f", 4), "doubles": ("<d", 8)}


def read_message(content: memoryview, known: Mapping[int, str], what: str) -> Fields:
    """Returns the fields of a protobuf message by name: numbers, or views of bytes; lists of those that repeat."""
    fields: Fields = {name: [] for name in known.values() if name in _REPEATED}
    for position, (number, value) in enumerate(_iterate_fields(content)):
        if position >= MAX_FIELDS:
            raise DataError(f"a {what} has more than {MAX_FIELDS} fields")
        name = known.get(number)
        if name is None:
            raise DataError(
                f"it has {_FORBIDDEN.get((what, number), f'field {number} in a {what}')}, which is not read"
            )
        if name in _REPEATED:
            fields[name].append(value)
        elif name in fields and name != "text":
            raise DataError(f"a {what} has its {name} twice")
        else:
            if isinstance(value, int) != (name in _NUMBERS) and name != "text":
                raise DataError(f"a {what} has a malformed {name}")
            fields[name] = value if name != "float" else _to_float(value)
    return fields


def _iterate_fields(content: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields number and value of each field of a message; fixed numbers come as their bytes."""
    place, end = 0, len(content)
    while place < end:
        tag, place = _read_varint(content, place)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, place = _read_varint(content, place)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if kind == 2:
            size, place = _read_varint(content, place)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise DataError(f"it is no ONNX file: a field of kind {kind}")
        if size > end - place:
            raise DataError("it is no ONNX file: it ends within a field")
        yield number, content[place : place + size]
        place += size


def _read_varint(content: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(content):
            raise DataError("it is no ONNX file: it ends within a number")
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            if value >> 64:
                break
            return value, place
    raise DataError("it is no ONNX file: a number has more than 64 bits")


def encode_field(number: int, value: int | bytes | memoryview) -> bytes:
    """Returns a field of a message: a number of 64 bits, or bytes."""
    if isinstance(value, int):
        return _encode_varint(number << 3) + _encode_varint(value & (1 << 64) - 1)
    return b"".join([_encode_varint(number << 3 | 2), _encode_varint(len(value)), value])


def _encode_varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def unpack(entries: list[int | memoryview], kind: str, at_most: int = MAX_NUMBERS) -> list[Any]:
    """Returns repeated numbers, packed or not."""
    values: list[Any] = []
    for entry in entries:
        if isinstance(entry, int):
            values.append(entry)
        elif kind in _FORMATS:
            form, size = _FORMATS[kind]
            if len(entry) % size or len(entry) // size > at_most:
                raise DataError("it is no ONNX file: numbers of another size")
            values += [number for (number,) in struct.iter_unpack(form, entry)]
        else:
            place = 0
            while place < len(entry) and len(values) <= at_most:
                value, place = _read_varint(entry, place)
                values.append(value - (1 << 64) if value >> 63 else value)
        if len(values) > at_most:
            raise DataError(f"a list has more than {at_most} numbers")
    return values


def _to_float(value: object) -> float:
    if not isinstance(value, memoryview) or len(value) != 4:
        raise DataError("it is no ONNX file: a malformed float")
    return float(np.frombuffer(value, "<f4")[0])


def to_text(value: object) -> str:
    """Returns a name, with what is no text escaped."""
    content = bytes(value) if isinstance(value, memoryview | bytes) else None
    if content is None or len(content) > MAX_NAME_BYTES:
        raise DataError("it is no ONNX file: a malformed or too long name")
    return escape_text(content.decode(errors="backslashreplace"))
