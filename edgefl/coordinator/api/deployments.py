"""Routes of deployments: operators submit and read them, devices fetch their model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import FileResponse

from edgefl.coordinator.api.rollout_encoding import encode_rollout, encode_rollout_with_devices
from edgefl.coordinator.auth import MAX_PATH_CHARS, AccessCheck
from edgefl.coordinator.rejected_requests import RecordRejection, get_client_network, ignore_rejection
from edgefl.coordinator.rollouts.deployment_requests import DeploymentRequest
from edgefl.coordinator.rollouts.deployments import DeploymentService
from edgefl.core.config import from_mapping
from edgefl.core.errors import NotAllowedError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.storage.repositories.deployment_records import DeploymentRecord
from edgefl.storage.store import Store

REQUEST_FIELDS = ("model", "devices", "canary", "canary_s", "tolerance", "min_accuracy")


def require_device(
    find_signer: Callable[[Request], str | None], *, record_rejection: RecordRejection = ignore_rejection
) -> AccessCheck:
    """Returns a FastAPI dependency that stores the signing device in the request's state; others get 401.

    `record_rejection` is called for those others.
    """

    def check(request: Request) -> None:
        device_id = find_signer(request)
        if device_id is None:
            address = get_client_network(request.client.host if request.client else None)
            record_rejection(
                "signature", address, f"{request.url.path[:MAX_PATH_CHARS]}: its key or its signature does not count"
            )
            raise NotAllowedError("only a device that has joined this fleet may ask for this, with its signature")
        request.state.device_id = device_id

    return check


def deployment_router(
    *, store: Store, deployments: DeploymentService, viewer: AccessCheck, operator: AccessCheck, device: AccessCheck
) -> APIRouter:
    """Returns the routes below `/edgefl/v1/deployments`."""
    router = APIRouter(prefix="/edgefl/v1/deployments")
    viewer_only, operator_only, device_only = [Depends(viewer)], [Depends(operator)], [Depends(device)]

    @router.get("", dependencies=viewer_only)
    def listed() -> Json:
        counts = store.count_deployment_devices()
        rows = [
            encode_rollout(record, counts.get(record.deployment_id, {}))
            for record in reversed(store.list_deployments())
        ]
        return {"v": PROTOCOL_VERSION, "rows": rows}

    @router.post("", dependencies=operator_only)
    def submit(body: Annotated[Json, Body()]) -> Json:
        request_fields = {name: body[name] for name in REQUEST_FIELDS if body.get(name) is not None}
        return _encode_deployment(
            store, deployments.submit(from_mapping(DeploymentRequest, request_fields, path="deployment"))
        )

    @router.get("/{deployment}", dependencies=viewer_only)
    def show(deployment: str) -> Json:
        return _encode_deployment(store, store.get_deployment(deployment))

    @router.get("/{deployment}/offer", dependencies=device_only)
    def offer(deployment: str, request: Request) -> Json:
        return {"v": PROTOCOL_VERSION, **deployments.offer(deployment, request.state.device_id)}

    @router.get("/{deployment}/model", dependencies=device_only)
    def model(deployment: str, request: Request) -> FileResponse:
        path = deployments.get_file(deployment, request.state.device_id)
        return FileResponse(path, media_type="application/octet-stream")

    return router


def _encode_deployment(store: Store, record: DeploymentRecord) -> Json:
    rows, counts = store.list_deployment_devices(record.deployment_id), store.count_deployment_devices()
    return encode_rollout_with_devices(record, rows, counts.get(record.deployment_id, {}))
