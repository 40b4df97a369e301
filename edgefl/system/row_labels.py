"""Labels of rows by time: a file beside a shard's segments, to which lines are only ever appended.

A line has a beginning and an end in seconds since 1970, a label, its kind, and the CRC-32 of that text. What a person
says counts more than an event, that more than a default, and all of them more than a weak label. Of one kind the
later line counts, so a correction is one more line. A line that a crash has cut off does not count. Tables that have
a column `time` and none that is called `label` get that from here.
"""

from __future__ import annotations

import bisect
import contextlib
import csv
import errno
import fcntl
import io
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from edgefl.core.errors import StoreError
from edgefl.system.atomic_files import give_to_owner, write_atomic

LABELS_NAME, LOCK_NAME = ".labels.csv", ".labels.lock"
TIME_COLUMN, LABEL_COLUMN = "time", "label"
MAX_BYTES = 4 * 1024**2
"""That labels grow to: about 70,000 lines."""
MAX_READ_BYTES = 2 * MAX_BYTES
"""To cut a time out of lines makes at most two of each."""
MAX_LINE_BYTES = 4096
UNLABELLED_FOLDER = ".unlabelled"
"""Of a shard of files, beside its class folders."""
MEDIA_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".wav": "audio/wav"}
"""Of examples that are files, by suffix."""
WEAK_WEIGHT = 0.5
"""Of an example with a weak label, in loss and gradient."""


class LabelKind(StrEnum):
    """Who says a label; `clear` takes back what a person has said, `weak` is a guess of a model or function."""

    WEAK = "weak"
    DEFAULT = "default"
    EVENT = "event"
    PERSON = "person"
    CLEAR = "clear"


_RANKS = {
    LabelKind.WEAK: 0,
    LabelKind.DEFAULT: 1,
    LabelKind.EVENT: 2,
    LabelKind.PERSON: 3,
    LabelKind.CLEAR: 3,
}
NUM_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelLine:
    """Label of the rows of a time, both ends included; an empty one of a person leaves them out."""

    since_s: float
    until_s: float
    label: str
    kind: LabelKind


class RowLabels:
    """Labels by time, of lines in the order of the file."""

    def __init__(self, lines: Sequence[LabelLine]) -> None:
        self.lines = tuple(lines)

    def find(self, times: Sequence[float]) -> list[str]:
        """Returns the label of each time, empty where it has none but a weak one."""
        return [_choose(labels) for _, *labels in self._find_ranked(times)]

    def find_weak(self, times: Sequence[float]) -> list[str]:
        """Returns the weak label of each time, empty where it has none or anybody has said another."""
        return [
            (weak or "") if all(label is None for label in others) else ""
            for weak, *others in self._find_ranked(times)
        ]

    def _find_ranked(self, times: Sequence[float]) -> list[tuple[str | None, ...]]:
        """Returns for each time what is said by those of each rank, None for nothing."""
        order = sorted(range(len(times)), key=times.__getitem__)
        ordered = [times[place] for place in order]
        if not ordered:
            return []
        by_rank: list[list[str | None]] = [[None] * len(ordered) for _ in range(NUM_RANKS)]
        for line in self.lines:
            if line.until_s < ordered[0] or line.since_s > ordered[-1]:
                continue
            first, end = bisect.bisect_left(ordered, line.since_s), bisect.bisect_right(ordered, line.until_s)
            label = None if line.kind is LabelKind.CLEAR else line.label
            by_rank[_RANKS[line.kind]][first:end] = [label] * (end - first)
        found: list[tuple[str | None, ...]] = [()] * len(ordered)
        for place, labels in zip(order, zip(*by_rank, strict=True), strict=True):
            found[place] = labels
        return found


def _choose(labels: Sequence[str | None]) -> str:
    """Returns what counts of labels by rank, empty for nothing."""
    return next((label for label in reversed(labels) if label is not None), "")


def has_labels(folder: Path) -> bool:
    """Returns whether a folder has a file of labels."""
    return (folder / LABELS_NAME).is_file()


def get_labels_size(folder: Path) -> int:
    """Returns the bytes of a folder's labels; 0 where there are none."""
    return (folder / LABELS_NAME).stat().st_size if has_labels(folder) else 0


def get_labels_version(folder: Path) -> tuple[int, ...]:
    """Returns what is another one once a folder's labels have changed."""
    if not has_labels(folder):
        return ()
    status = (folder / LABELS_NAME).stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_row_labels(folder: Path) -> RowLabels:
    """Returns the labels in a folder; none where there is no file. Lines that are damaged are left out.

    Errors of the operating system propagate.
    """
    return RowLabels(list(_iterate_lines(folder, MAX_READ_BYTES)))


def _iterate_lines(folder: Path, max_bytes: float = math.inf) -> Iterator[LabelLine]:
    """Yields the whole lines that begin within so many bytes; those who replace the file read all of it."""
    with contextlib.suppress(FileNotFoundError), (folder / LABELS_NAME).open("rb") as file:
        while file.tell() < max_bytes and (text := file.readline(MAX_LINE_BYTES)):
            if text.endswith(b"\n") and (line := _parse_line(text[:-1])) is not None:
                yield line


def append_row_labels(folder: Path, lines: Sequence[LabelLine]) -> None:
    """Appends labels, durably; errors of the operating system propagate, one of a file that would be too large, too.

    What root appends to is its folder's owner's: a collector and an agent of another user go on.
    """
    content = b"".join(map(_encode_line, lines))
    with _lock(folder), (folder / LABELS_NAME).open("ab+") as file:
        size = file.tell()
        if lines and size + len(content) >= MAX_BYTES:  # what is behind them nobody would read
            raise OSError(errno.EFBIG, f"labels may have {MAX_BYTES:,} bytes in all")
        os.fchmod(file.fileno(), 0o600)
        give_to_owner(file.fileno(), folder)
        is_cut = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if is_cut else b"") + content)
        file.flush()
        os.fdatasync(file.fileno())


def cut_row_labels(folder: Path, since_s: float, until_s: float) -> None:
    """Removes labels of a time, both ends included, and makes one line of defaults that touch.

    The file is replaced in one step.

    Raises:
        StoreError: it cannot be written.
    """
    if not has_labels(folder):
        return
    with _lock(folder):
        lines = list(_iterate_lines(folder))
        kept = _merge_defaults([part for line in lines for part in _cut_line(line, since_s, until_s)])
        if kept != lines:
            write_atomic(folder / LABELS_NAME, b"".join(map(_encode_line, kept)))


def replace_weak_labels(folder: Path, lines: Sequence[LabelLine]) -> None:
    """Replaces all weak labels by other ones, in one step.

    Raises:
        StoreError: the file cannot be written, or would be too large.
    """
    with _lock(folder):
        kept = [line for line in _iterate_lines(folder) if line.kind is not LabelKind.WEAK]
        content = b"".join(map(_encode_line, [*kept, *lines]))
        if lines and len(content) >= MAX_BYTES:
            raise StoreError(f"labels may have {MAX_BYTES:,} bytes in all, with {len(lines)} weak ones more")
        write_atomic(folder / LABELS_NAME, content)


def parse_example_time(name: str) -> float:
    """Returns the time with which the name of a collected file begins, in seconds since 1970.

    Raises:
        ValueError: it begins with none.
    """
    return datetime.fromisoformat(name[:19]).replace(tzinfo=UTC).timestamp()


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Waits for whoever appends to or replaces the file; the lock ends with the process."""
    with (folder / LOCK_NAME).open("w") as lock:
        give_to_owner(lock.fileno(), folder)
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cut_line(line: LabelLine, since_s: float, until_s: float) -> Iterator[LabelLine]:
    """Yields what a line has outside of a time."""
    for first_s, last_s in (
        (line.since_s, min(line.until_s, math.nextafter(since_s, -math.inf))),
        (max(line.since_s, math.nextafter(until_s, math.inf)), line.until_s),
    ):
        if first_s <= last_s:
            yield LabelLine(since_s=first_s, until_s=last_s, label=line.label, kind=line.kind)


def _merge_defaults(lines: Sequence[LabelLine]) -> list[LabelLine]:
    merged, last = list[LabelLine](), -1
    for line in lines:
        if line.kind is not LabelKind.DEFAULT:
            merged.append(line)
        elif last >= 0 and merged[last].label == line.label and merged[last].until_s == line.since_s:
            merged[last] = replace(merged[last], until_s=line.until_s)
        else:
            last = len(merged)
            merged.append(line)
    return merged


def _encode_line(line: LabelLine) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(
        [repr(line.since_s), repr(line.until_s), line.label, line.kind.value]
    )
    content = text.getvalue().encode()
    return b"%s,%08x\n" % (content, zlib.crc32(content))


def _parse_line(content: bytes) -> LabelLine | None:
    """Returns a line that is whole; None for any other."""
    text, _, check = content.rpartition(b",")
    if check != b"%08x" % zlib.crc32(text):
        return None
    try:
        since, until, label, kind = next(csv.reader([text.decode()], strict=True))
        since_s, until_s = float(since), float(until)
        if math.isfinite(since_s) and math.isfinite(until_s):
            return LabelLine(since_s=since_s, until_s=until_s, label=label, kind=LabelKind(kind))
    except (ValueError, StopIteration, csv.Error):
        pass
    return None
