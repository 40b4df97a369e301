"""The payload: one folder `edgefl/` with everything that a board needs, the same for every way of bringing it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from edgefl import __version__
from edgefl.provision import sources
from edgefl.provision.locks import BOARDS, lock_name

FOLDER = "edgefl"
MANIFEST = "manifest.json"
LOCK = "requirements.txt"
"""The lock that was chosen for the board; without one it takes the one of its kind, of `locks/`."""
SCRIPTS = ("board/firstboot.sh", "board/install.sh", "board/edgefl-firstboot.service")
SECRET = frozenset({"join.json"})
"""What is not named in the manifest: it is taken away once it was used."""


def payload(join_file: str, extra: Mapping[str, bytes | Path] | None = None) -> dict[str, bytes | Path]:
    """Returns path -> content of all files below `edgefl/`, the manifest included.

    Args:
        join_file: the text of `join.json`.
        extra: more files, such as wheels, signers or drop-ins, by their path below the folder.
    """
    files: dict[str, bytes | Path] = {"join.json": join_file.encode(), **(extra or {})}
    if LOCK not in files:
        files |= _board_locks()
    files.setdefault("version", f"{__version__}\n".encode())
    files |= {Path(name).name: sources.path(name) for name in SCRIPTS}
    files |= {f"units/{unit.name}": unit for unit in sorted(sources.path("units").glob("edgefl-*"))}
    files[MANIFEST] = manifest({name: content for name, content in files.items() if name not in SECRET})
    return files


def manifest(files: Mapping[str, bytes | Path]) -> bytes:
    """Returns the manifest: SHA-256 and size of every file, by its path below the folder."""
    told = {}
    for name, content in sorted(files.items()):
        body = content if isinstance(content, bytes) else content.read_bytes()
        told[name] = {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    return (json.dumps({"v": 1, "files": told}, indent=2) + "\n").encode()


def _board_locks() -> dict[str, bytes | Path]:
    """Returns the lock of every kind of board, by what `install.sh` can see of one: machine and CPython."""
    light = {f"{family.machine}-{family.abi}": lock_name(family) for family in BOARDS.values()}
    return {f"locks/{board}.txt": sources.path(f"locks/{name}") for board, name in light.items()}
