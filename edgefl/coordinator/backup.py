"""Backup of a coordinator in one file: store, journals, checkpoints, models, keys, certificates, settings.

Consistent while the coordinator runs. Everything is first staged by hard links in a folder inside the directory:
files that are replaced meanwhile keep their old content there, journals only grow, and the store is copied by
SQLite's own online backup. The manifest with the SHA-256 of each file is the archive's last member, so a torn archive
has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from edgefl import __version__
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.core.errors import StoreError, UsageError
from edgefl.core.types import Json
from edgefl.storage.sqlite_backup import check_database, copy_database
from edgefl.system.atomic_files import TEMPORARY_SUFFIX, make_store_error, open_atomic

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SECRETS_NOTICE = (
    "This archive holds the fleet's keys: who has it can be the coordinator. Keep it as safe as the coordinator."
)
_STAGE_PREFIX = ".backup-"
_EXCLUDED_NAMES = frozenset({"lock", "broker.lock", "backup.lock", "broker"})
"""Locks, and files that a broker makes anew at each start."""
_MAX_ATTEMPTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupFile:
    """One file of a backup."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupManifest:
    """Manifest of a backup; `revision` is that of the store's schema, None if the store is not included."""

    fleet: str
    version: str
    created_at: float
    revision: str | None
    has_models: bool
    files: dict[str, BackupFile] = field(default_factory=dict)

    def to_json(self) -> Json:
        return {"v": FORMAT_VERSION, "notice": SECRETS_NOTICE, "holds_keys": True, **asdict(self)}


def create_backup(
    directory: CoordinatorDirectory, target: Path, *, store: Path | None, with_models: bool = True
) -> BackupManifest:
    """Writes a backup to `target`, a new .tar.gz of mode 0600; the coordinator may be running or not.

    Args:
        directory: to be backed up.
        target: must not exist; written atomically.
        store: the SQLite database; None if the store is elsewhere.
        with_models: include the models of finished runs; checkpoints always are.

    Raises:
        UsageError: the target exists, or lies in the directory.
        StoreError: something cannot be read or written, or another backup is under way.
        StoreFullError: no room.
    """
    if target.exists():
        raise UsageError(f"{target} exists already; name a new file")
    if target.resolve().is_relative_to(directory.root.resolve()):
        raise UsageError(f"{target} lies in the directory that is backed up; name a file elsewhere")
    try:
        with _stage(directory) as stage:
            # Before the store: rows are written before their checkpoint, so the copied store has those of these.
            _link_runs(directory.runs, stage / "runs")
            if with_models:  # before and after: a model that the copied store names existed at one of the two times
                _link_tree(directory.models, stage / "models")
            revision = None if store is None else _copy_store(store, stage / directory.database.name)
            _link_rest(directory, stage, with_models=with_models)
            return _write_archive(stage, target, directory.fleet, revision=revision, has_models=with_models)
    except OSError as error:
        raise make_store_error(target, error) from None


def _copy_store(store: Path, copy: Path) -> str:
    """Copies the store, checks the copy, and returns its revision: later damage would be found too late."""
    copy_database(store, copy)
    report = check_database(copy)
    if report.problems:
        raise StoreError(f"store {store} is damaged: {report.problems[0]}; see edgefl doctor")
    return report.revision


@contextlib.contextmanager
def _stage(directory: CoordinatorDirectory) -> Iterator[Path]:
    """Yields an empty folder on the directory's own disk, after removing those of killed backups."""
    with (directory.root / "backup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another backup of {directory.root} is under way; wait for it") from None
        for stale in directory.root.glob(f"{_STAGE_PREFIX}*"):
            shutil.rmtree(stale)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=directory.root))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _link_runs(runs: Path, destination: Path) -> None:
    """Links each run's journal with its checkpoints: pruned in between, they would not match."""
    for run in sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []:
        for _ in range(_MAX_ATTEMPTS):
            files_before = _list_files(run)
            _link_tree(run, destination / run.name)
            if files_before == _list_files(run):
                break
            shutil.rmtree(destination / run.name, ignore_errors=True)
        else:
            raise StoreError(f"run {run.name} changes too fast to be backed up; try again")


def _link_rest(directory: CoordinatorDirectory, stage: Path, *, with_models: bool) -> None:
    handled = {directory.runs.name, *(directory.database.name + end for end in ("", "-wal", "-shm", "-journal"))}
    excluded = handled | _EXCLUDED_NAMES | (set() if with_models else {directory.models.name})
    for path in sorted(directory.root.iterdir()):
        if path.name not in excluded and not path.name.startswith("."):
            _link_tree(path, stage / path.name)
    # Empty folders are part of a directory that is set up; an archive has only files.
    for name in (directory.models, directory.runs):
        (stage / name.name).mkdir(exist_ok=True)


def _link_tree(source: Path, destination: Path) -> None:
    """Links a file, or a folder's files, to `destination`; skips files that vanish meanwhile."""
    if source.is_symlink() or source.name.endswith((TEMPORARY_SUFFIX, ".log", ".log.1")) or source.name == "lock":
        return
    if source.is_dir():
        destination.mkdir(mode=0o700, exist_ok=True, parents=True)
        for path in sorted(source.iterdir()):
            _link_tree(path, destination / path.name)
    elif source.is_file() and not destination.exists():
        with contextlib.suppress(FileNotFoundError):
            destination.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
            _link_file(source, destination)


def _link_file(source: Path, destination: Path) -> None:
    try:
        destination.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without hard links, or a folder on another one
        shutil.copyfile(source, destination)


def _list_files(folder: Path) -> set[tuple[str, int]]:
    """Returns a folder's files with their identity, which changes when a file is replaced."""
    files = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.name.endswith((TEMPORARY_SUFFIX, ".log")) and path.name != "lock":
                files.add((str(path.relative_to(folder)), path.stat().st_ino))
    return files


def _write_archive(
    stage: Path, target: Path, fleet: str, *, revision: str | None, has_models: bool
) -> BackupManifest:
    manifest = BackupManifest(
        fleet=fleet, version=__version__, created_at=time.time(), revision=revision, has_models=has_models
    )
    with open_atomic(target) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(path for path in stage.rglob("*") if path.is_file()):
            name = path.relative_to(stage).as_posix()
            manifest.files[name] = _add_file(archive, name, path)
        content = json.dumps(manifest.to_json(), indent=1).encode()
        with tempfile.SpooledTemporaryFile() as text:
            text.write(content)
            text.seek(0)
            archive.addfile(_make_member(MANIFEST, len(content)), text)
    return manifest


def _add_file(archive: tarfile.TarFile, name: str, path: Path) -> BackupFile:
    """Adds the present content of a file; a journal that grows meanwhile is valid up to there."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        reader = _HashingReader(file)
        archive.addfile(_make_member(name, size), reader)  # type: ignore[arg-type]  # it only calls read
    return BackupFile(sha256=reader.digest.hexdigest(), num_bytes=size)


def _make_member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(time.time())
    return member


class _HashingReader:
    """Reads a file and hashes what was read."""

    def __init__(self, file: IO[Any]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        content: bytes = self._file.read(size)
        self.digest.update(content)
        return content
