"""Reader of CSV files: chosen columns of a file, or of a folder's files by name, within bounds.

The first line names the columns. Between cells are commas, semicolons or tabs, whichever the first line has most of;
with semicolons a number may have a decimal comma. A last line that is still being written is left for later.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Array

MAX_FILE_BYTES = 2 * 1024**3
MAX_LINE_CHARS = 1_000_000
MAX_FILES = 100_000
MAX_CELLS = 250_000_000
"""Numbers of a shard: 1 GB as float32."""
MAX_SHOWN_COLUMNS, MAX_SHOWN_CHARS = 12, 400
CHUNK_ROWS = 8192
PARQUET = ".parquet"
_DELIMITERS = (",", ";", "\t")
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "-"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """Rows of one file from `first_row` on: `numbers` [n, columns] float32, and each text column's texts by row."""

    path: Path
    numbers: Array
    texts: tuple[tuple[str, ...], ...]
    first_row: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is known of a shard without a run file: how many examples at most, and lines that describe it."""

    num_examples: int
    details: tuple[str, ...] = ()


def read_table(
    path: Path, task: str, numbers: Sequence[str], texts: Sequence[str] = (), *, drops_missing: bool = False
) -> list[TablePart]:
    """Returns the rows of each file.

    Args:
        path: a file or a folder of them.
        task: its name, for messages.
        numbers: columns of finite numbers.
        texts: columns of any text.
        drops_missing: whether a row with an empty cell is left out; else it is an error.

    Raises:
        DataError: no file, one that is no such table, or no rows.
    """
    parts, num_cells = [], 0
    for file in list_table_files(path, task):
        with _leave_out_gone(file, path):
            parts.append(_read_file(file, numbers, texts, drops_missing=drops_missing))
            num_cells += parts[-1].numbers.size
        if num_cells > MAX_CELLS:
            raise DataError(f"shard {path} of task {task} holds more than {MAX_CELLS:,} numbers; take fewer files")
    if not any(len(part.numbers) for part in parts):
        raise DataError(f"shard {path} of task {task} holds no rows")
    return parts


def iterate_shard(
    path: Path, task: str, numbers: Sequence[str], texts: Sequence[str] = (), *, drops_missing: bool = False
) -> Iterator[TablePart]:
    """Yields the rows of each file in turn, at most `CHUNK_ROWS` at once; as `read_table`, also what it raises."""
    num_rows = 0
    for file in list_table_files(path, task):
        with _leave_out_gone(file, path):
            for part in iterate_table(file, numbers, texts, drops_missing=drops_missing):
                num_rows += len(part.numbers)
                if num_rows * max(1, len(numbers)) > MAX_CELLS:
                    raise DataError(
                        f"shard {path} of task {task} holds more than {MAX_CELLS:,} numbers; take fewer files"
                    )
                if len(part.numbers):
                    yield part
    if not num_rows:
        raise DataError(f"shard {path} of task {task} holds no rows")


def iterate_table(
    path: Path, numbers: Sequence[str], texts: Sequence[str], *, drops_missing: bool
) -> Iterator[TablePart]:
    """Yields the rows of one file, at most `CHUNK_ROWS` at once, so that texts need not be held; as `read_table`."""
    num_rows = 0
    with _Table(path) as table:
        for rows in table.read_chunks(table.find_columns([*numbers, *texts])):
            first_row = num_rows + 1
            num_rows += len(rows)
            found = table.convert(rows, numbers, first_row)
            is_whole = np.isfinite(found).all(axis=1)
            is_whole &= np.array([all(cell.strip() for cell in row[len(numbers) :]) for row in rows], bool)
            if not (drops_missing or is_whole.all()):
                row = int(np.argmin(is_whole))
                gaps = [name for name, cell in zip([*numbers, *texts], rows[row], strict=True) if _is_gap(cell)]
                raise DataError(
                    f"{path}, row {first_row + row}: {gaps[0] if gaps else 'a number'} is missing or no finite "
                    'number; missing = "drop" in [task] leaves such rows out'
                )
            kept = [row for row, is_kept in zip(rows, is_whole, strict=True) if is_kept]
            words = (
                tuple(row[place].strip() for row in kept) for place in range(len(numbers), len(numbers) + len(texts))
            )
            yield TablePart(path=path, numbers=found[is_whole], texts=tuple(words), first_row=first_row)


def survey_table(path: Path, task: str, *, is_detailed: bool = False) -> Survey:
    """Returns the number of rows; in detail, mean and deviation of each column of numbers. Raises as `read_table`."""
    count, columns = 0, dict[str, _Moments]()
    for file in list_table_files(path, task):
        with _leave_out_gone(file, path), _Table(file) as table:
            for rows in table.read_chunks(range(len(table.header)) if is_detailed else ()):
                count += len(rows)
                for name, cells in zip(table.header, zip(*rows, strict=True), strict=False):
                    columns.setdefault(name, _Moments()).add([table.clean(cell) for cell in cells])
    if not count:
        raise DataError(f"shard {path} of task {task} holds no rows")
    return Survey(num_examples=count, details=tuple(f"{name}: {moments}" for name, moments in columns.items()))


def list_table_files(path: Path, task: str) -> list[Path]:
    """Returns the file itself, or a folder's CSV files by name without those that begin with a dot.

    Raises:
        DataError: there is none, or it is not readable.
    """
    try:
        if path.is_dir():
            files = sorted(file for file in path.glob("*.csv") if not file.name.startswith("."))
        else:
            files = [path] if path.is_file() and path.suffix != PARQUET else []
        has_parquet = path.suffix == PARQUET or any(path.glob(f"*{PARQUET}"))
    except OSError as error:
        raise DataError(f"shard {path} of task {task} cannot be read: {error.strerror}") from None
    if not files:
        found = "Parquet, which is not read: write it as CSV" if has_parquet else "there is none"
        raise DataError(f"shard {path} of task {task} must be a CSV file or a folder of .csv files; {found}")
    if len(files) > MAX_FILES:
        raise DataError(f"shard {path} of task {task} has {len(files)} files, at most are {MAX_FILES}")
    return files


def is_gone(file: Path) -> bool:
    """Returns whether a file was removed since it was listed, as a collector removes its oldest."""
    try:
        file.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _read_file(path: Path, numbers: Sequence[str], texts: Sequence[str], *, drops_missing: bool) -> TablePart:
    parts, num_rows = list[TablePart](), 0
    for part in iterate_table(path, numbers, texts, drops_missing=drops_missing):
        parts.append(part)
        num_rows += len(part.numbers)
        if num_rows * max(1, len(numbers) + len(texts)) > MAX_CELLS:
            raise DataError(f"{path} holds more than {MAX_CELLS:,} cells in these columns; cut it into fewer rows")
    return TablePart(
        path=path,
        numbers=np.concatenate([part.numbers for part in parts]),
        texts=tuple(tuple(itertools.chain(*column)) for column in zip(*(part.texts for part in parts), strict=True)),
    )


class _Lines(Iterator[str]):
    """Lines of a file; `is_cut` says that the newest one has no end yet."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file, self._path, self.is_cut = file, path, False

    def __next__(self) -> str:
        line = self._file.readline(MAX_LINE_CHARS + 1)
        if not line:
            raise StopIteration
        if len(line) > MAX_LINE_CHARS:
            raise DataError(f"{self._path} has a line of more than {MAX_LINE_CHARS} characters: it is no table")
        self.is_cut = not line.endswith("\n")
        return line


class _Table:
    """An open CSV file: its header, and rows of chosen columns."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _open_bounded(path)
        self._lines = _Lines(self._file, path)
        self.header: list[str] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._file)
            with _explain_damage(self._path):
                first = next(self._lines, "")
                self._delimiter = max(_DELIMITERS, key=first.count)
                self.header = [name.strip() for name in next(csv.reader([first], delimiter=self._delimiter), [])]
            opened.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def find_columns(self, names: Sequence[str]) -> list[int]:
        """Returns where the named columns stand; raises `DataError` where one is missing or there twice."""
        for name in names:
            if (count := self.header.count(name)) != 1:
                if any(_parse_number(one) is not None for one in self.header):
                    raise DataError(f"{self._path} has no line of column names: its first line holds numbers")
                listing = ", ".join(self.header[:MAX_SHOWN_COLUMNS])[:MAX_SHOWN_CHARS]
                more = ", …" if len(self.header) > MAX_SHOWN_COLUMNS else ""
                raise DataError(
                    f"{self._path} has {f'{count} columns' if count else 'no column'} {name!r}; its first line names "
                    f"{escape_text(listing) or 'none'}{more}"
                )
        return [self.header.index(name) for name in names]

    def read_chunks(self, columns: Sequence[int]) -> Iterator[list[list[str]]]:
        """Yields rows of these columns' cells, at most `CHUNK_ROWS` at once."""
        rows: list[list[str]] = []
        reader, width = csv.reader(self._lines, delimiter=self._delimiter), len(self.header)
        with _explain_damage(self._path):
            for row in reader:
                if len(row) < width and self._lines.is_cut:
                    break
                if len(row) != width and row:
                    raise DataError(
                        f"{self._path}, row {reader.line_num}: {len(row)} cells, the first line has {width}"
                    )
                if row:
                    rows.append([row[column] for column in columns])
                if len(rows) == CHUNK_ROWS:
                    yield rows
                    rows = []
        yield rows

    def convert(self, rows: list[list[str]], names: Sequence[str], first_row: int) -> Array:
        """Returns [n, names] float32 of the first cells, NaN for a missing one; raises `DataError` at other texts.

        Errors name rows and columns, and no cell: they reach the coordinator.
        """
        cells = [[self.clean(cell) for cell in row[: len(names)]] for row in rows]
        try:
            with np.errstate(over="ignore"):
                return np.array(cells, np.float64).astype(np.float32).reshape(len(rows), len(names))
        except ValueError:
            places = (
                (name, row)
                for row, found in enumerate(cells, first_row)
                for name, cell in zip(names, found, strict=True)
                if _parse_number(cell) is None
            )
            name, row = next(places)
            raise DataError(f"{self._path}, row {row}: column {name!r} must hold numbers, and holds text") from None

    def clean(self, cell: str) -> str:
        """Returns the text of a number as Python writes it, `nan` for a missing one."""
        if _is_gap(cell):
            return "nan"
        return cell.strip().replace(",", ".") if self._delimiter == ";" else cell.strip()


class _Moments:
    """Mean and deviation of a column, added up by chunks (Chan, Golub and LeVeque, 1983)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares, self._is_number = 0, np.float64(0), np.float64(0), True

    def add(self, cells: Sequence[str]) -> None:
        numbers = [_parse_number(cell) for cell in cells]
        values = np.array([number for number in numbers if number is not None and np.isfinite(number)], np.float64)
        self._is_number &= None not in numbers
        if not len(values):
            return
        # Hex digits such as 12e200 are numbers too, whose squares are beyond a float's range.
        with np.errstate(over="ignore", invalid="ignore"):
            mean, total = values.mean(), self._count + len(values)
            step = mean - self._mean
            self._squares += np.square(values - mean).sum() + np.square(step) * self._count * len(values) / total
            self._mean, self._count = self._mean + step * len(values) / total, total

    def __str__(self) -> str:
        if not self._is_number or not self._count:
            return "texts"
        return f"mean {self._mean:.6g}, deviation {(self._squares / self._count) ** 0.5:.6g}"


def _open_bounded(path: Path) -> IO[str]:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise DataError(f"{path} has {size} bytes, at most {MAX_FILE_BYTES} are read")
        return path.open(newline="", encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def _leave_out_gone(file: Path, folder: Path) -> Iterator[None]:
    """Leaves out a file of a folder that is gone when it is to be opened."""
    try:
        yield
    except DataError:
        if file == folder or not is_gone(file):
            raise


@contextlib.contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}); it must be UTF-8 text with commas") from None


def _is_gap(cell: str) -> bool:
    return cell.strip().lower() in _MISSING


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
