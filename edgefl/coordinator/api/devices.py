"""Routes of devices (rows and logs, join tokens, draining, removal, rotation of certificates), users and rollouts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, fields
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from edgefl.coordinator.api.access import AUDIT_DETAIL_KEY
from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.enrolment.tokens import (
    DEFAULT_TTL,
    USER_ROLES,
    check_user_name,
    format_join_command,
    format_setup_command,
    make_token,
    make_user,
    parse_ttl,
)
from edgefl.coordinator.fleet.membership import get_signed_state, list_old_signatures
from edgefl.coordinator.fleet.registry import DEFAULT_STATUS_ROW, DeviceRegistry
from edgefl.coordinator.rollouts.installations import BundleStore
from edgefl.coordinator.rollouts.service import RolloutService
from edgefl.core.errors import NetworkError, NotFoundError, UsageError
from edgefl.core.protocol import BUNDLES_PATH, EVALUATOR_NAME, PROTOCOL_VERSION, CommandKind, JoinToken
from edgefl.core.safe_parsing import SHA256
from edgefl.core.settings import from_mapping
from edgefl.core.types import Json
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.repositories.rollouts import RolloutRecord
from edgefl.storage.store import Store


def devices_router(context: ApiContext) -> APIRouter:
    """Returns the routes below `/edgefl/v1/devices`, and those of tokens and certificates."""
    router = APIRouter(prefix="/edgefl/v1")
    operator_only, admin_only = [Depends(context.operator)], [Depends(context.admin)]
    _add_read_routes(router, context)

    @router.get("/bases/{sha256}", dependencies=[Depends(context.device)])
    def fetch_base(sha256: str) -> FileResponse:
        path = context.directory.bases / f"{sha256}.safetensors"
        if not SHA256.match(sha256) or not path.is_file():
            raise NotFoundError(f"no base {sha256[:12]!a} is here")
        return FileResponse(path, media_type="application/octet-stream")

    @router.post("/devices/{device}/drain", dependencies=operator_only)
    def drain_device(device: str) -> Json:
        context.drain_controller.drain(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": True}

    @router.post("/devices/{device}/resume", dependencies=operator_only)
    def resume_device(device: str) -> Json:
        context.drain_controller.resume(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "drained": False}

    @router.post("/devices/{device}/remove", dependencies=admin_only)
    def remove_device(device: str) -> Json:
        if device == EVALUATOR_NAME:
            raise UsageError(f"{device} is the coordinator's own; start the coordinator without --test-shard instead")
        context.remove_device(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "removed": True}

    @router.post("/supernodes/{name}", dependencies=admin_only)
    def add_supernode(
        name: str,
        key: Annotated[str, Body()],
        jobs: Annotated[list[str], Body()],
        groups: Annotated[list[str] | None, Body()] = None,
    ) -> Json:
        context.add_supernode(name, key, jobs=jobs, groups=groups or [])
        return {"v": PROTOCOL_VERSION, "device_id": name, "jobs": jobs}

    @router.post("/certificates/rotate", dependencies=admin_only)
    def rotate_certificates() -> Json:
        return {"v": PROTOCOL_VERSION, "devices": context.rotation.rotate()}

    @router.post("/tokens", dependencies=admin_only)
    def create_token(
        ttl: Annotated[str, Body()] = DEFAULT_TTL,
        uses: Annotated[int, Body()] = 1,
        groups: Annotated[list[str] | None, Body()] = None,
        role: Annotated[str, Body()] = "trainer",
    ) -> Json:
        now, ttl_s, groups = time.time(), parse_ttl(ttl), groups or []
        token = make_token(
            context.store, context.directory, now=now, ttl_s=ttl_s, uses=uses, groups=groups, role=role
        )
        setup = format_setup_command(token, context.directory)
        return {
            **_encode_token(token),
            "setup": setup,
            "expires_at": now + ttl_s,
            "uses": uses,
            "groups": groups,
            "role": role,
        }

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
        signed = {
            info.device_id: state
            for info in registry.list_devices()
            if (state := get_signed_state(info.capabilities)) is not None
        }
        return {
            "v": PROTOCOL_VERSION,
            **row,
            "signed": signed.get(device),
            "held_back": list_old_signatures(signed, time.time()).get(device),
            "capabilities": dict(capabilities.facts) if capabilities else {},
        }

    @router.get("/devices/{device}/logs", dependencies=viewer_only)
    def read_logs(device: str, run: str | None = None, since: float | None = None, after: int | None = None) -> Json:
        run_id = None if run is None else find_run_id(store, run)
        filters = {"run": run_id, "since": since, "after": after}
        argument = {name: value for name, value in filters.items() if value is not None}
        reply: Mapping[str, Any] = context.clients.device_rpc.call(device, CommandKind.LOGS, argument)
        lines = reply.get("lines", [])
        rows = [{"device_id": device, **line} for line in lines if isinstance(line, dict)]
        return {"v": PROTOCOL_VERSION, "rows": rows, "has_more": reply.get("has_more") is True}


def users_router(context: ApiContext) -> APIRouter:
    """Returns the routes below `/edgefl/v1/users`, for admins: who may use the coordinator."""
    router = APIRouter(prefix="/edgefl/v1/users", dependencies=[Depends(context.admin)])
    store = context.store

    @router.get("")
    def list_users() -> Json:
        now = time.time()
        return {
            "v": PROTOCOL_VERSION,
            "rows": [{**asdict(user), "state": user.get_state(now)} for user in store.list_users()],
        }

    @router.post("/{name}")
    def add_user(
        request: Request,
        name: str,
        role: Annotated[str, Body(embed=True)] = USER_ROLES[0],
        expires: Annotated[str | None, Body(embed=True)] = None,
    ) -> Json:
        ttl_s, now = None if expires is None else parse_ttl(expires), time.time()
        token = make_user(store, name, role, ttl_s=ttl_s, now=now)
        setattr(request.state, AUDIT_DETAIL_KEY, f" as {role}")
        expires_at = None if ttl_s is None else now + ttl_s
        return {
            "v": PROTOCOL_VERSION,
            "name": check_user_name(name),
            "role": role,
            "expires_at": expires_at,
            "token": token,
        }

    @router.post("/{name}/revoke")
    def revoke_user(name: str) -> Json:
        name = check_user_name(name)
        store.revoke_user(name, at=time.time())
        return {"v": PROTOCOL_VERSION, "name": name, "revoked": True}

    return router


def rollout_router(
    service: RolloutService[Any, Any], *, viewer: AccessCheck, operator: AccessCheck, device: AccessCheck
) -> APIRouter:
    """Returns the routes of one kind of rollout, such as those below `/edgefl/v1/deployments`."""
    kind, rollouts = service.kind, service.kind.repository
    router = APIRouter(prefix=f"/edgefl/v1/{service.name}s")
    viewer_only, operator_only, device_only = [Depends(viewer)], [Depends(operator)], [Depends(device)]

    @router.get("", dependencies=viewer_only)
    def listed() -> Json:
        counts = rollouts.count_devices()
        rows = [_encode_rollout(record, counts.get(record.id, {})) for record in reversed(rollouts.list_newest())]
        return {"v": PROTOCOL_VERSION, "rows": rows}

    @router.post("", dependencies=operator_only)
    def submit(body: Annotated[Json, Body()]) -> Json:
        values = {item.name: body[item.name] for item in fields(kind.request) if body.get(item.name) is not None}
        record, excluded = service.submit(from_mapping(kind.request, values, path=service.name))
        return {**encode(record), **({} if excluded is None else {"left_out": excluded})}

    @router.get("/{rollout}", dependencies=viewer_only)
    def show(rollout: str) -> Json:
        return encode(rollouts.get(rollout))

    @router.get("/{rollout}/offer", dependencies=device_only)
    def offer(rollout: str, request: Request) -> Json:
        return {"v": PROTOCOL_VERSION, **service.make_offer(rollout, request.state.device_id)}

    @router.get(f"/{{rollout}}/{kind.artefact}", dependencies=device_only)
    def fetch(rollout: str, request: Request) -> FileResponse:
        path = service.get_file(rollout, request.state.device_id)
        return FileResponse(path, media_type="application/octet-stream")

    def encode(record: RolloutRecord) -> Json:
        """Returns a rollout with the state of each of its devices."""
        rows = [{**asdict(row), "state": str(row.state)} for row in rollouts.list_devices(record.id)]
        counts = Counter(row["state"] for row in rows)
        return {"v": PROTOCOL_VERSION, **_encode_rollout(record, counts), "each": rows}

    return router


def bundle_router(bundle_store: BundleStore, *, viewer: AccessCheck, operator: AccessCheck) -> APIRouter:
    """Returns the routes of uploaded bundles."""
    router = APIRouter(prefix=BUNDLES_PATH)

    @router.get("", dependencies=[Depends(viewer)])
    def bundles() -> Json:
        return {"v": PROTOCOL_VERSION, "rows": [one.to_json() for one in bundle_store.list_bundles()]}

    @router.post("", dependencies=[Depends(operator)])
    async def bring(request: Request) -> Json:
        # Disk access happens in a thread: this loop serves the whole fleet.
        with closing(await asyncio.to_thread(bundle_store.start_upload)) as upload:
            try:
                async for chunk in request.stream():
                    await asyncio.to_thread(upload.write, chunk)
            except ClientDisconnect:
                raise NetworkError("the bundle broke off on its way; bring it again") from None
            return {"v": PROTOCOL_VERSION, **(await asyncio.to_thread(upload.complete)).to_json()}

    return router


def _encode_rollout(record: RolloutRecord, counts: Mapping[str, int]) -> Json:
    """Returns a rollout with the number of its devices by state."""
    return {**asdict(record), "status": str(record.status), "counts": dict(counts)}


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


def _encode_token(token: JoinToken) -> Json:
    """Returns a new token as JSON, with its join command."""
    return {
        "v": PROTOCOL_VERSION,
        "token": token.text(),
        "token_id": token.token_id,
        "fleet": token.fleet,
        "addresses": list(token.addresses),
        "join": format_join_command(token),
    }
