"""Fetches a model's file from the coordinator: piece by piece, from where it stopped, checked while it arrives."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.device.model_store import PART_SUFFIX
from edgefl.device.trust import request
from edgefl.errors import DataError, NetworkError, NotFoundError, StoreFullError
from edgefl.files import FULL_ERRNOS, make_private_directory, store_error, sync_directory
from edgefl.protocol import MAX_MODEL_BYTES, error_from_code, load_json
from edgefl.types import Json

TIMEOUT_S = 20.0
PIECE_BYTES = 64 * 1024
SPARE_BYTES = 32 * 1024 * 1024
"""What must be left on the disk beside the model, for the board itself."""
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where models are fetched, and with what proof of who asks."""

    address: str
    trust: ssl.SSLContext
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the coordinator says of a model before it is fetched."""

    deployment: str
    model: str
    sha256: str
    num_bytes: int
    task: str
    options: Mapping[str, Any]
    tolerance: float
    min_accuracy: float
    test_fraction: float


def fetch_offer(source: Source, deployment: str) -> Offer:
    """Returns what the coordinator offers.

    Raises:
        NotFoundError: the deployment is not for this device (any more).
        DataError: the offer makes no sense, or its file is larger than a device takes.
        NetworkError: no answer.
    """
    path = f"/edgefl/v1/deployments/{deployment}/offer"
    status, body = request(source.address, source.trust, "GET", path, headers=source.headers, timeout_s=TIMEOUT_S)
    value = _answer(source.address, status, body)
    try:
        offer = Offer(
            deployment=str(value["deployment"]),
            model=str(value["model"]),
            sha256=str(value["sha256"]),
            num_bytes=int(value["bytes"]),
            task=str(value["task"]),
            options=dict(value["options"]),
            tolerance=float(value["tolerance"]),
            min_accuracy=float(value["min_accuracy"]),
            test_fraction=float(value["test_fraction"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"the coordinator's offer makes no sense: {error!r}") from None
    if not _SHA256.match(offer.sha256) or offer.num_bytes < 1:
        raise DataError(
            f"the coordinator's offer makes no sense: {offer.num_bytes} bytes, sha256 {offer.sha256[:64]!r}"
        )
    if offer.num_bytes > MAX_MODEL_BYTES:
        raise DataError(f"the model has {offer.num_bytes} bytes, a device takes {MAX_MODEL_BYTES} at most")
    return offer


def fetch_model(source: Source, offer: Offer, folder: Path, is_wanted: Callable[[], bool] = lambda: True) -> Path:
    """Returns the model's file once it is whole, checked and durable; goes on with a part that is there.

    Raises:
        NetworkError: it broke off, or nobody wants it any more; what has come stays for the next attempt.
        DataError: what came is not what was offered; nothing of it stays.
        StoreFullError: it does not fit on the disk.
        NotFoundError: the coordinator has taken it back.
    """
    make_private_directory(folder)
    whole, part = folder / f"{offer.sha256}.onnx", folder / f"{offer.sha256}{PART_SUFFIX}"
    if whole.is_file() and _digest(whole).hexdigest() == offer.sha256:
        return whole
    if part.is_file() and part.stat().st_size > offer.num_bytes:
        part.unlink()
    _check_room(folder, offer.num_bytes - (part.stat().st_size if part.is_file() else 0))
    digest = _digest(part)
    try:
        with part.open("ab") as file:
            if file.tell() < offer.num_bytes:
                _receive(source, offer, file, digest, is_wanted)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            part.unlink(missing_ok=True)
        raise store_error(part, error) from None
    except DataError:
        part.unlink(missing_ok=True)
        raise
    if digest.hexdigest() != offer.sha256:
        part.unlink()
        raise DataError(f"the model has SHA-256 {digest.hexdigest()[:12]}…, {offer.sha256[:12]}… was offered")
    part.replace(whole)
    sync_directory(folder)
    return whole


def _receive(source: Source, offer: Offer, file: Any, digest: Any, is_wanted: Callable[[], bool]) -> None:
    """Appends what is missing, and adds it to the digest."""
    host, _, port = source.address.rpartition(":")
    connection = http.client.HTTPSConnection(host.strip("[]"), int(port), timeout=TIMEOUT_S, context=source.trust)
    try:
        path = f"/edgefl/v1/deployments/{offer.deployment}/model"
        connection.request("GET", path, headers={**source.headers, "Range": f"bytes={file.tell()}-"})
        response = connection.getresponse()
        _check_answer(source.address, response, file.tell())
        while piece := response.read1(PIECE_BYTES):  # what has come by now: a slow link must not lose much
            if file.tell() + len(piece) > offer.num_bytes:
                raise DataError(f"the model has more than the {offer.num_bytes} bytes that were offered")
            file.write(piece)
            digest.update(piece)
            if not is_wanted():
                break
    except (http.client.HTTPException, ssl.SSLError, ConnectionError, TimeoutError) as error:
        raise NetworkError(f"the model broke off at {file.tell()} bytes: {error or type(error).__name__}") from None
    except OSError as error:
        if error.errno in FULL_ERRNOS:
            raise
        raise NetworkError(f"{source.address} cannot be reached: {error.strerror or error}") from None
    finally:
        connection.close()
    if file.tell() < offer.num_bytes:
        raise NetworkError(f"the model broke off at {file.tell()} of {offer.num_bytes} bytes")


def _check_answer(address: str, response: http.client.HTTPResponse, start: int) -> None:
    """Raises unless the answer brings the file from `start` on."""
    if response.status not in {200, 206}:
        _answer(address, response.status, response.read(65536))
    if response.status == 200 and start:
        raise DataError(f"{address} sends the model from its beginning")
    if response.status == 206 and not (response.getheader("Content-Range") or "").startswith(f"bytes {start}-"):
        raise NetworkError(f"{address} does not go on where the model broke off")


def _answer(address: str, status: int, body: bytes) -> Json:
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


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes + SPARE_BYTES:
        raise StoreFullError(
            f"the model needs {num_bytes} bytes and {SPARE_BYTES} must stay free; {folder} has {free} left"
        )


def _digest(path: Path) -> Any:
    digest = hashlib.sha256()
    if path.is_file():
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
    return digest
