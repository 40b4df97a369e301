"""Bundle file: an uncompressed tar of `manifest.json`, `signatures.json` and the wheels, in this order.

The manifest names kind, version, expiry, and every wheel, or the model, by SHA-256 and size. A signature covers the
exact bytes of its text: nothing in a bundle is used before it is verified, and a wheel that the text does not list is
no part of it.
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
from dataclasses import asdict, dataclass
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
from edgefl.system.bundles.signatures import MAX_SIGNATURES_BYTES, Signatures, require_int, require_str

MANIFEST_FORMAT = 2
MAX_MANIFEST_BYTES = 256 * 1024
MAX_WHEELS = 500
MAX_TOTAL_WHEEL_BYTES = 1024 * 1024 * 1024
"""The largest bundle that a coordinator stores and a board accepts."""
SIGNERS_NAME = "edgefl-signers"
"""Name of every bundle that brings a list of signers."""
RESERVED_PROJECTS = frozenset({"edgefl", DISTRIBUTION, SIGNERS_NAME})
"""Import name and distribution of edgefl, and what else is its own: no pack may replace projects of these names."""
MODEL_PREFIX = "model-"
MAX_TASK_CHARS = 200
MAX_OPTIONS_CHARS = 16 * 1024

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\Z")
_FILE = re.compile(r"[A-Za-z0-9_.+!-]{1,200}\.whl\Z")
_MODEL_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,90}\.onnx\Z")

MANIFEST_FILE, SIGNATURE_FILE, WHEEL_FOLDER = "manifest.json", "signatures.json", "wheels"
MAX_BUNDLE_FILE_BYTES = MAX_TOTAL_WHEEL_BYTES + 2 * 1024 * 1024
"""Maximum size of the file including headers."""
_BLOCK_BYTES = tarfile.BLOCKSIZE
_END_BYTES = 2 * _BLOCK_BYTES
_MAX_PADDING_BYTES = _END_BYTES + tarfile.RECORDSIZE
"""A tar ends with two empty blocks, and may then be padded to a whole record."""
MAX_SIGNED_CHARS = MAX_MANIFEST_BYTES + 4 * MAX_SIGNATURES_BYTES
_CHUNK_BYTES = 1 << 20
_ENTRY_KINDS = {
    tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.DIRTYPE: "a folder",
    tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a pipe",
}  # fmt: skip


class BundleKind(StrEnum):
    """A RELEASE is edgefl with its dependencies, a PACK a user's own task, codec or local steps.

    A REMOVAL uninstalls a pack, up to its version. SIGNERS brings a list of signers. Neither holds wheels. A MODEL is
    one ONNX file, for a deployment.
    """

    RELEASE = "release"
    PACK = "pack"
    REMOVAL = "removal"
    SIGNERS = "signers"
    MODEL = "model"


_EMPTY_KINDS = frozenset({BundleKind.REMOVAL, BundleKind.SIGNERS})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a signed model is: SHA-256 of the tensors that it was made from, and the task with its options."""

    sha256: str
    task: str
    options: Mapping[str, Any]

    @property
    def bundle_name(self) -> str:
        """Returns the name of bundles with models of this task."""
        slug = canonicalize_name(re.sub(r"[^A-Za-z0-9]+", "-", self.task)).strip("-")
        return f"{MODEL_PREFIX}{slug}"[:63].rstrip("-")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelEntry:
    """One wheel of a bundle, whose file name encodes project, version and platform tags; or its one model."""

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
            pack that it uninstalls, a model after its task.
        serial: Unix seconds of its making, so that it grows: an older bundle is never installed after a newer one.
        expires: Unix seconds from which on no board takes it any more.
        key: id of the key that signed it first, see `signatures.compute_key_id`; empty before.
        wheels: several of one project are allowed, for different boards.
        allow_downgrade: it may replace a newer version.
        model: of a bundle of this kind.
    """

    kind: BundleKind
    name: str
    version: str
    serial: int
    expires: int
    key: str = ""
    wheels: tuple[WheelEntry, ...] = ()
    allow_downgrade: bool = False
    model: ModelFacts | None = None

    def encode(self) -> bytes:
        wheels = [{"file": wheel.file, "sha256": wheel.sha256, "bytes": wheel.num_bytes} for wheel in self.wheels]
        document = {
            "v": MANIFEST_FORMAT, "kind": str(self.kind), "name": self.name, "version": self.version,
            "serial": self.serial, "expires": self.expires, "key": self.key,
            "allow_downgrade": self.allow_downgrade, "wheels": wheels,
        }  # fmt: skip
        if self.model is not None:
            document["model"] = {**asdict(self.model), "options": dict(self.model.options)}
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
        if not isinstance(wheels, list) or len(wheels) > MAX_WHEELS or bool(wheels) == (kind in _EMPTY_KINDS):
            raise BundleError(f"a release or pack holds 1 to {MAX_WHEELS} wheels, a model one file, a removal none")
        model = value.get("model") if kind is BundleKind.MODEL else None
        return cls(
            kind=kind,
            name=require_str(value["name"]),
            version=require_str(value["version"]),
            serial=require_int(value["serial"]),
            expires=require_int(value["expires"]),
            key=require_str(value["key"]),
            allow_downgrade=value.get("allow_downgrade") is True,
            wheels=tuple(
                WheelEntry(
                    file=require_str(entry["file"]),
                    sha256=require_str(entry["sha256"]),
                    num_bytes=require_int(entry["bytes"]),
                )
                for entry in wheels
            ),
            model=None if model is None else _parse_model(model),
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
    if manifest.expires <= manifest.serial:
        raise BundleError("it expires before it was signed")
    for wheel in manifest.wheels:
        _validate_entry(wheel, manifest.kind)
    files = {wheel.file for wheel in manifest.wheels}
    if len(files) != len(manifest.wheels):
        raise BundleError("it names a wheel twice")
    total = sum(wheel.num_bytes for wheel in manifest.wheels)
    if total > MAX_TOTAL_WHEEL_BYTES:
        raise BundleError(f"its wheels have {total} bytes together, at most {MAX_TOTAL_WHEEL_BYTES} are taken")
    _validate_projects(manifest)


def _parse_model(value: Mapping[str, Any]) -> ModelFacts:
    options = value["options"]
    if not isinstance(options, dict) or len(json.dumps(options)) > MAX_OPTIONS_CHARS:
        raise TypeError(f"options of a task must be a table of at most {MAX_OPTIONS_CHARS} characters")
    facts = ModelFacts(sha256=require_str(value["sha256"]), task=require_str(value["task"]), options=options)
    if not SHA256.match(facts.sha256) or not 0 < len(facts.task) <= MAX_TASK_CHARS or not facts.task.isprintable():
        raise ValueError("it says no SHA-256, or no task, of its model")
    return facts


def _validate_entry(wheel: WheelEntry, kind: BundleKind) -> None:
    is_model = kind is BundleKind.MODEL
    try:
        match: object = _MODEL_FILE.match(wheel.file) if is_model else _FILE.match(wheel.file)
        if match and not is_model:
            parse_wheel_filename(wheel.file)
    except (InvalidWheelFilename, InvalidVersion):
        match = None
    if not match:
        raise BundleError(f"it names {wheel.file[:120]!r}, which is no name of a {'model' if is_model else 'wheel'}")
    if not SHA256.match(wheel.sha256) or wheel.num_bytes < 1:
        raise BundleError(f"its manifest says no SHA-256 or no size of {wheel.file}")


def _validate_projects(manifest: BundleManifest) -> None:
    is_release = manifest.kind is BundleKind.RELEASE
    if is_release != (manifest.name == DISTRIBUTION):
        raise BundleError(f"a release is named {DISTRIBUTION}, a pack is not; got a {manifest.kind} {manifest.name}")
    if (manifest.kind is BundleKind.SIGNERS) != (manifest.name == SIGNERS_NAME):
        raise BundleError(f"a list of signers, and nothing else, is named {SIGNERS_NAME}; got {manifest.name}")
    if manifest.kind is BundleKind.MODEL:
        if manifest.model is None or manifest.name != manifest.model.bundle_name or len(manifest.wheels) != 1:
            raise BundleError("a model is one file, with its task and the hash of its tensors, named after the task")
        return
    if manifest.kind in _EMPTY_KINDS:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedManifest:
    """A manifest and its signatures; untrusted until `TrustedKeys.verify` has checked them."""

    manifest_bytes: bytes
    signatures: Signatures
    manifest: BundleManifest

    def encode(self) -> str:
        """Returns both texts as one, for a file that travels beside them."""
        return json.dumps({"manifest": self.manifest_bytes.decode(), "signatures": self.signatures.encode().decode()})

    @classmethod
    def decode(cls, content: str) -> SignedManifest:
        """Returns what `encode` wrote, validated; raises `BundleError` for anything else."""
        if len(content) > MAX_SIGNED_CHARS:
            raise BundleError(
                f"its manifest and signatures have {len(content)} characters, {MAX_SIGNED_CHARS} are read"
            )
        try:
            value = parse_json(content)
            manifest, signatures = (require_str(value[name]).encode() for name in ("manifest", "signatures"))
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"its signature makes no sense: {error!r:.200}") from None
        return cls(
            manifest_bytes=manifest,
            signatures=Signatures.decode(signatures),
            manifest=BundleManifest.decode(manifest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle(SignedManifest):
    """Opened bundle: its file, and where in it the wheels begin."""

    file: IO[bytes]
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


def write_bundle(out: Path, *, manifest_bytes: bytes, signatures: Signatures, wheels: Sequence[Path]) -> None:
    """Writes a bundle: manifest text, signatures, and the wheels in the manifest's order."""
    with open_atomic(out, mode=0o644) as file:
        for name, content in ((MANIFEST_FILE, manifest_bytes), (SIGNATURE_FILE, signatures.encode())):
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
    signatures = Signatures.decode(_read_file(file, SIGNATURE_FILE, 1, MAX_SIGNATURES_BYTES))
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
    return Bundle(file=file, manifest_bytes=text, signatures=signatures, manifest=manifest, wheel_offsets=offsets)


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
