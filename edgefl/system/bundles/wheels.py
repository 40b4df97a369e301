"""Wheels of a bundle: checks before installation, selection for a board, and signing on the operator's machine."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from email.parser import BytesHeaderParser
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from packaging.tags import Tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from edgefl import DISTRIBUTION
from edgefl.core.errors import BundleError, UsageError
from edgefl.system.atomic_files import compute_sha256, make_store_error
from edgefl.system.bundles.archive import (
    RESERVED_PROJECTS,
    SIGNERS_NAME,
    BundleKind,
    BundleManifest,
    WheelEntry,
    read_bundle,
    write_bundle,
)
from edgefl.system.bundles.signatures import SignedList, compute_key_id, sign_manifest
from edgefl.system.zip_members import ZIP_ERRORS, find_member_fault, read_member

MAX_UNPACKED_BYTES = 2 * 1024 * 1024 * 1024
MAX_ENTRIES = 50_000
MAX_METADATA_BYTES = 1024 * 1024
# Run whenever any Python of the slot starts, the privileged updater's too: only a release may hold them.
_STARTUP_MODULES = frozenset({"sitecustomize", "usercustomize"})
# Likewise, or installed outside site-packages, or (egg-info) able to pose as a project of another name.
_FORBIDDEN_PACK_SUFFIXES = (".pth", ".data", ".egg-info", ".egg-link", ".egg")

MAX_NAME_CHARS = 100
"""Maximum length of a file's own name in a tar header."""
_FIXED_NAMES = {BundleKind.RELEASE: DISTRIBUTION, BundleKind.SIGNERS: SIGNERS_NAME}


def check_wheel(path: Path, entry: WheelEntry, kind: BundleKind) -> list[str]:
    """Returns the paths in a wheel after checking that they are allowed; executes nothing.

    Raises:
        BundleError: it is no wheel, its metadata contradict its name, or it holds files that this kind must not.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            infos = wheel.infolist()
            _check_sizes(entry, infos)
            for info in infos:
                _check_entry(entry, info)
            _check_metadata(entry, wheel)
    except ZIP_ERRORS as error:
        raise BundleError(f"{entry.file} is no wheel: {error}") from None
    names = [info.filename for info in infos if not info.is_dir()]
    if len(set(names)) != len(names):
        raise BundleError(f"{entry.file} holds a file twice")
    if kind is BundleKind.PACK:
        _check_pack(entry, names)
    return names


def compute_unpacked_bytes(path: Path) -> int:
    """Returns the unpacked size of a wheel in bytes, as its own directory declares."""
    with zipfile.ZipFile(path) as wheel:
        return sum(info.file_size for info in wheel.infolist())


def select_compatible_wheels(entries: Iterable[WheelEntry], tags: Sequence[Tag]) -> list[WheelEntry]:
    """Returns the best wheel of every project for a Python with these tags (best first).

    Raises:
        BundleError: a project has no compatible wheel.
    """
    ranks = {tag: rank for rank, tag in enumerate(tags)}
    by_project: dict[str, list[WheelEntry]] = {}
    for entry in entries:
        by_project.setdefault(entry.project, []).append(entry)
    chosen = []
    for project, wheels in by_project.items():
        ranked = [
            (min(ranks[tag] for tag in matching_tags), wheel)
            for wheel in wheels
            if (matching_tags := wheel.tags & ranks.keys())
        ]
        if not ranked:
            files = ", ".join(wheel.file for wheel in wheels)
            platform = f"Python {sys.version_info.major}.{sys.version_info.minor}, {tags[0] if tags else 'unknown'}"
            raise BundleError(f"it is not for this board ({platform}): of {project} it holds only {files}")
        chosen.append(min(ranked, key=lambda candidate: candidate[0])[1])
    return chosen


def _check_sizes(entry: WheelEntry, infos: Sequence[zipfile.ZipInfo]) -> None:
    total = sum(info.file_size for info in infos)
    if len(infos) > MAX_ENTRIES or total > MAX_UNPACKED_BYTES:
        raise BundleError(
            f"{entry.file} would unpack to {len(infos)} files and {total} bytes; at most {MAX_ENTRIES} files and "
            f"{MAX_UNPACKED_BYTES} bytes are taken"
        )


def _check_entry(entry: WheelEntry, info: zipfile.ZipInfo) -> None:
    if fault := find_member_fault(info):
        raise BundleError(f"{entry.file} {fault}")


def _check_metadata(entry: WheelEntry, wheel: zipfile.ZipFile) -> None:
    """Raises `BundleError` unless the metadata inside a wheel agree with its file name."""
    metadata_files = [
        name for name in wheel.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1
    ]
    if len(metadata_files) != 1:
        raise BundleError(f"{entry.file} is no wheel: it has {len(metadata_files)} METADATA, expected 1")
    info = wheel.getinfo(metadata_files[0])
    metadata = BytesHeaderParser().parsebytes(read_member(wheel, info, MAX_METADATA_BYTES))
    # A header with non-ASCII bytes is not a str.
    name, version = str(metadata.get("Name") or ""), str(metadata.get("Version") or "")
    try:
        matches_name = canonicalize_name(name) == entry.project and str(Version(version)) == entry.version
    except InvalidVersion:
        matches_name = False
    if not matches_name:
        raise BundleError(f"{entry.file} says inside that it is {name[:80]} {version[:80]}")


def _check_pack(entry: WheelEntry, names: Sequence[str]) -> None:
    for name in names:
        top_level = name.partition("/")[0]
        # A module is also a package, a compiled file or an extension: `name/`, `name.pyc`, `name.cpython-311-….so`.
        if (
            top_level.lower().endswith(_FORBIDDEN_PACK_SUFFIXES)
            or top_level.lower().partition(".")[0] in _STARTUP_MODULES
        ):
            raise BundleError(f"{entry.file} holds {name[:120]!r}, which a pack must not: packages and entry points")
        if canonicalize_name(top_level.partition("-")[0].partition(".")[0]) in RESERVED_PROJECTS:
            raise BundleError(f"{entry.file} holds {name[:120]!r}, which is edgefl's own; a pack must not replace it")


def make_bundle(
    draft: BundleManifest,
    wheels: Sequence[Path],
    key: Ed25519PrivateKey,
    out: Path,
    lists: tuple[SignedList, ...] = (),
) -> BundleManifest:
    """Writes a signed bundle and returns its manifest; rejects wheels that a board would reject.

    Args:
        draft: the manifest without key and wheels. An empty name is that of the only project, or of edgefl.
        wheels: of the bundle; the file of a model.
        key: signs it.
        out: the file to write.
        lists: of signers, that travel along.

    Raises:
        BundleError: the wheels make no bundle of this kind.
        StoreError: the file cannot be written.
    """
    entries = tuple(_make_entry(path, draft.kind) for path in wheels)
    name = _FIXED_NAMES.get(draft.kind) or draft.name or _get_single_project(draft.kind, entries)
    manifest = replace(draft, name=name, key=compute_key_id(key.public_key()), wheels=entries)
    text = manifest.encode()
    BundleManifest.decode(text)
    if draft.kind is not BundleKind.MODEL:
        for path, entry in zip(wheels, entries, strict=True):
            check_wheel(path, entry, draft.kind)
    signatures = replace(sign_manifest(key, text), lists=lists)
    try:
        write_bundle(out, manifest_bytes=text, signatures=signatures, wheels=wheels)
    except OSError as error:
        raise make_store_error(out, error) from None
    return manifest


def add_signature(path: Path, key: Ed25519PrivateKey) -> BundleManifest:
    """Adds a signature to a bundle in place and returns its manifest.

    Raises:
        BundleError: it is no bundle, or damaged.
        StoreError: the file cannot be written.
    """
    try:
        with path.open("rb") as file, tempfile.TemporaryDirectory(dir=path.absolute().parent) as folder:
            bundle = read_bundle(file)
            wheels = [Path(folder) / entry.file for entry in bundle.manifest.wheels]
            for entry, wheel in zip(bundle.manifest.wheels, wheels, strict=True):
                bundle.extract_wheel(entry, wheel)
            added = sign_manifest(key, bundle.manifest_bytes).by_key
            signatures = replace(bundle.signatures, by_key={**bundle.signatures.by_key, **added})
            write_bundle(path, manifest_bytes=bundle.manifest_bytes, signatures=signatures, wheels=wheels)
    except OSError as error:
        raise make_store_error(path, error) from None
    return bundle.manifest


def _make_entry(path: Path, kind: BundleKind) -> WheelEntry:
    if len(path.name) > MAX_NAME_CHARS:
        raise BundleError(f"{path.name} has a name of {len(path.name)} characters, at most {MAX_NAME_CHARS} fit")
    if kind is not BundleKind.MODEL and path.suffix != ".whl":
        raise BundleError(f"{path.name} is no wheel; only wheels are signed, build one: pip wheel --no-deps FOLDER")
    return WheelEntry(file=path.name, sha256=compute_sha256(path), num_bytes=path.stat().st_size)


def _get_single_project(kind: BundleKind, entries: Sequence[WheelEntry]) -> str:
    if kind is BundleKind.REMOVAL:
        raise UsageError("say with --name which pack is to be taken off")
    try:
        projects = {entry.project for entry in entries}
    except ValueError as error:
        raise BundleError(str(error)) from None
    if len(projects) != 1:
        raise UsageError(f"the wheels are of {', '.join(sorted(projects))}; say with --name whose pack it is")
    return projects.pop()
