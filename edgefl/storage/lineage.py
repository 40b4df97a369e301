"""Lineage of a store: its identity, which changes when its directory turns out to be an older copy.

Two marks count the durable transactions: a row of the database, written with each of them, and a file, overwritten in
place after each. A database behind the file has lost transactions: its write-ahead log is gone. The file's directory
is a copy where inode or time of change differ from what was recorded: no program can set the latter. A snapshot of a
whole disk has the same, so devices are a third place: they remember the newest journal record that they heard of.
Runs whose rows were lost are restored from their folders.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, delete, insert, select, update

from edgefl.core.errors import StoreError, StoreFullError
from edgefl.core.safe_parsing import parse_json
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.store import Store
from edgefl.storage.tables import LineageTable
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

LINEAGE_FILE = "lineage"
"""The id and the inode of the other file; never changed after it was written."""
MARK_FILE = "lineage.mark"
"""The id, the time of change of the other file, and the number of durable transactions; overwritten in place."""
LINEAGE_BEGAN = "lineage-began"
"""Event kind: why devices' answers to the former lineage are not used any more."""
RUN_FILE = "run.json"
"""File beside a run's journal: its row, which nothing else could rebuild."""
MAX_RUN_FILE_BYTES = 4 * 1024 * 1024
_ID_BYTES = 16
_SECOND_NS = 1_000_000_000
_ROW = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LineageMark:
    """Content of the mark file: `changed_ns` is the time of change of `LINEAGE_FILE`."""

    lineage_id: str
    changed_ns: int = 0
    num_commits: int = 0

    def encode(self) -> bytes:
        """Returns the content, of the same length for all values."""
        text = f"edgefl-lineage 1 {self.lineage_id} {self.changed_ns:020d} {self.num_commits:020d}".encode()
        return b"%s %08x\n" % (text, zlib.crc32(text))

    @classmethod
    def decode(cls, content: bytes) -> Self | None:
        """Returns the mark, None if the content is damaged or of another version."""
        text, _, checksum = content.rpartition(b" ")
        words = text.decode("ascii", "replace").split()
        if len(words) != 5 or words[:2] != ["edgefl-lineage", "1"] or checksum != b"%08x\n" % zlib.crc32(text):
            return None
        return cls(lineage_id=words[2], changed_ns=int(words[3]), num_commits=int(words[4]))


class Lineage:
    """Lineage of an open store. Thread-safe as the store is.

    Args:
        store: whose durable transactions are counted from now on.
        folder: of the two files.
        is_shared: whether other hosts write to the store in turn, each with files of its own: these may be missing,
            and behind the store.

    Attributes:
        lineage_id: 32 hexadecimal digits.
        num_lost_commits: durable transactions that the database had lost when it was opened.
        finding: why a new lineage began, in one line; None if the former one goes on, or the store is new.

    Raises:
        StoreFullError: no room.
        StoreError: a file cannot be written.
    """

    def __init__(self, store: Store, folder: Path, *, is_shared: bool = False) -> None:
        self._store, self._folder = store, folder
        self._handle, self._changed_ns, self._has_write_failed = -1, 0, False
        self.num_lost_commits = 0
        self.finding: str | None = None
        row, mark = self._read_row(), self._read_mark()
        self.lineage_id = "" if row is None else row.lineage_id
        if is_shared and row is not None and not _is_ahead(mark, row):
            self._save_files()
            return
        if row is not None or mark is not None:
            self.finding = self._find_discontinuity(row, mark)
        if row is None or self.finding is not None:
            self.renew()
            return
        assert mark is not None
        self._changed_ns = mark.changed_ns
        self._open()

    def renew(self) -> None:
        """Begins a new lineage.

        Raises:
            StoreFullError: no room; the next start begins another one.
            StoreError: as `Lineage`.
        """
        self.close()
        lineage_id = secrets.token_hex(_ID_BYTES)
        with self._store.database.write(durable=True) as connection:
            connection.execute(delete(LineageTable))
            connection.execute(insert(LineageTable), {"id": _ROW, "lineage_id": lineage_id, "num_commits": 0})
        self.lineage_id = lineage_id
        self._save_files()
        self.save(0)

    def close(self) -> None:
        """Closes the mark file; later transactions are counted in the database alone."""
        self._store.database.set_commit_counter(None)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def count(self, connection: Connection) -> int:
        """Counts a durable transaction, in itself; returns the number."""
        counting = update(LineageTable).values(num_commits=LineageTable.num_commits + 1)
        return connection.execute(counting.returning(LineageTable.num_commits)).scalar() or 0

    def save(self, num_commits: int) -> None:
        """Writes the number of committed transactions to the file; a failure is logged once.

        In place, and the bytes are allocated: it needs no room. A file behind the database is no discontinuity.
        """
        mark = LineageMark(lineage_id=self.lineage_id, changed_ns=self._changed_ns, num_commits=num_commits)
        try:
            os.pwrite(self._handle, mark.encode(), 0)
        except OSError as error:
            if not self._has_write_failed:
                log.warning("%s cannot be written: %s", self._folder / MARK_FILE, error.strerror)
            self._has_write_failed = True

    def _save_files(self) -> None:
        mark_path, path = self._folder / MARK_FILE, self._folder / LINEAGE_FILE
        write_atomic(mark_path, LineageMark(lineage_id=self.lineage_id).encode())
        write_atomic(path, f"{self.lineage_id} {mark_path.stat().st_ino}\n".encode())
        self._changed_ns = path.stat().st_ctime_ns
        self._open()

    def _open(self) -> None:
        path = self._folder / MARK_FILE
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror}") from None
        self._store.database.set_commit_counter(self)

    def _read_row(self) -> LineageTable | None:
        with self._store.database.read() as connection:
            row = connection.execute(select(LineageTable.lineage_id, LineageTable.num_commits)).first()
        return None if row is None else LineageTable(lineage_id=row.lineage_id, num_commits=row.num_commits)

    def _read_mark(self) -> LineageMark | None:
        try:
            return LineageMark.decode((self._folder / MARK_FILE).read_bytes())
        except OSError:
            return None

    def _find_discontinuity(self, row: LineageTable | None, mark: LineageMark | None) -> str | None:
        """Returns why the lineage cannot go on, in one line; None if it can."""
        if mark is None:
            return f"{self._folder / MARK_FILE} is missing or damaged, as in a restored directory"
        copy_finding = self._find_copy(mark)
        if copy_finding is not None:
            return copy_finding
        num_commits = 0 if row is None else row.num_commits
        if row is not None and row.lineage_id != mark.lineage_id:
            return f"the store is of another lineage than {self._folder / MARK_FILE}"
        if num_commits < mark.num_commits:
            self.num_lost_commits = mark.num_commits - num_commits
            return (
                f"the store has {num_commits} of {mark.num_commits} durable transactions: its write-ahead log "
                f"(-wal) was removed or cut, or an older database was put in its place"
            )
        return None

    def _find_copy(self, mark: LineageMark) -> str | None:
        path = self._folder / LINEAGE_FILE
        try:
            lineage_id, inode = path.read_text().split()
            changed_ns, mark_inode = path.stat().st_ctime_ns, (self._folder / MARK_FILE).stat().st_ino
        except (OSError, ValueError):
            return f"{path} is missing or damaged, as in a restored directory"
        is_same_change = changed_ns == mark.changed_ns or (
            # Some file systems keep whole seconds, and forget the rest once the inode left their cache.
            changed_ns % _SECOND_NS == 0 and changed_ns // _SECOND_NS == mark.changed_ns // _SECOND_NS
        )
        if not is_same_change or lineage_id != mark.lineage_id or inode != str(mark_inode):
            return f"{self._folder} is a copy of the directory in which it was written, perhaps an older one"
        return None


def _is_ahead(mark: LineageMark | None, row: LineageTable) -> bool:
    """Returns whether a mark counts transactions that the row of its lineage has not."""
    return mark is not None and mark.lineage_id == row.lineage_id and mark.num_commits > row.num_commits


def open_lineage(store: Store, folder: Path, *, runs_folder: Path, now: float, is_shared: bool = False) -> Lineage:
    """Returns the lineage of the store of a coordinator's folder; a new one is recorded, and lost runs are restored.

    Raises:
        StoreFullError: no room.
        StoreError: its files or the store cannot be written.
    """
    lineage = Lineage(store, folder, is_shared=is_shared)
    if lineage.finding is None:
        return lineage
    restored_ids = _restore_lost_runs(runs_folder, store)
    message = f"{lineage.finding}; a new lineage begins, and devices' answers to the former one are not used"
    if lineage.num_lost_commits:
        message += f"; lost are the last {lineage.num_lost_commits} changes of runs, devices and tokens"
        message += f", but for {', '.join(restored_ids)}, from the journal" if restored_ids else ""
    log.warning("%s", message)
    with store.batch(durable=True):
        store.record_event(LINEAGE_BEGAN, message, at=now, data={"lineage": lineage.lineage_id})
    return lineage


def save_run_record(runs_folder: Path, record: RunRecord) -> None:
    """Writes a run's row beside its journal, for a store that loses it.

    Raises:
        StoreFullError: no room.
        StoreError: it cannot be written.
    """
    content = json.dumps({**asdict(record), "config": dict(record.config)}).encode()
    write_atomic(runs_folder / record.run_id / RUN_FILE, content)


def _restore_lost_runs(folder: Path, store: Store) -> list[str]:
    """Returns the runs that have a journal and no row any more; each gets a row, as one whose coordinator died."""
    known_ids = {record.run_id for record in store.list_runs()}
    restored_ids = []
    for path in sorted(folder.glob(f"*/{RUN_FILE}")):
        run_id = path.parent.name
        if run_id in known_ids:
            continue
        try:
            store.restore_run(_parse_run_record(run_id, path))
        except StoreFullError:
            raise
        except (StoreError, OSError, ValueError, TypeError, KeyError) as error:
            log.warning("run %s cannot be restored from %s: %s", run_id, path, error)
            continue
        restored_ids.append(run_id)
    return restored_ids


def _parse_run_record(run_id: str, path: Path) -> RunRecord:
    with path.open("rb") as file:
        value: Any = parse_json(file.read(MAX_RUN_FILE_BYTES))
    if not isinstance(value, Mapping) or value.get("run_id") != run_id:
        raise ValueError(f"it must be the row of {run_id}")
    return RunRecord(**{**value, "status": RunStatus.RUNNING, "finished_at": None, "reason": None})
