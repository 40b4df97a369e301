"""The file of a bundle: an uncompressed tar of `manifest.json`, `manifest.sig` and the wheels, in this order.

It is read header by header, without unpacking anything, and each header must be the one that is due: a plain file
of the due name and size. So there is nothing to be tricked by: no links, no devices, no long names, nothing twice,
nothing behind the end.
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

from edgefl.bundles.manifest import MAX_BUNDLE_BYTES, MAX_MANIFEST_BYTES, Manifest, WheelEntry
from edgefl.errors import BundleError
from edgefl.files import open_whole

MANIFEST, SIGNATURE, WHEELS = "manifest.json", "manifest.sig", "wheels"
SIGNATURE_BYTES = 64
MAX_FILE_BYTES = MAX_BUNDLE_BYTES + 1024 * 1024
"""What the file may have with its headers."""
_BLOCK = tarfile.BLOCKSIZE
_END_BYTES = 2 * _BLOCK
_MAX_REST_BYTES = _END_BYTES + tarfile.RECORDSIZE
"""A tar ends with two empty blocks, and may then be filled up to a whole record."""
_PIECE_BYTES = 1 << 20
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.DIRTYPE: "a folder",
    tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a pipe",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An opened bundle. Nothing in it is believed before `keys.verify` has seen text and signature."""

    file: IO[bytes]
    text: bytes
    signature: bytes
    manifest: Manifest
    starts: Mapping[str, int]

    def unpack(self, entry: WheelEntry, out: Path) -> None:
        """Writes one wheel, whole and with the SHA-256 that the manifest says, or not at all.

        Raises:
            BundleError: it is another one.
        """
        self.file.seek(self.starts[entry.file])
        digest, left = hashlib.sha256(), entry.num_bytes
        with open_whole(out) as file:
            while left and (piece := self.file.read(min(left, _PIECE_BYTES))):
                digest.update(piece)
                file.write(piece)
                left -= len(piece)
            if left or digest.hexdigest() != entry.sha256:
                raise BundleError(f"{entry.file} is not what was signed: it was changed, or is damaged")


def write_bundle(out: Path, *, text: bytes, signature: bytes, wheels: Sequence[Path]) -> None:
    """Writes a bundle of a manifest's text, its signature, and the wheels in the manifest's order."""
    with open_whole(out, mode=0o644) as file:
        for name, content in ((MANIFEST, text), (SIGNATURE, signature)):
            _add(file, name, len(content), io.BytesIO(content))
        for wheel in wheels:
            with wheel.open("rb") as source:
                _add(file, f"{WHEELS}/{wheel.name}", wheel.stat().st_size, source)
        # The end alone, not filled up to a whole record as tarfile does: that may be more than older readers take.
        file.write(bytes(_END_BYTES))


def read_bundle(file: IO[bytes]) -> Bundle:
    """Returns the bundle in an open file, once its structure is as it must be; wheels are not read.

    Raises:
        BundleError: it is no bundle, or holds what does not belong there.
    """
    size = os.fstat(file.fileno()).st_size
    if size > MAX_FILE_BYTES:
        raise BundleError(f"the bundle has {size} bytes, at most {MAX_FILE_BYTES} are taken")
    file.seek(0)
    text = _content(file, MANIFEST, 1, MAX_MANIFEST_BYTES)
    signature = _content(file, SIGNATURE, SIGNATURE_BYTES, SIGNATURE_BYTES)
    manifest, starts = Manifest.load(text), {}
    for entry in manifest.wheels:
        num_bytes = _due(file, f"{WHEELS}/{entry.file}")
        if num_bytes != entry.num_bytes:
            raise BundleError(f"{entry.file} has {num_bytes} bytes, the manifest says {entry.num_bytes}")
        starts[entry.file] = file.tell()
        file.seek(_padded(num_bytes), os.SEEK_CUR)
    if file.tell() > size:
        raise BundleError("the bundle ends in the middle of a wheel; fetch or copy it again")
    rest = file.read(_MAX_REST_BYTES + 1)
    if len(rest) > _MAX_REST_BYTES or rest.strip(b"\0"):
        raise BundleError("the bundle holds more than its manifest names")
    return Bundle(file=file, text=text, signature=signature, manifest=manifest, starts=starts)


def _add(file: IO[bytes], name: str, num_bytes: int, source: IO[bytes]) -> None:
    """Writes a plain file and its header."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = num_bytes, 0o644
    file.write(info.tobuf(tarfile.USTAR_FORMAT))
    shutil.copyfileobj(source, file)
    file.write(bytes(_padded(num_bytes) - num_bytes))


def _content(file: IO[bytes], name: str, least: int, most: int) -> bytes:
    num_bytes = _due(file, name)
    if not least <= num_bytes <= most:
        raise BundleError(f"{name} of the bundle has {num_bytes} bytes, expected {least} to {most}")
    content = file.read(_padded(num_bytes))
    return content[:num_bytes]


def _due(file: IO[bytes], name: str) -> int:
    """Reads the next header and returns the size of its file, which must be the plain one of this name."""
    block = file.read(_BLOCK)
    try:
        # One header alone: tarfile itself would follow those that announce long names, of any length.
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.TarError, ValueError) as error:
        raise BundleError(f"this is no bundle, or a damaged one: where {name} is due, {error}") from None
    if info.type != tarfile.REGTYPE:
        kind = _KINDS.get(info.type, f"an entry of type {info.type!r}")
        raise BundleError(f"the bundle holds {info.name[:120]!r}, {kind}; only plain files are taken")
    if info.name != name:
        raise BundleError(f"the bundle holds {info.name[:120]!r} where its manifest says {name!r}")
    if info.size < 0:
        raise BundleError(f"the bundle says that {name!r} has {info.size} bytes")
    return info.size


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK
