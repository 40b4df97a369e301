"""Routes of saved models under `/edgefl/v1/models`: their list and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from edgefl.coordinator.auth import AccessCheck
from edgefl.core.errors import NotFoundError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.storage.repositories.saved_models import find_model, list_models
from edgefl.storage.store import Store

CHUNK_BYTES = 1 << 20


def model_router(*, store: Store, folder: Path, viewer: AccessCheck) -> APIRouter:
    """Returns the routes; `folder` has the model files, `viewer` admits viewers."""
    router = APIRouter(dependencies=[Depends(viewer)])

    @router.get("/edgefl/v1/models")
    def models(run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, "rows": list_models(store, run)}

    @router.get("/edgefl/v1/models/{model}")
    def show(model: str, run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, **find_model(store, model, run)}

    @router.get("/edgefl/v1/models/{model}/file")
    def file(model: str, run: str | None = None) -> StreamingResponse:
        sha256 = find_model(store, model, run)["sha256"]
        try:
            # Opened here: the file may be deleted for a newer model, but an open one stays readable.
            opened = (folder / f"{sha256}.safetensors").open("rb")
        except OSError:
            raise NotFoundError(f"the file of model {sha256[:12]} is missing in {folder}") from None
        size = str(opened.seek(0, 2))
        opened.seek(0)
        headers = {"Content-Length": size, "ETag": f'"{sha256}"'}
        return StreamingResponse(_read_chunks(opened), media_type="application/octet-stream", headers=headers)

    return router


def _read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
