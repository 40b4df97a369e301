"""Row store: a shard of CSV segments that only grow, and a state file that says how much of them counts.

A commit appends whole lines to the newest segment, syncs it, and then replaces the state file, which holds the
segment's length and where each source was. What a crash leaves behind that length is cut off at the next start, and
the sources go on where the state says, so that no row is torn, lost after a commit or there twice. Each row ends with
the CRC-32 of its text: a copy proves itself without the state, and a reader of a line that is being written, which
lacks its last cell, leaves it for later.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edgefl.core.errors import ConfigError, StoreError
from edgefl.device.collect.alignment import Row
from edgefl.device.collect.store_state import (
    Segment,
    StoreState,
    count_written,
    lock_folder,
    read_store_state,
    save_store_state,
)
from edgefl.system.atomic_files import make_private_directory, make_store_error, remove_temporary_files
from edgefl.system.row_labels import cut_row_labels, get_labels_size

log = logging.getLogger(__name__)

NUM_SEGMENTS = 16
"""In which a full store is cut: so much of it goes at once."""
MAX_SEGMENT_BYTES = 8 * 1024**2
_PATTERN = "rows-*.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Most bytes and seconds of rows or files with their labels; 0 seconds for no limit."""

    max_bytes: int
    max_age_s: float = 0.0

    @property
    def segment_bytes(self) -> int:
        return min(MAX_SEGMENT_BYTES, self.max_bytes // NUM_SEGMENTS)

    def get_max_bytes(self, folder: Path) -> int:
        """Returns the most bytes beside the labels in a folder: half of all at least, however many those are."""
        return max(self.max_bytes - get_labels_size(folder), self.max_bytes // 2)


class RowStore:
    """Store of rows in a folder; one process at a time, by `open_row_store`.

    Attributes:
        folder: of the shard.
        state: as of the last commit.
    """

    def __init__(self, folder: Path, state: StoreState, limits: StoreLimits) -> None:
        self.folder, self.state, self._limits = folder, state, limits

    @property
    def oldest_s(self) -> float:
        """Returns the time of the oldest row; minus infinity where there is none."""
        return min((segment.first_s for segment in self.state.segments), default=-math.inf)

    def commit(
        self, rows: Sequence[Row], positions: Mapping[str, str], counts: Mapping[str, int], now_s: float
    ) -> None:
        """Stores rows, positions and counts together, durably, or nothing of them.

        Raises:
            StoreFullError: no room.
            StoreError: they cannot be written, for another reason.
        """
        state = replace(self.state, positions=dict(positions), counts=dict(counts))
        content = b""
        if rows:
            state, content = self._append_rows(state, rows)
        state, removed = self._select_kept(state, now_s, is_growing=bool(rows))
        state = count_written(state, len(content), now_s)
        try:
            if content:
                _append(self.folder / state.segments[-1].name, content, state.segments[-1].num_bytes - len(content))
            save_store_state(self.folder, state)
        except OSError as error:
            self._cut_back()
            raise make_store_error(self.folder, error) from None
        except StoreError:
            self._cut_back()
            raise
        self.state = state
        for segment in removed:
            with contextlib.suppress(OSError):  # the next start removes what the state does not name
                (self.folder / segment.name).unlink()
        if removed:
            self.trim_labels()

    def trim_labels(self, above_bytes: int = 0) -> None:
        """Removes labels from before the oldest row, and makes one of defaults that touch, in a file above a size."""
        try:
            # Rows have milliseconds.
            if get_labels_size(self.folder) > above_bytes:
                cut_row_labels(self.folder, -math.inf, self.oldest_s - 0.001)
        except (OSError, StoreError) as error:
            log.warning("labels of %s cannot be removed: %s", self.folder, error)

    def has_excess(self, now_s: float) -> bool:
        """Returns whether a commit without rows would remove something that is too much or too old."""
        return bool(self._select_kept(self.state, now_s, is_growing=False)[1])

    def restore(self) -> None:
        """Makes the folder what the state says, as `restore_rows`."""
        self.state = restore_rows(self.folder, self.state)

    def reload(self) -> None:
        """Takes the state from its file, after another function that may have ended half-way, and restores.

        Raises:
            StoreError: it cannot be read, or the folder cannot be changed.
        """
        self.state = read_store_state(self.folder) or self.state
        self.restore()

    def _append_rows(self, state: StoreState, rows: Sequence[Row]) -> tuple[StoreState, bytes]:
        """Returns the state with rows in its last segment, and what is to be appended to that."""
        content = encode_rows(rows)
        segments, number = list(state.segments), state.number
        if not segments or self._is_full(segments[-1], rows[-1].time_s):
            number += 1
            segments.append(Segment(name=f"rows-{number:08d}.csv", first_s=rows[0].time_s))
            content = _encode_header(state.columns) + content
        last = segments[-1]
        segments[-1] = replace(
            last,
            first_s=min(last.first_s, *(row.time_s for row in rows)),  # the clock may be set back
            num_rows=last.num_rows + len(rows),
            num_bytes=last.num_bytes + len(content),
            last_s=rows[-1].time_s,
        )
        return replace(state, segments=tuple(segments), number=number, span=rows[-1].span), content

    def _is_full(self, segment: Segment, now_s: float) -> bool:
        age_s = self._limits.max_age_s / NUM_SEGMENTS
        return segment.num_bytes >= self._limits.segment_bytes or bool(age_s and now_s - segment.first_s >= age_s)

    def _select_kept(self, state: StoreState, now_s: float, *, is_growing: bool) -> tuple[StoreState, list[Segment]]:
        """Returns the state without the oldest segments, too many or too old, and those.

        The last one stays while it grows, and goes by its age alone.
        """
        segments, removed = list(state.segments), []
        max_bytes = self._limits.get_max_bytes(self.folder)
        while len(segments) > is_growing and (
            (len(segments) > 1 and sum(segment.num_bytes for segment in segments) > max_bytes)
            or (self._limits.max_age_s and now_s - segments[0].last_s > self._limits.max_age_s)
        ):
            removed.append(segments.pop(0))
        return replace(state, segments=tuple(segments)), removed

    def _cut_back(self) -> None:
        """Removes what a failed commit has appended; where that fails too, the next append or start does it."""
        with contextlib.suppress(OSError, StoreError):
            self.restore()


@contextlib.contextmanager
def open_row_store(folder: Path, columns: Sequence[str], limits: StoreLimits) -> Iterator[RowStore]:
    """Yields the store in a folder, which is made where there is none, locked for this process.

    Raises:
        StoreBusyError: another collector uses it.
        ConfigError: it holds other columns.
        StoreError: it cannot be used, or its state is damaged.
    """
    make_private_directory(folder)
    with lock_folder(folder):
        state = read_store_state(folder) or StoreState(columns=tuple(columns))
        if state.columns != tuple(columns):
            raise ConfigError(
                f"{folder} holds rows of {', '.join(state.columns):.200}, the collect file has "
                f"{', '.join(columns):.200}; take another folder"
            )
        store = RowStore(folder, state, limits)
        store.restore()
        yield store


def restore_rows(folder: Path, state: StoreState) -> StoreState:
    """Removes what was not committed from a folder, and returns its state; the folder's lock is held.

    Raises:
        StoreError: it cannot be changed.
    """
    names = {segment.name for segment in state.segments}
    try:
        remove_temporary_files(folder)
        for path in folder.glob(_PATTERN):
            if path.name not in names:
                path.unlink()
        return replace(state, segments=tuple(_restore_segments(folder, state)))
    except OSError as error:
        raise make_store_error(folder, error) from None


def encode_rows(rows: Sequence[Row]) -> bytes:
    """Returns lines of time, values, span and the CRC-32 of what stands before."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="")
    for row in rows:
        start = text.tell()
        writer.writerow([_format_time(row.time_s), *map(_format_cell, row.values), row.span])
        text.seek(start)
        line = text.read()
        text.write(f",{zlib.crc32(line.encode()):08x}\n")
    return text.getvalue().encode()


def round_time(time_s: float) -> float:
    """Returns a row's time as those who read the shard find it."""
    return float(_format_time(time_s))


def encode_lines(columns: Sequence[str], rows: Sequence[Row]) -> bytes:
    """Returns rows as a segment that begins with them has them."""
    return _encode_header(columns) + encode_rows(rows)


def count_whole_rows(path: Path) -> tuple[int, int]:
    """Returns how many rows of a segment are whole, up to the first that is not, and how many bytes they end at."""
    num_rows = num_bytes = 0
    try:
        with path.open("rb") as file:
            for line in file:
                is_header = not num_bytes and line.startswith(b"time,") and line.endswith(b",check\n")
                if not is_header and not is_whole(line):
                    break
                num_rows += not is_header
                num_bytes += len(line)
    except FileNotFoundError:
        return 0, 0
    return num_rows, num_bytes


def _restore_segments(folder: Path, state: StoreState) -> Iterator[Segment]:
    for segment in state.segments:
        path = folder / segment.name
        size = path.stat().st_size if path.is_file() else 0
        if size > segment.num_bytes:
            os.truncate(path, segment.num_bytes)
        if size >= segment.num_bytes:
            yield segment
            continue
        log.warning(
            "%s has %d bytes of %d that were written: the card lost rows, or they were forgotten",
            path, size, segment.num_bytes,
        )  # fmt: skip
        num_rows, num_bytes = count_whole_rows(path)
        if num_rows:
            os.truncate(path, num_bytes)
            yield replace(segment, num_rows=num_rows, num_bytes=num_bytes)


def is_whole(line: bytes) -> bool:
    """Returns whether a row with its end of line is what was written."""
    text, _, check = line.rpartition(b",")
    return check == b"%08x\n" % zlib.crc32(text)


def _encode_header(columns: Sequence[str]) -> bytes:
    return f"time,{','.join(columns)},span,check\n".encode()


def _format_time(time_s: float) -> str:
    return f"{time_s:.3f}"


def _format_cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.9g}"


def _append(path: Path, content: bytes, start: int) -> None:
    """Appends to a file of `start` bytes, durably; what lies behind them goes.

    Raises:
        StoreError: it has less.
    """
    size = path.stat().st_size if path.is_file() else 0
    if size < start:  # to truncate would fill up with zeros
        raise StoreError(f"{path} has {size} bytes of {start} that were written: somebody has removed rows")
    with path.open("ab") as file:
        os.fchmod(file.fileno(), 0o600)
        if size > start:
            file.truncate(start)
        file.write(content)
        file.flush()
        os.fdatasync(file.fileno())
