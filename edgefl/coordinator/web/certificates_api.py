"""What an operator does about who belongs to the fleet: removes a device, has all certificates renewed."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends

from edgefl.coordinator.access import Guard
from edgefl.coordinator.joining.rotation import Rotation
from edgefl.errors import UsageError
from edgefl.protocol import EVALUATOR_NAME, PROTOCOL_VERSION
from edgefl.types import Json


def certificates_router(*, rotation: Rotation, remove: Callable[[str], None], operator: Guard) -> APIRouter:
    """Returns the routes; `remove` takes a device out of the fleet."""
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
