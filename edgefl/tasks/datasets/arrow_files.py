"""Arrow files in folders of Hugging Face's `datasets`, read in NumPy: chosen columns, a few rows at once.

`Dataset.save_to_disk` writes streams of record batches without compression, `state.json` with their names, and
`dataset_info.json` with the names of classes, which are numbers in the files. Every place and length in such a stream
is the file's word: none is used before it is known to lie within the file and a bound.

Source: Apache Arrow, Columnar format 1.5, Message.fbs and Schema.fbs; Google, FlatBuffers internals.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Array, Json
from edgefl.tasks.datasets.parquet_files import (
    MAX_FILE_TEXT_BYTES,
    MAX_JSON_BYTES,
    MAX_PICTURE_BYTES,
    MAX_TEXT_CHARS,
    PICTURE_BYTES,
    PICTURE_ROWS,
    parse_classes,
)

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
MAX_METADATA_BYTES = 16 * 1024**2
"""Of one message of a stream, without its rows."""
MAX_MESSAGES = 1_000_000
"""Of a stream: batches of rows, and those of categories, which are not read."""
MAX_FIELDS, MAX_DEPTH, MAX_NAME_BYTES = 65_536, 64, 1024
MAX_SHOWN = 12
_CONTINUATION = b"\xff\xff\xff\xff"
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3
"""Kinds of messages."""
_STRUCT_BYTES = 16
"""Of a node, which is a number of rows and one of nulls, and of a buffer, which is a place and a number of bytes."""
_INT, _FLOAT, _BOOL, _STRUCT = 2, 3, 6, 13
_FLOATS = ("<f2", "<f4", "<f8")
_OFFSETS = {4: "<i4", 5: "<i4", 19: "<i8", 20: "<i8"}
"""By kind of texts and bytes."""
_KINDS = (
    "none", "null", "int", "float", "bytes", "text", "bool", "decimal", "date", "time", "timestamp", "interval",
    "list", "struct", "union", "fixed bytes", "fixed list", "map", "duration", "bytes", "text", "list",
)  # fmt: skip
_NUM_BUFFERS = {1: 0, 4: 3, 5: 3, 12: 2, 13: 1, 16: 1, 17: 2, 19: 3, 20: 3, 21: 2}
"""By kind, 2 for all others; those of children follow."""


def list_arrow_files(folder: Path) -> list[Path]:
    """Returns the Arrow files of a folder, in the order of its `state.json` where it has one, else by name.

    Raises:
        DataError: it holds several data sets, or says files that are none of its own.
    """
    if (splits := folder / SPLITS).is_file():
        found = _read_json(splits).get("splits")
        names = [str(name) for name in found] if isinstance(found, list) else []
        raise DataError(
            f"{folder} holds several data sets ({escape_text(', '.join(names[:MAX_SHOWN]))[:200]}); name the folder "
            "of one of them"
        )
    if not (state := folder / STATE).is_file():
        return sorted(folder.glob("[!.]*.arrow"))
    entries = _read_json(state).get("_data_files")
    found = entries if isinstance(entries, list) else []
    names = [str(entry.get("filename")) if isinstance(entry, dict) else "" for entry in found]
    if not names or any(Path(name).name != name or not name.endswith(".arrow") for name in names):
        raise DataError(f"{state} must list .arrow files beside it, under _data_files")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise DataError(f"{state} lists {escape_text(name)[:200]} {count} times; each file must be there once")
    if gone := [name for name in names if not (folder / name).is_file()]:
        raise DataError(f"{state} lists {escape_text(gone[0])[:200]}, which is not there; copy the folder again")
    return [folder / name for name in names]


class ArrowTable:
    """An open Arrow file; see `TableFile`.

    Args:
        path: of the file; names of classes are those of the `dataset_info.json` beside it.
        max_cells: rows times columns that are read of it.
    """

    def __init__(self, path: Path, *, max_cells: int) -> None:
        self._path, self._file, self._max_cells = path, path.open("rb"), max_cells
        self._columns: tuple[_Column, ...] = ()
        self._batches: list[_Message] = []
        self._num_rows, self._num_text_bytes = 0, 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._file)
            with self._explain_damage():
                self._read_index()
            self._classes = _read_classes(self._path.parent / INFO)
            self._check_cells(1)
            opened.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    @property
    def header(self) -> Sequence[str]:
        return [column.name for column in self._columns]

    def read_chunks(
        self, numbers: Sequence[str], texts: Sequence[str], chunk_rows: int
    ) -> Iterator[tuple[Array, Sequence[Sequence[str]]]]:
        columns = {column.name: column for column in self._columns}
        for name in (*numbers, *texts):
            if not columns[name].is_number and (name in numbers or not columns[name].is_text):
                what = "texts" if name in texts else "numbers"
                raise DataError(f"{self._path}: column {name!r} must hold {what}, and holds {columns[name].what}")
        self._check_cells(len(numbers) + len(texts))
        yield np.empty((0, len(numbers)), np.float32), [()] * len(texts)
        with self._explain_damage():
            for batch in self._iterate_batches():
                for start in range(0, batch.num_rows, chunk_rows):
                    stop = min(batch.num_rows, start + chunk_rows)
                    found = np.empty((stop - start, len(numbers)), np.float32)
                    with np.errstate(over="ignore", invalid="ignore"):
                        for place, name in enumerate(numbers):
                            found[:, place] = _read_numbers(batch, columns[name], start, stop)
                    yield found, [self._read_texts(batch, columns[name], start, stop) for name in texts]

    def read_pictures(self, image: str, target: str) -> Iterator[tuple[bytes, str]]:
        """Yields the file that lies in each row's picture, empty for none, and the row's class, likewise.

        Raises:
            DataError: a column holds no such thing, a picture is too large, or the file is damaged.
        """
        columns = {column.name: column for column in self._columns}
        pictures, classes = columns[image], columns[target]
        content = next((part for part in pictures.parts if part.name == PICTURE_BYTES), pictures)
        if not content.is_text:
            raise DataError(f"{self._path}: column {image!r} must hold pictures, and holds {pictures.what}")
        if not (classes.is_number or classes.is_text):
            raise DataError(f"{self._path}: column {target!r} must hold texts, and holds {classes.what}")
        self._check_cells(2)
        with self._explain_damage():
            for batch in self._iterate_batches():
                for start in range(0, batch.num_rows, PICTURE_ROWS):
                    stop = min(batch.num_rows, start + PICTURE_ROWS)
                    is_there = batch.read_validity(pictures, start, stop) & batch.read_validity(content, start, stop)
                    offsets = batch.read_values(content, 1, content.form, start, stop + 1).tolist()
                    words = self._read_texts(batch, classes, start, stop)
                    for has_one, (first, last), word in zip(
                        is_there.tolist(), itertools.pairwise(offsets), words, strict=True
                    ):
                        if last - first > MAX_PICTURE_BYTES:
                            raise DataError(
                                f"{self._path}: column {image!r} has a picture of {last - first:,} bytes, at most "
                                f"{MAX_PICTURE_BYTES:,} are read"
                            )
                        yield batch.read_bytes(content, 2, first, last) if has_one else b"", word

    def survey(
        self, chunk_rows: int, *, is_detailed: bool
    ) -> Iterator[tuple[int, Iterable[tuple[str, Array | None]]]]:
        most = self._max_cells // max(1, self._num_rows)
        counts = Counter(self.header if is_detailed else ())
        seen = [column for column in self._columns if counts[column.name] == 1][:most]
        numbers = [column for column in seen if column.is_number and column.name not in self._classes]
        is_number = {column.name for column in numbers}
        yield self._num_rows, [(column.name, np.empty(0) if column.name in is_number else None) for column in seen]
        with self._explain_damage():
            for batch in self._iterate_batches() if numbers else ():
                for start in range(0, batch.num_rows, chunk_rows):
                    rows = start, min(batch.num_rows, start + chunk_rows)
                    yield 0, [(column.name, _read_numbers(batch, column, *rows)) for column in numbers]

    def _check_cells(self, num_columns: int) -> None:
        max_rows = self._max_cells // max(1, num_columns)
        if self._num_rows > max_rows:
            raise DataError(
                f"{self._path} has {self._num_rows:,} rows, with so many columns at most {max_rows:,} are read; "
                "save it in more shards (num_shards)"
            )

    def _read_index(self) -> None:
        """Finds the columns and all batches of rows, whose places lie in the file."""
        size, place, num_messages = os.fstat(self._file.fileno()).st_size, 0, 0
        while content := self._read_metadata(place, size):
            message = _Message.parse(content, place + 8 + len(content), self._file.fileno())
            if not 0 <= message.body_bytes <= size - message.body:
                raise _make_cut_error(self._path)
            if bool(self._columns) == (message.kind == _SCHEMA):
                raise ValueError("a schema must come first, and once")
            if message.kind == _SCHEMA:
                self._columns = _parse_schema(message.header)
            elif message.kind == _RECORD_BATCH:
                self._add_batch(message)
            elif message.kind != _DICTIONARY_BATCH:
                raise ValueError("no message of a table")
            place, num_messages = message.body + message.body_bytes, num_messages + 1
            if num_messages > MAX_MESSAGES:
                raise ValueError("too many messages")
        if not self._columns:
            raise ValueError("no columns")

    def _add_batch(self, batch: _Message) -> None:
        if batch.header.find(3):
            raise DataError(f"{self._path} is compressed, which is not read; save it by save_to_disk of datasets")
        if batch.num_rows < 0:
            raise ValueError("a batch of less than no rows")
        self._num_rows += batch.num_rows
        self._batches.append(replace(batch, header=_FlatTable(b"", 0)))  # its metadata are read again

    def _read_metadata(self, place: int, size: int) -> bytes:
        """Returns the metadata of the message at a place, nothing at the end of the stream."""
        start = os.pread(self._file.fileno(), 8, place)
        if len(start) < 8:
            raise _make_cut_error(self._path)
        num_bytes = int.from_bytes(start[4:], "little")
        if start[:4] != _CONTINUATION or num_bytes > MAX_METADATA_BYTES:
            raise ValueError("no message of a stream, or too large a one")
        if num_bytes > size - place - 8:
            raise _make_cut_error(self._path)
        return os.pread(self._file.fileno(), num_bytes, place + 8)

    def _iterate_batches(self) -> Iterator[_Message]:
        size = os.fstat(self._file.fileno()).st_size
        for batch in self._batches:
            if batch.num_rows:
                content = self._read_metadata(batch.start, size)
                yield _Message.parse(content, batch.body, self._file.fileno())

    def _read_texts(self, batch: _Message, column: _Column, start: int, stop: int) -> list[str]:
        # What lies in the place of a missing value is any number, or any bytes.
        validity = batch.read_validity(column, start, stop).tolist()
        if column.is_text:
            return self._read_words(batch, column, start, validity)
        numbers = zip(batch.read_values(column, 1, column.form, start, stop).tolist(), validity, strict=True)
        names = self._classes.get(column.name)
        if names is None or column.form == "bool":
            return [str(number).lower() if is_there else "" for number, is_there in numbers]
        classes = [number if is_there else -1 for number, is_there in numbers]
        if not -1 <= min(classes) <= max(classes) < len(names):
            raise DataError(f"{self._path}: column {column.name!r} has a class of more than {len(names)}")
        return ["" if number < 0 else names[int(number)] for number in classes]  # -1 is an example without a class

    def _read_words(self, batch: _Message, column: _Column, start: int, validity: Sequence[bool]) -> list[str]:
        offsets = batch.read_values(column, 1, column.form, start, start + len(validity) + 1).astype(np.int64)
        if (offsets[1:] < offsets[:-1]).any():  # differences would wrap
            raise ValueError("texts that end before they begin")
        first, last = int(offsets[0]), int(offsets[-1])
        self._num_text_bytes += last - first
        if self._num_text_bytes > MAX_FILE_TEXT_BYTES:
            raise DataError(
                f"{self._path}: its rows have more than {MAX_FILE_TEXT_BYTES:,} bytes of text in these columns; "
                "save it in more shards (num_shards)"
            )
        content = batch.read_bytes(column, 2, first, last)
        places = itertools.pairwise((offsets - first).tolist())
        words = [content[a:b].decode() if is_there else "" for (a, b), is_there in zip(places, validity, strict=True)]
        if any(len(word) > MAX_TEXT_CHARS for word in words):
            raise DataError(
                f"{self._path}: column {column.name!r} has a text of more than {MAX_TEXT_CHARS} characters"
            )
        return [word.strip() for word in words]

    @contextlib.contextmanager
    def _explain_damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            # No more than the kind: texts of errors may show cells, and reach the coordinator.
            raise DataError(
                f"{self._path} cannot be read as a stream of Arrow ({type(error).__name__}): it is damaged, or not "
                "of save_to_disk; save it again"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of the schema: its places among a batch's nodes and buffers, and what its values are.

    `form` is NumPy's type of numbers, of texts that of their offsets, `bool` for bits, and empty for all else.
    `parts` are those of a struct.
    """

    name: str
    node: int
    first_buffer: int
    form: str
    is_text: bool
    what: str
    parts: tuple[_Column, ...] = ()

    @property
    def is_number(self) -> bool:
        return bool(self.form) and not self.is_text


@dataclass(frozen=True, slots=True)
class _FlatTable:
    """A table of a FlatBuffer: fields by number, whose places are checked when they are used.

    Raises:
        ValueError: something lies outside the content.
    """

    content: bytes
    place: int

    def find(self, number: int) -> int:
        """Returns the place of a field, 0 where it is not there."""
        start = self.place - self.read(self.place, 4)
        if 4 + 2 * number >= self.read(start, 2):
            return 0
        offset = self.read(start + 4 + 2 * number, 2)
        return self.place + offset if offset else 0

    def read(self, place: int, num_bytes: int, *, is_signed: bool = False) -> int:
        """Returns a number at a place; all but the first offset of a table lie before, and are never negative."""
        if not 0 <= place <= len(self.content) - num_bytes:
            raise ValueError("a place outside the metadata")
        is_signed |= num_bytes == 4 and place == self.place
        return int.from_bytes(self.content[place : place + num_bytes], "little", signed=is_signed)

    def integer(self, number: int, num_bytes: int, *, is_signed: bool = False) -> int:
        place = self.find(number)
        return self.read(place, num_bytes, is_signed=is_signed) if place else 0

    def table(self, number: int) -> _FlatTable:
        place = self.find(number)
        if not place:
            raise ValueError("a part is missing")
        return _FlatTable(self.content, place + self.read(place, 4))

    def vector(self, number: int, item_bytes: int) -> tuple[int, int]:
        """Returns the place and the length of a vector, which lies within the content."""
        found = self.find(number)
        if not found:
            return 0, 0
        place = found + self.read(found, 4)
        length = self.read(place, 4)
        if length * item_bytes > len(self.content) - place - 4:
            raise ValueError("a vector outside the metadata")
        return place + 4, length

    def tables(self, number: int) -> Iterator[_FlatTable]:
        place, length = self.vector(number, 4)
        for item in range(place, place + 4 * length, 4):
            yield _FlatTable(self.content, item + self.read(item, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message of a stream: its kind, its header, and the place and size of its body in the file."""

    kind: int
    start: int
    body: int
    body_bytes: int
    num_rows: int
    header: _FlatTable = field(repr=False)
    descriptor: int

    @classmethod
    def parse(cls, content: bytes, body: int, descriptor: int) -> _Message:
        root = _FlatTable(content, -1)
        message = _FlatTable(content, root.read(0, 4))
        kind, header = message.integer(1, 1), message.table(2)
        return cls(
            kind=kind,
            start=body - len(content) - 8,
            body=body,
            body_bytes=message.integer(3, 8, is_signed=True),
            num_rows=header.integer(0, 8, is_signed=True) if kind == _RECORD_BATCH else 0,
            header=header,
            descriptor=descriptor,
        )

    def read_validity(self, column: _Column, start: int, stop: int) -> Array:
        """Returns [stop - start] bool: whether a row has a value."""
        place, length = self.header.vector(1, _STRUCT_BYTES)
        if column.node >= length or self._read_long(place + column.node * _STRUCT_BYTES) != self.num_rows:
            raise ValueError("a column of another length")
        if not self._find_buffer(column, 0)[1]:
            return np.ones(stop - start, bool)
        return self.read_values(column, 0, "bool", start, stop)

    def read_values(self, column: _Column, number: int, form: str, start: int, stop: int) -> Array:
        """Returns [stop - start] values of one of a column's buffers."""
        if form != "bool":
            width = np.dtype(form).itemsize
            return np.frombuffer(self.read_bytes(column, number, start * width, stop * width), form)
        content = self.read_bytes(column, number, start // 8, -(-stop // 8))
        bits = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")
        return bits[start % 8 :][: stop - start].astype(bool)

    def read_bytes(self, column: _Column, number: int, start: int, stop: int) -> bytes:
        """Returns some bytes of one of a column's buffers, which must have them."""
        place, length = self._find_buffer(column, number)
        if not 0 <= start <= stop <= length:
            raise ValueError("a column with fewer values than rows")
        content = os.pread(self.descriptor, stop - start, self.body + place + start)
        if len(content) != stop - start:
            raise ValueError("a file that was cut meanwhile")
        return content

    def _find_buffer(self, column: _Column, number: int) -> tuple[int, int]:
        """Returns place and length of a buffer, which lies within the body."""
        start, length = self.header.vector(2, _STRUCT_BYTES)
        if column.first_buffer + number >= length:
            raise ValueError("a batch with too few buffers")
        item = start + (column.first_buffer + number) * _STRUCT_BYTES
        place, num_bytes = self._read_long(item), self._read_long(item + 8)
        if not 0 <= place <= place + num_bytes <= self.body_bytes:
            raise ValueError("a buffer outside its batch")
        return place, num_bytes

    def _read_long(self, place: int) -> int:
        return self.header.read(place, 8, is_signed=True)


def _parse_schema(schema: _FlatTable) -> tuple[_Column, ...]:
    """Returns the columns; raises a `ValueError` where the places of their buffers cannot be known."""
    if schema.integer(0, 2):
        raise ValueError("the other order of bytes")
    columns, num_nodes, num_buffers = list[_Column](), 0, 0
    for found in schema.tables(1):
        node, first_buffer = num_nodes, num_buffers
        for node_buffers in _iterate_nodes(found):
            num_nodes, num_buffers = num_nodes + 1, num_buffers + node_buffers
            if num_nodes > MAX_FIELDS:
                raise ValueError("too many columns")
        columns.append(_make_column(found, node, first_buffer))  # whose parts are known to be few
    return tuple(columns)


def _make_column(found: _FlatTable, node: int, first_buffer: int, *, has_parts: bool = True) -> _Column:
    kind, parts = found.integer(2, 1), list[_Column]()
    form = "" if found.find(4) else _find_form(found, kind)
    if kind == _STRUCT and has_parts:
        num_nodes, num_buffers = node + 1, first_buffer + _NUM_BUFFERS[_STRUCT]
        for child in found.tables(5):
            parts.append(_make_column(child, num_nodes, num_buffers, has_parts=False))
            below = list(_iterate_nodes(child))
            num_nodes, num_buffers = num_nodes + len(below), num_buffers + sum(below)
    return _Column(
        name=_read_name(found),
        node=node,
        first_buffer=first_buffer,
        form=form,
        is_text=kind in _OFFSETS and bool(form),
        what="categories" if found.find(4) else _KINDS[kind] if kind < len(_KINDS) else "an unknown type",
        parts=tuple(parts),
    )


def _iterate_nodes(found: _FlatTable, depth: int = MAX_DEPTH) -> Iterator[int]:
    """Yields the number of buffers of a field and of each of its children, in the order of a batch."""
    kind = found.integer(2, 1)
    if not depth or kind in {0, 14} or kind >= len(_KINDS):
        raise ValueError("a type whose buffers are not known")
    if found.find(4):  # a dictionary lies in batches of its own, here are numbers of its entries
        yield 2
        return
    yield _NUM_BUFFERS.get(kind, 2)
    for child in found.tables(5):
        yield from _iterate_nodes(child, depth - 1)


def _find_form(found: _FlatTable, kind: int) -> str:
    if kind in _OFFSETS:
        return _OFFSETS[kind]
    if kind == _BOOL:
        return "bool"
    if kind == _FLOAT:
        precision = found.table(3).integer(0, 2)
        return _FLOATS[precision] if precision < len(_FLOATS) else ""
    if kind == _INT:
        width, is_signed = found.table(3).integer(0, 4), found.table(3).integer(1, 1)
        return f"<{'i' if is_signed else 'u'}{width // 8}" if width in {8, 16, 32, 64} else ""
    return ""


def _read_name(found: _FlatTable) -> str:
    place, length = found.vector(0, 1)
    if length > MAX_NAME_BYTES:
        raise ValueError("a name that is too long")
    return found.content[place : place + length].decode()


def _read_numbers(batch: _Message, column: _Column, start: int, stop: int) -> Array:
    """Returns [stop - start] float64, NaN for a missing one."""
    values = batch.read_values(column, 1, column.form, start, stop).astype(np.float64)
    values[~batch.read_validity(column, start, stop)] = np.nan
    return values


def _read_classes(path: Path) -> Mapping[str, Sequence[str]]:
    """Returns the names of the classes of columns, of a `dataset_info.json`; none where it is not there."""
    if not path.is_file():
        return {}
    return parse_classes(_read_json(path).get("features"), path)


def _read_json(path: Path) -> Json:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise DataError(f"{path} has more than {MAX_JSON_BYTES:,} bytes")
        found = parse_json(content)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {type(error).__name__}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} must hold an object of JSON")
    return found


def _make_cut_error(path: Path) -> DataError:
    return DataError(
        f"{path} is no whole stream of Arrow; copy it again, under a name that begins with a dot until it is whole"
    )
