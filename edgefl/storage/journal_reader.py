"""Reading a journal: its records in order, and single bodies out of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edgefl.errors import JournalError, NotKeptError
from edgefl.storage.wal import FileHeader, FileScan, Record, file_number, journal_files, read_header


def read_journal(directory: Path, *, after: int = 0) -> Iterator[Record]:
    """Yields the records behind number `after`, oldest first; a torn tail is left out.

    Raises:
        JournalError: a durable place is damaged, or records are missing.
        StoreTooNewError: a newer edgefl wrote a part of it.
    """
    files = files_behind(journal_files(directory), after)
    following = None
    for path in files:
        header = read_header(path)
        if header is not None:
            _check_follows(
                directory, header, after + 1 if following is None else following, is_first=following is None
            )
        scan = FileScan(path, is_newest=path is files[-1])
        for record in scan:
            if record.number > after:
                yield record
        following = scan.next_record or following
    if after and (following or 1) <= after:
        raise JournalError(
            f"journal {directory} ends with record {(following or 1) - 1}, the checkpoint contains record {after}"
        )


def files_behind(files: Sequence[Path], after: int) -> list[Path]:
    """Returns the files from the one on that holds the first record behind `after`."""
    for index in range(len(files) - 1, 0, -1):
        header = read_header(files[index])
        if header is not None and header.first_record <= after + 1:
            return list(files[index:])
    return list(files)


def _check_follows(directory: Path, header: FileHeader, expected: int, *, is_first: bool) -> None:
    if header.first_record > expected or (not is_first and header.first_record != expected):
        raise JournalError(
            f"journal {directory}: record {expected} is missing, the next file begins with {header.first_record}"
        )


def body_reader(path: Path, base: int) -> Callable[[int, int], bytes]:
    """Returns a function that reads `length` bytes at `start` behind `base` of the file.

    It raises `NotKeptError` where the journal has let go of the file, `JournalError` where it is gone otherwise.
    """

    def read(start: int, length: int) -> bytes:
        try:
            with path.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), length, base + start)
        except FileNotFoundError:
            if not _was_pruned(path):
                raise JournalError(f"journal {path} is gone, an update in it cannot be read") from None
            raise NotKeptError(f"journal {path} was pruned, an update in it can no longer be read") from None
        if len(content) != length:
            raise JournalError(f"journal {path} is damaged at byte {base + start}: it ends too early")
        return content

    return read


def _was_pruned(path: Path) -> bool:
    """Returns whether the journal went on without this file: it lets go of the oldest ones alone."""
    kept = journal_files(path.parent)
    return bool(kept) and file_number(kept[0]) > file_number(path)
