"""Download of a model that the coordinator offers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.core.errors import DataError
from edgefl.core.protocol import MAX_MODEL_BYTES
from edgefl.device.file_download import TIMEOUT_S, DownloadSource, RemoteFile, download_file, parse_json_response
from edgefl.system.https_client import request

__all__ = ["DownloadSource", "ModelOffer", "download_model", "fetch_model_offer"]

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOffer:
    """Coordinator's description of a model before its download."""

    deployment: str
    model: str
    sha256: str
    num_bytes: int
    task: str
    options: Mapping[str, Any]
    tolerance: float
    min_accuracy: float
    test_fraction: float


def fetch_model_offer(source: DownloadSource, deployment: str) -> ModelOffer:
    """Returns the coordinator's offer.

    Raises:
        NotFoundError: the deployment is not for this device (any more).
        DataError: the offer is malformed, or its file is larger than a device accepts.
        NetworkError: no answer.
    """
    path = f"/edgefl/v1/deployments/{deployment}/offer"
    status, body = request(
        source.address, source.tls_context, "GET", path, headers=source.headers, timeout_s=TIMEOUT_S
    )
    value = parse_json_response(source.address, status, body)
    try:
        offer = ModelOffer(
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


def download_model(
    source: DownloadSource, offer: ModelOffer, folder: Path, should_continue: Callable[[], bool] = lambda: True
) -> Path:
    """Returns the complete, verified and durable model file; raises as `download_file`."""
    remote = RemoteFile(
        what="the model",
        path=f"/edgefl/v1/deployments/{offer.deployment}/model",
        sha256=offer.sha256,
        num_bytes=offer.num_bytes,
        suffix=".onnx",
    )
    return download_file(source, remote, folder, should_continue)
