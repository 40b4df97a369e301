"""Mirror of a coordinator's directory in its store, from which another host goes on.

Runs, models and what devices fetch are files in the directory, on this host's disk. With a mirror that copy is a
cache, and what counts is in the store: journals in rows of bytes, small files in rows, and files named by their
SHA-256 in the shared objects. A journal's record is in the store before `WalJournal.sync` returns, together with each
file that changed in the directory. Before any other transaction commits, the files that its rows may name are there
too. So what another host restores is the directory as after a power cut of this one, and the same recovery goes on
from there.

Each transaction checks the lease, so a host that lost it commits nothing. The shared objects need no fence: their
keys begin with the epoch of their writer, who removes one only when a transaction that dropped it has committed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from sqlalchemy import BigInteger, Column, Connection, LargeBinary, Table, Text, delete, select
from sqlalchemy.dialects.postgresql import insert

from edgefl.core.errors import EdgeflError, NotFoundError, StoreBusyError, StoreError, StoreFullError
from edgefl.core.safe_parsing import SHA256
from edgefl.storage.database import Database
from edgefl.storage.lease import FAILOVER_TABLES, Lease
from edgefl.storage.shared_objects import SharedObjects
from edgefl.system.atomic_files import (
    TEMPORARY_SUFFIX,
    compute_sha256,
    make_private_directory,
    make_store_error,
    write_atomic,
)

log = logging.getLogger(__name__)

FOLDERS = ("runs", "models", "bases", "deployments", "bundles")
"""The mirrored folders; keys, certificates and settings are each host's own, and the rest is made anew."""
MAX_INLINE_BYTES = 1024 * 1024
"""Of a file in a row; a larger one is a shared object, as all are that are named by their SHA-256."""
COPY_MARK = "mirrored"
"""File of a directory that is a copy of its store's mirror, or its source; it has the store's location."""
REPLACED_FOLDER = "replaced"
"""Where a directory that was no copy keeps what the mirror has not, or has otherwise."""
CHUNK_BYTES = 8 * 1024 * 1024
_SETTLED_NS = 1_000_000_000
"""A folder that changed less than this before it was listed is listed again: times of change are coarse."""
_JOURNAL_SUFFIX = ".wal"

_FILES = Table(
    "mirrored_files",
    FAILOVER_TABLES,
    Column("path", Text, primary_key=True),
    Column("sha256", Text, nullable=False),
    Column("object_key", Text, nullable=False),
    Column("content", LargeBinary, nullable=True),
)
_JOURNALS = Table(
    "mirrored_journals",
    FAILOVER_TABLES,
    Column("path", Text, primary_key=True),
    Column("start", BigInteger, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A mirrored file; `identity` is of the local copy, and changes when it is replaced."""

    sha256: str
    object_key: str
    identity: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True)
class _Folder:
    """A folder as it was listed; `mark` is None where it must be listed again."""

    mark: tuple[int, int] | None
    folders: list[str]
    files: set[str]


@dataclass(slots=True)
class _Changes:
    """What the next transaction writes: files with their content, and paths that are gone."""

    files: dict[str, tuple[_File, bytes | None]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    removed_journals: set[str] = field(default_factory=set)
    folders: dict[str, _Folder] = field(default_factory=dict)


class DirectoryMirror:
    """Mirror of the folders under `root`; implements `database.WriteFence`. Thread-safe once it is open.

    Args:
        root: of the coordinator's directory, locked for this process.
        lease: of the store; held before anything is written.
        objects: shared by all hosts.
        clock_ns: Unix nanoseconds, by which the file system marks changes.
    """

    def __init__(self, root: Path, lease: Lease, objects: SharedObjects, *, clock_ns: Callable[[], int]) -> None:
        self._root, self._lease, self._objects, self._clock_ns = root, lease, objects, clock_ns
        self._database: Database | None = None
        self._files: dict[str, _File] = {}
        self._folders: dict[str, _Folder] = {}
        self._journals: dict[str, int | None] = {}
        self._changes = _Changes()
        self._unused_keys: set[str] = set()
        self._lock = threading.RLock()

    # The host that waits

    def load_files(self) -> None:
        """Makes the files of the directory those of the mirror, journals aside; may run while another host is active.

        Raises:
            StoreError: the store cannot be read, a file is damaged, or nothing can be written.
            EdgeflError: the shared objects cannot be read.
        """
        query = select(_FILES.c.path, _FILES.c.sha256, _FILES.c.object_key)
        rows = {row.path: row for row in self._lease.database.read_rows(query)}
        for path, row in rows.items():
            known = self._files.get(path)
            if known is None or (known.sha256, known.object_key) != (row.sha256, row.object_key):
                self._load_file(path, _File(sha256=row.sha256, object_key=row.object_key))
        is_copy = self._is_copy()
        for path in sorted(self._list_local_files(with_journals=not is_copy) - set(rows)):
            self._remove_local(path, is_copy=is_copy)
            self._files.pop(path, None)
        if not is_copy:
            self._mark_copy()

    def load(self) -> None:
        """Makes the directory that of the mirror, once the lease is held; the first holder's own becomes the mirror.

        Raises:
            StoreError, EdgeflError: as `load_files`.
        """
        if not self._lease.is_mirrored:
            return  # `open` saves all that is here
        self.load_files()
        for folder in self._root.glob("runs/*/journal"):
            for path in folder.glob(f"*{_JOURNAL_SUFFIX}"):
                path.unlink()
        query = select(_JOURNALS.c.path).distinct()
        for row in self._lease.database.read_rows(query):
            self._journals[row.path] = self._load_journal(row.path)

    def open(self, database: Database) -> None:
        """Begins to mirror: from here on the store's transactions are fenced, and files are saved with them.

        Raises:
            LeaseLostError: the lease is over.
            EdgeflError: something cannot be read or saved.
        """
        self._database = database
        database.set_fence(self)
        with database.write(durable=True):
            pass
        for path in sorted(self._root.glob(f"runs/*/journal/*{_JOURNAL_SUFFIX}")):
            if self._relative(path) not in self._journals:
                with path.open("rb") as file:
                    self.append_journal(path, file.fileno(), path.stat().st_size)
        self._lease.record_mirrored()
        self._mark_copy()
        self._remove_orphans()

    # The host that is active

    def append_journal(self, path: Path, handle: int, end: int) -> None:
        """Returns when the journal file up to byte `end` is in the store, and all files that changed.

        Raises:
            LeaseLostError: the lease is over.
            StoreError: the store cannot be written.
        """
        assert self._database is not None
        name = self._relative(path)
        start = self._journals.get(name, 0)
        with self._database.write(durable=True) as connection:
            if start is None:
                connection.execute(delete(_JOURNALS).where(_JOURNALS.c.path == name))
            for chunk_start in range(start or 0, end, CHUNK_BYTES):
                content = _read(handle, chunk_start, min(CHUNK_BYTES, end - chunk_start), path)
                row = {"path": name, "start": chunk_start, "content": content}
                adding = insert(_JOURNALS).values(row)
                # Repeated where it is not known whether a commit went through.
                adding = adding.on_conflict_do_update(index_elements=["path", "start"], set_={"content": content})
                connection.execute(adding)
        with self._lock:
            self._journals[name] = end

    def truncate_journal(self, path: Path, end: int) -> None:
        """Has the next `append_journal` replace the file, where the store has more of it than `end` bytes."""
        name = self._relative(path)
        with self._lock:
            if (self._journals.get(name) or 0) > end:
                self._journals[name] = None

    def prepare(self) -> None:
        """Finds the files that changed, and saves the large ones; see `WriteFence`.

        Raises:
            StoreBusyError, StoreFullError: the place for models cannot be used now.
            StoreError: the directory cannot be read.
        """
        with self._lock:
            self._changes = self._find_changes()

    def check(self, connection: Connection) -> None:
        """Checks the lease, and writes the rows of the files that changed; see `WriteFence`."""
        self._lease.check(connection)
        changes = self._changes
        for path, (file, content) in changes.files.items():
            row = {"path": path, "sha256": file.sha256, "object_key": file.object_key, "content": content}
            saving = insert(_FILES).values(row)
            connection.execute(saving.on_conflict_do_update(index_elements=["path"], set_=row))
        if changes.removed:
            connection.execute(delete(_FILES).where(_FILES.c.path.in_(changes.removed)))
        if changes.removed_journals:
            connection.execute(delete(_JOURNALS).where(_JOURNALS.c.path.in_(changes.removed_journals)))

    def finish(self) -> None:
        """Removes the objects that no file has any more; see `WriteFence`."""
        with self._lock:
            changes, self._changes = self._changes, _Changes()
            for path in changes.removed_journals:
                self._journals.pop(path, None)
            self._folders = changes.folders
            before = [self._files.pop(path, None) for path in (*changes.removed, *changes.files)]
            self._files |= {path: file for path, (file, _) in changes.files.items()}
            self._unused_keys |= {file.object_key for file in before if file is not None and file.object_key}
            if self._unused_keys:
                self._remove_unused()

    def _remove_unused(self) -> None:
        used = {file.object_key for file in self._files.values()}
        keys, self._unused_keys = self._unused_keys - used, set()
        for key in keys:
            try:
                self._objects.remove(key)
            except (EdgeflError, OSError) as error:  # the next start removes it
                log.warning("a file that is not needed stays among the shared ones: %s", error)

    def _remove_orphans(self) -> None:
        """Removes objects of earlier epochs that no row names: their writers can commit none any more."""
        used = {file.object_key for file in self._files.values()}
        try:
            keys = self._objects.list_keys()
        except EdgeflError as error:  # the next start removes them
            log.warning("files that are not needed may stay among the shared ones: %s", error)
            return
        for key in keys:
            epoch, _, name = key.partition("/")
            if epoch.isdigit() and int(epoch) < self._lease.epoch and SHA256.match(name) and key not in used:
                self._unused_keys.add(key)
        self._remove_unused()

    # Looking for changes

    def _find_changes(self) -> _Changes:
        changes, seen = _Changes(), set()
        for name, found in self._walk():
            changes.folders[name] = found
            seen |= found.files
            if self._folders.get(name) is found:
                continue
            for path in found.files:
                if (change := self._find_change(path)) is not None:
                    changes.files[path] = change
        changes.removed = set(self._files) - seen
        changes.removed_journals = {path for path in self._journals if not (self._root / path).exists()}
        return changes

    def _walk(self) -> Iterator[tuple[str, _Folder]]:
        """Yields the folders; one that did not change is the very object of the last time."""
        waiting = list(FOLDERS)
        while waiting:
            name = waiting.pop()
            found = self._list_folder(name)
            if found is not None:
                yield name, found
                waiting += found.folders

    def _list_folder(self, name: str) -> _Folder | None:
        known = self._folders.get(name)
        try:
            info = (self._root / name).stat()
            mark = (info.st_ino, info.st_mtime_ns)
            if known is not None and known.mark == mark:
                return known
            is_old = self._clock_ns() - info.st_mtime_ns > _SETTLED_NS
            found = _Folder(mark if is_old else None, [], set())
            with os.scandir(self._root / name) as entries:
                for entry in entries:
                    path = f"{name}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        found.folders.append(path)
                    elif entry.is_file(follow_symlinks=False) and _is_mirrored(path):
                        found.files.add(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{self._root / name} cannot be read: {error.strerror or error}") from None
        return found

    def _find_change(self, path: str) -> tuple[_File, bytes | None] | None:
        local, known = self._root / path, self._files.get(path)
        try:
            identity = _identify(local)
            if known is not None and known.identity == identity:
                return None
            sha256 = compute_sha256(local)
            if known is not None and known.sha256 == sha256:
                self._files[path] = _File(sha256=sha256, object_key=known.object_key, identity=identity)
                return None
            if identity[2] <= MAX_INLINE_BYTES and not SHA256.match(local.stem):
                content = local.read_bytes()
                sha256 = hashlib.sha256(content).hexdigest()
                return _File(sha256=sha256, object_key="", identity=identity), content
            key = f"{self._lease.epoch}/{sha256}"
            if not self._save_object(key, local, sha256, identity):
                return None
        except FileNotFoundError:  # removed meanwhile, which the next look finds
            return None
        except OSError as error:
            raise StoreError(f"{local} cannot be read: {error.strerror or error}") from None
        return _File(sha256=sha256, object_key=key, identity=identity), None

    def _save_object(self, key: str, local: Path, sha256: str, identity: tuple[int, int, int]) -> bool:
        """Returns whether the file is among the shared objects; not if it was replaced meanwhile.

        Raises:
            StoreBusyError: the storage cannot be used now, or not by us.
            FileNotFoundError: the file was removed meanwhile.
        """
        try:
            self._objects.save(key, local, sha256)
        except StoreFullError:
            raise
        except EdgeflError as error:
            if _identify(local) != identity:
                return False
            raise StoreBusyError(f"the place for models cannot be used: {error}") from error
        return True

    # Loading

    def _is_copy(self) -> bool:
        mark = self._root / COPY_MARK
        return mark.is_file() and mark.read_text(errors="replace") == self._lease.database.location

    def _mark_copy(self) -> None:
        write_atomic(self._root / COPY_MARK, self._lease.database.location.encode())

    def _remove_local(self, path: str, *, is_copy: bool) -> None:
        """Removes a file; one of a directory that is no copy yet is kept aside instead."""
        local, kept = self._root / path, self._root / REPLACED_FOLDER / path
        if is_copy or kept.exists():
            local.unlink(missing_ok=True)
            return
        make_private_directory(kept.parent)
        local.rename(kept)
        log.warning("%s is not in the store's mirror; it is kept as %s", local, kept)

    def _list_local_files(self, *, with_journals: bool) -> set[str]:
        found: set[str] = set()
        for folder in FOLDERS:
            for root, _, names in os.walk(self._root / folder):
                found |= {self._relative(Path(root) / name) for name in names}
        return {path for path in found if with_journals or not _is_journal(path)}

    def _load_file(self, path: str, file: _File) -> None:
        local = self._check_path(path)
        if not (local.is_file() and compute_sha256(local) == file.sha256):
            make_private_directory(local.parent)
            if local.is_file() and not self._is_copy():
                self._remove_local(path, is_copy=False)
            if file.object_key:
                try:
                    self._objects.load(file.object_key, local, file.sha256)
                except NotFoundError:
                    if self._lease.epoch:
                        raise
                    return  # the active host has just removed it
            else:
                content = self._lease.database.read_value(select(_FILES.c.content).where(_FILES.c.path == path))
                if content is None or hashlib.sha256(content).hexdigest() != file.sha256:
                    if self._lease.epoch:
                        raise StoreError(f"{path} in store {self._lease.database.location} is damaged")
                    return  # likewise
                write_atomic(local, content)
        self._files[path] = _File(sha256=file.sha256, object_key=file.object_key, identity=_identify(local))

    def _load_journal(self, path: str) -> int:
        """Returns the file's length."""
        local, end = self._check_path(path), 0
        make_private_directory(local.parent)
        query = select(_JOURNALS.c.start).where(_JOURNALS.c.path == path).order_by(_JOURNALS.c.start)
        try:
            with local.open("wb") as file:
                local.chmod(0o600)
                for row in self._lease.database.read_rows(query):
                    if row.start != end:
                        raise StoreError(f"{path} in the store lacks bytes {end} to {row.start}")
                    at = (_JOURNALS.c.path == path) & (_JOURNALS.c.start == row.start)
                    end += file.write(self._lease.database.read_value(select(_JOURNALS.c.content).where(at)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise make_store_error(local, error) from None
        return end

    def _check_path(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if not parts or parts[0] not in FOLDERS or ".." in parts or "\0" in path:
            raise StoreError(f"the store names {path!r:.80}, which is no file of a coordinator's directory")
        return self._root / path

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _is_journal(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return len(parts) == 4 and parts[0] == "runs" and parts[2] == "journal" and path.endswith(_JOURNAL_SUFFIX)


def _is_mirrored(path: str) -> bool:
    name = path.rpartition("/")[2]
    return not (name.startswith(".") or name.endswith(TEMPORARY_SUFFIX) or _is_journal(path))


def _identify(path: Path) -> tuple[int, int, int]:
    info = path.stat()
    return info.st_ino, info.st_mtime_ns, info.st_size


def _read(handle: int, start: int, length: int, path: Path) -> bytes:
    content = os.pread(handle, length, start)
    if len(content) != length:
        raise StoreError(f"journal {path} ends at byte {start + len(content)}, expected {start + length}")
    return content
