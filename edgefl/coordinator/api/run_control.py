"""Routes to plan and resume runs, and to read the logs of their devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends

from edgefl.coordinator.api.operator_routes import encode_run
from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.execution.rpc import DeviceRpc
from edgefl.coordinator.runs.scheduler import RunScheduler
from edgefl.core.config import RunConfig, parse_run
from edgefl.core.protocol import PROTOCOL_VERSION, CommandKind
from edgefl.core.types import Json
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.store import Store

PlanRun = Callable[[RunConfig], Json]


def run_control_router(
    *,
    store: Store,
    run_scheduler: RunScheduler,
    device_rpc: DeviceRpc,
    plan: PlanRun,
    viewer: AccessCheck,
    operator: AccessCheck,
) -> APIRouter:
    """Returns the routes; `plan` returns the plan of a run, the rest is as in `operator_router`."""
    router = APIRouter()
    viewer_only, operator_only = [Depends(viewer)], [Depends(operator)]

    @router.post("/edgefl/v1/runs/plan", dependencies=operator_only)
    def planned(config: Annotated[dict[str, Any], Body(embed=True)]) -> Json:
        return {"v": PROTOCOL_VERSION, **plan(parse_run(config))}

    @router.post("/edgefl/v1/runs/{run}/resume", dependencies=operator_only)
    def resume(run: str) -> Json:
        run_id = find_run_id(store, run)
        run_scheduler.resume_run(run_id)
        return encode_run(store.get_run(run_id))

    @router.get("/edgefl/v1/devices/{device}/logs", dependencies=viewer_only)
    def logs(device: str, run: str | None = None, since: float | None = None, after: int | None = None) -> Json:
        run_id = None if run is None else find_run_id(store, run)
        filters = {"run": run_id, "since": since, "after": after}
        argument = {name: value for name, value in filters.items() if value is not None}
        reply: Mapping[str, Any] = device_rpc.call(device, CommandKind.LOGS, argument)
        lines = reply.get("lines", [])
        rows = [{"device_id": device, **line} for line in lines if isinstance(line, dict)]
        return {"v": PROTOCOL_VERSION, "rows": rows, "has_more": reply.get("has_more") is True}

    return router
