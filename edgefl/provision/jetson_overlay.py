"""Overlay of a Jetson: files for its root file system, added before flashing."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

from edgefl.core.errors import StoreError
from edgefl.provision import provisioning_files
from edgefl.provision.payload import PAYLOAD_FOLDER
from edgefl.system.atomic_files import make_store_error, open_atomic

CARD_PATH = "var/lib/edgefl-card"
FIRSTBOOT_PATH = "var/lib/edgefl-firstboot"
UNITS_PATH = "etc/systemd/system"
FIRSTBOOT_UNIT = "edgefl-firstboot.service"
GPU_DROP_IN = "10-gpu.conf"
# The same files give the same bytes; tar would warn of 1970.
MTIME = 946_684_800


def write_overlay(out: Path, payload: Mapping[str, bytes | Path]) -> None:
    """Writes `out`, a tar of mode 0600 to unpack over a root file system, for a join at first boot.

    Everything belongs to root; only root can enter the folder of the token. Folders of the system itself are not in
    it, so that unpacking leaves their modes unchanged.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        with open_atomic(out) as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
            for folder in (CARD_PATH, f"{CARD_PATH}/{PAYLOAD_FOLDER}", FIRSTBOOT_PATH):
                _add_entry(tar, folder, kind=tarfile.DIRTYPE, mode=0o700)
            folders = {str(parent) for name in payload for parent in Path(name).parents if str(parent) != "."}
            for folder in sorted(folders):
                _add_entry(tar, f"{CARD_PATH}/{PAYLOAD_FOLDER}/{folder}", kind=tarfile.DIRTYPE, mode=0o700)
            for name, content in sorted(payload.items()):
                _add_entry(tar, f"{CARD_PATH}/{PAYLOAD_FOLDER}/{name}", content, mode=0o600)
            _add_entry(
                tar, f"{FIRSTBOOT_PATH}/firstboot.sh", provisioning_files.find_path("board/firstboot.sh"), mode=0o700
            )
            _add_entry(tar, f"{FIRSTBOOT_PATH}/source", f"/{CARD_PATH}/{PAYLOAD_FOLDER}\n".encode(), mode=0o600)
            _add_entry(
                tar,
                f"{UNITS_PATH}/{FIRSTBOOT_UNIT}",
                provisioning_files.find_path(f"board/{FIRSTBOOT_UNIT}"),
                mode=0o644,
            )
            _add_entry(
                tar,
                f"{UNITS_PATH}/multi-user.target.wants/{FIRSTBOOT_UNIT}",
                kind=tarfile.SYMTYPE,
                link=f"/{UNITS_PATH}/{FIRSTBOOT_UNIT}",
            )
            for unit in ("edgefl-device", "edgefl-join"):
                _add_entry(
                    tar,
                    f"{UNITS_PATH}/{unit}.service.d/{GPU_DROP_IN}",
                    provisioning_files.find_path(f"units/{GPU_DROP_IN}"),
                    mode=0o644,
                )
    except OSError as error:
        raise make_store_error(out, error) from None
    except tarfile.TarError as error:
        raise StoreError(f"{out} cannot be written: {error}") from None


def _add_entry(
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
