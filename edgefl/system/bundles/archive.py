"""Bundle file: an uncompressed tar of `manifest.json`, `manifest.sig` and the wheels, in this order.

The manifest names kind, version, signer, and every wheel by SHA-256 and size. The signature covers the exact bytes of
its text: nothing in a bundle is used before it is verified, and a wheel that the text does not list is no part of it.
The tar is read header by header, without unpacking anything, and each header must be the expected one: a plain file
of the expected name and size. This rules out links, devices, long names, duplicates and trailing content.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from edgefl import DISTRIBUTION
from edgefl.core.errors import BundleError
from edgefl.core.safe_parsing import SHA256, parse_json
from edgefl.system.atomic_files import open_atomic

MANIFEST_FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 1024
MAX_WHEELS = 500
MAX_TOTAL_WHEEL_BYTES = 1024 * 1024 * 1024
"""The largest bundle that a coordinator stores and a board accepts."""
RESERVED_PROJECTS = frozenset({"edgefl", DISTRIBUTION})
"""Import name and distribution of edgefl: no pack may replace projects of these names."""

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
        key: id of the key that signed it, see `keys.compute_key_id`; empty before.
        wheels: several of one project are allowed, for different boards.
        allow_downgrade: it may replace a newer version.
    """

    kind: BundleKind
    name: str
    version: str
    serial: int
    key: str = ""
    wheels: tuple[WheelEntry, ...] = ()
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
    if not SHA256.match(wheel.sha256) or wheel.num_bytes < 1:
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


MANIFEST_FILE, SIGNATURE_FILE, WHEEL_FOLDER = "manifest.json", "manifest.sig", "wheels"
SIGNATURE_BYTES = 64
MAX_BUNDLE_FILE_BYTES = MAX_TOTAL_WHEEL_BYTES + 1024 * 1024
"""Maximum size of the file including headers."""
_BLOCK_BYTES = tarfile.BLOCKSIZE
_END_BYTES = 2 * _BLOCK_BYTES
_MAX_PADDING_BYTES = _END_BYTES + tarfile.RECORDSIZE
"""A tar ends with two empty blocks, and may then be padded to a whole record."""
_CHUNK_BYTES = 1 << 20
_ENTRY_KINDS = {
    tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.DIRTYPE: "a folder",
    tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a pipe",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Opened bundle; untrusted until `TrustedKeys.verify` has checked its manifest and signature."""

    file: IO[bytes]
    manifest_bytes: bytes
    signature: bytes
    manifest: BundleManifest
    wheel_offsets: Mapping[str, int]

    def extract_wheel(self, entry: WheelEntry, out: Path) -> None:
        """Writes one wheel atomically, with the SHA-256 of the manifest, or nothing.

        Raises:
            BundleError: its content differs from the manifest.
        """
        self.file.seek(self.wheel_offsets[entry.file])
        digest, bytes_left = hashlib.sha256(), entry.num_bytes
        with open_atomic(out) as file:
            while bytes_left and (chunk := self.file.read(min(bytes_left, _CHUNK_BYTES))):
                digest.update(chunk)
                file.write(chunk)
                bytes_left -= len(chunk)
            if bytes_left or digest.hexdigest() != entry.sha256:
                raise BundleError(f"{entry.file} is not what was signed: it was changed, or is damaged")


def write_bundle(out: Path, *, manifest_bytes: bytes, signature: bytes, wheels: Sequence[Path]) -> None:
    """Writes a bundle: manifest text, signature, and the wheels in the manifest's order."""
    with open_atomic(out, mode=0o644) as file:
        for name, content in ((MANIFEST_FILE, manifest_bytes), (SIGNATURE_FILE, signature)):
            _write_file(file, name, len(content), io.BytesIO(content))
        for wheel in wheels:
            with wheel.open("rb") as source:
                _write_file(file, f"{WHEEL_FOLDER}/{wheel.name}", wheel.stat().st_size, source)
        # Only the end marker, not padded to a whole record as tarfile does: older readers may reject more.
        file.write(bytes(_END_BYTES))


def read_bundle(file: IO[bytes]) -> Bundle:
    """Returns the bundle in an open file after validating its structure; wheels are not read.

    Raises:
        BundleError: it is no bundle, or holds unexpected content.
    """
    size = os.fstat(file.fileno()).st_size
    if size > MAX_BUNDLE_FILE_BYTES:
        raise BundleError(f"the bundle has {size} bytes, at most {MAX_BUNDLE_FILE_BYTES} are taken")
    file.seek(0)
    text = _read_file(file, MANIFEST_FILE, 1, MAX_MANIFEST_BYTES)
    signature = _read_file(file, SIGNATURE_FILE, SIGNATURE_BYTES, SIGNATURE_BYTES)
    manifest, offsets = BundleManifest.decode(text), {}
    for entry in manifest.wheels:
        num_bytes = _read_header(file, f"{WHEEL_FOLDER}/{entry.file}")
        if num_bytes != entry.num_bytes:
            raise BundleError(f"{entry.file} has {num_bytes} bytes, the manifest says {entry.num_bytes}")
        offsets[entry.file] = file.tell()
        file.seek(_compute_padded_bytes(num_bytes), os.SEEK_CUR)
    if file.tell() > size:
        raise BundleError("the bundle ends in the middle of a wheel; fetch or copy it again")
    trailing = file.read(_MAX_PADDING_BYTES + 1)
    if len(trailing) > _MAX_PADDING_BYTES or trailing.strip(b"\0"):
        raise BundleError("the bundle holds more than its manifest names")
    return Bundle(file=file, manifest_bytes=text, signature=signature, manifest=manifest, wheel_offsets=offsets)


def _write_file(file: IO[bytes], name: str, num_bytes: int, source: IO[bytes]) -> None:
    """Writes a plain file and its header."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = num_bytes, 0o644
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    shutil.copyfileobj(source, file)
    file.write(bytes(_compute_padded_bytes(num_bytes) - num_bytes))


def _read_file(file: IO[bytes], name: str, min_bytes: int, max_bytes: int) -> bytes:
    num_bytes = _read_header(file, name)
    if not min_bytes <= num_bytes <= max_bytes:
        raise BundleError(f"{name} of the bundle has {num_bytes} bytes, expected {min_bytes} to {max_bytes}")
    content = file.read(_compute_padded_bytes(num_bytes))
    return content[:num_bytes]


def _read_header(file: IO[bytes], name: str) -> int:
    """Reads the next header, which must be of a plain file of this name; returns its size."""
    block = file.read(_BLOCK_BYTES)
    try:
        # A single header: tarfile itself would follow long-name headers, of any length.
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise BundleError(f"this is no bundle, or a damaged one: where {name} is due, {error}") from None
    if info.type != tarfile.REGTYPE:
        kind = _ENTRY_KINDS.get(info.type, f"an entry of type {info.type!r}")
        raise BundleError(f"the bundle holds {info.name[:120]!r}, {kind}; only plain files are taken")
    if info.name != name:
        raise BundleError(f"the bundle holds {info.name[:120]!r} where its manifest says {name!r}")
    if info.size < 0:
        raise BundleError(f"the bundle says that {name!r} has {info.size} bytes")
    return info.size


def _compute_padded_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
