"""Fetches a model that the coordinator offers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.device.file_fetch import TIMEOUT_S, Source, WantedFile, fetch_file, json_answer
from edgefl.device.trust import request
from edgefl.errors import DataError
from edgefl.protocol import MAX_MODEL_BYTES

__all__ = ["Offer", "Source", "fetch_model", "fetch_offer"]

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


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
    value = json_answer(source.address, status, body)
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
    """Returns the model's file once it is whole, checked and durable; raises as `fetch_file`."""
    wanted = WantedFile(
        what="the model",
        path=f"/edgefl/v1/deployments/{offer.deployment}/model",
        sha256=offer.sha256,
        num_bytes=offer.num_bytes,
        suffix=".onnx",
    )
    return fetch_file(source, wanted, folder, is_wanted)
