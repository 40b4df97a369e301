"""Members of ZIP archives of others: wheels, and bundles of Flower apps."""

from __future__ import annotations

import stat
import zipfile
from pathlib import PurePosixPath


def find_member_fault(info: zipfile.ZipInfo) -> str:
    """Returns why a member of a ZIP archive is no plain file inside of where it is unpacked; empty where it is."""
    path = PurePosixPath(info.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in info.orig_filename or "\0" in info.orig_filename:
        return f"holds {info.filename[:120]!r}, which lies outside of where it is installed"
    # One spelling only, so that the path checked is the path that pip installs: `./x.pth` is installed as `x.pth`.
    if str(path) != info.filename.removesuffix("/"):
        return f"holds {info.filename[:120]!r}, which must be called {str(path)[:120]!r}"
    mode = info.external_attr >> 16
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or not stat.S_IFMT(mode)):
        return f"holds {info.filename[:120]!r}, which is no plain file"
    return "is encrypted" if info.flag_bits & 0x1 else ""
