"""The journal of a run: what happened, on disk before anybody acts on it."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from edgefl.errors import JournalError, StoreFullError
from edgefl.files import FULL_ERRNOS, make_private_directory, sync_directory
from edgefl.storage.failures import full_disk_explained
from edgefl.storage.journal_reader import body_reader, files_behind, read_journal
from edgefl.storage.journal_records import (
    CheckpointMark,
    Decode,
    Entry,
    Packed,
    Seen,
    Turn,
    entry_of,
    lazy_tensors,
    pack_aggregated,
    pack_checkpoint,
    pack_decision,
    pack_event,
    pack_seen,
    pack_turn,
    update_format,
)
from edgefl.storage.wal import (
    HEADER_BYTES,
    MAX_FILE_BYTES,
    FileHeader,
    FileScan,
    file_number,
    journal_files,
    pack_header,
    pack_record_header,
    read_header,
)
from edgefl.types import Decision, Event, LazyTensors, Update, bytes_of

KEPT_BYTES = 16 * 1024 * 1024
"""The newest updates stay decoded up to so many bytes, the last one in any case; others are read from the file."""


class WalJournal:
    """Appends to the journal in `directory`; implements `types.Journal`. One thread uses it.

    Opening cuts a torn tail. After `StoreFullError` from anything but `commit` nothing of that call was kept, and
    it may be repeated once there is room; after a failed `commit` the journal must be opened anew, since the
    operating system may have dropped what it could not write.
    """

    def __init__(
        self,
        directory: Path,
        decode: Decode,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        time_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Opens the journal, made if it is not there.

        Args:
            directory: of this run alone.
            decode: turns an update's codec body into tensors, when somebody asks for them.
            max_file_bytes: a file that is larger gets a successor.
            time_sync: gives what each fsync of `commit` runs in.

        Raises:
            JournalError: it is damaged.
            StoreFullError: no room for a new one.
        """
        self._directory = directory
        self._decode = decode
        self._max_file_bytes, self._time_sync = max_file_bytes, time_sync
        self._record_of: dict[str, int] = {}
        self._decoded = _Decoded()
        self._failure: str | None = None
        self._handle = -1
        self._path = directory
        self._salt = self._end = self._synced = 0
        self._needs_sync = False
        self._next_record = 1
        make_private_directory(directory)
        self._open_newest()

    @property
    def last_record(self) -> int:
        """The number of the newest record, 0 if there is none."""
        return self._next_record - 1

    def record_of(self, assignment_id: str) -> int | None:
        """Returns the number of the update's record if this journal appended it and has not pruned it."""
        return self._record_of.get(assignment_id)

    def received(self, events: Sequence[Event]) -> Sequence[Event]:
        """Returns the events, the updates among them without body and with tensors that can read the journal."""
        with self._all_or_nothing():
            return [self._received(event) for event in events]

    def decided(self, decision: Decision) -> None:
        """Keeps a decision that orders something."""
        if decision.orders:
            with self._all_or_nothing():
                self._append(pack_decision(decision))

    def aggregated(self, version: int, assignment_ids: Sequence[str], state: object = None) -> None:  # noqa: ARG002
        """Keeps that `version` was made of these updates; the state is for journals that checkpoint by themselves."""
        with self._all_or_nothing():
            self._append(pack_aggregated(version, assignment_ids))

    def turned(self, entry: Turn | Seen) -> None:
        """Keeps what the loop sees of the fleet. It becomes durable with what follows from it, and needs no sync."""
        with self._all_or_nothing():
            self._append(pack_turn(entry) if isinstance(entry, Turn) else pack_seen(entry), is_needed=False)

    def checkpointed(self, mark: CheckpointMark) -> None:
        """Keeps, durably, that a checkpoint was written, and begins a new file."""
        with self._all_or_nothing():
            self._append(pack_checkpoint(mark))
            self.sync()
            self._rotate()

    def commit(self) -> None:
        """Returns when everything that happened is durable: one fsync, none if nothing did."""
        self._check_usable()
        if self._needs_sync:
            self.sync()

    def sync(self) -> None:
        """Returns when everything that was appended is durable."""
        self._check_usable()
        if self._synced == self._end:
            return
        try:
            with self._time_sync():
                os.fdatasync(self._handle)
        except OSError as error:
            self._failure = f"journal {self._path} could not be made durable ({error.strerror}); start the run again"
            raise (StoreFullError if error.errno in FULL_ERRNOS else JournalError)(self._failure) from error
        self._synced, self._needs_sync = self._end, False

    def entries(self, *, after: int = 0) -> Iterator[tuple[int, Entry]]:
        """Yields record number and content of what was appended behind record `after`."""
        return journal_entries(self._directory, self._decode, after=after)

    def prune(self, through: int) -> None:
        """Removes the files that hold no record behind `through`; updates in them can no longer be read."""
        files = journal_files(self._directory)
        kept = files_behind(files, through)
        for path in files[: len(files) - len(kept)]:
            path.unlink()
        sync_directory(self._directory)
        self._record_of = {name: number for name, number in self._record_of.items() if number > through}

    def close(self) -> None:
        """Makes everything durable and closes the file."""
        if self._handle < 0:
            return
        try:
            if self._failure is None:
                self.sync()
        finally:
            os.close(self._handle)
            self._handle = -1
            self._failure = f"journal {self._directory} is closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _received(self, event: Event) -> Event:
        packed = pack_event(event)
        if packed is None:
            return event
        start = self._append(packed)
        if not isinstance(event, Update):
            return event
        self._record_of[event.assignment_id] = self.last_record
        length = sum(len(part) for part in packed.parts) - packed.tensors_at
        read, at = body_reader(self._path, start), packed.tensors_at
        # What was decoded from the body is nobody else's, who could change it.
        decoded = event.tensors if event.body is not None and event.tensors else None
        tensors = lazy_tensors(lambda: read(at, length), update_format(event), self._decode, decoded)
        if decoded is not None:
            self._decoded.keep(tensors, bytes_of(decoded))
        return replace(event, body=None, tensors=tensors)

    def _append(self, packed: Packed, *, is_needed: bool = True) -> int:
        """Returns where the body of the new record begins in the file."""
        if self._end > max(self._max_file_bytes, HEADER_BYTES):
            self.sync()
            self._rotate()
        identity = packed.assignment_id.encode()
        head = pack_record_header(packed.kind, identity, packed.parts, salt=self._salt, synced=self._synced)
        start = self._end + len(head)
        for part in (head, *packed.parts):
            _write_all(self._handle, part, self._end)
            self._end += len(part)
        self._next_record += 1
        self._needs_sync |= is_needed
        return start

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        self._check_usable()
        path, end, next_record = self._path, self._end, self._next_record
        try:
            with full_disk_explained(f"journal {self._path}"):
                yield
        except BaseException:
            if self._failure is None:
                self._go_back(path, end, next_record)
            raise

    def _go_back(self, path: Path, end: int, next_record: int) -> None:
        for newer in reversed(journal_files(self._directory)):
            if file_number(newer) > file_number(path):
                newer.unlink()
        self._record_of = {name: number for name, number in self._record_of.items() if number < next_record}
        try:
            self._open_file(path, end=end, next_record=next_record)
        except OSError as error:
            self._failure = f"journal {path} cannot be written ({error.strerror}); start the run again"

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise JournalError(self._failure)

    def _open_newest(self) -> None:
        files = journal_files(self._directory)
        if not files:
            self._create(1, 1)
            return
        scan = _scanned(files[-1], is_newest=True)
        if scan.end:
            with full_disk_explained(f"journal {files[-1]}"):
                self._open_file(files[-1], end=scan.end, next_record=scan.next_record)
            return
        # A crash while the file was made: it goes on where the one before ends.
        if len(files) == 1 and file_number(files[-1]) > 1:
            raise JournalError(f"journal {files[-1]} is damaged at byte 0, and the file before it is gone")
        next_record = _scanned(files[-2], is_newest=False).next_record if len(files) > 1 else 1
        self._create(file_number(files[-1]), next_record)

    def _rotate(self) -> None:
        self._create(file_number(self._path) + 1, self._next_record)

    def _create(self, number: int, first_record: int) -> None:
        path = self._directory / f"{number:06d}.wal"
        with full_disk_explained(f"journal {path}"):
            begin_journal(self._directory, number=number, first_record=first_record)
            self._open_file(path, end=HEADER_BYTES, next_record=first_record)

    def _open_file(self, path: Path, *, end: int, next_record: int) -> None:
        """Goes on behind byte `end`; what lies behind it goes, and what lies before it is made durable."""
        header = read_header(path)
        if header is None:
            raise JournalError(f"journal {path} is damaged at byte 0")
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, end)
            os.fsync(handle)
        except BaseException:
            os.close(handle)
            raise
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._path, self._salt = handle, path, header.salt
        self._end = self._synced = end
        self._next_record = next_record


class _Decoded:
    """The newest updates as they came: who folds them at once need not read and decode them again."""

    def __init__(self) -> None:
        self._kept: deque[tuple[LazyTensors, int]] = deque()
        self._num_bytes = 0

    def keep(self, tensors: LazyTensors, num_bytes: int) -> None:
        """Lets the oldest go until the rest takes at most `KEPT_BYTES`, or is this one alone."""
        self._kept.append((tensors, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > KEPT_BYTES and len(self._kept) > 1:
            oldest, freed = self._kept.popleft()
            oldest.release()
            self._num_bytes -= freed


def begin_journal(directory: Path, *, number: int, first_record: int) -> None:
    """Makes a file of a journal, durable and empty; the journal goes on in it, with this record.

    Raises:
        StoreFullError: no room.
    """
    path = directory / f"{number:06d}.wal"
    with full_disk_explained(f"journal {path}"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(handle, pack_header(FileHeader(first_record=first_record, salt=secrets.randbits(32))), 0)
            os.fsync(handle)
        finally:
            os.close(handle)
        sync_directory(directory)


def journal_entries(directory: Path, decode: Decode = lambda _: {}, *, after: int = 0) -> Iterator[tuple[int, Entry]]:
    """Yields what `WalJournal.entries` does, without opening the journal: somebody may be writing it."""
    for record in read_journal(directory, after=after):
        yield record.number, entry_of(record, decode, body_reader(record.path, record.offset))


def _scanned(path: Path, *, is_newest: bool) -> FileScan:
    scan = FileScan(path, is_newest=is_newest)
    for _ in scan:
        pass
    return scan


def _write_all(handle: int, content: bytes, offset: int) -> None:
    rest = memoryview(content)
    while rest:
        written = os.pwrite(handle, rest, offset)
        rest, offset = rest[written:], offset + written
