"""Reader of a journal: its records in order, and single bodies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from edgefl.core.errors import JournalError, NotKeptError
from edgefl.storage.journal.file_format import (
    JournalFileHeader,
    JournalFileScanner,
    JournalRecord,
    list_journal_files,
    parse_file_number,
    read_header,
)


def read_records(directory: Path, *, after: int = 0) -> Iterator[JournalRecord]:
    """Yields the records behind number `after`, oldest first; a torn tail is skipped.

    Raises:
        JournalError: a durable place is damaged, or records are missing.
        StoreTooNewError: a newer edgefl wrote a part of it.
    """
    files = list_files_after(list_journal_files(directory), after)
    following = None
    for path in files:
        header = read_header(path)
        if header is not None:
            _check_continuity(
                directory, header, after + 1 if following is None else following, is_first=following is None
            )
        scan = JournalFileScanner(path, is_newest=path is files[-1])
        for record in scan:
            if record.number > after:
                yield record
        following = scan.next_record or following
    if after and (following or 1) <= after:
        raise JournalError(
            f"journal {directory} ends with record {(following or 1) - 1}, the checkpoint contains record {after}"
        )


def list_files_after(files: Sequence[Path], after: int) -> list[Path]:
    """Returns the files from the one with the first record behind `after`."""
    for index in range(len(files) - 1, 0, -1):
        header = read_header(files[index])
        if header is not None and header.first_record <= after + 1:
            return list(files[index:])
    return list(files)


def _check_continuity(directory: Path, header: JournalFileHeader, expected: int, *, is_first: bool) -> None:
    if header.first_record > expected or (not is_first and header.first_record != expected):
        raise JournalError(
            f"journal {directory}: record {expected} is missing, the next file begins with {header.first_record}"
        )


def make_body_reader(path: Path, base: int) -> Callable[[int, int], bytes]:
    """Returns a function that reads `length` bytes at `start` behind `base` of the file.

    It raises `NotKeptError` where the journal pruned the file, `JournalError` where it is missing otherwise.
    """

    def read(start: int, length: int) -> bytes:
        try:
            with path.open("rb", buffering=0) as file:
                content = os.pread(file.fileno(), length, base + start)
        except FileNotFoundError:
            if not _is_pruned(path):
                raise JournalError(f"journal {path} is gone, an update in it cannot be read") from None
            raise NotKeptError(f"journal {path} was pruned, an update in it can no longer be read") from None
        if len(content) != length:
            raise JournalError(f"journal {path} is damaged at byte {base + start}: it ends too early")
        return content

    return read


def _is_pruned(path: Path) -> bool:
    """Returns whether the journal pruned this file: only the oldest ones are."""
    remaining = list_journal_files(path.parent)
    return bool(remaining) and parse_file_number(remaining[0]) > parse_file_number(path)
