"""A coordinator's directory back out of a backup: checked as a whole before anything is put in place."""

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

from edgefl.coordinator.backup import FORMAT, MANIFEST, BackedUpFile, Manifest
from edgefl.coordinator.directory import CoordinatorDirectory, load_directory
from edgefl.coordinator.runs.standing import ANOTHER_LIFE
from edgefl.errors import NotFoundError, StoreError, StoreTooNewError, UsageError
from edgefl.files import DATABASE_NAME, make_private_directory, store_error, sync_directory
from edgefl.storage.database import SCHEMA_REVISION
from edgefl.storage.snapshot import check_database
from edgefl.untrusted import parse_json

MAX_MANIFEST_BYTES = 256 * 1024 * 1024
_BLOCK_BYTES = 1 << 20
# TypeError: what tarfile makes of a file that ends within gzip's header; ValueError: the system, of a NUL in a name.
# AttributeError: tarfile before Python 3.11.4 raises it when a stream's first bytes are damaged.
_DAMAGE = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, TypeError, ValueError, AttributeError)


@dataclass(slots=True)
class _Found:
    """What an archive was seen to hold."""

    files: dict[str, BackedUpFile] = field(default_factory=dict)
    manifest: Manifest | None = None


def restore(archive: Path, root: Path) -> tuple[CoordinatorDirectory, Manifest]:
    """Returns the directory that a backup was made of, now at `root`, and what the backup says of itself.

    Raises:
        UsageError: `root` holds something already.
        NotFoundError: there is no such backup.
        StoreTooNewError: a newer edgefl made it.
        StoreError: it is no backup, is damaged or not whole; or there is no room. Nothing was put in place.
    """
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(f"{root} is not empty; restore into a new --dir, and move it when it is right")
    if not archive.is_file():
        raise NotFoundError(f"no backup {archive}")
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{root.name}.restore-", dir=root.parent))
    except OSError as error:
        raise store_error(root, error) from None
    try:
        manifest = _checked(archive, _unpacked(archive, stage))
        _check_store(stage, manifest)
        load_directory(stage)
        _make_durable(stage)
        stage.replace(root)
        sync_directory(root.parent)
    except OSError as error:
        raise store_error(root, error) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return load_directory(root), manifest


def _unpacked(archive: Path, stage: Path) -> _Found:
    found = _Found()
    try:
        with tarfile.open(archive, mode="r|*") as members:
            for member in members:
                name = _safe_name(archive, member)
                if name == MANIFEST:
                    found.manifest = _manifest(archive, members, member)
                else:
                    found.files[name] = _write(members, member, stage / name)
    except _DAMAGE as error:
        raise StoreError(f"{archive} is no whole backup: {error}") from None
    return found


def _safe_name(archive: Path, member: tarfile.TarInfo) -> str:
    path = PurePosixPath(member.name)
    if not member.isreg() or path.is_absolute() or ".." in path.parts or not path.parts:
        raise StoreError(f"{archive} is no backup of edgefl: it holds {member.name[:80]!r}")
    return path.as_posix()


def _write(members: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> BackedUpFile:
    source, digest = members.extractfile(member), hashlib.sha256()
    assert source is not None  # a regular file, as was checked
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(handle, "wb") as file:
        while block := source.read(_BLOCK_BYTES):
            digest.update(block)
            file.write(block)
    return BackedUpFile(sha256=digest.hexdigest(), num_bytes=member.size)


def _manifest(archive: Path, members: tarfile.TarFile, member: tarfile.TarInfo) -> Manifest:
    source = members.extractfile(member)
    if source is None or member.size > MAX_MANIFEST_BYTES:
        raise StoreError(f"{archive}: its manifest of {member.size} bytes is too large")
    try:
        value = parse_json(source.read())
        if value["v"] > FORMAT:
            raise StoreTooNewError(f"{archive} was made by a newer edgefl ({value['version']}); update edgefl")
        files = {name: BackedUpFile(**entry) for name, entry in value["files"].items()}
        known = {name: value[name] for name in ("fleet", "version", "created_at", "revision", "has_models")}
        return Manifest(**known, files=files)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(f"{archive}: its manifest cannot be read: {error!r}") from None


def _checked(archive: Path, found: _Found) -> Manifest:
    manifest = found.manifest
    if manifest is None:
        raise StoreError(f"{archive} is no whole backup: it has no {MANIFEST}, which is its last part; copy it again")
    for name, expected in manifest.files.items():
        if name not in found.files:
            raise StoreError(f"{archive}: {name} is missing; copy the backup again")
        if found.files[name] != expected:
            raise StoreError(
                f"{archive}: {name} is damaged, its SHA-256 is not the manifest's; copy the backup again"
            )
    if extra := sorted(set(found.files) - set(manifest.files)):
        raise StoreError(f"{archive}: {extra[0]} is not in its manifest; nothing was restored")
    return manifest


def _check_store(stage: Path, manifest: Manifest) -> None:
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


def _make_durable(stage: Path) -> None:
    for run in (stage / "runs").glob("*"):
        (run / ANOTHER_LIFE).touch(mode=0o600)
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
