"""Routes of devices: their rows and logs, join tokens, draining, removal and the rotation of certificates."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from typing import Annotated, Any

import segno
from fastapi import APIRouter, Body, Depends

from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.enrolment.tokens import DEFAULT_TTL, JoinTokenSpec, format_join_command, make_token, parse_ttl
from edgefl.coordinator.fleet.registry import DEFAULT_STATUS_ROW, DeviceRegistry
from edgefl.core.errors import UsageError
from edgefl.core.protocol import EVALUATOR_NAME, PROTOCOL_VERSION, CommandKind, JoinToken
from edgefl.core.types import Json
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.store import Store

QR_SCALE = 4


def devices_router(context: ApiContext) -> APIRouter:
    """Returns the routes below `/edgefl/v1/devices`, and those of tokens and certificates."""
    router = APIRouter(prefix="/edgefl/v1")
    operator_only = [Depends(context.operator)]
    _add_read_routes(router, context)

    @router.post("/devices/{device}/drain", dependencies=operator_only)
    def drain_device(device: str) -> Json:
        context.drain_controller.drain(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": True}

    @router.post("/devices/{device}/resume", dependencies=operator_only)
    def resume_device(device: str) -> Json:
        context.drain_controller.resume(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": False}

    @router.post("/devices/{device}/remove", dependencies=operator_only)
    def remove_device(device: str) -> Json:
        if device == EVALUATOR_NAME:
            raise UsageError(f"{device} is the coordinator's own; start the coordinator without --test-shard instead")
        context.remove_device(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "removed": True}

    @router.post("/certificates/rotate", dependencies=operator_only)
    def rotate_certificates() -> Json:
        return {"v": PROTOCOL_VERSION, "devices": context.rotation.rotate()}

    @router.post("/tokens", dependencies=operator_only)
    def create_token(
        ttl: Annotated[str, Body()] = DEFAULT_TTL,
        uses: Annotated[int, Body()] = 1,
        groups: Annotated[list[str] | None, Body()] = None,
        role: Annotated[str, Body()] = "trainer",
    ) -> Json:
        spec = JoinTokenSpec(ttl_s=parse_ttl(ttl), uses=uses, groups=tuple(groups or ()), role=role)
        now = time.time()
        return _encode_token(make_token(context.store, context.directory, spec, now=now), spec, now=now)

    return router


def _add_read_routes(router: APIRouter, context: ApiContext) -> None:
    store, registry, viewer_only = context.store, context.registry, [Depends(context.viewer)]

    @router.get("/devices", dependencies=viewer_only)
    def list_devices() -> Json:
        return {"v": PROTOCOL_VERSION, "rows": list_device_rows(store, registry)}

    @router.get("/devices/{device}", dependencies=viewer_only)
    def get_device(device: str) -> Json:
        store.get_device(device)
        row = next(row for row in list_device_rows(store, registry) if row["device_id"] == device)
        capabilities = store.get_capabilities(device)
        return {"v": PROTOCOL_VERSION, **row, "capabilities": dict(capabilities.facts) if capabilities else {}}

    @router.get("/devices/{device}/logs", dependencies=viewer_only)
    def read_logs(device: str, run: str | None = None, since: float | None = None, after: int | None = None) -> Json:
        run_id = None if run is None else find_run_id(store, run)
        filters = {"run": run_id, "since": since, "after": after}
        argument = {name: value for name, value in filters.items() if value is not None}
        reply: Mapping[str, Any] = context.clients.device_rpc.call(device, CommandKind.LOGS, argument)
        lines = reply.get("lines", [])
        rows = [{"device_id": device, **line} for line in lines if isinstance(line, dict)]
        return {"v": PROTOCOL_VERSION, "rows": rows, "has_more": reply.get("has_more") is True}


def list_device_rows(store: Store, registry: DeviceRegistry) -> list[Json]:
    """Returns one row per device: that of the store, updated with its live status."""
    live_rows = {row["device_id"]: row for row in registry.list_status_rows()}
    running, heartbeats = store.deployments.get_running(), registry.list_heartbeats()
    return [
        {
            "device_id": record.device_id,
            "role": record.role,
            "groups": list(record.groups),
            "examples": dict(record.examples),
            "version": record.version,
            "joined_at": record.joined_at,
            "last_seen_at": record.last_seen_at,
            "model": heartbeat.model
            if (heartbeat := heartbeats.get(record.device_id))
            else getattr(running.get(record.device_id), "model", None),
            **live_rows.get(record.device_id, DEFAULT_STATUS_ROW),  # a joining device is in the store first
        }
        for record in store.list_devices()
    ]


def _encode_token(token: JoinToken, spec: JoinTokenSpec, *, now: float) -> Json:
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
