"""Members of ZIP archives of others: wheels, and bundles of Flower apps."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from pathlib import PurePosixPath

ZIP_ERRORS = (
    zipfile.BadZipFile, OSError, LookupError, ValueError, EOFError, RuntimeError, OverflowError, MemoryError,
    struct.error, zlib.error,
)  # fmt: skip
"""What `zipfile` raises for damaged archives."""


def find_member_fault(info: zipfile.ZipInfo) -> str:
    """Returns why a member of a ZIP archive is not taken, such as a path outside of its folder; empty if it is."""
    path = PurePosixPath(info.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in info.orig_filename or "\0" in info.orig_filename:
        return f"holds {info.filename[:120]!r}, which lies outside of where it is installed"
    # One spelling only, so that the path checked is the path that pip installs: `./x.pth` is installed as `x.pth`.
    if str(path) != info.filename.removesuffix("/"):
        return f"holds {info.filename[:120]!r}, which must be called {str(path)[:120]!r}"
    mode = info.external_attr >> 16
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or not stat.S_IFMT(mode)):
        return f"holds {info.filename[:120]!r}, which is no plain file"
    # The others unpack all that they are given, however little of it is asked for.
    if info.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        return f"holds {info.filename[:120]!r}, which is compressed in a way other than deflate"
    return "is encrypted" if info.flag_bits & 0x1 else ""


def read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, max_bytes: int) -> bytes:
    """Returns the first bytes of a member without a fault; no more is unpacked than the archive declares.

    Raises:
        ZIP_ERRORS: it is damaged.
    """
    with archive.open(info) as file:
        return file.read(min(info.file_size, max_bytes))
