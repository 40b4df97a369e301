"""Parquet files by pyarrow: chosen columns, a few rows at once, within bounds that hold for hostile files too.

pyarrow decodes each page, a piece of a column, as a whole, whatever its header says. So the headers of the pages that
are wanted are read here before.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np

from edgefl.core.errors import DataError, format_install_command
from edgefl.core.safe_parsing import parse_json
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Array
from edgefl.tasks.registry import import_extra

log = logging.getLogger(__name__)

MAGIC = b"PAR1"
MAX_FOOTER_BYTES = 16 * 1024**2
MAX_LISTED = 65_536
"""Columns of a file, and groups of rows."""
MAX_BYTES_AT_ONCE = 256 * 1024**2
"""Decompressed pages that are in memory together: the largest of each wanted column, all of a group's for texts."""
MAX_PAGES, MAX_PAGE_VALUES, MAX_PAGE_BYTES = 1_000_000, 2**24, 2**31 - 1
MAX_UNPACKED_BYTES = 64 * 1024**3
"""Decompressed pages that are read of one file, in which several groups of rows may have the same ones."""
MAX_TEXT_CHARS = 1_000_000
MAX_FILE_TEXT_BYTES = 2**28
"""Of the texts that are read of one file, each as often as rows have it: a dictionary needs one copy in the file."""
MAX_TYPE_CHARS = 200
PICTURE_BYTES = "bytes"
"""Part of a struct that is a picture's file, as Hugging Face's `datasets` writes it; beside it is its path."""
PICTURE_ROWS = 32
"""Rows of pictures that are read at once, at most."""
MAX_PICTURE_BYTES = 64 * 1024**2
MAX_JSON_BYTES = 1024**2
MAX_DIGITS = 9
"""Of a class's number."""
FEATURES_KEY = b"huggingface"
"""Of a file's metadata, with the names of its classes."""
BUFFER_BYTES = 64 * 1024


class ParquetTable:
    """An open Parquet file; see `TableFile`.

    Args:
        path: of the file.
        max_cells: rows times columns that are read of it, since a few bytes may be any number of equal rows.

    Raises:
        TaskError: pyarrow is not installed.
    """

    def __init__(self, path: Path, *, max_cells: int) -> None:
        purpose, command = "Parquet files are read with pyarrow", format_install_command("pyarrow")
        self._arrow = import_extra("pyarrow", purpose, command)
        self._parquet = import_extra("pyarrow.parquet", purpose, command)
        self._compute = import_extra("pyarrow.compute", purpose, command)
        self._path, self._file, self._max_cells = path, path.open("rb"), max_cells
        self._num_pages, self._unpacked_bytes, self._num_text_bytes = 0, 0, 0
        self._words = dict[str, str]()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._file)
            self._check_footer()
            with self._explain_damage():
                file = self._open()
                self._metadata, self._schema = file.metadata, file.schema_arrow
                self._leaves = _find_leaves(file.schema)
            self._check_cells(1)
            opened.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        self._arrow.default_memory_pool().release_unused()

    @property
    def header(self) -> Sequence[str]:
        return self._schema.names  # type: ignore[no-any-return]

    def read_chunks(
        self, numbers: Sequence[str], texts: Sequence[str], chunk_rows: int
    ) -> Iterator[tuple[Array, Sequence[Sequence[str]]]]:
        for name in (*numbers, *texts):
            if fault := self._find_fault(name, is_text=name in texts):
                what = "texts" if name in texts else "numbers"
                raise DataError(f"{self._path}: column {name!r} must hold {what}, and holds {fault}")
        self._check_cells(len(numbers) + len(texts))
        yield np.empty((0, len(numbers)), np.float32), [()] * len(texts)
        with self._explain_damage():
            for batch in self._iterate_batches(numbers, texts, chunk_rows):
                found = np.empty((batch.num_rows, len(numbers)), np.float32)
                with np.errstate(over="ignore"):
                    for place, name in enumerate(numbers):
                        found[:, place] = self._to_numbers(batch[name])
                yield found, [self._to_texts(batch[name], name) for name in texts]

    def read_pictures(self, image: str, target: str) -> Iterator[tuple[bytes, str]]:
        """Yields what `ArrowTable.read_pictures` does."""
        types, kind = self._arrow.types, self._schema.field(image).type
        is_struct = types.is_struct(kind)
        leaf = f"{image}.{PICTURE_BYTES}" if is_struct else image
        value = kind.field(PICTURE_BYTES).type if is_struct and leaf in self._leaves else kind
        if leaf not in self._leaves or not (types.is_binary(value) or types.is_large_binary(value)):
            fault = escape_text(str(kind))[:MAX_TYPE_CHARS]
            raise DataError(f"{self._path}: column {image!r} must hold pictures, and holds {fault}")
        if fault := self._find_fault(target, is_text=True):
            raise DataError(f"{self._path}: column {target!r} must hold texts, and holds {fault}")
        self._check_cells(2)
        names = self._read_classes().get(target)
        with self._explain_damage():
            for batch in self._iterate_batches([], [leaf, target], PICTURE_ROWS):
                words = self._to_texts(batch[target], target)
                if names is not None:
                    words = [self._name_class(word, names, target) for word in words]
                batch[image].validate(full=True)
                pictures = self._compute.struct_field(batch[image], PICTURE_BYTES) if is_struct else batch[image]
                for picture, word in zip(pictures, words, strict=True):
                    yield self._to_bytes(picture, image), word

    def _to_bytes(self, picture: Any, image: str) -> bytes:
        value = picture.value if self._arrow.types.is_dictionary(picture.type) else picture
        content = value.as_buffer() if value is not None and value.is_valid else b""
        if len(content) > MAX_PICTURE_BYTES:
            raise DataError(
                f"{self._path}: column {image!r} has a picture of {len(content):,} bytes, at most "
                f"{MAX_PICTURE_BYTES:,} are read"
            )
        return bytes(content)

    def _name_class(self, word: str, names: Sequence[str], target: str) -> str:
        """Returns the name of a class by its number, empty for -1 and a missing one."""
        if word in {"", "-1"}:
            return ""
        if not word.isdecimal() or len(word) > MAX_DIGITS or int(word) >= len(names):
            raise DataError(f"{self._path}: column {target!r} has a class of more than {len(names)}")
        return names[int(word)]

    def _read_classes(self) -> Mapping[str, Sequence[str]]:
        """Returns the names of the classes of columns, as `datasets` keeps them in a file's metadata."""
        content = (self._metadata.metadata or {}).get(FEATURES_KEY, b"{}")
        if len(content) > MAX_JSON_BYTES:
            raise DataError(f"{self._path} has more than {MAX_JSON_BYTES:,} bytes on its classes")
        try:
            found = parse_json(content)
        except ValueError as error:
            raise DataError(f"{self._path}: its classes cannot be read as JSON: {type(error).__name__}") from None
        info = found.get("info") if isinstance(found, dict) else None
        return parse_classes(info.get("features") if isinstance(info, dict) else None, self._path)

    def survey(
        self, chunk_rows: int, *, is_detailed: bool
    ) -> Iterator[tuple[int, Iterable[tuple[str, Array | None]]]]:
        counts = Counter(self.header if is_detailed else ())
        numbers = [name for name, count in counts.items() if count == 1 and not self._find_fault(name, is_text=False)]
        num_rows = max(0, self._metadata.num_rows)
        if more := set(numbers[self._max_cells // max(1, num_rows) :]):
            log.warning("%s: %d columns are left out, it has too many numbers to look at all", self._path, len(more))
            numbers = numbers[: -len(more)]
        is_number = dict.fromkeys(numbers, True)
        yield num_rows, [(name, np.empty(0) if name in is_number else None) for name in counts if name not in more]
        for name in numbers:  # one after the other, since each has a page in memory
            with self._explain_damage():
                for batch in self._iterate_batches([name], [], chunk_rows):
                    yield 0, [(name, self._to_numbers(batch[name]))]

    def _open(self, texts: Sequence[str] = (), metadata: Any = None, file: Any = None) -> Any:
        # Texts as a dictionary: one long text with a short number for each row would else be copied for each.
        return self._parquet.ParquetFile(
            self._file if file is None else file,
            metadata=metadata,
            read_dictionary=list(texts) or None,
            buffer_size=BUFFER_BYTES,
            pre_buffer=False,
            thrift_string_size_limit=MAX_FOOTER_BYTES,
            thrift_container_size_limit=MAX_LISTED,
            arrow_extensions_enabled=False,
        )

    def _check_cells(self, num_columns: int) -> None:
        num_rows, max_rows = self._metadata.num_rows, self._max_cells // max(1, num_columns)
        if num_rows > max_rows:
            raise DataError(
                f"{self._path} has {num_rows:,} rows, with so many columns at most {max_rows:,} are read; cut it "
                "into several files"
            )

    def _check_footer(self) -> None:
        try:
            self._size = os.fstat(self._file.fileno()).st_size
            tail = os.pread(self._file.fileno(), 8, max(0, self._size - 8))
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error.strerror}") from None
        if self._size < len(MAGIC) + len(tail) or tail[4:] != MAGIC:
            raise DataError(
                f"{self._path} is no whole Parquet file; copy it again, under a name that begins with a dot until it "
                "is whole"
            )
        if (num_bytes := int.from_bytes(tail[:4], "little")) > MAX_FOOTER_BYTES:
            raise DataError(
                f"{self._path} has a footer of {num_bytes:,} bytes, at most {MAX_FOOTER_BYTES:,} are read; write "
                "fewer columns, or larger groups of rows"
            )

    def _find_fault(self, name: str, *, is_text: bool) -> str:
        """Returns the type of a column where it can hold no such values, else nothing."""
        types, kind = self._arrow.types, self._schema.field(name).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        is_right = types.is_integer(value) or types.is_floating(value) or types.is_decimal(value)
        is_right |= types.is_boolean(value)
        if is_text:
            is_right |= types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)
            is_right |= types.is_binary(value) or types.is_temporal(value)
        return "" if is_right and name in self._leaves else escape_text(str(kind))[:MAX_TYPE_CHARS]

    def _iterate_batches(self, numbers: Sequence[str], texts: Sequence[str], chunk_rows: int) -> Iterator[Any]:
        """Yields the rows, and raises a `ValueError` where there are more than the footer says."""
        columns, num_rows = [*numbers, *texts], 0
        without_pages = self._open(metadata=self._metadata, file=_NoPages(self._size))
        for group in range(self._metadata.num_row_groups):
            # pyarrow's `RowGroupMetaData.column` ends the process where the footer is damaged; reading raises.
            with contextlib.suppress(_PagesAskedError):
                next(without_pages.iter_batches(1, row_groups=[group], columns=columns, use_threads=False), None)
            file = self._open(self._check_pages(self._metadata.row_group(group), columns, texts), self._metadata)
            self._words = {}
            for batch in file.iter_batches(chunk_rows, row_groups=[group], columns=columns, use_threads=False):
                num_rows += batch.num_rows
                if num_rows > self._metadata.num_rows:
                    raise ValueError("more rows than the footer says")
                yield batch

    def _check_pages(self, group: Any, columns: Sequence[str], texts: Sequence[str]) -> list[str]:
        """Returns the texts that have a dictionary.

        Raises:
            DataError: a group of rows needs too much memory, or would if it were unpacked.
            ValueError: it is damaged.
        """
        num_bytes, with_dictionary = 0, []
        for name in columns:
            pages = _measure_pages(self._file.fileno(), group.column(self._leaves[name]), self._size)
            has_dictionary = bool(pages.encodings & _DICTIONARIES)
            if _DELTA_BYTE_ARRAY in pages.encodings or (
                has_dictionary and _DELTA_LENGTH_BYTE_ARRAY in pages.encodings
            ):
                raise DataError(
                    f"{self._path}: column {name!r} is encoded as DELTA_BYTE_ARRAY, or in two ways, which is not "
                    "read; write it with a dictionary or plain"
                )
            if name in texts and has_dictionary:
                with_dictionary.append(name)
            num_bytes += pages.total_bytes if name in texts else pages.largest_bytes
            self._num_pages += pages.num_pages
            self._unpacked_bytes += pages.total_bytes
        if self._num_pages > MAX_PAGES or self._unpacked_bytes > MAX_UNPACKED_BYTES:
            raise DataError(
                f"{self._path} has more than {MAX_PAGES:,} pages or {MAX_UNPACKED_BYTES:,} bytes in these columns; "
                "cut it into several files, or write larger pages"
            )
        if num_bytes > MAX_BYTES_AT_ONCE:
            raise DataError(
                f"{self._path}: a group of rows needs {num_bytes:,} bytes at once in these columns, at most are "
                f"{MAX_BYTES_AT_ONCE:,}; write smaller groups of rows"
            )
        return with_dictionary

    def _to_numbers(self, column: Any) -> Array:
        if self._arrow.types.is_dictionary(column.type):
            column.validate(full=True)
            column = column.dictionary_decode()
        column = column.cast(self._arrow.float64(), safe=False)
        return _to_array(column, np.dtype(np.float64), missing=np.nan)

    def _to_texts(self, column: Any, name: str) -> list[str]:
        if not self._arrow.types.is_dictionary(column.type):
            return self._decode(column, name)
        indices = column.indices.cast(self._arrow.int64())
        places = _to_array(indices, np.dtype(np.int64), missing=-1)
        used, counts = np.unique(places[places >= 0], return_counts=True)
        content = self._arrow.py_buffer(used)  # whose `array` would import pandas, too
        taken = self._arrow.Array.from_buffers(self._arrow.int64(), len(used), [None, content])
        words = self._decode(column.dictionary.take(taken), name, counts)
        # The rows of a group, which are decoded in many chunks, share the texts of its dictionary.
        word_of = {
            place: self._words.setdefault(word, word) for place, word in zip(used.tolist(), words, strict=True)
        }
        return [word_of.get(place, "") for place in places.tolist()]

    def _decode(self, values: Any, name: str, counts: Array | None = None) -> list[str]:
        """Returns the texts; `counts` says how many rows have each, 1 if it is None."""
        values = values.cast(self._arrow.large_string())
        lengths = _to_array(self._compute.binary_length(values), np.dtype(np.int64), missing=0)
        self._num_text_bytes += int(lengths.sum() if counts is None else lengths @ counts)
        if self._num_text_bytes > MAX_FILE_TEXT_BYTES:
            raise DataError(
                f"{self._path}: its rows have more than {MAX_FILE_TEXT_BYTES:,} bytes of text in these columns; cut "
                "it into several files"
            )
        words = values.to_pylist()
        if any(word is not None and len(word) > MAX_TEXT_CHARS for word in words):
            raise DataError(f"{self._path}: column {name!r} has a text of more than {MAX_TEXT_CHARS} characters")
        return ["" if word is None else word.strip() for word in words]

    @contextlib.contextmanager
    def _explain_damage(self) -> Iterator[None]:
        try:
            yield
        except (self._arrow.ArrowException, OSError, ValueError, LookupError, OverflowError, MemoryError) as error:
            # No more than the kind: pyarrow's texts may show cells, and errors reach the coordinator.
            raise DataError(
                f"{self._path} cannot be read as Parquet ({type(error).__name__}): it is damaged or encrypted, or "
                "pyarrow does not know how it is written; write it again"
            ) from error


class _PagesAskedError(Exception):
    """What `_NoPages` raises."""


class _NoPages(io.RawIOBase):
    """A file of so many bytes whose pages cannot be read, for what is checked before."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._place = num_bytes, 0

    def seek(self, offset: int, start: int = os.SEEK_SET, /) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._num_bytes}[start]
        return self._place

    def tell(self) -> int:
        return self._place

    def readable(self) -> bool:
        return True

    def read(self, _size: int = -1, /) -> NoReturn:
        raise _PagesAskedError


def _to_array(column: Any, kind: np.dtype[Any], *, missing: float) -> Array:
    """Returns [n] numbers of a column of this kind, `missing` where it has none.

    pyarrow's `to_numpy` imports pandas where that is installed, which takes 30 MB and more.
    """
    validity, content = column.buffers()
    if not len(column) or content is None:
        return np.full(len(column), missing, kind)
    values: Array = np.frombuffer(content, kind, len(column), column.offset * kind.itemsize)
    if not column.null_count:
        return values
    is_there = np.unpackbits(np.frombuffer(validity, np.uint8), bitorder="little")
    return np.where(is_there[column.offset : column.offset + len(column)], values, kind.type(missing))


def _find_leaves(schema: Any) -> Mapping[str, int]:
    """Returns where columns stand, of structs their parts, by `struct.part`; but no lists."""
    leaves = [schema.column(place) for place in range(len(schema.names))]
    counts = Counter(leaf.path for leaf in leaves)
    return {
        leaf.path: place
        for place, leaf in enumerate(leaves)
        if leaf.max_repetition_level == 0 and counts[leaf.path] == 1
    }


def parse_classes(features: object, path: Path) -> Mapping[str, Sequence[str]]:
    """Returns the names of the classes of columns, of the features that `datasets` writes; none of anything else.

    Raises:
        DataError: they are no texts.
    """
    names = dict[str, Sequence[str]]()
    for name, one in features.items() if isinstance(features, dict) else ():
        if isinstance(one, dict) and one.get("_type") == "ClassLabel":
            classes = one.get("names")
            if not isinstance(classes, list) or not all(isinstance(word, str) for word in classes):
                raise DataError(f"{path}: names of the classes of {escape_text(name)[:80]!r} must be a list of texts")
            names[name] = classes
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSizes:
    """Bytes of a column's pages in a group of rows, decompressed, and how they are encoded."""

    num_pages: int
    largest_bytes: int
    total_bytes: int
    encodings: frozenset[int]


_SIZE, _PACKED_SIZE = 2, 3
_ENCODING_OF_BODY = {5: 2, 7: 2, 8: 4}
"""By field of a page header that has more on a page of data, of a dictionary, or of data in version 2."""
_NUM_VALUES = 1
_DICTIONARIES, _DELTA_LENGTH_BYTE_ARRAY = frozenset({2, 8}), 6
_DELTA_BYTE_ARRAY = 7
"""A value is a part of the one before and more, so that a few bytes may be gigabytes."""


def _measure_pages(descriptor: int, chunk: Any, file_size: int) -> PageSizes:
    """Returns what the headers of a column's pages say.

    Raises:
        ValueError: they are damaged, or say what cannot be.

    Source: Apache Parquet, parquet.thrift, PageHeader.
    """
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < place:
        place = chunk.dictionary_page_offset
    end = place + chunk.total_compressed_size
    if not len(MAGIC) <= place <= end <= file_size:
        raise ValueError("a column lies outside the file")
    largest, total, num_pages, encodings = 0, 0, 0, set[int]()
    while place < end:
        fields, num_bytes = _read_page_header(descriptor, place, end)
        sizes = fields.integers.get(_SIZE, -1), fields.integers.get(_PACKED_SIZE, -1)
        num_pages += 1
        if not all(0 <= size <= MAX_PAGE_BYTES for size in sizes) or num_pages > MAX_PAGES:
            raise ValueError("too many pages, or one without a size")
        for body, encoding in _ENCODING_OF_BODY.items():
            if found := fields.structs.get(body):
                encodings.add(found.integers[encoding])
                if not 0 <= found.integers[_NUM_VALUES] <= MAX_PAGE_VALUES:
                    raise ValueError("too many values on a page")
        largest, total = max(largest, sizes[0]), total + sizes[0]
        place += num_bytes + sizes[1]
    return PageSizes(num_pages=num_pages, largest_bytes=largest, total_bytes=total, encodings=frozenset(encodings))


def _read_page_header(descriptor: int, start: int, end: int) -> tuple[_Fields, int]:
    """Returns the fields of a page's header, and its bytes, of which smallest and largest values may be most."""
    for num_bytes in (512, 64 * 1024, 1024**2):
        content = os.pread(descriptor, min(num_bytes, end - start), start)
        with contextlib.suppress(IndexError):
            return _parse_struct(content, 0)
    raise ValueError("a page's header does not end")


@dataclass(frozen=True, slots=True)
class _Fields:
    """Whole numbers of 32 bits and structs of a struct, by field number."""

    integers: dict[int, int]
    structs: dict[int, _Fields]


_BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY, _STRUCT = 3, 4, 5, 6, 7, 8, 12
MAX_DEPTH = 4


def _parse_struct(content: bytes, place: int, depth: int = MAX_DEPTH) -> tuple[_Fields, int]:
    """Returns the fields of a struct, and where it ends; without lists and maps, of which page headers have none.

    Raises:
        IndexError: the content ends before.
        ValueError: it has a list or a map, or too many structs in each other.

    Source: Apache Thrift, compact protocol.
    """
    fields, number = _Fields({}, {}), 0
    while kind := content[place] & 15:
        step, place = content[place] >> 4, place + 1
        value = 0
        if not step:
            number, place = _parse_integer(content, place)
        number += step
        if not 0 < number < 2**15:  # Thrift cuts larger ones, and those of 32 bits, and would find another field
            raise ValueError("no field of a struct")
        if kind in {_INT16, _INT32, _INT64}:
            value, place = _parse_integer(content, place)
        elif kind == _BINARY:
            num_bytes, place = _parse_varint(content, place)
            place += num_bytes
        elif kind == _STRUCT and depth:
            fields.structs[number], place = _parse_struct(content, place, depth - 1)
        elif kind not in {1, 2, _BYTE, _DOUBLE}:
            raise ValueError("no header of a page")
        else:
            place += {_BYTE: 1, _DOUBLE: 8}.get(kind, 0)
        if kind == _INT32:
            if not -(2**31) <= value < 2**31:
                raise ValueError("no number of 32 bits")
            fields.integers[number] = value
    return fields, place + 1


def _parse_integer(content: bytes, place: int) -> tuple[int, int]:
    value, place = _parse_varint(content, place)
    return (value >> 1) ^ -(value & 1), place


def _parse_varint(content: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("no number of 64 bits")
