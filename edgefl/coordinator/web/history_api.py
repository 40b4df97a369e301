"""The history over HTTPS: rows of one kind, the newest or page by page, and why a round took so long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query

from edgefl.errors import UsageError
from edgefl.history.why import explain
from edgefl.protocol import PROTOCOL_VERSION
from edgefl.storage.queries import PAGE_ROWS, Filters, history, history_page
from edgefl.storage.round_facts import round_facts
from edgefl.storage.store import Store
from edgefl.types import Json

MAX_ROWS = 50_000
"""What one answer may hold when somebody asks for so many; more come page by page."""


def add_history(router: APIRouter, store: Store, reads: Sequence[Any]) -> None:
    """Adds the routes; `reads` are the dependencies that let those through who may read."""

    @router.get("/edgefl/v1/history/why", dependencies=reads)
    def why(run: str, round: int | None = None) -> Json:  # noqa: A002 the parameter's name in the URL
        return {"v": PROTOCOL_VERSION, **explain(round_facts(store, run, round))}

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
        filters = Filters(run=run, device=device, since=since, until=until, limit=limit, where=where or (), by=by)
        answer = {"v": PROTOCOL_VERSION, "kind": kind}
        if after is not None:
            page = history_page(store, kind, after, **filters)
            return {**answer, "rows": page.rows, "next": page.next}
        if limit is not None and limit > MAX_ROWS:
            raise UsageError(f"one answer holds {MAX_ROWS} rows at most, got {limit}; ask page by page with `after`")
        filters["limit"] = limit or PAGE_ROWS
        return {**answer, "rows": history(store, kind, **filters)}
