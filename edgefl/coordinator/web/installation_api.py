"""Bundles and installations over HTTPS: operators bring, order and read, devices fetch what is meant for them."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect

from edgefl.config import from_mapping
from edgefl.coordinator.access import Guard
from edgefl.coordinator.rollouts.installations import Installations, InstallationWish
from edgefl.coordinator.web.rollout_json import rollout_json, rollout_with_devices
from edgefl.errors import NetworkError
from edgefl.protocol import BUNDLES_PATH, PROTOCOL_VERSION
from edgefl.storage.installation_records import InstallationRecord
from edgefl.storage.store import Store
from edgefl.types import Json

ASKED = ("bundle", "version", "devices", "canary", "canary_s")


def installation_router(
    *, store: Store, installations: Installations, viewer: Guard, operator: Guard, device: Guard
) -> APIRouter:
    """Returns the routes below `/edgefl/v1/bundles` and `/edgefl/v1/installations`."""
    router = APIRouter()
    reads, acts, signs = [Depends(viewer)], [Depends(operator)], [Depends(device)]
    files = installations.files

    @router.get(BUNDLES_PATH, dependencies=reads)
    def bundles() -> Json:
        return {"v": PROTOCOL_VERSION, "rows": [one.as_json() for one in files.kept()]}

    @router.post(BUNDLES_PATH, dependencies=acts)
    async def bring(request: Request) -> Json:
        # All that waits for the disk does so in a thread: this loop serves the whole fleet.
        with closing(await asyncio.to_thread(files.begin)) as upload:
            try:
                async for piece in request.stream():
                    await asyncio.to_thread(upload.write, piece)
            except ClientDisconnect:
                raise NetworkError("the bundle broke off on its way; bring it again") from None
            return {"v": PROTOCOL_VERSION, **(await asyncio.to_thread(upload.finish)).as_json()}

    @router.get("/edgefl/v1/installations", dependencies=reads)
    def listed() -> Json:
        counts = store.installation_counts()
        rows = [rollout_json(one, counts.get(one.installation_id, {})) for one in reversed(store.installations())]
        return {"v": PROTOCOL_VERSION, "rows": rows}

    @router.post("/edgefl/v1/installations", dependencies=acts)
    def submit(body: Annotated[Json, Body()]) -> Json:
        asked = {name: body[name] for name in ASKED if body.get(name) is not None}
        record, left_out = installations.submit(from_mapping(InstallationWish, asked, path="installation"))
        return {**_shown(store, record), "left_out": left_out}

    @router.get("/edgefl/v1/installations/{installation}", dependencies=reads)
    def show(installation: str) -> Json:
        return _shown(store, store.installation(installation))

    @router.get("/edgefl/v1/installations/{installation}/offer", dependencies=signs)
    def offer(installation: str, request: Request) -> Json:
        return {"v": PROTOCOL_VERSION, **installations.offer(installation, request.state.device_id)}

    @router.get("/edgefl/v1/installations/{installation}/bundle", dependencies=signs)
    def bundle(installation: str, request: Request) -> FileResponse:
        path = installations.file(installation, request.state.device_id)
        return FileResponse(path, media_type="application/octet-stream")

    return router


def _shown(store: Store, record: InstallationRecord) -> Json:
    rows, counts = store.installation_devices(record.installation_id), store.installation_counts()
    return rollout_with_devices(record, rows, counts.get(record.installation_id, {}))
