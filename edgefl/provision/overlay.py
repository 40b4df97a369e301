"""A Jetson's overlay: what goes into the root file system before it is flashed."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from edgefl.errors import StoreError
from edgefl.files import open_whole, store_error
from edgefl.provision import sources
from edgefl.provision.payload import FOLDER

CARD = "var/lib/edgefl-card"
KEPT = "var/lib/edgefl-firstboot"
UNITS = "etc/systemd/system"
UNIT = "edgefl-firstboot.service"
GPU = "10-gpu.conf"
# The same files give the same bytes; tar would warn of 1970.
MTIME = 946_684_800


def write_overlay(out: Path, payload: Mapping[str, bytes | Path]) -> None:
    """Writes `out`, a tar of mode 0600: unpacked over a root file system it makes the first boot join.

    Everything belongs to root; what holds the token can be entered by nobody else. Folders of the system itself are
    not in it, so that unpacking changes none of theirs.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        with open_whole(out) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
            for folder in (CARD, f"{CARD}/{FOLDER}", KEPT):
                _add(tar, folder, kind=tarfile.DIRTYPE, mode=0o700)
            folders = {str(parent) for name in payload for parent in Path(name).parents if str(parent) != "."}
            for folder in sorted(folders):
                _add(tar, f"{CARD}/{FOLDER}/{folder}", kind=tarfile.DIRTYPE, mode=0o700)
            for name, content in sorted(payload.items()):
                _add(tar, f"{CARD}/{FOLDER}/{name}", content, mode=0o600)
            _add(tar, f"{KEPT}/firstboot.sh", sources.path("board/firstboot.sh"), mode=0o700)
            _add(tar, f"{KEPT}/source", f"/{CARD}/{FOLDER}\n".encode(), mode=0o600)
            _add(tar, f"{UNITS}/{UNIT}", sources.path(f"board/{UNIT}"), mode=0o644)
            _add(tar, f"{UNITS}/multi-user.target.wants/{UNIT}", kind=tarfile.SYMTYPE, link=f"/{UNITS}/{UNIT}")
            for unit in ("edgefl-device", "edgefl-join"):
                _add(tar, f"{UNITS}/{unit}.service.d/{GPU}", sources.path(f"units/{GPU}"), mode=0o644)
    except OSError as error:
        raise store_error(out, error) from None
    except tarfile.TarError as error:
        raise StoreError(f"{out} cannot be written: {error}") from None


def _add(
    tar: tarfile.TarFile,
    name: str,
    content: bytes | Path = b"",
    *,
    mode: int = 0o777,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.mtime, entry.linkname = kind, mode, MTIME, link
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    body = content if isinstance(content, bytes) else content.read_bytes()
    entry.size = len(body) if kind == tarfile.REGTYPE else 0
    tar.addfile(entry, io.BytesIO(body))
