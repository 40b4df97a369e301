"""The journal's file format, little-endian: a header, then records one after another.

    header: magic 8 | version u16 | reserved u16 | salt u32 | number of the first record u64 | CRC-32 u32 of these
    record: magic 4 | length u32 | CRC-32 u32 | kind u8 | id length u8 | reserved u16 | synced u64 | id | body

`length` counts id and body. The CRC covers the whole record but itself and starts from the file's random salt, so
that no body, which comes from a device, can hold what passes for a record. `synced` says how many bytes of this
file were durable when the record was written, and so tells damage from a torn tail: a crash may leave anything
behind the last sync, in any order of pages, but nothing before it. A bad place is a torn tail unless a later
record proves that it was durable.

A header keeps this form in all versions, so that one of a newer edgefl is told from a damaged one.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

from edgefl.errors import JournalError, NotKeptError, StoreTooNewError
from edgefl.storage.formats import check_format

MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_RECORD_BYTES = 1024 * 1024 * 1024
MAX_ID_BYTES = 255

_FILE_MAGIC = b"EDGEFLWJ"
_VERSION = 1
_FILE_HEADER = struct.Struct("<8sHHIQ")
_CRC = struct.Struct("<I")
_RECORD_MAGIC = b"\xe5WR\x01"
_RECORD_START = struct.Struct("<4sI")
_RECORD_REST = struct.Struct("<BBHQ")
_FILE_NAME = re.compile(r"(\d{6,})\.wal\Z")

HEADER_BYTES = _FILE_HEADER.size + _CRC.size
RECORD_HEADER_BYTES = _RECORD_START.size + _CRC.size + _RECORD_REST.size


class RecordKind(IntEnum):
    """What a record says; numbers are never reused."""

    UPDATE = 1
    EVALUATED = 2
    LOST = 3
    STOP = 4
    DECISION = 5
    AGGREGATED = 6
    CHECKPOINT = 7
    TURN = 8
    VITALS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record; `number` counts from 1 over all files, `offset` is where `body` begins in `path`."""

    number: int
    kind: RecordKind
    assignment_id: str
    body: bytes
    path: Path
    offset: int


def journal_files(directory: Path) -> list[Path]:
    """Returns the journal's files, oldest first."""
    if not directory.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in directory.iterdir() if (match := _FILE_NAME.match(path.name))]
    return [path for _, path in sorted(numbered)]


def file_number(path: Path) -> int:
    return int(path.stem)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileHeader:
    """What stands at the beginning of a file."""

    first_record: int
    salt: int


def pack_header(header: FileHeader) -> bytes:
    start = _FILE_HEADER.pack(_FILE_MAGIC, _VERSION, 0, header.salt, header.first_record)
    return start + _CRC.pack(zlib.crc32(start))


def pack_record_header(
    kind: RecordKind, identity: bytes, body_parts: Sequence[bytes], *, salt: int, synced: int
) -> bytes:
    """Returns a record's bytes up to and with its id; the body parts follow.

    Raises:
        NotKeptError: id or body are longer than the format allows.
    """
    length = len(identity) + sum(len(part) for part in body_parts)
    if len(identity) > MAX_ID_BYTES or length > MAX_RECORD_BYTES:
        raise NotKeptError(
            f"journal record of {length} bytes with an id of {len(identity)}, at most {MAX_RECORD_BYTES} and "
            f"{MAX_ID_BYTES} are possible"
        )
    start = _RECORD_START.pack(_RECORD_MAGIC, length)
    rest = _RECORD_REST.pack(kind, len(identity), 0, synced) + identity
    crc = zlib.crc32(rest, zlib.crc32(start, salt))
    for part in body_parts:
        crc = zlib.crc32(part, crc)
    return start + _CRC.pack(crc) + rest


def read_header(path: Path) -> FileHeader | None:
    """Returns a file's header, None if it is not whole.

    Raises:
        StoreTooNewError: a newer edgefl wrote it.
    """
    with path.open("rb") as file:
        return _read_header(file)


@dataclass(slots=True)
class FileScan:
    """Reads one file record by record; `end` is where the good records end."""

    path: Path
    is_newest: bool
    end: int = 0
    next_record: int = 0

    def __iter__(self) -> Iterator[Record]:
        """Yields the good records.

        Raises:
            JournalError: a place that was durable is damaged; the message names file and offset.
            StoreTooNewError: a newer edgefl wrote the file, or a record in it.
        """
        with self.path.open("rb") as file:
            header = _read_header(file)
            if header is None:
                self._accept_torn(file, 0, None)
                return
            self.end, self.next_record = HEADER_BYTES, header.first_record
            size = os.fstat(file.fileno()).st_size
            while self.end < size:
                found = _read_record(file, self.end, header.salt)
                if found is None:
                    self._accept_torn(file, self.end, header.salt)
                    return
                kind, identity, body = found
                record = Record(
                    number=self.next_record, kind=kind, assignment_id=identity, body=body, path=self.path,
                    offset=file.tell() - len(body),
                )  # fmt: skip
                self.end, self.next_record = file.tell(), self.next_record + 1
                yield record

    def _accept_torn(self, file: BinaryIO, offset: int, salt: int | None) -> None:
        if not self.is_newest or _is_durable(file, offset, salt):
            raise JournalError(
                f"journal {self.path} is damaged at byte {offset}; restore a backup, or start the run again"
            )


def _read_header(file: BinaryIO) -> FileHeader | None:
    raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or _CRC.unpack(raw[-_CRC.size :])[0] != zlib.crc32(raw[: -_CRC.size]):
        return None
    magic, version, _, salt, first = _FILE_HEADER.unpack(raw[: -_CRC.size])
    if magic != _FILE_MAGIC or version == 0:
        return None
    check_format(f"journal {file.name}", version, _VERSION)
    return FileHeader(first_record=first, salt=salt)


def _read_record(file: BinaryIO, offset: int, salt: int) -> tuple[RecordKind, str, bytes] | None:
    """Returns kind, id and body of the record at `offset`, None if there is no whole one; leaves `file` behind it."""
    file.seek(offset)
    head = file.read(RECORD_HEADER_BYTES)
    if len(head) < RECORD_HEADER_BYTES:
        return None
    magic, length = _RECORD_START.unpack_from(head)
    if magic != _RECORD_MAGIC or length > MAX_RECORD_BYTES or offset + len(head) + length > _size(file):
        return None
    content = file.read(length)
    rest = head[_RECORD_START.size + _CRC.size :]
    crc = zlib.crc32(content, zlib.crc32(rest, zlib.crc32(head[: _RECORD_START.size], salt)))
    if len(content) < length or _CRC.unpack_from(head, _RECORD_START.size)[0] != crc:
        return None
    kind, id_length, _, _ = _RECORD_REST.unpack(rest)
    if id_length > length:
        return None
    if kind not in set(RecordKind):  # no damage has the right CRC
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
    """Returns whether a good record behind `offset` says that `offset` had been synced before it.

    A damaged header hides the salt; then any record proves that the header was durable.
    """
    if salt is None or _size(file) == 0:
        return _size(file) >= HEADER_BYTES + RECORD_HEADER_BYTES
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.find(_RECORD_MAGIC, offset + 1)
        while place != -1:
            if len(content) - place >= RECORD_HEADER_BYTES:
                synced = _RECORD_REST.unpack_from(content, place + _RECORD_START.size + _CRC.size)[3]
                if offset < synced <= place and _read_record(file, place, salt) is not None:
                    return True
            place = content.find(_RECORD_MAGIC, place + 1)
    return False


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size
