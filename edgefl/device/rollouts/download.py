"""Offers of the coordinator, and the resumable, verified download of what it offers."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError, NetworkError, NotFoundError, StoreFullError
from edgefl.core.protocol import error_from_code, load_json
from edgefl.core.safe_parsing import SHA256
from edgefl.core.types import Json
from edgefl.system.atomic_files import DISK_FULL_ERRNOS, make_private_directory, make_store_error, sync_directory
from edgefl.system.https_client import SignRequest, request

PART_SUFFIX = ".part"
"""Suffix of an incomplete file."""
TIMEOUT_S = 20.0
CHUNK_BYTES = 64 * 1024
MAX_OFFER_BYTES = 4 * 1024 * 1024
MIN_FREE_BYTES = 32 * 1024 * 1024
"""Space that must stay free on the disk beside the file, for the board itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSource:
    """Coordinator address and signer of requests for downloads."""

    address: str
    tls_context: ssl.SSLContext
    sign: SignRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """What a kind of rollout brings: its names in URLs and messages, the suffix of its files, and their limit."""

    rollout: str
    name: str
    suffix: str
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """File that the coordinator offers: `path` is that of its URL, `what` its name in messages."""

    what: str
    path: str
    sha256: str
    num_bytes: int
    suffix: str


def fetch_offer(source: DownloadSource, artefact: Artefact, rollout_id: str) -> tuple[Json, RemoteFile]:
    """Returns the coordinator's offer of a rollout, and its file.

    Raises:
        NotFoundError: it is not for this device (any more).
        DataError: the offer is malformed, or its file is larger than a device accepts.
        NetworkError: no answer.
    """
    path = f"/edgefl/v1/{artefact.rollout}s/{rollout_id}"
    headers = source.sign("GET", f"{path}/offer", b"")
    status, body = request(
        source.address,
        source.tls_context,
        "GET",
        f"{path}/offer",
        headers=headers,
        timeout_s=TIMEOUT_S,
        max_bytes=MAX_OFFER_BYTES,
    )
    value = parse_json_response(source.address, status, body)
    sha256, num_bytes = value.get("sha256"), value.get("bytes")
    if not isinstance(sha256, str) or not SHA256.match(sha256) or not isinstance(num_bytes, int) or num_bytes < 1:
        raise DataError(f"the coordinator's offer makes no sense: {num_bytes!r:.40} bytes, sha256 {sha256!r:.80}")
    if num_bytes > artefact.max_bytes:
        raise DataError(f"the {artefact.name} has {num_bytes} bytes, a device takes {artefact.max_bytes} at most")
    return value, RemoteFile(
        what=f"the {artefact.name}",
        path=f"{path}/{artefact.name}",
        sha256=sha256,
        num_bytes=num_bytes,
        suffix=artefact.suffix,
    )


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
    num_present = part.stat().st_size if part.is_file() else 0
    check_free_space(folder, remote.num_bytes - num_present, f"{remote.what} needs")
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
        headers = source.sign("GET", remote.path, b"")
        connection.request("GET", remote.path, headers={**headers, "Range": f"bytes={file.tell()}-"})
        response = connection.getresponse()
        _check_response(source.address, response, file.tell())
        # read1 returns the bytes received so far: a slow link must not lose much.
        while chunk := response.read1(CHUNK_BYTES):
            if file.tell() + len(chunk) > remote.num_bytes:
                raise DataError(f"{remote.what} has more than the {remote.num_bytes} bytes that were offered")
            file.write(chunk)
            file.flush()  # a killed agent resumes from here, be the file ever so small
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


def check_free_space(folder: Path, num_bytes: int, what_needs: str) -> None:
    """Raises `StoreFullError` unless `MIN_FREE_BYTES` stay free after `num_bytes`; `what_needs` begins the text."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < num_bytes + MIN_FREE_BYTES:
        raise StoreFullError(
            f"{what_needs} {num_bytes} bytes and {MIN_FREE_BYTES} must stay free; {folder} has {free_bytes} left"
        )


def _compute_digest(path: Path) -> Any:
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest
