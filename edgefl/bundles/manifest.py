"""What a bundle says of itself: what it is, who signed it, and every wheel in it by SHA-256 and size.

The signature is over the exact bytes of this text, so nothing of a bundle has a meaning before that is verified, and
a wheel that the text does not name is no part of it.
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
from edgefl.errors import BundleError
from edgefl.untrusted import parse_json

FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 1024
MAX_WHEELS = 500
MAX_BUNDLE_BYTES = 1024 * 1024 * 1024
"""The largest bundle that a coordinator keeps and a board takes."""
OWN_NAMES = frozenset({"edgefl", DISTRIBUTION})
"""Of the import name and of the distribution: no pack replaces what is installed under these."""

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_FILE = re.compile(r"[A-Za-z0-9_.+!-]{1,200}\.whl\Z")


class Kind(StrEnum):
    """A RELEASE is edgefl itself with what it needs, a PACK a user's own task, codec or local steps.

    A REMOVAL takes a pack off again, up to its version; it brings no wheels.
    """

    RELEASE = "release"
    PACK = "pack"
    REMOVAL = "removal"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelEntry:
    """One wheel of a bundle. Its file name says project, version and what it runs on."""

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
class Manifest:
    """What a bundle is.

    Attributes:
        kind, name, version: a release is named `edgefl-fleet`, a pack like the project that it brings, a removal like
            the pack that it takes off.
        serial: grows with every signature of the same signer: an older bundle is never taken after a newer one.
        key: id of the key that signed it; see `keys.key_id`.
        wheels: of one project there may be several, for different boards.
        allow_downgrade: it may replace a newer version.
    """

    kind: Kind
    name: str
    version: str
    serial: int
    key: str
    wheels: tuple[WheelEntry, ...]
    allow_downgrade: bool = False

    def dump(self) -> bytes:
        wheels = [{"file": one.file, "sha256": one.sha256, "bytes": one.num_bytes} for one in self.wheels]
        told = {
            "v": FORMAT, "kind": str(self.kind), "name": self.name, "version": self.version, "serial": self.serial,
            "key": self.key, "allow_downgrade": self.allow_downgrade, "wheels": wheels,
        }  # fmt: skip
        return (json.dumps(told, indent=1) + "\n").encode()

    @classmethod
    def load(cls, text: bytes) -> Manifest:
        """Returns the manifest in `text`, once all of it makes sense.

        Raises:
            BundleError: it does not.
        """
        if len(text) > MAX_MANIFEST_BYTES:
            raise BundleError(f"its manifest has {len(text)} bytes, at most {MAX_MANIFEST_BYTES} are read")
        try:
            value = parse_json(text.decode())
        except ValueError as error:
            raise BundleError(f"its manifest is not JSON: {error}") from None
        if not isinstance(value, dict) or value.get("v") != FORMAT:
            raise BundleError(f"its manifest is not of format {FORMAT}; it was made by another edgefl")
        try:
            manifest = cls._made(value)
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"its manifest makes no sense: {type(error).__name__} {error}") from None
        _check(manifest)
        return manifest

    @classmethod
    def _made(cls, value: Mapping[str, Any]) -> Manifest:
        wheels = value["wheels"]
        kind = Kind(value["kind"])
        if not isinstance(wheels, list) or len(wheels) > MAX_WHEELS or bool(wheels) == (kind is Kind.REMOVAL):
            raise BundleError(f"a release or pack holds 1 to {MAX_WHEELS} wheels, a removal none")
        return cls(
            kind=kind,
            name=_text(value["name"]),
            version=_text(value["version"]),
            serial=_number(value["serial"]),
            key=_text(value["key"]),
            allow_downgrade=value.get("allow_downgrade") is True,
            wheels=tuple(
                WheelEntry(file=_text(one["file"]), sha256=_text(one["sha256"]), num_bytes=_number(one["bytes"]))
                for one in wheels
            ),
        )


def later(one: str, other: str) -> bool:
    """Returns whether version `one` comes after the `other`."""
    return Version(one) > Version(other)


def _check(manifest: Manifest) -> None:
    if not _NAME.match(manifest.name) or canonicalize_name(manifest.name) != manifest.name:
        raise BundleError(f"a bundle is named with a-z, 0-9 and '-', got {manifest.name[:80]!r}")
    try:
        Version(manifest.version)
    except InvalidVersion:
        raise BundleError(f"its version must be one such as 1.2.0, got {manifest.version[:80]!r}") from None
    for wheel in manifest.wheels:
        _check_entry(wheel)
    files = {wheel.file for wheel in manifest.wheels}
    if len(files) != len(manifest.wheels):
        raise BundleError("it names a wheel twice")
    total = sum(wheel.num_bytes for wheel in manifest.wheels)
    if total > MAX_BUNDLE_BYTES:
        raise BundleError(f"its wheels have {total} bytes together, at most {MAX_BUNDLE_BYTES} are taken")
    _check_projects(manifest)


def _check_entry(wheel: WheelEntry) -> None:
    try:
        sound = _FILE.match(wheel.file) and parse_wheel_filename(wheel.file)
    except (InvalidWheelFilename, InvalidVersion):
        sound = None
    if not sound:
        raise BundleError(f"it names {wheel.file[:120]!r}, which is no name of a wheel")
    if not _SHA256.match(wheel.sha256) or wheel.num_bytes < 1:
        raise BundleError(f"its manifest says no SHA-256 or no size of {wheel.file}")


def _check_projects(manifest: Manifest) -> None:
    is_release = manifest.kind is Kind.RELEASE
    if is_release != (manifest.name == DISTRIBUTION):
        raise BundleError(f"a release is named {DISTRIBUTION}, a pack is not; got a {manifest.kind} {manifest.name}")
    if manifest.kind is Kind.REMOVAL:
        return
    versions = {wheel.version for wheel in manifest.wheels if wheel.project == manifest.name}
    if versions != {str(Version(manifest.version))}:
        found = ", ".join(sorted(versions)) or "none"
        raise BundleError(
            f"{manifest.kind} {manifest.name} {manifest.version} must hold a wheel of {manifest.name} in this "
            f"version, and of it in no other; it holds {found}"
        )
    if not is_release and (own := OWN_NAMES & {wheel.project for wheel in manifest.wheels}):
        raise BundleError(
            f"a pack must not bring {min(own)} itself; a release of edgefl is signed with --kind release"
        )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {str(value)[:80]!r}")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise TypeError(f"expected a whole number, got {str(value)[:80]!r}")
    return value
