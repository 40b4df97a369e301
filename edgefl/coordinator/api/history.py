"""Routes of the history (rows of one kind, the newest or by pages, the diagnosis of a round) and of saved models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from edgefl.coordinator.api.context import ApiContext
from edgefl.core.errors import NotFoundError, UsageError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.history.diagnosis import diagnose_round
from edgefl.storage.queries.columns import HistoryFilters
from edgefl.storage.queries.history import (
    PAGE_ROWS,
    get_round_details,
    read_history,
    read_history_page,
)
from edgefl.storage.repositories.saved_models import find_model, list_models

MAX_ROWS = 50_000
"""Maximum rows of one response; more come by pages."""
CHUNK_BYTES = 1 << 20


def history_router(context: ApiContext) -> APIRouter:
    """Returns the routes below `/edgefl/v1/history` and `/edgefl/v1/models`."""
    router, store = APIRouter(prefix="/edgefl/v1", dependencies=[Depends(context.viewer)]), context.store
    _add_model_routes(router, context)

    @router.get("/history/why")
    def diagnose(run: str, round: int | None = None) -> Json:  # noqa: A002 the parameter's name in the URL
        return {"v": PROTOCOL_VERSION, **diagnose_round(get_round_details(store, run, round))}

    @router.get("/history/{kind}")
    def list_rows(  # noqa: PLR0913 one parameter per filter
        *,
        kind: str,
        run: str | None = None,
        device: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
        where: Annotated[list[str] | None, Query()] = None,
        by: str | None = None,
        after: str | None = None,
    ) -> Json:
        filters = HistoryFilters(
            run=run, device=device, since=since, until=until, limit=limit, where=where or (), by=by
        )
        response = {"v": PROTOCOL_VERSION, "kind": kind}
        if after is not None:
            page = read_history_page(store, kind, after, **filters)
            return {**response, "rows": page.rows, "next": page.next_cursor}
        if limit is not None and limit > MAX_ROWS:
            raise UsageError(f"one answer holds {MAX_ROWS} rows at most, got {limit}; ask page by page with `after`")
        filters["limit"] = limit or PAGE_ROWS
        return {**response, "rows": read_history(store, kind, **filters)}

    return router


def _add_model_routes(router: APIRouter, context: ApiContext) -> None:
    store, folder = context.store, context.directory.models

    @router.get("/models")
    def list_saved_models(run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, "rows": list_models(store, run)}

    @router.get("/models/{model}")
    def get_model(model: str, run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, **find_model(store, model, run)}

    @router.get("/models/{model}/file")
    def get_model_file(model: str, run: str | None = None) -> StreamingResponse:
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


def _read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
