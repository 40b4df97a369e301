"""Routes to remove a device and to rotate all certificates."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends

from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.enrolment.rotation import CertificateRotation
from edgefl.core.errors import UsageError
from edgefl.core.protocol import EVALUATOR_NAME, PROTOCOL_VERSION
from edgefl.core.types import Json


def certificates_router(
    *, rotation: CertificateRotation, remove: Callable[[str], None], operator: AccessCheck
) -> APIRouter:
    """Returns the routes; `remove` removes a device from the fleet."""
    router = APIRouter(prefix="/edgefl/v1", dependencies=[Depends(operator)])

    @router.post("/devices/{device}/remove")
    def remove_device(device: str) -> Json:
        if device == EVALUATOR_NAME:
            raise UsageError(f"{device} is the coordinator's own; start the coordinator without --test-shard instead")
        remove(device)
        return {"v": PROTOCOL_VERSION, "device_id": device, "removed": True}

    @router.post("/certificates/rotate")
    def rotate() -> Json:
        return {"v": PROTOCOL_VERSION, "devices": rotation.rotate()}

    return router
