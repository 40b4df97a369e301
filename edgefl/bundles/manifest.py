"""Manifest of a bundle: kind, version, signer, and every wheel by SHA-256 and size.

The signature covers the exact bytes of this text: nothing in a bundle is used before it is verified, and a wheel
that the text does not list is no part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from edgefl import DISTRIBUTION
from edgefl.core.errors import BundleError
from edgefl.core.safe_parsing import parse_json

MANIFEST_FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 1024
MAX_WHEELS = 500
MAX_TOTAL_WHEEL_BYTES = 1024 * 1024 * 1024
"""The largest bundle that a coordinator stores and a board accepts."""
RESERVED_PROJECTS = frozenset({"edgefl", DISTRIBUTION})
"""Import name and distribution of edgefl: no pack may replace projects of these names."""

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_FILE = re.compile(r"[A-Za-z0-9_.+!-]{1,200}\.whl\Z")


class BundleKind(StrEnum):
    """A RELEASE is edgefl with its dependencies, a PACK a user's own task, codec or local steps.

    A REMOVAL uninstalls a pack, up to its version; it holds no wheels.
    """

    RELEASE = "release"
    PACK = "pack"
    REMOVAL = "removal"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelEntry:
    """One wheel of a bundle; its file name encodes project, version and platform tags."""

    file: str
    sha256: str
    num_bytes: int

    @property
    def project(self) -> str:
        return str(parse_wheel_filename(self.file)[0])

    @property
    def version(self) -> str:
        return str(parse_wheel_filename(self.file)[1])

    @property
    def tags(self) -> frozenset[Tag]:
        return parse_wheel_filename(self.file)[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleManifest:
    """Identity, signer and contents of a bundle.

    Attributes:
        kind, name, version: a release is named `edgefl-fleet`, a pack after its main project, a removal after the
            pack that it uninstalls.
        serial: grows with every signature of the same signer: an older bundle is never installed after a newer one.
        key: id of the key that signed it; see `keys.compute_key_id`.
        wheels: several of one project are allowed, for different boards.
        allow_downgrade: it may replace a newer version.
    """

    kind: BundleKind
    name: str
    version: str
    serial: int
    key: str
    wheels: tuple[WheelEntry, ...]
    allow_downgrade: bool = False

    def encode(self) -> bytes:
        wheels = [{"file": wheel.file, "sha256": wheel.sha256, "bytes": wheel.num_bytes} for wheel in self.wheels]
        document = {
            "v": MANIFEST_FORMAT, "kind": str(self.kind), "name": self.name, "version": self.version,
            "serial": self.serial, "key": self.key, "allow_downgrade": self.allow_downgrade, "wheels": wheels,
        }  # fmt: skip
        return (json.dumps(document, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, text: bytes) -> BundleManifest:
        """Returns the validated manifest in `text`.

        Raises:
            BundleError: it is malformed.
        """
        if len(text) > MAX_MANIFEST_BYTES:
            raise BundleError(f"its manifest has {len(text)} bytes, at most {MAX_MANIFEST_BYTES} are read")
        try:
            value = parse_json(text.decode())
        except ValueError as error:
            raise BundleError(f"its manifest is not JSON: {error}") from None
        if not isinstance(value, dict) or value.get("v") != MANIFEST_FORMAT:
            raise BundleError(f"its manifest is not of format {MANIFEST_FORMAT}; it was made by another edgefl")
        try:
            manifest = cls._from_json(value)
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"its manifest makes no sense: {type(error).__name__} {error}") from None
        _validate(manifest)
        return manifest

    @classmethod
    def _from_json(cls, value: Mapping[str, Any]) -> BundleManifest:
        wheels = value["wheels"]
        kind = BundleKind(value["kind"])
        if not isinstance(wheels, list) or len(wheels) > MAX_WHEELS or bool(wheels) == (kind is BundleKind.REMOVAL):
            raise BundleError(f"a release or pack holds 1 to {MAX_WHEELS} wheels, a removal none")
        return cls(
            kind=kind,
            name=_require_str(value["name"]),
            version=_require_str(value["version"]),
            serial=_require_int(value["serial"]),
            key=_require_str(value["key"]),
            allow_downgrade=value.get("allow_downgrade") is True,
            wheels=tuple(
                WheelEntry(
                    file=_require_str(entry["file"]),
                    sha256=_require_str(entry["sha256"]),
                    num_bytes=_require_int(entry["bytes"]),
                )
                for entry in wheels
            ),
        )


def is_newer(candidate: str, reference: str) -> bool:
    """Returns whether version `candidate` is newer than `reference`."""
    return Version(candidate) > Version(reference)


def _validate(manifest: BundleManifest) -> None:
    if not _NAME.match(manifest.name) or canonicalize_name(manifest.name) != manifest.name:
        raise BundleError(f"a bundle is named with a-z, 0-9 and '-', got {manifest.name[:80]!r}")
    try:
        Version(manifest.version)
    except InvalidVersion:
        raise BundleError(f"its version must be one such as 1.2.0, got {manifest.version[:80]!r}") from None
    for wheel in manifest.wheels:
        _validate_entry(wheel)
    files = {wheel.file for wheel in manifest.wheels}
    if len(files) != len(manifest.wheels):
        raise BundleError("it names a wheel twice")
    total = sum(wheel.num_bytes for wheel in manifest.wheels)
    if total > MAX_TOTAL_WHEEL_BYTES:
        raise BundleError(f"its wheels have {total} bytes together, at most {MAX_TOTAL_WHEEL_BYTES} are taken")
    _validate_projects(manifest)


def _validate_entry(wheel: WheelEntry) -> None:
    try:
        match = _FILE.match(wheel.file) and parse_wheel_filename(wheel.file)
    except (InvalidWheelFilename, InvalidVersion):
        match = None
    if not match:
        raise BundleError(f"it names {wheel.file[:120]!r}, which is no name of a wheel")
    if not _SHA256.match(wheel.sha256) or wheel.num_bytes < 1:
        raise BundleError(f"its manifest says no SHA-256 or no size of {wheel.file}")


def _validate_projects(manifest: BundleManifest) -> None:
    is_release = manifest.kind is BundleKind.RELEASE
    if is_release != (manifest.name == DISTRIBUTION):
        raise BundleError(f"a release is named {DISTRIBUTION}, a pack is not; got a {manifest.kind} {manifest.name}")
    if manifest.kind is BundleKind.REMOVAL:
        return
    versions = {wheel.version for wheel in manifest.wheels if wheel.project == manifest.name}
    if versions != {str(Version(manifest.version))}:
        held = ", ".join(sorted(versions)) or "none"
        raise BundleError(
            f"{manifest.kind} {manifest.name} {manifest.version} must hold a wheel of {manifest.name} in this "
            f"version, and of it in no other; it holds {held}"
        )
    if not is_release and (reserved := RESERVED_PROJECTS & {wheel.project for wheel in manifest.wheels}):
        raise BundleError(
            f"a pack must not bring {min(reserved)} itself; a release of edgefl is signed with --kind release"
        )


def _require_str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {str(value)[:80]!r}")
    return value


def _require_int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise TypeError(f"expected a whole number, got {str(value)[:80]!r}")
    return value
