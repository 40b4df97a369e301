"""What the unprivileged agent leaves for the updater: a request and a bundle, in `STATE/updates`.

Whoever has taken over the agent chooses what lies there, so the updater follows no links, waits for no pipes, reads
no more than it must, and works on its own copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgefl.bundles.archive import MAX_FILE_BYTES
from edgefl.errors import BundleError
from edgefl.files import FULL_ERRNOS, open_whole, store_error, write_whole
from edgefl.untrusted import parse_json

FOLDER, REQUEST = "updates", "request.json"
SUFFIX = ".bundle"
MAX_REQUEST_BYTES = 4096
_PIECE_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_ID = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallRequest:
    """Which bundle is to be installed, on whose word: the id of an installation, or what a person chose."""

    id: str
    sha256: str


def write_request(state_dir: Path, request: InstallRequest) -> None:
    """Leaves a request; the bundle must lie there already."""
    content = {"v": 1, "id": request.id, "bundle": request.sha256}
    write_whole(state_dir / FOLDER / REQUEST, json.dumps(content).encode())


def read_request(state_dir: Path) -> InstallRequest | None:
    """Returns what the agent asks for; None when there is nothing.

    Raises:
        BundleError: what lies there makes no sense.
    """
    try:
        with _opened(state_dir, REQUEST) as handle:
            content = os.read(handle, MAX_REQUEST_BYTES)
        value = parse_json(content)
        found = InstallRequest(id=value["id"], sha256=value["bundle"])
        sound = value["v"] == 1 and _ID.match(found.id) and _SHA256.match(found.sha256)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise BundleError(f"{state_dir / FOLDER / REQUEST} makes no sense: {error!r}") from None
    if not sound:
        raise BundleError(f"{state_dir / FOLDER / REQUEST} makes no sense: it names no installation and no bundle")
    return found


def copy_bundle(state_dir: Path, request: InstallRequest, out: Path) -> None:
    """Copies the bundle of a request to where its sender cannot change it any more.

    Raises:
        BundleError: it is missing, no plain file, too large, or not the one of the request.
        StoreFullError: there is no room for it.
    """
    name, digest, num_bytes = f"{request.sha256}{SUFFIX}", hashlib.sha256(), 0
    try:
        with _opened(state_dir, name) as handle, open_whole(out) as file:
            while piece := os.read(handle, _PIECE_BYTES):
                num_bytes += len(piece)
                if num_bytes > MAX_FILE_BYTES:
                    raise BundleError(f"the bundle has more than {MAX_FILE_BYTES} bytes")
                digest.update(piece)
                file.write(piece)
            if digest.hexdigest() != request.sha256:
                raise BundleError(f"{name} has SHA-256 {digest.hexdigest()[:12]}…; it is damaged")
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise store_error(out, error) from None
        raise BundleError(
            f"the bundle cannot be taken from {state_dir / FOLDER}: {error.strerror or error}"
        ) from None


@contextlib.contextmanager
def _opened(state_dir: Path, name: str) -> Iterator[int]:
    """Gives a handle of a plain file in the inbox; neither the folder nor the file may be a link."""
    folder = os.open(state_dir / FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BundleError(f"{state_dir / FOLDER / name} is no plain file")
        yield handle
    finally:
        os.close(handle)
