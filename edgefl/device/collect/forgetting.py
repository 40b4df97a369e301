"""Forgetting: removes the rows or files of a time, whole, from a shard that a collector may be writing.

A request is a small file in the shard's folder. Whoever holds the folder's lock applies it: the running collector at
its next turn, else the command itself. Each segment is replaced in one step, a file is removed in one, and the
request goes last. So a crash leaves no half of a row, and what was left to do is done at the collector's next start;
to apply a request twice does what once does. A task that reads meanwhile sees a segment as it was, or as it is.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from edgefl.core.errors import StoreBusyError, StoreError
from edgefl.core.safe_parsing import parse_message
from edgefl.device.collect.file_store import KeptFile, list_files, read_file_time
from edgefl.device.collect.row_store import is_whole, restore_rows
from edgefl.device.collect.store_state import Segment, StoreState, save_store_state
from edgefl.device.collect.uncertain_times import forget_uncertain_times
from edgefl.system.atomic_files import make_store_error, remove_temporary_files, sync_directory, write_atomic
from edgefl.system.row_labels import LABEL_COLUMN, RowLabels, cut_row_labels, read_row_labels

log = logging.getLogger(__name__)

FORGET_NAME = ".forget.json"
MAX_REQUEST_BYTES = 65_536
CHUNK_ROWS = 1000
"""That are held at once."""
LABEL, GROUP = LABEL_COLUMN, "group"
"""What a condition on files is about: their class folder, or the text that their names begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """What is to go: rows or files of a time, both ends included, of which each condition holds.

    Attributes:
        since_s: seconds since 1970.
        until_s: likewise.
        where: text of columns of rows, by name; of files `label` and `group`.
    """

    since_s: float
    until_s: float
    where: Mapping[str, str] = field(default_factory=dict)

    def has_row(self, time_s: float, cells: Mapping[str, str]) -> bool:
        """Returns whether it is about a row."""
        is_in_time = self.since_s <= time_s <= self.until_s
        return is_in_time and all(cells.get(name) == text for name, text in self.where.items())

    def has_file(self, file: KeptFile) -> bool:
        """Returns whether it is about a file of a collector, whose name begins with its time."""
        is_group = file.name.startswith(self.where.get(GROUP, ""))
        is_label = self.where.get(LABEL, file.label) == file.label
        return is_group and is_label and self.since_s <= read_file_time(file) <= self.until_s


def write_forget_request(folder: Path, request: ForgetRequest) -> None:
    """Asks whoever holds the folder's lock; a request that is there already goes first.

    Raises:
        StoreBusyError: another one was not applied yet.
        StoreError: it cannot be written.
    """
    path = folder / FORGET_NAME
    if path.exists():
        raise StoreBusyError(f"{folder} has a request that is not done yet; try again when {path.name} is gone")
    write_atomic(path, json.dumps({"v": 1, **asdict(request)}).encode())


def read_forget_request(folder: Path) -> ForgetRequest | None:
    """Returns what is to be forgotten; None for nothing.

    Raises:
        StoreError: the file is damaged, or cannot be read; it stays.
    """
    path = folder / FORGET_NAME
    try:
        with path.open("rb") as file:
            value = parse_message(file.read(MAX_REQUEST_BYTES + 1))
        return _parse_request(value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} cannot be read, and nothing is forgotten; remove it: {error!s:.200}") from None


def has_forget_request(folder: Path) -> bool:
    """Returns whether a request waits."""
    return (folder / FORGET_NAME).exists()


def remove_forget_request(folder: Path) -> None:
    """Ends a request that was applied, durably."""
    try:
        (folder / FORGET_NAME).unlink(missing_ok=True)
        sync_directory(folder)
    except OSError as error:
        raise make_store_error(folder, error) from None


def forget_rows(folder: Path, state: StoreState, request: ForgetRequest, newest_span: int = 0) -> StoreState:
    """Removes rows, and returns the state that it has stored; the folder's lock is held, and all rows are committed.

    Rows behind those that went get a new span, so that no window lies over them.

    Args:
        folder: of the shard.
        state: as of the last commit.
        request: what is to go.
        newest_span: number of the newest span, also of rows that are to come.

    Raises:
        StoreError: a segment cannot be read or written; what is done stays done.
    """
    labels = _read_labels(folder)
    span, segments = max(state.span, newest_span), list[Segment]()
    for index, segment in enumerate(state.segments):
        path = folder / segment.name
        try:
            content = path.read_bytes()[: segment.num_bytes]
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None
        cut = _SegmentCut(request, state.columns, span, labels)
        kept = cut.remove(content)
        span = cut.span
        if not cut.times:
            _remove_segment(path)
            continue
        # Of each: a crash between a segment and the state leaves another number of rows than the state has.
        first_s, last_s = min(cut.times), cut.times[-1]
        segments.append(
            replace(segment, num_rows=len(cut.times), num_bytes=len(kept), first_s=first_s, last_s=last_s)
        )
        if kept != content:
            # After a crash the file may be shorter than the state says, but not longer, and no span comes again.
            most = replace(segments[-1], num_bytes=max(len(kept), len(content)))
            later = state.segments[index + 1 :]
            save_store_state(folder, replace(state, span=span, segments=(*segments[:-1], most, *later)))
            write_atomic(path, kept)
    _forget_labels(folder, request)
    state = replace(state, segments=tuple(segments), span=span)
    save_store_state(folder, state)
    return state


def forget_files(folder: Path, request: ForgetRequest) -> list[KeptFile]:
    """Removes files, and returns them; the folder's lock is held.

    Raises:
        StoreError: one cannot be removed.
    """
    removed = [file for file in list_files(folder) if request.has_file(file)]
    try:
        for file in removed:
            (folder / file.label / file.name).unlink(missing_ok=True)
        for label in {file.label for file in removed}:
            sync_directory(folder / label)
        _forget_labels(folder, request)
    except OSError as error:
        raise make_store_error(folder, error) from None
    return removed


def restore_here(folder: Path, state: StoreState) -> StoreState:
    """Removes what a collector has not committed, and returns the state; the folder's lock is held, none runs.

    Raises:
        StoreError: the folder cannot be changed.
    """
    if state.columns:
        return restore_rows(folder, state)
    remove_temporary_files(folder)
    return state


def forget_here(folder: Path, state: StoreState) -> None:
    """Applies the request in a folder whose lock is held, while no collector runs; restores it first.

    Raises:
        StoreError: a segment or a file cannot be read, written or removed.
    """
    state, request = restore_here(folder, state), read_forget_request(folder)
    if request is None:
        return
    if state.columns:
        forget_rows(folder, state, request)
    else:
        forget_files(folder, request)
    remove_forget_request(folder)


def iterate_rows(folder: Path, state: StoreState) -> Iterator[tuple[float, dict[str, str]]]:
    """Yields time and cells by column of a store's rows, with `span`, in the order in which they were written.

    Where the shard has labels, they are one more column. A segment that goes meanwhile, as a collector removes its
    oldest, is left out.
    """
    labels = _read_labels(folder)
    names = ("time", *state.columns, "span", "check")
    for segment in state.segments:
        try:
            lines = (folder / segment.name).read_bytes()[: segment.num_bytes].decode(errors="replace").split("\n")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(f"{folder / segment.name} cannot be read: {error.strerror}") from None
        reader = csv.reader(lines[1:])
        while chunk := list(itertools.islice(reader, CHUNK_ROWS)):
            rows = list[tuple[float, dict[str, str]]]()
            for cells in chunk:
                with contextlib.suppress(ValueError):  # a row that the card has damaged
                    rows.append((float(cells[0]) if cells else 0.0, dict(zip(names, cells, strict=True))))
            if labels.lines and LABEL not in names:
                for (_, row), label in zip(rows, labels.find([time_s for time_s, _ in rows]), strict=True):
                    row[LABEL] = label
            yield from rows


def _remove_segment(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise make_store_error(path, error) from None


class _SegmentCut:
    """Rows of one segment that stay: `times` of them, and the newest `span` that there is."""

    def __init__(self, request: ForgetRequest, columns: Sequence[str], span: int, labels: RowLabels) -> None:
        self._request, self._names, self._labels = request, ("time", *columns, "span", "check"), labels
        self.span, self.times = span, list[float]()
        self._old_span = self._new_span = b""
        self._is_cut = False

    def remove(self, content: bytes) -> bytes:
        """Returns a segment without the rows that go."""
        header, *lines = content.removesuffix(b"\n").split(b"\n")
        kept, times = [header], [_read_time(line) for line in lines]
        by_row = self._labels.find(times) if LABEL in self._request.where else itertools.repeat("")
        for line, time_s, label in zip(lines, times, by_row, strict=False):
            start, _, _check = line.rpartition(b",")
            values, _, span = start.rpartition(b",")
            if self._should_go(line, time_s, label):
                self._is_cut |= span == self._old_span or time_s == -math.inf
                continue
            self.times.append(time_s)
            kept.append(self._renumber(line, values, span))
        return b"\n".join(kept) + b"\n"

    def _should_go(self, line: bytes, time_s: float, label: str) -> bool:
        """Returns whether a row goes; one that is damaged always does, as nobody can say what it is about."""
        if time_s == -math.inf:
            return True
        if not self._request.since_s <= time_s <= self._request.until_s:
            return False
        cells = next(csv.reader([line.decode(errors="replace")]), [])
        return self._request.has_row(time_s, {LABEL: label, **dict(zip(self._names, cells, strict=False))})

    def _renumber(self, line: bytes, values: bytes, span: bytes) -> bytes:
        """Returns a row that stays, in a span of its own where rows before it went."""
        if span != self._old_span:
            self._old_span = self._new_span = span
        elif self._is_cut:
            self.span += 1
            self._new_span = b"%d" % self.span
        self._is_cut = False
        if self._new_span == span:
            return line
        text = values + b"," + self._new_span
        return b"%s,%08x" % (text, zlib.crc32(text))


def _read_time(line: bytes) -> float:
    """Returns the time of a row without its end of line; minus infinity for one that is damaged."""
    return float(line[: line.index(b",")]) if is_whole(line + b"\n") else -math.inf


def _forget_labels(folder: Path, request: ForgetRequest) -> None:
    """Removes the labels of a time of which all goes, and the uncertain times, which may be of any of it."""
    try:
        forget_uncertain_times(folder)
        if request.where:
            return
        cut_row_labels(folder, request.since_s, request.until_s)
    except OSError as error:
        raise make_store_error(folder, error) from None


def _read_labels(folder: Path) -> RowLabels:
    try:
        return read_row_labels(folder)
    except OSError as error:
        raise StoreError(f"the labels in {folder} cannot be read: {error.strerror}") from None


def _parse_request(value: Mapping[str, object]) -> ForgetRequest:
    since_s, until_s, where = (value[name] for name in ("since_s", "until_s", "where"))
    if value["v"] != 1 or not isinstance(since_s, int | float) or not isinstance(until_s, int | float):
        raise ValueError("it is no request of version 1")
    if not isinstance(where, Mapping) or not all(isinstance(text, str) for text in where.values()):
        raise ValueError("where must have texts")
    if not math.isfinite(since_s) or not math.isfinite(until_s):
        raise ValueError("times must be finite")
    return ForgetRequest(since_s=float(since_s), until_s=float(until_s), where=dict(where))
