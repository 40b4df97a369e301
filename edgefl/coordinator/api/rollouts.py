"""Routes of rollouts: operators bring bundles, submit and read rollouts, devices fetch what they are offered."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, fields
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.rollouts.installations import BundleStore
from edgefl.coordinator.rollouts.service import RolloutService
from edgefl.core.config import from_mapping
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import BUNDLES_PATH, PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.storage.repositories.rollouts import RolloutRecord


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
