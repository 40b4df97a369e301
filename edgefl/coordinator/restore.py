"""Restore of a coordinator's directory from a backup, verified as a whole before it is moved into place."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from edgefl.coordinator.backup import FORMAT_VERSION, MANIFEST, BackupFile, BackupManifest
from edgefl.coordinator.directory import CoordinatorDirectory, load_directory
from edgefl.coordinator.runs.run_snapshot import NEW_INCARNATION_FILE
from edgefl.core.errors import NotFoundError, StoreError, StoreTooNewError, UsageError
from edgefl.core.safe_parsing import parse_json
from edgefl.storage.database import SCHEMA_REVISION
from edgefl.storage.sqlite_backup import check_database
from edgefl.system.atomic_files import DATABASE_NAME, make_private_directory, make_store_error, sync_directory

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_BLOCK_BYTES = 1 << 20
# TypeError: of tarfile for a file that ends within gzip's header; ValueError: of the system for a NUL in a name.
# AttributeError: tarfile before Python 3.11.4 raises it when a stream's first bytes are damaged.
_DAMAGE_ERRORS = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, TypeError, ValueError, AttributeError)


@dataclass(slots=True)
class _ArchiveContents:
    """Files and manifest read from an archive."""

    files: dict[str, BackupFile] = field(default_factory=dict)
    manifest: BackupManifest | None = None


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
        manifest = _check_manifest(archive, _extract_archive(archive, stage))
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


def _extract_archive(archive: Path, stage: Path) -> _ArchiveContents:
    contents = _ArchiveContents()
    try:
        with tarfile.open(archive, mode="r|*") as members:
            for member in members:
                name = _get_safe_name(archive, member)
                if name == MANIFEST:
                    contents.manifest = _read_manifest(archive, members, member)
                else:
                    contents.files[name] = _extract_file(members, member, stage / name)
    except _DAMAGE_ERRORS as error:
        raise StoreError(f"{archive} is no whole backup: {error}") from None
    return contents


def _get_safe_name(archive: Path, member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    if not member.isreg() or path.is_absolute() or ".." in path.parts or not path.parts:
        raise StoreError(f"{archive} is no backup of edgefl: it holds {member.name[:80]!r}")
    return path.as_posix()


def _extract_file(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> BackupFile:
    source, digest = members.extractfile(member), hashlib.sha256()
    assert source is not None  # a regular file, as was checked
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "wb") as file:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    return BackupFile(sha256=digest.hexdigest(), num_bytes=member.size)


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


def _check_manifest(archive: Path, contents: _ArchiveContents) -> BackupManifest:
    manifest = contents.manifest
    if manifest is None:
        raise StoreError(f"{archive} is no whole backup: it has no {MANIFEST}, which is its last part; copy it again")
    for name, expected in manifest.files.items():
        if name not in contents.files:
            raise StoreError(f"{archive}: {name} is missing; copy the backup again")
        if contents.files[name] != expected:
            raise StoreError(
                f"{archive}: {name} is damaged, its SHA-256 is not the manifest's; copy the backup again"
            )
    if extra := sorted(set(contents.files) - set(manifest.files)):
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
    report = check_database(stage / DATABASE_NAME)
    if report.problems:
        raise StoreError(f"the backup's store is damaged: {report.problems[0]}; take an earlier backup")


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
