"""Dashboard: the files of its page, with a strict content security policy, and the routes that only the page uses."""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import Response

from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.api.feed import FeedResponse
from edgefl.core.errors import NotFoundError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.engine.assembly.schema import make_run_schema
from edgefl.storage.queries.dashboard import find_newest_rounds, get_device_timeline, get_run_curve
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.store import Store

MAX_POINTS = 10_000
MAX_SPAN_ROUNDS = 100
MAX_CACHED_CURVES = 32
PAGE_FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
MEDIA_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
# No inline code, no other origin, no framing. With trusted types no text can become markup, whatever the name of a
# device or a run.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = MappingProxyType(
    {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        # Revalidated each time: an updated coordinator must not be used with the scripts of the former version.
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
    }
)

Curve = tuple[int, list[Json]]


def dashboard_router(context: ApiContext) -> APIRouter:
    """Returns the routes of the page's data: feed, charts of a run, and the schema of run files."""
    router = APIRouter(prefix="/edgefl/v1")
    store, viewer_only = context.store, [Depends(context.viewer)]
    get_curve = cache_curves(store)

    @router.get("/feed", dependencies=viewer_only)
    async def open_feed(request: Request) -> Response:
        client = context.feed.add_client()
        last_id, can_read = (
            request.headers.get("last-event-id"),
            functools.partial(context.auth.can_still_read, request),
        )
        return FeedResponse(context.feed, client, last_id, can_read=can_read)

    @router.get("/runs/{run}/curve", dependencies=viewer_only)
    def get_run_course(run: str, points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 400) -> Json:
        run_id = find_run_id(store, run)
        num_rounds, rows = get_curve(run_id, points)
        return {"v": PROTOCOL_VERSION, "run_id": run_id, "num_rounds": num_rounds, "rows": rows}

    @router.get("/run-schema", dependencies=viewer_only)
    def get_schema() -> Json:
        return {"v": PROTOCOL_VERSION, "schema": make_run_schema()}

    @router.get("/runs/{run}/spans", dependencies=viewer_only)
    def get_spans(
        run: str,
        rounds: Annotated[int, Query(ge=1, le=MAX_SPAN_ROUNDS)] = 12,
        until: Annotated[int | None, Query(ge=0)] = None,
    ) -> Json:
        run_id = find_run_id(store, run)
        newest = find_newest_rounds(store, run_id, rounds)
        response: Json = {"v": PROTOCOL_VERSION, "run_id": run_id, "num_devices": 0, "rows": []}
        if newest is None:
            return response
        first, last = newest if until is None else (until - rounds + 1, until)
        return {**response, "first": first, "last": last, **get_device_timeline(store, run_id, first, last)}

    return router


def cache_curves(store: Store) -> Callable[[str, int], Curve]:
    """Returns `get_run_curve` of a store, with the curves of finished runs cached. Thread-safe."""

    @functools.lru_cache(MAX_CACHED_CURVES)
    def get_final_curve(run_id: str, points: int, _finished_at: float) -> Curve:
        return get_run_curve(store, run_id, points)

    def get_curve(run_id: str, points: int) -> Curve:
        record = store.get_run(run_id)
        if not record.status.is_final or record.finished_at is None:
            return get_run_curve(store, run_id, points)
        return get_final_curve(run_id, points, record.finished_at)  # a resumed run ends at another time

    return get_curve


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAsset:
    """One file of the page; `compressed` is it with gzip."""

    body: bytes
    compressed: bytes
    media_type: str
    etag: str


def load_assets(folder: Path = PAGE_FOLDER) -> Mapping[str, PageAsset]:
    """Returns the page's files by name; only those of a type in `MEDIA_TYPES`."""
    page_assets = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in MEDIA_TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            page_assets[path.name] = PageAsset(
                body=body, compressed=gzip.compress(body, mtime=0), media_type=MEDIA_TYPES[path.suffix], etag=etag
            )
    return page_assets


def page_router() -> APIRouter:
    """Returns the routes of the page's files, without authentication: they hold no data."""
    router, assets = APIRouter(), load_assets()

    @router.get("/")
    async def get_index(request: Request) -> Response:
        return _respond(request, assets[INDEX])

    @router.get("/edgefl/page/{name}")
    async def get_file(request: Request, name: str) -> Response:
        if name not in assets:
            raise NotFoundError(f"the page has no file {name[:80]!r}")
        return _respond(request, assets[name])

    return router


def _respond(request: Request, asset: PageAsset) -> Response:
    headers = {**HEADERS, "ETag": asset.etag}
    client_etags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if asset.etag in client_etags:
        return Response(status_code=304, headers=headers)
    codings = [coding.partition(";")[0].strip() for coding in request.headers.get("accept-encoding", "").split(",")]
    if "gzip" in codings:
        return Response(
            asset.compressed, media_type=asset.media_type, headers={**headers, "Content-Encoding": "gzip"}
        )
    return Response(asset.body, media_type=asset.media_type, headers=headers)
