"""One file with all that a coordinator is: store, journals, checkpoints, models, keys, certificates, settings.

Consistent while the coordinator runs. Everything is first held still in a folder inside the directory, by hard links:
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
from edgefl.errors import StoreError, UsageError
from edgefl.files import TEMPORARY_SUFFIX, open_whole, store_error
from edgefl.storage.snapshot import check_database, copy_database
from edgefl.types import Json

FORMAT = 1
MANIFEST = "manifest.json"
NOTICE = "This archive holds the fleet's keys: who has it can be the coordinator. Keep it as safe as the coordinator."
_STAGE_PREFIX = ".backup-"
_LEFT_OUT = frozenset({"lock", "broker.lock", "backup.lock", "broker"})
"""Locks, and what a broker makes anew at each start."""
_TRIES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class BackedUpFile:
    """One file of a backup."""

    sha256: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a backup says of itself; `revision` is that of the store's schema, None for a store that is not in it."""

    fleet: str
    version: str
    created_at: float
    revision: str | None
    has_models: bool
    files: dict[str, BackedUpFile] = field(default_factory=dict)

    def to_json(self) -> Json:
        return {"v": FORMAT, "notice": NOTICE, "holds_keys": True, **asdict(self)}


def back_up(
    directory: CoordinatorDirectory, target: Path, *, store: Path | None, with_models: bool = True
) -> Manifest:
    """Returns what was written to `target`, a new .tar.gz of mode 0600; the coordinator may be running or not.

    Args:
        directory: what is backed up.
        target: must not exist; there whole or not at all.
        store: the SQLite database; None leaves it out, since it is kept elsewhere.
        with_models: else the models of finished runs stay out; checkpoints never do.

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
            # Before the store: rows are in it before a checkpoint is written, so its copy has all that these know of.
            _hold_runs(directory.runs, stage / "runs")
            if with_models:  # before and after: a model that the copied store names was there at one of the two times
                _hold(directory.models, stage / "models")
            revision = None if store is None else _copied(store, stage / directory.database.name)
            _hold_rest(directory, stage, with_models=with_models)
            return _pack(stage, target, directory.fleet, revision=revision, has_models=with_models)
    except OSError as error:
        raise store_error(target, error) from None


def _copied(store: Path, copy: Path) -> str:
    """Returns the revision of the copy once it is known to be sound: a damaged one would only be found too late."""
    copy_database(store, copy)
    report = check_database(copy)
    if report.problems:
        raise StoreError(f"store {store} is damaged: {report.problems[0]}; see edgefl doctor")
    return report.revision


@contextlib.contextmanager
def _stage(directory: CoordinatorDirectory) -> Iterator[Path]:
    """Gives an empty folder on the directory's own disk; what a killed backup left goes first."""
    with (directory.root / "backup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"another backup of {directory.root} is under way; wait for it") from None
        for left in directory.root.glob(f"{_STAGE_PREFIX}*"):
            shutil.rmtree(left)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=directory.root))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _hold_runs(runs: Path, held: Path) -> None:
    """Holds each run's journal together with its checkpoints: pruned in between, they would not fit each other."""
    for run in sorted(path for path in runs.iterdir() if path.is_dir()) if runs.is_dir() else []:
        for _ in range(_TRIES):
            before = _names(run)
            _hold(run, held / run.name)
            if before == _names(run):
                break
            shutil.rmtree(held / run.name, ignore_errors=True)
        else:
            raise StoreError(f"run {run.name} changes too fast to be backed up; try again")


def _hold_rest(directory: CoordinatorDirectory, stage: Path, *, with_models: bool) -> None:
    done = {directory.runs.name, *(directory.database.name + end for end in ("", "-wal", "-shm", "-journal"))}
    left_out = done | _LEFT_OUT | (set() if with_models else {directory.models.name})
    for path in sorted(directory.root.iterdir()):
        if path.name not in left_out and not path.name.startswith("."):
            _hold(path, stage / path.name)
    # Empty folders are part of a directory that is set up; an archive has only files.
    for name in (directory.models, directory.runs):
        (stage / name.name).mkdir(exist_ok=True)


def _hold(source: Path, held: Path) -> None:
    """Links a file, or a folder's files, to `held`; what vanishes meanwhile was not to stay."""
    if source.is_symlink() or source.name.endswith((TEMPORARY_SUFFIX, ".log", ".log.1")) or source.name == "lock":
        return
    if source.is_dir():
        held.mkdir(mode=0o700, exist_ok=True, parents=True)
        for path in sorted(source.iterdir()):
            _hold(path, held / path.name)
    elif source.is_file() and not held.exists():
        with contextlib.suppress(FileNotFoundError):
            held.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
            _link(source, held)


def _link(source: Path, held: Path) -> None:
    try:
        held.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without hard links, or a folder on another one
        shutil.copyfile(source, held)


def _names(folder: Path) -> set[tuple[str, int]]:
    """Returns a folder's files with their identity, which changes when a file is replaced."""
    found = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.name.endswith((TEMPORARY_SUFFIX, ".log")) and path.name != "lock":
                found.add((str(path.relative_to(folder)), path.stat().st_ino))
    return found


def _pack(stage: Path, target: Path, fleet: str, *, revision: str | None, has_models: bool) -> Manifest:
    manifest = Manifest(
        fleet=fleet, version=__version__, created_at=time.time(), revision=revision, has_models=has_models
    )
    with open_whole(target) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(path for path in stage.rglob("*") if path.is_file()):
            name = path.relative_to(stage).as_posix()
            manifest.files[name] = _add(archive, name, path)
        content = json.dumps(manifest.to_json(), indent=1).encode()
        with tempfile.SpooledTemporaryFile() as text:
            text.write(content)
            text.seek(0)
            archive.addfile(_member(MANIFEST, len(content)), text)
    return manifest


def _add(archive: tarfile.TarFile, name: str, path: Path) -> BackedUpFile:
    """Adds what a file holds now; a journal that grows meanwhile is a good one up to there, too."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        reader = _Hashing(file)
        archive.addfile(_member(name, size), reader)  # type: ignore[arg-type]  # it only calls read
    return BackedUpFile(sha256=reader.digest.hexdigest(), num_bytes=size)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, 0o600, int(time.time())
    return member


class _Hashing:
    """Reads a file and remembers the hash of what was read."""

    def __init__(self, file: IO[Any]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        content: bytes = self._file.read(size)
        self.digest.update(content)
        return content
