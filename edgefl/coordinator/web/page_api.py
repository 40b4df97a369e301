"""What the page needs of the API besides what commands use: the feed, charts, pasted run files, tokens, draining."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import segno
from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi.responses import Response

from edgefl import __version__
from edgefl.config import RunConfig, parse_run_text
from edgefl.coordinator.access import Guard
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.draining import Draining
from edgefl.coordinator.joining.tokens import DEFAULT_TTL, TokenTerms, join_line, make_token, parse_ttl
from edgefl.coordinator.web.curve_book import CurveBook
from edgefl.coordinator.web.feed import Feed
from edgefl.coordinator.web.feed_response import FeedResponse
from edgefl.protocol import PROTOCOL_VERSION, JoinToken
from edgefl.storage.queries import find_run
from edgefl.storage.spans import newest_rounds, spans
from edgefl.storage.store import Store
from edgefl.types import Json

Check = Callable[[RunConfig], Json]
MAX_POINTS = 10_000
MAX_SPAN_ROUNDS = 100
QR_SCALE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSite:
    """What the routes work with."""

    directory: CoordinatorDirectory
    store: Store
    feed: Feed
    curves: CurveBook
    draining: Draining
    check: Check
    rights: Callable[[Request], tuple[bool, bool]]


def page_router(site: PageSite, *, viewer: Guard, operator: Guard) -> APIRouter:
    """Returns the routes; `viewer` and `operator` let those through who may read and who may act."""
    router = APIRouter(prefix="/edgefl/v1")
    reads, acts = [Depends(viewer)], [Depends(operator)]
    _add_reads(router, site, reads)

    @router.post("/run-files", dependencies=acts)
    def run_file(toml: Annotated[str, Body(embed=True)]) -> Json:
        config = parse_run_text(toml)
        return {**site.check(config), "v": PROTOCOL_VERSION, "config": config.to_json()}

    @router.post("/tokens", dependencies=acts)
    def token(
        ttl: Annotated[str, Body()] = DEFAULT_TTL,
        uses: Annotated[int, Body()] = 1,
        groups: Annotated[list[str] | None, Body()] = None,
        role: Annotated[str | None, Body()] = None,
    ) -> Json:
        terms = TokenTerms(ttl_s=parse_ttl(ttl), uses=uses, groups=tuple(groups or ()), role=role)
        now = time.time()
        return token_answer(make_token(site.store, site.directory, terms, now=now), terms, now=now)

    @router.post("/devices/{device}/drain", dependencies=acts)
    def drain(device: str) -> Json:
        site.draining.drain(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": True}

    @router.post("/devices/{device}/resume", dependencies=acts)
    def resume(device: str) -> Json:
        site.draining.resume(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": False}

    return router


def _add_reads(router: APIRouter, site: PageSite, reads: list[Any]) -> None:
    @router.get("/access")
    def access(request: Request) -> Json:
        may_read, may_act = site.rights(request)
        about = {"version": __version__, "fleet": site.directory.fleet} if may_read else {}
        return {"v": PROTOCOL_VERSION, "reads": may_read, "acts": may_act, **about}

    @router.get("/feed", dependencies=reads)
    async def feed(request: Request) -> Response:
        return FeedResponse(site.feed, site.feed.admit(), request.headers.get("last-event-id"))

    @router.get("/runs/{run}/curve", dependencies=reads)
    def run_curve(run: str, points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 400) -> Json:
        run_id = find_run(site.store, run)
        num_rounds, rows = site.curves.curve(run_id, points)
        return {"v": PROTOCOL_VERSION, "run_id": run_id, "num_rounds": num_rounds, "rows": rows}

    @router.get("/runs/{run}/spans", dependencies=reads)
    def time_line(
        run: str,
        rounds: Annotated[int, Query(ge=1, le=MAX_SPAN_ROUNDS)] = 12,
        until: Annotated[int | None, Query(ge=0)] = None,
    ) -> Json:
        run_id = find_run(site.store, run)
        found = newest_rounds(site.store, run_id, rounds)
        answer: Json = {"v": PROTOCOL_VERSION, "run_id": run_id, "num_devices": 0, "rows": []}
        if found is None:
            return answer
        first, last = found if until is None else (until - rounds + 1, until)
        return {**answer, "first": first, "last": last, **spans(site.store, run_id, first, last)}


def token_answer(token: JoinToken, terms: TokenTerms, *, now: float) -> Json:
    """Returns a new token as the page and programs get it: with the command that uses it, also as a QR code."""
    line = join_line(token)
    return {
        "v": PROTOCOL_VERSION,
        "token": token.text(),
        "token_id": token.token_id,
        "fleet": token.fleet,
        "expires_at": now + terms.ttl_s,
        "uses": terms.uses,
        "groups": list(terms.groups),
        "role": terms.role,
        "addresses": list(token.addresses),
        "join": line,
        "qr_svg": qr_svg(line),
    }


def qr_svg(text: str) -> str:
    """Returns a QR code with its quiet zone, black on white, as an SVG picture that stands for itself."""
    out = io.BytesIO()
    segno.make(text, error="l", micro=False).save(
        out, kind="svg", scale=QR_SCALE, dark="#000", light="#fff", xmldecl=False, nl=False
    )
    return out.getvalue().decode()
