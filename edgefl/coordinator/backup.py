"""Backup of a coordinator in one file: store, journals, checkpoints, models, keys, certificates, settings.

Consistent while the coordinator runs. Everything is first staged by hard links in a folder inside the directory:
files that are replaced meanwhile keep their old content there, journals only grow, and the store is copied by
SQLite's own online backup. The manifest with the SHA-256 of each file is the archive's last member, so a torn archive
has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from edgefl import __version__
from edgefl.coordinator.directory import CoordinatorDirectory, load_directory
from edgefl.coordinator.failover import HOST_ID_FILE
from edgefl.coordinator.runs.checkpointing import NEW_INCARNATION_FILE
from edgefl.core.errors import NotFoundError, StoreError, StoreTooNewError, UsageError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.storage.database import SCHEMA_REVISION
from edgefl.storage.lineage import LINEAGE_FILE, MARK_FILE
from edgefl.storage.mirror import COPY_MARK, REPLACED_FOLDER
from edgefl.storage.sqlite_backup import check_database, copy_database
from edgefl.system.atomic_files import (
    DATABASE_NAME,
    TEMPORARY_SUFFIX,
    make_private_directory,
    make_store_error,
    open_atomic,
    sync_directory,
)

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SECRETS_NOTICE = (
    "This archive holds the fleet's keys: who has it can be the coordinator. Keep it as safe as the coordinator."
)
_STAGE_PREFIX = ".backup-"
_EXCLUDED_NAMES = frozenset(
    {"lock", "broker.lock", "backup.lock", "broker", "compiled", "setup.sh", "setup.tar", LINEAGE_FILE, MARK_FILE}
    | {HOST_ID_FILE, COPY_MARK, REPLACED_FOLDER}
)
"""Locks, what a broker makes anew at each start, the cache of compiled tasks, what boards download, what is each
host's own, and the lineage: a restored directory begins another one."""
_MAX_ATTEMPTS = 50
MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_BLOCK_BYTES = 1 << 20
# TypeError: of tarfile for a file that ends within gzip's header; ValueError: of the system for a NUL in a name.
# AttributeError: tarfile before Python 3.11.4 raises it when a stream's first bytes are damaged.
_DAMAGE_ERRORS = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, TypeError, ValueError, AttributeError)


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
    revision, problems = check_database(copy)
    if problems:
        raise StoreError(f"store {store} is damaged: {problems[0]}; see edgefl doctor")
    return revision


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
        archive.addfile(_make_member(MANIFEST, len(content)), io.BytesIO(content))
    return manifest


def _add_file(archive: tarfile.TarFile, name: str, path: Path) -> BackupFile:
    """Adds the present content of a file; a journal that grows meanwhile is valid up to there."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        reader = _HashingReader(file)
        archive.addfile(_make_member(name, size), reader)
    return BackupFile(sha256=reader.digest.hexdigest(), num_bytes=size)


def _make_member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(time.time())
    return member


class _HashingReader:
    """Reads a file and hashes what was read."""

    def __init__(self, file: IO[Any]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        content: bytes = self._file.read(size)
        self.digest.update(content)
        return content


def restore_backup(archive: Path, root: Path) -> tuple[CoordinatorDirectory, BackupManifest]:
    """Returns the directory restored from a backup at `root`, and the backup's manifest.

    Raises:
        UsageError: `root` is not empty.
        NotFoundError: there is no such backup.
        StoreTooNewError: a newer edgefl made it.
        StoreError: it is no backup, damaged or incomplete; or there is no room. Nothing was restored.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(f"{root} is not empty; restore into a new --dir, and move it when it is right")
    if not archive.is_file():
        raise NotFoundError(f"no backup {archive}")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{root.name}.restore-", dir=root.parent))
    except OSError as error:
        raise make_store_error(root, error) from None
    try:
        manifest = _check_manifest(archive, *_extract_archive(archive, stage))
        _check_store(stage, manifest)
        load_directory(stage)
        _sync_to_disk(stage)
        stage.replace(root)
        sync_directory(root.parent)
    except OSError as error:
        raise make_store_error(root, error) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return load_directory(root), manifest


def _extract_archive(archive: Path, stage: Path) -> tuple[dict[str, BackupFile], BackupManifest | None]:
    """Extracts the files, and returns them and the manifest as the archive has it."""
    files: dict[str, BackupFile] = {}
    manifest = None
    try:
        with tarfile.open(archive, mode="r|*") as members:
            for member in members:
                name = _get_safe_name(archive, member)
                if name == MANIFEST:
                    manifest = _read_manifest(archive, members, member)
                else:
                    files[name] = _extract_file(members, member, stage / name)
    except _DAMAGE_ERRORS as error:
        raise StoreError(f"{archive} is no whole backup: {error}") from None
    return files, manifest


def _get_safe_name(archive: Path, member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    if not member.isreg() or path.is_absolute() or ".." in path.parts or not path.parts:
        raise StoreError(f"{archive} is no backup of edgefl: it holds {member.name[:80]!r}")
    return path.as_posix()


def _extract_file(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> BackupFile:
    source = members.extractfile(member)
    assert source is not None  # a regular file, as was checked
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    reader = _HashingReader(source)
    with os.fdopen(handle, "wb") as file:
        shutil.copyfileobj(reader, file, _BLOCK_BYTES)
    return BackupFile(sha256=reader.digest.hexdigest(), num_bytes=member.size)


def _read_manifest(archive: Path, members: tarfile.TarFile, member: tarfile.TarInfo) -> BackupManifest:
    source = members.extractfile(member)
    if source is None or member.size > MAX_MANIFEST_BYTES:
        raise StoreError(f"{archive}: its manifest of {member.size} bytes is too large")
    try:
        value = parse_json(source.read())
        if value["v"] > FORMAT_VERSION:
            raise StoreTooNewError(f"{archive} was made by a newer edgefl ({value['version']}); update edgefl")
        files = {name: BackupFile(**entry) for name, entry in value["files"].items()}
        fields = {name: value[name] for name in ("fleet", "version", "created_at", "revision", "has_models")}
        return BackupManifest(**fields, files=files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{archive}: its manifest cannot be read: {error!r}") from None


def _check_manifest(archive: Path, files: dict[str, BackupFile], manifest: BackupManifest | None) -> BackupManifest:
    if manifest is None:
        raise StoreError(f"{archive} is no whole backup: it has no {MANIFEST}, which is its last part; copy it again")
    for name, expected in manifest.files.items():
        if name not in files:
            raise StoreError(f"{archive}: {name} is missing; copy the backup again")
        if files[name] != expected:
            raise StoreError(
                f"{archive}: {name} is damaged, its SHA-256 is not the manifest's; copy the backup again"
            )
    if extra := sorted(set(files) - set(manifest.files)):
        raise StoreError(f"{archive}: {extra[0]} is not in its manifest; nothing was restored")
    return manifest


def _check_store(stage: Path, manifest: BackupManifest) -> None:
    if manifest.revision is None:
        return
    if not manifest.revision.isdigit() or int(manifest.revision) > int(SCHEMA_REVISION):
        raise StoreTooNewError(
            f"the backup's store has revision {manifest.revision}, this program knows {SCHEMA_REVISION}; "
            "update edgefl"
        )
    _, problems = check_database(stage / DATABASE_NAME)
    if problems:
        raise StoreError(f"the backup's store is damaged: {problems[0]}; take an earlier backup")


def _sync_to_disk(stage: Path) -> None:
    for run in (stage / "runs").glob("*"):
        (run / NEW_INCARNATION_FILE).touch(mode=0o600)
    for name in ("models", "runs", "broker"):
        make_private_directory(stage / name)
    for path in stage.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            path.chmod(0o700)
            sync_directory(path)
    stage.chmod(0o700)
    sync_directory(stage)
