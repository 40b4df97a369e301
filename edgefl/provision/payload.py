"""The payload: one folder `edgefl/` with all files of a device, the same for every way of provisioning."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from edgefl import __version__
from edgefl.provision import provisioning_files
from edgefl.provision.wheel_locks import WHEEL_PLATFORMS, get_lock_name

PAYLOAD_FOLDER = "edgefl"
MANIFEST_NAME = "manifest.json"
LOCK_NAME = "requirements.txt"
"""The lock chosen for the device; without one it takes its platform's lock of `locks/`."""
SCRIPTS = ("board/firstboot.sh", "board/install.sh", "board/edgefl-firstboot.service")
SECRET_FILES = frozenset({"join.json"})
"""Files outside the manifest: they are removed after use."""


def make_payload(join_file: str, extra_files: Mapping[str, bytes | Path] | None = None) -> dict[str, bytes | Path]:
    """Returns path -> content of all files below `edgefl/`, the manifest included.

    Args:
        join_file: the text of `join.json`.
        extra_files: more files, such as wheels, signers or drop-ins, by their path below the folder.
    """
    files: dict[str, bytes | Path] = {"join.json": join_file.encode(), **(extra_files or {})}
    if LOCK_NAME not in files:
        files |= _list_platform_locks()
    files.setdefault("version", f"{__version__}\n".encode())
    files |= {Path(name).name: provisioning_files.find_path(name) for name in SCRIPTS}
    files |= {f"units/{unit.name}": unit for unit in sorted(provisioning_files.find_path("units").glob("edgefl-*"))}
    files[MANIFEST_NAME] = render_manifest(
        {name: content for name, content in files.items() if name not in SECRET_FILES}
    )
    return files


def render_manifest(files: Mapping[str, bytes | Path]) -> bytes:
    """Returns the manifest: SHA-256 and size of every file, by its path below the folder."""
    entries = {}
    for name, content in sorted(files.items()):
        body = content if isinstance(content, bytes) else content.read_bytes()
        entries[name] = {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    return (json.dumps({"v": 1, "files": entries}, indent=2) + "\n").encode()


def _list_platform_locks() -> dict[str, bytes | Path]:
    """Returns the lock of every platform, by the machine and CPython that `install.sh` detects."""
    light = {f"{family.machine}-{family.abi}": get_lock_name(family) for family in WHEEL_PLATFORMS.values()}
    return {f"locks/{board}.txt": provisioning_files.find_path(f"locks/{name}") for board, name in light.items()}
