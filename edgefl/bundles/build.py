"""Packs wheels into a signed bundle, on the operator's own machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgefl import DISTRIBUTION
from edgefl.bundles.archive import write_bundle
from edgefl.bundles.keys import compute_key_id, sign_manifest
from edgefl.bundles.manifest import BundleKind, BundleManifest, WheelEntry
from edgefl.bundles.wheels import check_wheel
from edgefl.core.errors import BundleError, UsageError
from edgefl.system.atomic_files import compute_sha256, make_store_error

MAX_NAME_CHARS = 100
"""Maximum length of a file's own name in a tar header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleSpec:
    """Description of the bundle to sign.

    `name` is a pack's main project, which may be omitted when there is only one, or the pack that a removal
    uninstalls.
    """

    kind: BundleKind
    version: str
    serial: int
    name: str | None = None
    allow_downgrade: bool = False


def make_bundle(spec: BundleSpec, wheels: Sequence[Path], key: Ed25519PrivateKey, out: Path) -> BundleManifest:
    """Writes a signed bundle and returns its manifest; rejects wheels that a board would reject.

    Raises:
        BundleError: the wheels make no bundle of this kind.
        StoreError: the file cannot be written.
    """
    entries = tuple(_make_entry(path) for path in wheels)
    manifest = BundleManifest(
        kind=spec.kind,
        name=DISTRIBUTION
        if spec.kind is BundleKind.RELEASE
        else spec.name or _get_single_project(spec.kind, entries),
        version=spec.version,
        serial=spec.serial,
        key=compute_key_id(key.public_key()),
        wheels=entries,
        allow_downgrade=spec.allow_downgrade,
    )
    text = manifest.encode()
    BundleManifest.decode(text)
    for path, entry in zip(wheels, entries, strict=True):
        check_wheel(path, entry, spec.kind)
    try:
        write_bundle(out, manifest_bytes=text, signature=sign_manifest(key, text), wheels=wheels)
    except OSError as error:
        raise make_store_error(out, error) from None
    return manifest


def _make_entry(path: Path) -> WheelEntry:
    if len(path.name) > MAX_NAME_CHARS:
        raise BundleError(f"{path.name} has a name of {len(path.name)} characters, at most {MAX_NAME_CHARS} fit")
    if path.suffix != ".whl":
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
