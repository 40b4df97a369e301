"""The journal's file format, little-endian: a header, then records one after another.

    header: magic 8 | version u16 | reserved u16 | salt u32 | number of the first record u64 | CRC-32 u32 of these
    record: magic 4 | length u32 | CRC-32 u32 | kind u8 | id length u8 | reserved u16 | synced u64 | id | body

`length` counts id and body. The CRC covers the whole record but itself and starts from the file's random salt, so
that no body, which comes from a device, can contain a valid record. `synced` is the number of bytes of this file that
were durable when the record was written, and so distinguishes damage from a torn tail: a crash may leave anything
behind the last sync, in any order of pages, but nothing before it. A bad place is a torn tail unless a later
record proves that it was durable.

A header keeps this form in all versions, so that one of a newer edgefl is distinguished from a damaged one.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from edgefl.core.errors import JournalError, NotKeptError, StoreTooNewError
from edgefl.storage.state_serialisation import check_format_version

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_RECORD_BYTES = 1024 * 1024 * 1024
MAX_ID_BYTES = 255

_FILE_MAGIC = b"EDGEFLWJ"
_VERSION = 2
_FILE_HEADER = struct.Struct("<8sHHIQ")
_CRC = struct.Struct("<I")
_RECORD_MAGIC = b"\xe5WR\x01"
_RECORD_START = struct.Struct("<4sI")
_RECORD_FIELDS = struct.Struct("<BBHQ")
_FILE_NAME_PATTERN = re.compile(r"(\d{6,})\.wal\Z")

HEADER_BYTES = _FILE_HEADER.size + _CRC.size
RECORD_HEADER_BYTES = _RECORD_START.size + _CRC.size + _RECORD_FIELDS.size


class RecordKind(IntEnum):
    """Kind of a record; numbers are never reused."""

    UPDATE = 1
    EVALUATION = 2
    INSTRUCTION_FAILED = 3
    STOP = 4
    DECISION = 5
    AGGREGATION = 6
    CHECKPOINT = 7
    TURN = 8
    HEALTH = 9

    @property
    def label(self) -> str:
        """The kind in words, for messages."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRecord:
    """One record; `number` counts from 1 over all files, `offset` is where `body` begins in `path`."""

    number: int
    kind: RecordKind
    assignment_id: str
    body: bytes
    path: Path
    offset: int


def list_journal_files(directory: Path) -> list[Path]:
    """Returns the journal's files, oldest first."""
    if not directory.is_dir():
        return []
    numbered_paths = [
        (int(match[1]), path) for path in directory.iterdir() if (match := _FILE_NAME_PATTERN.match(path.name))
    ]
    return [path for _, path in sorted(numbered_paths)]


def parse_file_number(path: Path) -> int:
    return int(path.stem)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFileHeader:
    """Header of a journal file."""

    first_record: int
    salt: int


def encode_header(header: JournalFileHeader) -> bytes:
    start = _FILE_HEADER.pack(_FILE_MAGIC, _VERSION, 0, header.salt, header.first_record)
    return start + _CRC.pack(zlib.crc32(start))


def encode_record_header(
    kind: RecordKind, record_id: bytes, body_parts: Sequence[bytes], *, salt: int, synced: int
) -> bytes:
    """Returns a record's bytes up to and including its id; the body parts follow.

    Raises:
        NotKeptError: id or body are longer than the format allows.
    """
    length = len(record_id) + sum(len(part) for part in body_parts)
    if len(record_id) > MAX_ID_BYTES or length > MAX_RECORD_BYTES:
        raise NotKeptError(
            f"journal record of {length} bytes with an id of {len(record_id)}, at most {MAX_RECORD_BYTES} and "
            f"{MAX_ID_BYTES} are possible"
        )
    start = _RECORD_START.pack(_RECORD_MAGIC, length)
    fields = _RECORD_FIELDS.pack(kind, len(record_id), 0, synced) + record_id
    crc = zlib.crc32(fields, zlib.crc32(start, salt))
    for part in body_parts:
        crc = zlib.crc32(part, crc)
    return start + _CRC.pack(crc) + fields


def read_header(path: Path) -> JournalFileHeader | None:
    """Returns a file's header, None if it is incomplete.

    Raises:
        StoreTooNewError: a newer edgefl wrote it.
    """
    with path.open("rb") as file:
        return _read_header(file)


@dataclass(slots=True)
class JournalFileScanner:
    """Scanner of one file's records; `end_offset` is where the valid ones end."""

    path: Path
    is_newest: bool
    end_offset: int = 0
    next_record: int = 0

    def __iter__(self) -> Iterator[JournalRecord]:
        """Yields the valid records.

        Raises:
            JournalError: a durable place is damaged; the message names file and offset.
            StoreTooNewError: a newer edgefl wrote the file, or a record in it.
        """
        with self.path.open("rb") as file:
            header = _read_header(file)
            if header is None:
                self._check_torn_tail(file, 0, None)
                return
            self.end_offset, self.next_record = HEADER_BYTES, header.first_record
            size = os.fstat(file.fileno()).st_size
            while self.end_offset < size:
                parsed = _read_record(file, self.end_offset, header.salt)
                if parsed is None:
                    self._check_torn_tail(file, self.end_offset, header.salt)
                    return
                kind, identity, body = parsed
                record = JournalRecord(
                    number=self.next_record, kind=kind, assignment_id=identity, body=body, path=self.path,
                    offset=file.tell() - len(body),
                )  # fmt: skip
                self.end_offset, self.next_record = file.tell(), self.next_record + 1
                yield record

    def _check_torn_tail(self, file: BinaryIO, offset: int, salt: int | None) -> None:
        if not self.is_newest or _is_durable(file, offset, salt):
            raise JournalError(
                f"journal {self.path} is damaged at byte {offset}; restore a backup, or start the run again"
            )


def _read_header(file: BinaryIO) -> JournalFileHeader | None:
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or _CRC.unpack(raw[-_CRC.size :])[0] != zlib.crc32(raw[: -_CRC.size]):
        return None
    magic, version, _, salt, first = _FILE_HEADER.unpack(raw[: -_CRC.size])
    if magic != _FILE_MAGIC or version < _VERSION:
        return None
    check_format_version(f"journal {file.name}", version, _VERSION)
    return JournalFileHeader(first_record=first, salt=salt)


def _read_record(file: BinaryIO, offset: int, salt: int) -> tuple[RecordKind, str, bytes] | None:
    """Returns kind, id and body of the record at `offset`, None if it is incomplete; `file` ends behind it."""
    file.seek(offset)
    header_bytes = file.read(RECORD_HEADER_BYTES)
    if len(header_bytes) < RECORD_HEADER_BYTES:
        return None
    magic, length = _RECORD_START.unpack_from(header_bytes)
    if (
        magic != _RECORD_MAGIC
        or length > MAX_RECORD_BYTES
        or offset + len(header_bytes) + length > _get_file_size(file)
    ):
        return None
    content = file.read(length)
    fields = header_bytes[_RECORD_START.size + _CRC.size :]
    crc = zlib.crc32(content, zlib.crc32(fields, zlib.crc32(header_bytes[: _RECORD_START.size], salt)))
    if len(content) < length or _CRC.unpack_from(header_bytes, _RECORD_START.size)[0] != crc:
        return None
    kind, id_length, _, _ = _RECORD_FIELDS.unpack(fields)
    if id_length > length:
        return None
    if kind not in set(RecordKind):  # the CRC rules out damage
        raise StoreTooNewError(
            f"journal {file.name} has a record of kind {kind}, this program knows kinds up to {max(RecordKind)}: "
            "a newer edgefl wrote it; start a newer edgefl"
        )
    try:
        identity = content[:id_length].decode()
    except UnicodeDecodeError:
        return None
    return RecordKind(kind), identity, content[id_length:]


def _is_durable(file: BinaryIO, offset: int, salt: int | None) -> bool:
    """Returns whether a valid record behind `offset` proves that `offset` was synced before it.

    A damaged header hides the salt; then any record proves that the header was durable.
    """
    if salt is None or _get_file_size(file) == 0:
        return _get_file_size(file) >= HEADER_BYTES + RECORD_HEADER_BYTES
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        record_offset = content.find(_RECORD_MAGIC, offset + 1)
        while record_offset != -1:
            if len(content) - record_offset >= RECORD_HEADER_BYTES:
                synced_bytes = _RECORD_FIELDS.unpack_from(content, record_offset + _RECORD_START.size + _CRC.size)[3]
                if offset < synced_bytes <= record_offset and _read_record(file, record_offset, salt) is not None:
                    return True
            record_offset = content.find(_RECORD_MAGIC, record_offset + 1)
    return False


def _get_file_size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


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
