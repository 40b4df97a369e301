"""Routes for the page alone: the feed, charts, pasted run files, tokens, draining."""

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
from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.enrolment.tokens import DEFAULT_TTL, JoinTokenSpec, format_join_command, make_token, parse_ttl
from edgefl.coordinator.fleet.draining import DrainController
from edgefl.coordinator.web.curve_cache import CurveCache
from edgefl.coordinator.web.feed import Feed
from edgefl.coordinator.web.feed_response import FeedResponse
from edgefl.core.config import RunConfig, parse_run_text
from edgefl.core.protocol import PROTOCOL_VERSION, JoinToken
from edgefl.core.types import Json
from edgefl.storage.queries.device_timeline import find_newest_rounds, get_device_timeline
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.store import Store

CheckRun = Callable[[RunConfig], Json]
MAX_POINTS = 10_000
MAX_SPAN_ROUNDS = 100
QR_SCALE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """Services of the page's routes."""

    directory: CoordinatorDirectory
    store: Store
    feed: Feed
    curves: CurveCache
    drain_controller: DrainController
    check: CheckRun
    check_permissions: Callable[[Request], tuple[bool, bool]]


def page_router(context: PageContext, *, viewer: AccessCheck, operator: AccessCheck) -> APIRouter:
    """Returns the routes; `viewer` and `operator` admit those who may read and act."""
    router = APIRouter(prefix="/edgefl/v1")
    viewer_only, operator_only = [Depends(viewer)], [Depends(operator)]
    _add_read_routes(router, context, viewer_only)

    @router.post("/run-files", dependencies=operator_only)
    def run_file(toml: Annotated[str, Body(embed=True)]) -> Json:
        config = parse_run_text(toml)
        return {**context.check(config), "v": PROTOCOL_VERSION, "config": config.to_json()}

    @router.post("/tokens", dependencies=operator_only)
    def token(
        ttl: Annotated[str, Body()] = DEFAULT_TTL,
        uses: Annotated[int, Body()] = 1,
        groups: Annotated[list[str] | None, Body()] = None,
        role: Annotated[str | None, Body()] = None,
    ) -> Json:
        spec = JoinTokenSpec(ttl_s=parse_ttl(ttl), uses=uses, groups=tuple(groups or ()), role=role)
        now = time.time()
        return encode_token(make_token(context.store, context.directory, spec, now=now), spec, now=now)

    @router.post("/devices/{device}/drain", dependencies=operator_only)
    def drain(device: str) -> Json:
        context.drain_controller.drain(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": True}

    @router.post("/devices/{device}/resume", dependencies=operator_only)
    def resume(device: str) -> Json:
        context.drain_controller.resume(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": False}

    return router


def _add_read_routes(router: APIRouter, context: PageContext, reads: list[Any]) -> None:
    @router.get("/access")
    def access(request: Request) -> Json:
        may_read, may_act = context.check_permissions(request)
        details = {"version": __version__, "fleet": context.directory.fleet} if may_read else {}
        return {"v": PROTOCOL_VERSION, "reads": may_read, "acts": may_act, **details}

    @router.get("/feed", dependencies=reads)
    async def feed(request: Request) -> Response:
        return FeedResponse(context.feed, context.feed.add_client(), request.headers.get("last-event-id"))

    @router.get("/runs/{run}/curve", dependencies=reads)
    def run_curve(run: str, points: Annotated[int, Query(ge=2, le=MAX_POINTS)] = 400) -> Json:
        run_id = find_run_id(context.store, run)
        num_rounds, rows = context.curves.get(run_id, points)
        return {"v": PROTOCOL_VERSION, "run_id": run_id, "num_rounds": num_rounds, "rows": rows}

    @router.get("/runs/{run}/spans", dependencies=reads)
    def time_line(
        run: str,
        rounds: Annotated[int, Query(ge=1, le=MAX_SPAN_ROUNDS)] = 12,
        until: Annotated[int | None, Query(ge=0)] = None,
    ) -> Json:
        run_id = find_run_id(context.store, run)
        newest = find_newest_rounds(context.store, run_id, rounds)
        response: Json = {"v": PROTOCOL_VERSION, "run_id": run_id, "num_devices": 0, "rows": []}
        if newest is None:
            return response
        first, last = newest if until is None else (until - rounds + 1, until)
        return {**response, "first": first, "last": last, **get_device_timeline(context.store, run_id, first, last)}


def encode_token(token: JoinToken, spec: JoinTokenSpec, *, now: float) -> Json:
    """Returns a new token as JSON, with its join command, also as a QR code."""
    join_command = format_join_command(token)
    return {
        "v": PROTOCOL_VERSION,
        "token": token.text(),
        "token_id": token.token_id,
        "fleet": token.fleet,
        "expires_at": now + spec.ttl_s,
        "uses": spec.uses,
        "groups": list(spec.groups),
        "role": spec.role,
        "addresses": list(token.addresses),
        "join": join_command,
        "qr_svg": render_qr_svg(join_command),
    }


def render_qr_svg(text: str) -> str:
    """Returns a QR code with its quiet zone, black on white, as a complete SVG image."""
    buffer = io.BytesIO()
    segno.make(text, error="l", micro=False).save(
        buffer, kind="svg", scale=QR_SCALE, dark="#000", light="#fff", xmldecl=False, nl=False
    )
    return buffer.getvalue().decode()
