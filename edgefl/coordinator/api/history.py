"""Routes of the history: rows of one kind, the newest or by pages, and the diagnosis of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from edgefl.core.errors import UsageError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.history.diagnosis import diagnose_round
from edgefl.storage.queries.history import PAGE_ROWS, HistoryFilters, read_history, read_history_page
from edgefl.storage.queries.round_details import get_round_details
from edgefl.storage.store import Store

MAX_ROWS = 50_000
"""Maximum rows of one response; more come by pages."""


def add_history_routes(router: APIRouter, store: Store, reads: Sequence[Any]) -> None:
    """Adds the routes; `reads` are the dependencies that admit viewers."""

    @router.get("/edgefl/v1/history/why", dependencies=reads)
    def why(run: str, round: int | None = None) -> Json:  # noqa: A002 the parameter's name in the URL
        return {"v": PROTOCOL_VERSION, **diagnose_round(get_round_details(store, run, round))}

    @router.get("/edgefl/v1/history/{kind}", dependencies=reads)
    def past(  # noqa: PLR0913 one parameter per filter
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
