"""Resumable, verified download of a file from the coordinator."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError, NetworkError, NotFoundError, StoreFullError
from edgefl.core.protocol import error_from_code, load_json
from edgefl.core.types import Json
from edgefl.system.atomic_files import DISK_FULL_ERRNOS, make_private_directory, make_store_error, sync_directory

PART_SUFFIX = ".part"
"""Suffix of an incomplete file."""
TIMEOUT_S = 20.0
CHUNK_BYTES = 64 * 1024
MIN_FREE_BYTES = 32 * 1024 * 1024
"""Space that must stay free on the disk beside the file, for the board itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSource:
    """Coordinator address and authentication headers for downloads."""

    address: str
    tls_context: ssl.SSLContext
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """File that the coordinator offers: `path` is that of its URL, `what` its name in messages."""

    what: str
    path: str
    sha256: str
    num_bytes: int
    suffix: str


def download_file(
    source: DownloadSource, remote: RemoteFile, folder: Path, should_continue: Callable[[], bool] = lambda: True
) -> Path:
    """Returns the complete, verified and durable file; resumes a partial download.

    Raises:
        NetworkError: it broke off or was cancelled; the partial file stays for the next attempt.
        DataError: the content is not the offered one; the partial file is deleted.
        StoreFullError: it does not fit on the disk.
        NotFoundError: the coordinator has withdrawn it.
    """
    make_private_directory(folder)
    target, part = folder / f"{remote.sha256}{remote.suffix}", folder / f"{remote.sha256}{PART_SUFFIX}"
    if target.is_file() and _compute_digest(target).hexdigest() == remote.sha256:
        return target
    if part.is_file() and part.stat().st_size > remote.num_bytes:
        part.unlink()
    _check_disk_space(folder, remote.what, remote.num_bytes - (part.stat().st_size if part.is_file() else 0))
    digest = _compute_digest(part)
    try:
        with part.open("ab") as file:
            if file.tell() < remote.num_bytes:
                _receive(source, remote, file, digest, should_continue)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            part.unlink(missing_ok=True)
        raise make_store_error(part, error) from None
    except DataError:
        part.unlink(missing_ok=True)
        raise
    if digest.hexdigest() != remote.sha256:
        part.unlink()
        raise DataError(f"{remote.what} has SHA-256 {digest.hexdigest()[:12]}…, {remote.sha256[:12]}… was offered")
    part.replace(target)
    sync_directory(folder)
    return target


def _receive(
    source: DownloadSource, remote: RemoteFile, file: Any, digest: Any, should_continue: Callable[[], bool]
) -> None:
    """Appends the missing bytes to the file and the digest."""
    host, _, port = source.address.rpartition(":")
    connection = http.client.HTTPSConnection(
        host.strip("[]"), int(port), timeout=TIMEOUT_S, context=source.tls_context
    )
    try:
        connection.request("GET", remote.path, headers={**source.headers, "Range": f"bytes={file.tell()}-"})
        response = connection.getresponse()
        _check_response(source.address, response, file.tell())
        # read1 returns the bytes received so far: a slow link must not lose much.
        while chunk := response.read1(CHUNK_BYTES):
            if file.tell() + len(chunk) > remote.num_bytes:
                raise DataError(f"{remote.what} has more than the {remote.num_bytes} bytes that were offered")
            file.write(chunk)
            digest.update(chunk)
            if not should_continue():
                break
    except (http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
        raise NetworkError(
            f"{remote.what} broke off at {file.tell()} bytes: {error or type(error).__name__}"
        ) from None
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise
        raise NetworkError(f"{source.address} cannot be reached: {error.strerror or error}") from None
    finally:
        connection.close()
    if file.tell() < remote.num_bytes:
        raise NetworkError(f"{remote.what} broke off at {file.tell()} of {remote.num_bytes} bytes")


def _check_response(address: str, response: http.client.HTTPResponse, start: int) -> None:
    """Raises unless the response contains the file from `start` on."""
    if response.status not in {200, 206}:
        parse_json_response(address, response.status, response.read(65536))
    if response.status == 200 and start:
        raise DataError(f"{address} sends the file from its beginning")
    if response.status == 206 and not (response.getheader("Content-Range") or "").startswith(f"bytes {start}-"):
        raise NetworkError(f"{address} does not go on where the file broke off")


def parse_json_response(address: str, status: int, body: bytes) -> Json:
    """Returns the JSON of a response; raises `NotFoundError` as such, other errors as `NetworkError`."""
    try:
        value = load_json(body)
    except NetworkError:
        value = {}
    if status == 200 and value:
        return value
    error = error_from_code(str(value.get("error")), str(value.get("message", f"{address} answered {status}")))
    if isinstance(error, NotFoundError):
        raise error
    raise NetworkError(str(error))


def _check_disk_space(folder: Path, what: str, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes + MIN_FREE_BYTES:
        raise StoreFullError(
            f"{what} needs {num_bytes} bytes and {MIN_FREE_BYTES} must stay free; {folder} has {free_bytes} left"
        )


def _compute_digest(path: Path) -> Any:
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest
