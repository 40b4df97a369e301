"""Kept models under `/edgefl/v1/models`: which there are, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from edgefl.coordinator.access import Guard
from edgefl.errors import NotFoundError
from edgefl.protocol import PROTOCOL_VERSION
from edgefl.storage.model_rows import find_model, kept_models
from edgefl.storage.store import Store
from edgefl.types import Json

CHUNK_BYTES = 1 << 20


def model_router(*, store: Store, folder: Path, viewer: Guard) -> APIRouter:
    """Returns the routes; `folder` holds the model files, `viewer` lets those through who may read."""
    router = APIRouter(dependencies=[Depends(viewer)])

    @router.get("/edgefl/v1/models")
    def models(run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, "rows": kept_models(store, run)}

    @router.get("/edgefl/v1/models/{model}")
    def show(model: str, run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, **find_model(store, model, run)}

    @router.get("/edgefl/v1/models/{model}/file")
    def file(model: str, run: str | None = None) -> StreamingResponse:
        sha256 = find_model(store, model, run)["sha256"]
        try:
            # Opened here: the file may go when a newer model takes its place, but not from under an open one.
            opened = (folder / f"{sha256}.safetensors").open("rb")
        except OSError:
            raise NotFoundError(f"the file of model {sha256[:12]} is missing in {folder}") from None
        size = str(opened.seek(0, 2))
        opened.seek(0)
        headers = {"Content-Length": size, "ETag": f'"{sha256}"'}
        return StreamingResponse(_chunks(opened), media_type="application/octet-stream", headers=headers)

    return router


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
