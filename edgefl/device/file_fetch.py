"""Fetches a file from the coordinator: piece by piece, from where it stopped, checked while it arrives."""

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

from edgefl.errors import DataError, NetworkError, NotFoundError, StoreFullError
from edgefl.files import FULL_ERRNOS, make_private_directory, store_error, sync_directory
from edgefl.protocol import error_from_code, load_json
from edgefl.types import Json

PART_SUFFIX = ".part"
"""Of a file that has not come whole."""
TIMEOUT_S = 20.0
PIECE_BYTES = 64 * 1024
SPARE_BYTES = 32 * 1024 * 1024
"""What must be left on the disk beside the file, for the board itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where files are fetched, and with what proof of who asks."""

    address: str
    trust: ssl.SSLContext
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    """A file that the coordinator offers: `path` is that of its URL, `what` it is called in messages."""

    what: str
    path: str
    sha256: str
    num_bytes: int
    suffix: str


def fetch_file(
    source: Source, wanted: WantedFile, folder: Path, is_wanted: Callable[[], bool] = lambda: True
) -> Path:
    """Returns the file once it is whole, checked and durable; goes on with a part that is there.

    Raises:
        NetworkError: it broke off, or nobody wants it any more; what has come stays for the next attempt.
        DataError: what came is not what was offered; nothing of it stays.
        StoreFullError: it does not fit on the disk.
        NotFoundError: the coordinator has taken it back.
    """
    make_private_directory(folder)
    whole, part = folder / f"{wanted.sha256}{wanted.suffix}", folder / f"{wanted.sha256}{PART_SUFFIX}"
    if whole.is_file() and _digest(whole).hexdigest() == wanted.sha256:
        return whole
    if part.is_file() and part.stat().st_size > wanted.num_bytes:
        part.unlink()
    _check_room(folder, wanted.what, wanted.num_bytes - (part.stat().st_size if part.is_file() else 0))
    digest = _digest(part)
    try:
        with part.open("ab") as file:
            if file.tell() < wanted.num_bytes:
                _receive(source, wanted, file, digest, is_wanted)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            part.unlink(missing_ok=True)
        raise store_error(part, error) from None
    except DataError:
        part.unlink(missing_ok=True)
        raise
    if digest.hexdigest() != wanted.sha256:
        part.unlink()
        raise DataError(f"{wanted.what} has SHA-256 {digest.hexdigest()[:12]}…, {wanted.sha256[:12]}… was offered")
    part.replace(whole)
    sync_directory(folder)
    return whole


def _receive(source: Source, wanted: WantedFile, file: Any, digest: Any, is_wanted: Callable[[], bool]) -> None:
    """Appends what is missing, and adds it to the digest."""
    host, _, port = source.address.rpartition(":")
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=TIMEOUT_S, context=source.trust)
    try:
        connection.request("GET", wanted.path, headers={**source.headers, "Range": f"bytes={file.tell()}-"})
        response = connection.getresponse()
        _check_answer(source.address, response, file.tell())
        while piece := response.read1(PIECE_BYTES):  # what has come by now: a slow link must not lose much
            if file.tell() + len(piece) > wanted.num_bytes:
                raise DataError(f"{wanted.what} has more than the {wanted.num_bytes} bytes that were offered")
            file.write(piece)
            digest.update(piece)
            if not is_wanted():
                break
    except (http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
        raise NetworkError(
            f"{wanted.what} broke off at {file.tell()} bytes: {error or type(error).__name__}"
        ) from None
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise
        raise NetworkError(f"{source.address} cannot be reached: {error.strerror or error}") from None
    finally:
        connection.close()
    if file.tell() < wanted.num_bytes:
        raise NetworkError(f"{wanted.what} broke off at {file.tell()} of {wanted.num_bytes} bytes")


def _check_answer(address: str, response: http.client.HTTPResponse, start: int) -> None:
    """Raises unless the answer brings the file from `start` on."""
    if response.status not in {200, 206}:
        json_answer(address, response.status, response.read(65536))
    if response.status == 200 and start:
        raise DataError(f"{address} sends the file from its beginning")
    if response.status == 206 and not (response.getheader("Content-Range") or "").startswith(f"bytes {start}-"):
        raise NetworkError(f"{address} does not go on where the file broke off")


def json_answer(address: str, status: int, body: bytes) -> Json:
    """Returns the JSON of an answer; an error that the coordinator names is raised, the final ones as themselves."""
    try:
        value = load_json(body)
    except NetworkError:
        value = {}
    if status == 200 and value:
        return value
    named = error_from_code(str(value.get("error")), str(value.get("message", f"{address} answered {status}")))
    if isinstance(named, NotFoundError):
        raise named
    raise NetworkError(str(named))


def _check_room(folder: Path, what: str, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes + SPARE_BYTES:
        raise StoreFullError(
            f"{what} needs {num_bytes} bytes and {SPARE_BYTES} must stay free; {folder} has {free} left"
        )


def _digest(path: Path) -> Any:
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    return digest
