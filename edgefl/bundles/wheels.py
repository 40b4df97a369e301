"""What is looked at in a wheel before anybody installs it, and which wheels of a bundle fit a board."""

from __future__ import annotations

import lzma
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from email.parser import BytesHeaderParser
from pathlib import Path, PurePosixPath

from packaging.tags import Tag
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from edgefl.bundles.manifest import OWN_NAMES, Kind, WheelEntry
from edgefl.errors import BundleError

MAX_UNPACKED_BYTES = 2 * 1024 * 1024 * 1024
MAX_ENTRIES = 50_000
MAX_METADATA_BYTES = 1024 * 1024
# Run whenever any Python of the slot starts, the privileged updater's too: only a release may bring such.
_RUN_AT_START = frozenset({"sitecustomize", "usercustomize"})
# Likewise, or installed elsewhere than among the packages, or (egg-info) what passes for a project of another name.
_NOT_FOR_PACKS = (".pth", ".data", ".egg-info", ".egg-link", ".egg")


def wheel_names(path: Path, entry: WheelEntry, kind: Kind) -> list[str]:
    """Returns the paths in a wheel, once it is sure that they stay where they belong; runs nothing of it.

    Raises:
        BundleError: it is no wheel, not the one that its name says, or holds what a bundle of this kind must not.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            infos = wheel.infolist()
            _check_sizes(entry, infos)
            for info in infos:
                _check_entry(entry, info)
            _check_metadata(entry, wheel)
    except (zipfile.BadZipFile, OSError, LookupError, ValueError, EOFError, RuntimeError, struct.error, zlib.error,
            lzma.LZMAError) as error:  # fmt: skip
        raise BundleError(f"{entry.file} is no wheel: {error}") from None
    names = [info.filename for info in infos if not info.is_dir()]
    if len(set(names)) != len(names):
        raise BundleError(f"{entry.file} holds a file twice")
    if kind is Kind.PACK:
        _check_pack(entry, names)
    return names


def unpacked_bytes(path: Path) -> int:
    """Returns what a wheel takes on a disk once it is unpacked, as it says itself."""
    with zipfile.ZipFile(path) as wheel:
        return sum(info.file_size for info in wheel.infolist())


def fitting(entries: Iterable[WheelEntry], tags: Sequence[Tag]) -> list[WheelEntry]:
    """Returns the best wheel of every project for a Python that takes these tags, best first.

    Raises:
        BundleError: a project has none that fits.
    """
    ranks = {tag: rank for rank, tag in enumerate(tags)}
    by_project: dict[str, list[WheelEntry]] = {}
    for entry in entries:
        by_project.setdefault(entry.project, []).append(entry)
    chosen = []
    for project, wheels in by_project.items():
        ranked = [(min(ranks[tag] for tag in fits), wheel) for wheel in wheels if (fits := wheel.tags & ranks.keys())]
        if not ranked:
            files = ", ".join(wheel.file for wheel in wheels)
            here = f"Python {sys.version_info.major}.{sys.version_info.minor}, {tags[0] if tags else 'unknown'}"
            raise BundleError(f"it is not for this board ({here}): of {project} it holds only {files}")
        chosen.append(min(ranked, key=lambda one: one[0])[1])
    return chosen


def _check_sizes(entry: WheelEntry, infos: Sequence[zipfile.ZipInfo]) -> None:
    total = sum(info.file_size for info in infos)
    if len(infos) > MAX_ENTRIES or total > MAX_UNPACKED_BYTES:
        raise BundleError(
            f"{entry.file} would unpack to {len(infos)} files and {total} bytes; at most {MAX_ENTRIES} files and "
            f"{MAX_UNPACKED_BYTES} bytes are taken"
        )


def _check_entry(entry: WheelEntry, info: zipfile.ZipInfo) -> None:
    path = PurePosixPath(info.filename)
    if path.is_absolute() or ".." in path.parts or "\\" in info.orig_filename or "\0" in info.orig_filename:
        raise BundleError(f"{entry.file} holds {info.filename[:120]!r}, which lies outside of where it is installed")
    # One spelling alone, so that what is looked at is what pip makes of it: `./x.pth` is installed as `x.pth`.
    if str(path) != info.filename.removesuffix("/"):
        raise BundleError(f"{entry.file} holds {info.filename[:120]!r}, which must be called {str(path)[:120]!r}")
    mode = info.external_attr >> 16
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or not stat.S_IFMT(mode)):
        raise BundleError(f"{entry.file} holds {info.filename[:120]!r}, which is no plain file")
    if info.flag_bits & 0x1:
        raise BundleError(f"{entry.file} is encrypted")


def _check_metadata(entry: WheelEntry, wheel: zipfile.ZipFile) -> None:
    """The name of the file decides what is believed of a wheel; what is in it must say the same."""
    found = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1]
    if len(found) != 1:
        raise BundleError(f"{entry.file} is no wheel: it has {len(found)} METADATA, expected 1")
    with wheel.open(found[0]) as file:
        said = BytesHeaderParser().parsebytes(file.read(MAX_METADATA_BYTES))
    # A header of bytes that are no ASCII is no text.
    name, version = str(said.get("Name") or ""), str(said.get("Version") or "")
    try:
        is_same = canonicalize_name(name) == entry.project and str(Version(version)) == entry.version
    except InvalidVersion:
        is_same = False
    if not is_same:
        raise BundleError(f"{entry.file} says inside that it is {name[:80]} {version[:80]}")


def _check_pack(entry: WheelEntry, names: Sequence[str]) -> None:
    for name in names:
        top = name.partition("/")[0]
        # A module is also a package, a compiled file or an extension: `name/`, `name.pyc`, `name.cpython-311-….so`.
        if top.lower().endswith(_NOT_FOR_PACKS) or top.lower().partition(".")[0] in _RUN_AT_START:
            raise BundleError(f"{entry.file} holds {name[:120]!r}, which a pack must not: packages and entry points")
        if canonicalize_name(top.partition("-")[0].partition(".")[0]) in OWN_NAMES:
            raise BundleError(f"{entry.file} holds {name[:120]!r}, which is edgefl's own; a pack must not replace it")
