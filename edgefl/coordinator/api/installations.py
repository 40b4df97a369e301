"""Routes of bundles and installations: operators upload, submit and read, devices fetch their bundle."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from edgefl.coordinator.api.rollout_encoding import encode_rollout, encode_rollout_with_devices
from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.rollouts.installations import InstallationRequest, InstallationService
from edgefl.core.config import from_mapping
from edgefl.core.errors import NetworkError
from edgefl.core.protocol import BUNDLES_PATH, PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.storage.repositories.installation_records import InstallationRecord
from edgefl.storage.store import Store

REQUEST_FIELDS = ("bundle", "version", "devices", "canary", "canary_s")


def installation_router(
    *,
    store: Store,
    installations: InstallationService,
    viewer: AccessCheck,
    operator: AccessCheck,
    device: AccessCheck,
) -> APIRouter:
    """Returns the routes below `/edgefl/v1/bundles` and `/edgefl/v1/installations`."""
    router = APIRouter()
    viewer_only, operator_only, device_only = [Depends(viewer)], [Depends(operator)], [Depends(device)]
    bundle_store = installations.bundle_store

    @router.get(BUNDLES_PATH, dependencies=viewer_only)
    def bundles() -> Json:
        return {"v": PROTOCOL_VERSION, "rows": [one.to_json() for one in bundle_store.list_bundles()]}

    @router.post(BUNDLES_PATH, dependencies=operator_only)
    async def bring(request: Request) -> Json:
        # Disk access happens in a thread: this loop serves the whole fleet.
        with closing(await asyncio.to_thread(bundle_store.start_upload)) as upload:
            try:
                async for chunk in request.stream():
                    await asyncio.to_thread(upload.write, chunk)
            except ClientDisconnect:
                raise NetworkError("the bundle broke off on its way; bring it again") from None
            return {"v": PROTOCOL_VERSION, **(await asyncio.to_thread(upload.complete)).to_json()}

    @router.get("/edgefl/v1/installations", dependencies=viewer_only)
    def listed() -> Json:
        counts = store.count_installation_devices()
        rows = [
            encode_rollout(one, counts.get(one.installation_id, {})) for one in reversed(store.list_installations())
        ]
        return {"v": PROTOCOL_VERSION, "rows": rows}

    @router.post("/edgefl/v1/installations", dependencies=operator_only)
    def submit(body: Annotated[Json, Body()]) -> Json:
        request_fields = {name: body[name] for name in REQUEST_FIELDS if body.get(name) is not None}
        record, excluded = installations.submit(
            from_mapping(InstallationRequest, request_fields, path="installation")
        )
        return {**_encode_installation(store, record), "left_out": excluded}

    @router.get("/edgefl/v1/installations/{installation}", dependencies=viewer_only)
    def show(installation: str) -> Json:
        return _encode_installation(store, store.get_installation(installation))

    @router.get("/edgefl/v1/installations/{installation}/offer", dependencies=device_only)
    def offer(installation: str, request: Request) -> Json:
        return {"v": PROTOCOL_VERSION, **installations.offer(installation, request.state.device_id)}

    @router.get("/edgefl/v1/installations/{installation}/bundle", dependencies=device_only)
    def bundle(installation: str, request: Request) -> FileResponse:
        path = installations.get_file(installation, request.state.device_id)
        return FileResponse(path, media_type="application/octet-stream")

    return router


def _encode_installation(store: Store, record: InstallationRecord) -> Json:
    rows, counts = store.list_installation_devices(record.installation_id), store.count_installation_devices()
    return encode_rollout_with_devices(record, rows, counts.get(record.installation_id, {}))
