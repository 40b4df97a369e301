"""Bundle file format: an uncompressed tar of `manifest.json`, `manifest.sig` and the wheels, in this order.

It is read header by header, without unpacking anything, and each header must be the expected one: a plain file of
the expected name and size. This rules out links, devices, long names, duplicates and trailing content.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edgefl.bundles.manifest import MAX_MANIFEST_BYTES, MAX_TOTAL_WHEEL_BYTES, BundleManifest, WheelEntry
from edgefl.core.errors import BundleError
from edgefl.system.atomic_files import open_atomic

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
