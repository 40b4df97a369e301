"""The routes of the life of a job: what it would cost, taking it up again, and what its devices logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends

from edgefl.config import RunConfig, parse_run
from edgefl.coordinator.access import Guard
from edgefl.coordinator.dispatch.questions import Questions
from edgefl.coordinator.runs.worker import RunWorker
from edgefl.coordinator.web.api import run_json
from edgefl.protocol import PROTOCOL_VERSION, CommandKind
from edgefl.storage.queries import find_run
from edgefl.storage.store import Store
from edgefl.types import Json

Plan = Callable[[RunConfig], Json]


def jobs_router(
    *, store: Store, worker: RunWorker, questions: Questions, plan: Plan, viewer: Guard, operator: Guard
) -> APIRouter:
    """Returns the routes; `plan` says what a run would do, the others are as in `api.operator_router`."""
    router = APIRouter()
    reads, acts = [Depends(viewer)], [Depends(operator)]

    @router.post("/edgefl/v1/runs/plan", dependencies=acts)
    def planned(config: Annotated[dict[str, Any], Body(embed=True)]) -> Json:
        return {"v": PROTOCOL_VERSION, **plan(parse_run(config))}

    @router.post("/edgefl/v1/runs/{run}/resume", dependencies=acts)
    def resume(run: str) -> Json:
        run_id = find_run(store, run)
        worker.resume_run(run_id)
        return run_json(store.run(run_id))

    @router.get("/edgefl/v1/devices/{device}/logs", dependencies=reads)
    def logs(device: str, run: str | None = None, since: float | None = None, after: int | None = None) -> Json:
        run_id = None if run is None else find_run(store, run)
        wanted = {"run": run_id, "since": since, "after": after}
        asked = {name: value for name, value in wanted.items() if value is not None}
        said: Mapping[str, Any] = questions.ask(device, CommandKind.LOGS, asked)
        lines = said.get("lines", [])
        rows = [{"device_id": device, **line} for line in lines if isinstance(line, dict)]
        return {"v": PROTOCOL_VERSION, "rows": rows, "has_more": said.get("has_more") is True}

    return router
