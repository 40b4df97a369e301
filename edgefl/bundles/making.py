"""Puts wheels into a bundle and signs it, on the operator's own machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgefl import DISTRIBUTION
from edgefl.bundles.archive import write_bundle
from edgefl.bundles.keys import key_id, sign
from edgefl.bundles.manifest import Kind, Manifest, WheelEntry
from edgefl.bundles.wheels import wheel_names
from edgefl.errors import BundleError, UsageError
from edgefl.files import sha256_of_file, store_error

MAX_NAME_CHARS = 100
"""What the header of a tar holds of a file's own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleWish:
    """What is to be signed.

    `name` is that of a pack's main project, which can be left out when there is one alone, or of the pack that a
    removal takes off.
    """

    kind: Kind
    version: str
    serial: int
    name: str | None = None
    allow_downgrade: bool = False


def make_bundle(wish: BundleWish, wheels: Sequence[Path], key: Ed25519PrivateKey, out: Path) -> Manifest:
    """Writes a signed bundle and returns its manifest; a wheel that a board would refuse is refused here.

    Raises:
        BundleError: the wheels make no bundle of this kind.
        StoreError: the file cannot be written.
    """
    entries = tuple(_entry(path) for path in wheels)
    manifest = Manifest(
        kind=wish.kind,
        name=DISTRIBUTION if wish.kind is Kind.RELEASE else wish.name or _only_project(wish.kind, entries),
        version=wish.version,
        serial=wish.serial,
        key=key_id(key.public_key()),
        wheels=entries,
        allow_downgrade=wish.allow_downgrade,
    )
    text = manifest.dump()
    Manifest.load(text)
    for path, entry in zip(wheels, entries, strict=True):
        wheel_names(path, entry, wish.kind)
    try:
        write_bundle(out, text=text, signature=sign(key, text), wheels=wheels)
    except OSError as error:
        raise store_error(out, error) from None
    return manifest


def _entry(path: Path) -> WheelEntry:
    if len(path.name) > MAX_NAME_CHARS:
        raise BundleError(f"{path.name} has a name of {len(path.name)} characters, at most {MAX_NAME_CHARS} fit")
    if path.suffix != ".whl":
        raise BundleError(f"{path.name} is no wheel; only wheels are signed, build one: pip wheel --no-deps FOLDER")
    return WheelEntry(file=path.name, sha256=sha256_of_file(path), num_bytes=path.stat().st_size)


def _only_project(kind: Kind, entries: Sequence[WheelEntry]) -> str:
    if kind is Kind.REMOVAL:
        raise UsageError("say with --name which pack is to be taken off")
    try:
        projects = {entry.project for entry in entries}
    except ValueError as error:
        raise BundleError(str(error)) from None
    if len(projects) != 1:
        raise UsageError(f"the wheels are of {', '.join(sorted(projects))}; say with --name whose pack it is")
    return projects.pop()
