"""Install request of the unprivileged agent to the updater: a request and a bundle in `STATE/updates`.

A compromised agent controls this folder, so the updater follows no links, waits for no pipes, limits reads, and works
on its own copy.
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

from edgefl.bundles.archive import MAX_BUNDLE_FILE_BYTES
from edgefl.core.errors import BundleError
from edgefl.core.safe_parsing import parse_json
from edgefl.system.atomic_files import DISK_FULL_ERRNOS, make_store_error, open_atomic, write_atomic

REQUEST_FOLDER, REQUEST_FILE = "updates", "request.json"
BUNDLE_SUFFIX = ".bundle"
MAX_REQUEST_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_ID = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallRequest:
    """Request to install a bundle; `id` is of an installation, or chosen by a user."""

    id: str
    sha256: str


def write_request(state_dir: Path, request: InstallRequest) -> None:
    """Writes a request; the bundle must exist already."""
    content = {"v": 1, "id": request.id, "bundle": request.sha256}
    write_atomic(state_dir / REQUEST_FOLDER / REQUEST_FILE, json.dumps(content).encode())


def read_request(state_dir: Path) -> InstallRequest | None:
    """Returns the agent's request, or None.

    Raises:
        BundleError: it is malformed.
    """
    try:
        with _open_file(state_dir, REQUEST_FILE) as descriptor:
            content = os.read(descriptor, MAX_REQUEST_BYTES)
        value = parse_json(content)
        request = InstallRequest(id=value["id"], sha256=value["bundle"])
        is_valid = value["v"] == 1 and _ID.match(request.id) and _SHA256.match(request.sha256)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise BundleError(f"{state_dir / REQUEST_FOLDER / REQUEST_FILE} makes no sense: {error!r}") from None
    if not is_valid:
        raise BundleError(
            f"{state_dir / REQUEST_FOLDER / REQUEST_FILE} makes no sense: it names no installation and no bundle"
        )
    return request


def copy_bundle(state_dir: Path, request: InstallRequest, out: Path) -> None:
    """Copies the bundle of a request to a path that its sender cannot change.

    Raises:
        BundleError: it is missing, no plain file, too large, or not the requested one.
        StoreFullError: no room.
    """
    name, digest, num_bytes = f"{request.sha256}{BUNDLE_SUFFIX}", hashlib.sha256(), 0
    try:
        with _open_file(state_dir, name) as descriptor, open_atomic(out) as file:
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > MAX_BUNDLE_FILE_BYTES:
                    raise BundleError(f"the bundle has more than {MAX_BUNDLE_FILE_BYTES} bytes")
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != request.sha256:
                raise BundleError(f"{name} has SHA-256 {digest.hexdigest()[:12]}…; it is damaged")
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise make_store_error(out, error) from None
        raise BundleError(
            f"the bundle cannot be taken from {state_dir / REQUEST_FOLDER}: {error.strerror or error}"
        ) from None


@contextlib.contextmanager
def _open_file(state_dir: Path, name: str) -> Iterator[int]:
    """Yields a descriptor of a plain file in the request folder; neither may be a link."""
    folder = os.open(state_dir / REQUEST_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BundleError(f"{state_dir / REQUEST_FOLDER / name} is no plain file")
        yield descriptor
    finally:
        os.close(descriptor)
