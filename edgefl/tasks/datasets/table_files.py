"""Reader of CSV, Parquet and Arrow files: chosen columns of a file, or of a folder's files by name, within bounds.

The first line of a CSV file names the columns. Between cells are commas, semicolons or tabs, whichever the first line
has most of; with semicolons a number may have a decimal comma. A last line that is still being written is left for
later. Where labels lie beside the CSV files of a folder, as `row_labels` says, they are one more column, `label`. A
row without one, or with one that the task does not know, is left out where that is asked for.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, Self

import numpy as np

from edgefl.core.errors import DataError
from edgefl.core.safe_text import escape_text
from edgefl.core.types import Array
from edgefl.system.row_labels import LABEL_COLUMN, TIME_COLUMN, WEAK_WEIGHT, RowLabels, has_labels, read_row_labels
from edgefl.tasks.datasets.arrow_files import ArrowTable, list_arrow_files
from edgefl.tasks.datasets.parquet_files import ParquetTable

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 2 * 1024**3
MAX_LINE_CHARS = 1_000_000
MAX_FILES = 100_000
MAX_CELLS = 250_000_000
"""Numbers of a shard: 1 GB as float32."""
MAX_SHOWN_COLUMNS, MAX_SHOWN_CHARS = 12, 400
CHUNK_ROWS, CHUNK_CELLS = 8192, 65_536
"""That are read at once, at most: a cell of CSV takes 60 bytes and more until it is a number."""
NO_TIME = -1.0
"""Of a row whose time is none: it has no label."""
CSV, PARQUET, ARROW = ".csv", ".parquet", ".arrow"
_DELIMITERS = (",", ";", "\t")
_MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "-"})


class TableFile(Protocol):
    """An open file of rows."""

    @property
    def header(self) -> Sequence[str]:
        """Names of the columns."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def read_chunks(
        self, numbers: Sequence[str], texts: Sequence[str], chunk_rows: int
    ) -> Iterator[tuple[Array, Sequence[Sequence[str]]]]:
        """Yields [n, numbers] float32, NaN for a missing one, and each text column's texts, at most `chunk_rows`.

        A missing text is empty. A file without rows has one chunk of none.

        Raises:
            DataError: a column of numbers has others, or the file is damaged. Errors name rows and columns, and no
                cell: they reach the coordinator.
        """

    def survey(
        self, chunk_rows: int, *, is_detailed: bool
    ) -> Iterator[tuple[int, Iterable[tuple[str, Array | None]]]]:
        """Yields a number of rows, and in detail some values of columns by name, float64, None for texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """Rows of one file from `first_row` on: `numbers` [n, columns] float32, and each text column's texts by row.

    `num_read` counts those that are left out as well; `weak` [n] says which labels are weak, None for none.
    """

    path: Path
    numbers: Array
    texts: tuple[tuple[str, ...], ...]
    first_row: int = 1
    num_read: int = 0
    weak: Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is known of a shard without a run file: how many examples at most, and lines that describe it."""

    num_examples: int
    details: tuple[str, ...] = ()


class ShardLabels:
    """Labels beside the files of a shard, read once.

    Args:
        is_known: whether the task has a label; rows with others count as rows without any, and are logged.
    """

    def __init__(self, is_known: Callable[[str], bool] = bool) -> None:
        self._is_known = is_known
        self._by_folder: dict[Path, RowLabels] = {}
        self._known: dict[str, bool] = {"": True}
        self._num_unknown = Counter[Path]()

    def find(self, path: Path, cells: Sequence[str], *, has_weak: bool) -> tuple[list[str], list[bool]]:
        """Returns labels of rows by the texts of their times, empty for none or an unknown one, and which are weak.

        Raises:
            DataError: the labels cannot be read.
        """
        folder = path.parent
        if folder not in self._by_folder:
            try:
                self._by_folder[folder] = read_row_labels(folder)
            except OSError as error:
                raise DataError(f"the labels of {path} cannot be read: {error.strerror}") from None
        times = [_parse_number(cell) for cell in cells]
        seconds = [NO_TIME if time_s is None or math.isnan(time_s) else time_s for time_s in times]
        found = self._by_folder[folder].find(seconds)
        weak = self._by_folder[folder].find_weak(seconds) if has_weak else [""] * len(found)
        found = [label or guess for label, guess in zip(found, weak, strict=True)]
        for place, label in enumerate(found):
            if label not in self._known:
                self._known[label] = self._is_known(label)
            if not self._known[label]:
                found[place] = ""
                self._num_unknown[folder] += 1
        return found, list(map(bool, weak))

    def log_unknown(self) -> None:
        """Logs how many rows have labels that the task does not know."""
        for folder, count in self._num_unknown.items():
            log.warning("%d rows in %s have labels that the task does not have, and are left out", count, folder)


def iterate_shard(  # noqa: PLR0913 one keyword for each option
    path: Path,
    task: str,
    numbers: Sequence[str],
    texts: Sequence[str] = (),
    *,
    drops_missing: bool = False,
    keeps_unlabelled: bool = False,
    has_weak: bool = False,
    is_known: Callable[[str], bool] = bool,
) -> Iterator[TablePart]:
    """Yields the rows of each file in turn, at most `CHUNK_ROWS` at once.

    Args:
        path: a file or a folder of them.
        task: its name, for messages.
        numbers: columns of finite numbers.
        texts: columns of any text.
        drops_missing: whether a row with an empty cell is left out; else it is an error.
        keeps_unlabelled: whether a row without a label of `row_labels` is there all the same, with an empty text.
        has_weak: whether weak labels of `row_labels` count, too.
        is_known: whether the task has a label of `row_labels`; a row with another one counts as one without.

    Raises:
        DataError: no file, one that is no such table, or no rows.
    """
    num_rows, num_read, labels = 0, 0, ShardLabels(is_known)
    options = {"drops_missing": drops_missing, "keeps_unlabelled": keeps_unlabelled, "has_weak": has_weak}
    for file in list_table_files(path, task):
        with _leave_out_gone(file, path):
            for part in iterate_table(file, numbers, texts, labels=labels, **options):
                num_rows += len(part.numbers)
                num_read += part.num_read
                if max(num_rows * max(1, len(numbers)), num_read) > MAX_CELLS:
                    raise _make_size_error(path, task)
                if len(part.numbers):
                    yield part
    labels.log_unknown()
    if not num_rows:
        raise DataError(f"shard {path} of task {task} holds no rows")


def iterate_table(  # noqa: PLR0913 one keyword for each option
    path: Path,
    numbers: Sequence[str],
    texts: Sequence[str],
    *,
    drops_missing: bool,
    keeps_unlabelled: bool = False,
    has_weak: bool = False,
    labels: ShardLabels | None = None,
) -> Iterator[TablePart]:
    """Yields the rows of one file, at most `CHUNK_ROWS` at once; as `iterate_shard`."""
    names, first_row = [*numbers, *texts], 1
    with _open_table(path) as table:
        is_labelled = LABEL_COLUMN in texts and _has_labels_beside(path, table)
        labels = (labels or ShardLabels()) if is_labelled else None
        read = [TIME_COLUMN if labels is not None and name == LABEL_COLUMN else name for name in texts]
        check_columns(path, table, [*numbers, *read])
        for found, cells in table.read_chunks(numbers, read, _count_chunk_rows(len(names))):
            words, has_label, weak = list(cells), np.ones(len(found), bool), np.zeros(len(found), bool)
            if labels is not None:
                place = list(texts).index(LABEL_COLUMN)
                words[place], weak[:] = labels.find(path, cells[place], has_weak=has_weak)
                has_label = np.fromiter(map(bool, words[place]), bool, len(found))
            is_whole: Array = np.asarray(np.isfinite(found).all(axis=1))
            for name, column in zip(texts, words, strict=True):
                if labels is None or name != LABEL_COLUMN:
                    is_whole &= np.fromiter(map(bool, column), bool, len(column))
            is_left_out = np.zeros(len(found), bool) if keeps_unlabelled else ~has_label
            is_whole |= is_left_out
            if not (drops_missing or is_whole.all()):
                row = int(np.argmin(is_whole))
                is_gap = [*np.isnan(found[row]), *(not column[row] for column in words)]
                gaps = list(itertools.compress(names, is_gap))
                raise DataError(
                    f"{path}, row {first_row + row}: {gaps[0] if gaps else 'a number'} is missing or no finite "
                    'number; missing = "drop" in [task] leaves such rows out'
                )
            is_whole &= ~is_left_out
            kept = tuple(tuple(itertools.compress(column, is_whole.tolist())) for column in words)
            yield TablePart(
                path=path,
                numbers=found[is_whole],
                texts=kept,
                first_row=first_row,
                num_read=len(found),
                weak=weak[is_whole] if weak.any() else None,
            )
            first_row += len(found)


def survey_table(path: Path, task: str, *, is_detailed: bool = False) -> Survey:
    """Returns the number of rows; in detail, mean and deviation of each column of numbers; raises as reading does."""
    count, columns = _add_up_columns(path, task, is_detailed=is_detailed)
    return Survey(num_examples=count, details=tuple(f"{name}: {moments}" for name, moments in columns.items()))


def summarise_columns(path: Path, task: str) -> dict[str, ColumnMoments]:
    """Returns mean and deviation of each column, in the order of the first file; raises as reading does."""
    return _add_up_columns(path, task, is_detailed=True)[1]


def _add_up_columns(path: Path, task: str, *, is_detailed: bool) -> tuple[int, dict[str, ColumnMoments]]:
    count, columns = 0, dict[str, ColumnMoments]()
    for file in list_table_files(path, task):
        with _leave_out_gone(file, path), _open_table(file) as table:
            chunk_rows = _count_chunk_rows(len(table.header))
            for num_rows, values in table.survey(chunk_rows, is_detailed=is_detailed):
                count += num_rows
                for name, numbers in values:
                    columns.setdefault(name, ColumnMoments()).add(numbers)
    if not count:
        raise DataError(f"shard {path} of task {task} holds no rows")
    return count, columns


def list_table_files(path: Path, task: str) -> list[Path]:
    """Returns the file itself, or a folder's CSV files by name; without any its Parquet files, then its Arrow files.

    Names that begin with a dot do not count.

    Raises:
        DataError: there is none, or it is not readable.
    """
    try:
        if path.is_dir():
            files = sorted(path.glob(f"[!.]*{CSV}")) or sorted(path.glob(f"[!.]*{PARQUET}"))
            files = files or list_arrow_files(path)
        else:
            files = [path] if path.is_file() else []
    except OSError as error:
        raise DataError(f"shard {path} of task {task} cannot be read: {error.strerror}") from None
    if not files:
        raise DataError(
            f"shard {path} of task {task} must be a CSV, Parquet or Arrow file, or a folder of .csv, of .parquet or "
            "of .arrow files; there is none"
        )
    if len(files) > MAX_FILES:
        raise DataError(f"shard {path} of task {task} has {len(files)} files, at most are {MAX_FILES}")
    return files


def weigh_weak(weak: Array | None) -> dict[str, Array]:
    """Returns the fields of a `Dataset` by which weak labels count less; none where no example has one."""
    if weak is None or not weak.any():
        return {}
    return {"weak": weak, "weights": np.where(weak, np.float32(WEAK_WEIGHT), np.float32(1))}


def is_gone(file: Path) -> bool:
    """Returns whether a file was removed since it was listed, as a collector removes its oldest."""
    try:
        file.stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _count_chunk_rows(num_columns: int) -> int:
    return min(CHUNK_ROWS, max(1, CHUNK_CELLS // max(1, num_columns)))


def _make_size_error(path: Path, task: str) -> DataError:
    return DataError(f"shard {path} of task {task} holds more than {MAX_CELLS:,} numbers; take fewer files")


class _Lines(Iterator[str]):
    """Lines of a file; `is_cut` says that the newest one has no end yet."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self._file, self._path, self.is_cut = file, path, False
        self._returned = deque[str]()

    def put_back(self, lines: Iterable[str]) -> None:
        """Returns lines, which come next then."""
        self._returned.extend(lines)

    def __next__(self) -> str:
        line = self._returned.popleft() if self._returned else self._file.readline(MAX_LINE_CHARS + 1)
        if not line:
            raise StopIteration
        if len(line) > MAX_LINE_CHARS:
            raise DataError(f"{self._path} has a line of more than {MAX_LINE_CHARS} characters: it is no table")
        self.is_cut = not line.endswith("\n")
        return line


def _open_table(path: Path) -> TableFile:
    """Returns the file, to enter; raises `DataError` where it is too large or cannot be read."""
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise DataError(f"{path} has {size} bytes, at most {MAX_FILE_BYTES} are read")
        if path.suffix == ARROW:
            return ArrowTable(path, max_cells=MAX_CELLS)
        return ParquetTable(path, max_cells=MAX_CELLS) if path.suffix == PARQUET else CsvTable(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _has_labels_beside(path: Path, table: TableFile) -> bool:
    """Returns whether labels lie beside a CSV file that has times and no labels of its own."""
    is_timed = isinstance(table, CsvTable) and table.header.count(TIME_COLUMN) == 1
    return is_timed and LABEL_COLUMN not in table.header and has_labels(path.parent)


def check_columns(path: Path, table: TableFile, names: Sequence[str]) -> None:
    """Raises a `DataError` where one is missing or there twice."""
    for name in names:
        if (count := table.header.count(name)) != 1:
            if isinstance(table, CsvTable) and any(_parse_number(one) is not None for one in table.header):
                raise DataError(f"{path} has no line of column names: its first line holds numbers")
            listing = ", ".join(table.header[:MAX_SHOWN_COLUMNS])[:MAX_SHOWN_CHARS]
            more = ", …" if len(table.header) > MAX_SHOWN_COLUMNS else ""
            raise DataError(
                f"{path} has {f'{count} columns' if count else 'no column'} {name!r}; its columns are "
                f"{escape_text(listing) or 'none'}{more}"
            )


class CsvTable(TableFile):
    """An open CSV file."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open(newline="", encoding="utf-8-sig")
        self._lines, self._num_lines = _Lines(self._file, path), 0
        self._is_clean = True
        self._header: list[str] = []

    @property
    def header(self) -> list[str]:
        return self._header

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as opened:
            opened.enter_context(self._file)
            with _explain_damage(self._path):
                first = next(self._lines, "")
                self._delimiter = max(_DELIMITERS, key=first.count)
                self._header = [name.strip() for name in next(csv.reader([first], delimiter=self._delimiter), [])]
            opened.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def read_chunks(
        self, numbers: Sequence[str], texts: Sequence[str], chunk_rows: int
    ) -> Iterator[tuple[Array, Sequence[Sequence[str]]]]:
        places, first_row = [self._header.index(name) for name in (*numbers, *texts)], 1
        for lines, values in self._read_plain(places[: len(numbers)], chunk_rows):
            cells = [line.split(self._delimiter) for line in lines] if texts else []
            yield _to_float32(values), [[row[place].strip() for row in cells] for place in places[len(numbers) :]]
            first_row += len(lines)
        for rows in self._read_rows(places, chunk_rows):
            words = [[row[place].strip() for row in rows] for place in range(len(numbers), len(places))]
            yield self._convert(rows, numbers, first_row), words
            first_row += len(rows)

    def survey(
        self, chunk_rows: int, *, is_detailed: bool
    ) -> Iterator[tuple[int, Iterable[tuple[str, Array | None]]]]:
        places = range(len(self._header)) if is_detailed else ()
        for lines, values in self._read_plain(places, chunk_rows):
            yield len(lines), zip(self._header, values.T, strict=False)
        for rows in self._read_rows(places, chunk_rows):
            columns = zip(self._header, zip(*rows, strict=True), strict=False)
            yield len(rows), ((name, self._parse_column(cells)) for name, cells in columns)

    def _parse_column(self, cells: Sequence[str]) -> Array | None:
        """Returns [n] float64, None where a cell is a text."""
        numbers = _parse_numbers(cells)
        # Cleaning takes longer than parsing, and few files need it.
        return _parse_numbers(map(self._clean, cells)) if numbers is None else numbers

    def _read_plain(self, columns: Sequence[int], chunk_rows: int) -> Iterator[tuple[list[str], Array]]:
        """Yields lines, at most `chunk_rows` at once, and the numbers of these columns, [n, columns] float64.

        It ends before the first chunk that has a quote, a gap, another decimal sign, or anything else that is no
        plain number: those that follow are for `_read_rows`, which takes three times as long.
        """
        num_delimiters = len(self._header) - 1
        while num_delimiters:  # in one column a line may be empty
            with _explain_damage(self._path):
                lines = list(itertools.islice(self._lines, chunk_rows))
            is_plain = all(line.count(self._delimiter) == num_delimiters and '"' not in line for line in lines)
            values = _load_numbers(lines, self._delimiter, columns) if is_plain and lines else None
            if values is None:
                self._lines.put_back(lines)
                return
            yield lines, values
            self._num_lines += len(lines)

    def _read_rows(self, columns: Sequence[int], chunk_rows: int) -> Iterator[list[list[str]]]:
        """Yields rows of these columns' cells, at most `chunk_rows` at once."""
        rows: list[list[str]] = []
        reader, width = csv.reader(self._lines, delimiter=self._delimiter), len(self._header)
        with _explain_damage(self._path):
            for row in reader:
                if len(row) < width and self._lines.is_cut:
                    break
                if len(row) != width and row:
                    raise DataError(
                        f"{self._path}, row {self._num_lines + reader.line_num}: {len(row)} cells, "
                        f"the first line has {width}"
                    )
                if row:
                    rows.append([row[column] for column in columns])
                if len(rows) == chunk_rows:
                    yield rows
                    rows = []
        yield rows

    def _convert(self, rows: list[list[str]], names: Sequence[str], first_row: int) -> Array:
        cells = [row[: len(names)] for row in rows]
        try:
            found = np.array(cells, np.float64) if self._is_clean else None
        except ValueError:  # gaps, decimal commas, or text: in later chunks too, most likely
            self._is_clean, found = False, None
        if found is None:
            cells = [[self._clean(cell) for cell in row] for row in cells]
            found = self._convert_clean(cells, names, first_row)
        return _to_float32(found.reshape(len(rows), len(names)))

    def _convert_clean(self, cells: list[list[str]], names: Sequence[str], first_row: int) -> Array:
        try:
            return np.array(cells, np.float64)
        except ValueError:
            places = (
                (name, row)
                for row, found in enumerate(cells, first_row)
                for name, cell in zip(names, found, strict=True)
                if _parse_number(cell) is None
            )
            name, row = next(places)
            raise DataError(f"{self._path}, row {row}: column {name!r} must hold numbers, and holds text") from None

    def _clean(self, cell: str) -> str:
        """Returns the text of a number as Python writes it, `nan` for a missing one."""
        if _is_gap(cell):
            return "nan"
        return cell.strip().replace(",", ".") if self._delimiter == ";" else cell.strip()


class ColumnMoments:
    """Mean and deviation of a column, added up by chunks (Chan, Golub and LeVeque, 1983)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares, self._is_number = 0, np.float64(0), np.float64(0), True

    def add(self, numbers: Array | None) -> None:
        self._is_number &= numbers is not None
        values = np.empty(0) if numbers is None else numbers[np.isfinite(numbers)]
        if not len(values):
            return
        # Hex digits such as 12e200 are numbers too, whose squares are beyond a float's range.
        with np.errstate(over="ignore", invalid="ignore"):
            mean, total = values.mean(), self._count + len(values)
            step = mean - self._mean
            self._squares += np.square(values - mean).sum() + np.square(step) * self._count * len(values) / total
            self._mean, self._count = self._mean + step * len(values) / total, total

    @property
    def is_number(self) -> bool:
        return self._is_number and self._count > 0

    @property
    def mean(self) -> float:
        return float(self._mean)

    @property
    def deviation(self) -> float:
        return float((self._squares / self._count) ** 0.5) if self._count else 0.0

    def __str__(self) -> str:
        return f"mean {self.mean:.6g}, deviation {self.deviation:.6g}" if self.is_number else "texts"


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


def _load_numbers(lines: list[str], delimiter: str, columns: Sequence[int]) -> Array | None:
    """Returns [n, columns] float64; None where a cell is no plain number."""
    if not columns:
        return np.empty((len(lines), 0))
    try:
        return np.loadtxt(lines, delimiter=delimiter, usecols=columns, comments=None, ndmin=2)
    except ValueError:
        return None


def _to_float32(values: Array) -> Array:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _parse_numbers(cells: Iterable[str]) -> Array | None:
    """Returns [n] float64, None where a cell is a text."""
    try:
        return np.array([float(cell) for cell in cells], np.float64)
    except ValueError:
        return None


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
