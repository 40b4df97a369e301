"""Deployments over HTTPS: operators order and read them, devices fetch what is meant for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import FileResponse

from edgefl.config import from_mapping
from edgefl.coordinator.access import MAX_PATH_CHARS, Guard
from edgefl.coordinator.attempts import Note, network_of, nobody_notes
from edgefl.coordinator.rollouts.deployment_wishes import DeploymentWish
from edgefl.coordinator.rollouts.deployments import Deployments
from edgefl.coordinator.web.rollout_json import rollout_json, rollout_with_devices
from edgefl.errors import NotAllowedError
from edgefl.protocol import PROTOCOL_VERSION
from edgefl.storage.deployment_records import DeploymentRecord
from edgefl.storage.store import Store
from edgefl.types import Json

ASKED = ("model", "devices", "canary", "canary_s", "tolerance", "min_accuracy")


def require_device(device_of: Callable[[Request], str | None], *, note: Note = nobody_notes) -> Guard:
    """Returns a FastAPI dependency that puts the device that signed a request into its state; others get 401.

    `note` is told of those others.
    """

    def check(request: Request) -> None:
        device_id = device_of(request)
        if device_id is None:
            address = network_of(request.client.host if request.client else None)
            note(
                "signature", address, f"{request.url.path[:MAX_PATH_CHARS]}: its key or its signature does not count"
            )
            raise NotAllowedError("only a device that has joined this fleet may ask for this, with its signature")
        request.state.device_id = device_id

    return check


def deployment_router(
    *, store: Store, deployments: Deployments, viewer: Guard, operator: Guard, device: Guard
) -> APIRouter:
    """Returns the routes below `/edgefl/v1/deployments`."""
    router = APIRouter(prefix="/edgefl/v1/deployments")
    reads, acts, signs = [Depends(viewer)], [Depends(operator)], [Depends(device)]

    @router.get("", dependencies=reads)
    def listed() -> Json:
        counts = store.deployment_counts()
        rows = [rollout_json(one, counts.get(one.deployment_id, {})) for one in reversed(store.deployments())]
        return {"v": PROTOCOL_VERSION, "rows": rows}

    @router.post("", dependencies=acts)
    def submit(body: Annotated[Json, Body()]) -> Json:
        asked = {name: body[name] for name in ASKED if body.get(name) is not None}
        return _shown(store, deployments.submit(from_mapping(DeploymentWish, asked, path="deployment")))

    @router.get("/{deployment}", dependencies=reads)
    def show(deployment: str) -> Json:
        return _shown(store, store.deployment(deployment))

    @router.get("/{deployment}/offer", dependencies=signs)
    def offer(deployment: str, request: Request) -> Json:
        return {"v": PROTOCOL_VERSION, **deployments.offer(deployment, request.state.device_id)}

    @router.get("/{deployment}/model", dependencies=signs)
    def model(deployment: str, request: Request) -> FileResponse:
        path = deployments.file(deployment, request.state.device_id)
        return FileResponse(path, media_type="application/octet-stream")

    return router


def _shown(store: Store, record: DeploymentRecord) -> Json:
    rows, counts = store.deployment_devices(record.deployment_id), store.deployment_counts()
    return rollout_with_devices(record, rows, counts.get(record.deployment_id, {}))
