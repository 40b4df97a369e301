"""Write-ahead journal of a run: events are on disk before they take effect."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edgefl.core.errors import EdgeflError, JournalError, StoreFullError
from edgefl.core.types import Decision, Event, LazyTensors, Update, size_of_tensors
from edgefl.storage.database import translate_disk_full
from edgefl.storage.journal.file_format import (
    HEADER_BYTES,
    MAX_FILE_BYTES,
    JournalFileHeader,
    JournalFileScanner,
    encode_header,
    encode_record_header,
    list_files_after,
    list_journal_files,
    make_body_reader,
    parse_file_number,
    read_header,
    read_records,
)
from edgefl.storage.journal.record_encoding import (
    CheckpointMark,
    DecodeUpdate,
    EncodedRecord,
    HealthObserved,
    JournalEntry,
    TurnStarted,
    decode_record,
    encode_aggregation,
    encode_checkpoint,
    encode_decision,
    encode_event,
    encode_health,
    encode_turn,
    get_body_format,
    make_lazy_tensors,
)
from edgefl.system.atomic_files import DISK_FULL_ERRNOS, make_private_directory, sync_directory

if TYPE_CHECKING:
    from edgefl.storage.mirror import DirectoryMirror

MAX_CACHE_BYTES = 16 * 1024 * 1024
"""Size limit of decoded updates, the last one excepted; others are read from the file."""


class WalJournal:
    """Write-ahead journal in `directory`; implements `types.Journal`. Not thread-safe.

    Opening cuts a torn tail. After `StoreFullError` from anything but `commit` nothing of that call was written,
    and it may be repeated once there is room; after a failed `commit` the journal must be reopened, since the
    operating system may have dropped unwritten pages.

    Attributes:
        synced_record: number of the newest durable record, 0 if there is none.
    """

    def __init__(
        self,
        directory: Path,
        decode: DecodeUpdate,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        sync_timer: Callable[[], AbstractContextManager[object]] = nullcontext,
        mirror: DirectoryMirror | None = None,
    ) -> None:
        """Opens the journal, created if missing.

        Args:
            directory: of this run alone.
            decode: turns an update's codec body into tensors, at their first access.
            max_file_bytes: a larger file gets a successor.
            sync_timer: makes the context manager around each fsync of `commit`.
            mirror: has every durable record before `commit` returns; None for this disk alone.

        Raises:
            JournalError: it is damaged.
            StoreFullError: no room for a new one.
        """
        self._directory = directory
        self._decode = decode
        self._max_file_bytes, self._sync_timer, self._mirror = max_file_bytes, sync_timer, mirror
        self._decoded_cache = _DecodedCache()
        self._failure: str | None = None
        self._handle = -1
        self._path = directory
        self._salt = self._end_offset = self._synced_bytes = 0
        self._has_unsynced_records = False
        self._next_record = 1
        self.synced_record = 0
        make_private_directory(directory)
        self._open_newest()

    @property
    def last_record(self) -> int:
        """The number of the newest record, 0 if there is none."""
        return self._next_record - 1

    def record_events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Returns the events; updates come back without body and with tensors read from the journal."""
        with self._atomic_append():
            return [self._record_event(event) for event in events]

    def record_decision(self, decision: Decision) -> None:
        """Appends a decision that has instructions."""
        if decision.instructions:
            with self._atomic_append():
                self._append_record(encode_decision(decision))

    def record_aggregation(self, version: int, assignment_ids: Sequence[str]) -> None:
        """Appends an aggregation to `version`."""
        with self._atomic_append():
            self._append_record(encode_aggregation(version, assignment_ids))

    def record_turn(self, turn: TurnStarted | HealthObserved) -> None:
        """Appends the loop's view of the fleet, durable with the next commit."""
        with self._atomic_append():
            self._append_record(
                encode_turn(turn) if isinstance(turn, TurnStarted) else encode_health(turn), should_sync=False
            )

    def record_checkpoint(self, mark: CheckpointMark) -> None:
        """Appends, durably, that a checkpoint was written, and starts a new file."""
        with self._atomic_append():
            self._append_record(encode_checkpoint(mark))
            self.sync()
            self._rotate()

    def commit(self) -> None:
        """Returns when every event so far is durable: one fsync, none without new records."""
        self._check_usable()
        if self._has_unsynced_records:
            self.sync()

    def sync(self) -> None:
        """Returns when every appended record is durable."""
        self._check_usable()
        if self._synced_bytes == self._end_offset:
            return
        try:
            with self._sync_timer():
                os.fdatasync(self._handle)
        except OSError as error:
            self._failure = f"journal {self._path} could not be made durable ({error.strerror}); start the run again"
            raise (StoreFullError if error.errno in DISK_FULL_ERRNOS else JournalError)(self._failure) from error
        self._mirror_file()
        self._synced_bytes, self._has_unsynced_records = self._end_offset, False
        self.synced_record = self.last_record

    def _mirror_file(self) -> None:
        if self._mirror is None:
            return
        try:
            self._mirror.append_journal(self._path, self._handle, self._end_offset)
        except EdgeflError as error:  # whether it is there is not known: the run goes on from what is
            self._failure = f"journal {self._path} could not be mirrored ({error})"
            raise

    def read_entries(self, *, after: int = 0) -> Iterator[tuple[int, JournalEntry]]:
        """Yields number and entry of the records behind record `after`."""
        return load_journal_entries(self._directory, self._decode, after=after)

    def prune(self, through: int) -> None:
        """Removes the files without a record behind `through`; updates in them can no longer be read."""
        files = list_journal_files(self._directory)
        remaining = list_files_after(files, through)
        for path in files[: len(files) - len(remaining)]:
            path.unlink()
        sync_directory(self._directory)

    def close(self) -> None:
        """Syncs and closes the file."""
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record_event(self, event: Event) -> Event:
        encoded = encode_event(event)
        if encoded is None:
            return event
        start = self._append_record(encoded)
        if not isinstance(event, Update):
            return event
        length = sum(len(part) for part in encoded.parts) - encoded.tensors_offset
        read, offset = make_body_reader(self._path, start), encoded.tensors_offset
        # Tensors decoded from the body have no other owner that could change them.
        decoded_tensors = event.tensors if event.body is not None and event.tensors else None
        tensors = make_lazy_tensors(
            lambda: read(offset, length), get_body_format(event), self._decode, decoded_tensors
        )
        if decoded_tensors is not None:
            self._decoded_cache.add(tensors, size_of_tensors(decoded_tensors))
        return replace(event, body=None, tensors=tensors)

    def _append_record(self, record: EncodedRecord, *, should_sync: bool = True) -> int:
        """Returns the file offset of the new record's body."""
        if self._end_offset > max(self._max_file_bytes, HEADER_BYTES):
            self.sync()
            self._rotate()
        identity = record.assignment_id.encode()
        header = encode_record_header(record.kind, identity, record.parts, salt=self._salt, synced=self._synced_bytes)
        start = self._end_offset + len(header)
        for part in (header, *record.parts):
            _write_all(self._handle, part, self._end_offset)
            self._end_offset += len(part)
        self._next_record += 1
        self._has_unsynced_records |= should_sync
        return start

    @contextmanager
    def _atomic_append(self) -> Iterator[None]:
        self._check_usable()
        path, end, next_record = self._path, self._end_offset, self._next_record
        try:
            with translate_disk_full(f"journal {self._path}"):
                yield
        except BaseException:  # an interrupt too: half a record must not stay
            if self._failure is None:
                self._roll_back(path, end, next_record)
            raise

    def _roll_back(self, path: Path, end: int, next_record: int) -> None:
        for file_path in reversed(list_journal_files(self._directory)):
            if parse_file_number(file_path) > parse_file_number(path):
                file_path.unlink()
        try:
            self._open_file(path, end=end, next_record=next_record)
        except OSError as error:
            self._failure = f"journal {path} cannot be written ({error.strerror}); start the run again"

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise JournalError(self._failure)

    def _open_newest(self) -> None:
        files = list_journal_files(self._directory)
        if not files:
            self._create_file(1, 1)
            return
        scan = _scan_file(files[-1], is_newest=True)
        if scan.end_offset:
            with translate_disk_full(f"journal {files[-1]}"):
                self._open_file(files[-1], end=scan.end_offset, next_record=scan.next_record)
            self._mirror_file()
            return
        # A crash while the file was created: it continues where the one before ends.
        if len(files) == 1 and parse_file_number(files[-1]) > 1:
            raise JournalError(f"journal {files[-1]} is damaged at byte 0, and the file before it is gone")
        next_record = _scan_file(files[-2], is_newest=False).next_record if len(files) > 1 else 1
        self._create_file(parse_file_number(files[-1]), next_record)

    def _rotate(self) -> None:
        self._create_file(parse_file_number(self._path) + 1, self._next_record)

    def _create_file(self, number: int, first_record: int) -> None:
        path = self._directory / f"{number:06d}.wal"
        with translate_disk_full(f"journal {path}"):
            create_journal_file(self._directory, number=number, first_record=first_record)
            self._open_file(path, end=HEADER_BYTES, next_record=first_record)
        # Before the files before it are pruned: without records it still has the number of the next one.
        self._mirror_file()

    def _open_file(self, path: Path, *, end: int, next_record: int) -> None:
        """Opens a file for appending at byte `end`: truncates what lies behind and syncs what lies before."""
        header = read_header(path)
        if header is None:
            raise JournalError(f"journal {path} is damaged at byte 0")
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, end)
            os.fsync(handle)
        except BaseException:  # an interrupt too: the file is closed
            os.close(handle)
            raise
        if self._mirror is not None:
            self._mirror.truncate_journal(path, end)
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._path, self._salt = handle, path, header.salt
        self._end_offset = self._synced_bytes = end
        self._next_record = next_record
        self.synced_record = self.last_record


class _DecodedCache:
    """Cache of the newest decoded updates, which need not be read and decoded again."""

    def __init__(self) -> None:
        self._entries: deque[tuple[LazyTensors, int]] = deque()
        self._num_bytes = 0

    def add(self, tensors: LazyTensors, num_bytes: int) -> None:
        """Adds an entry and evicts the oldest beyond `MAX_CACHE_BYTES`, but never this one."""
        self._entries.append((tensors, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > MAX_CACHE_BYTES and len(self._entries) > 1:
            oldest, entry_bytes = self._entries.popleft()
            oldest.unload()
            self._num_bytes -= entry_bytes


def create_journal_file(directory: Path, *, number: int, first_record: int) -> None:
    """Creates an empty, durable journal file that continues with this record.

    Raises:
        StoreFullError: no room.
    """
    path = directory / f"{number:06d}.wal"
    with translate_disk_full(f"journal {path}"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(
                handle, encode_header(JournalFileHeader(first_record=first_record, salt=secrets.randbits(32))), 0
            )
            os.fsync(handle)
        finally:
            os.close(handle)
        sync_directory(directory)


def load_journal_entries(
    directory: Path, decode: DecodeUpdate = lambda _: {}, *, after: int = 0
) -> Iterator[tuple[int, JournalEntry]]:
    """Yields the entries of `WalJournal.read_entries` without opening the journal for writing."""
    for record in read_records(directory, after=after):
        yield record.number, decode_record(record, decode, make_body_reader(record.path, record.offset))


def _scan_file(path: Path, *, is_newest: bool) -> JournalFileScanner:
    scan = JournalFileScanner(path, is_newest=is_newest)
    for _ in scan:
        pass
    return scan


def _write_all(handle: int, content: bytes, offset: int) -> None:
    remaining = memoryview(content)
    while remaining:
        num_written = os.pwrite(handle, remaining, offset)
        remaining, offset = remaining[num_written:], offset + num_written
