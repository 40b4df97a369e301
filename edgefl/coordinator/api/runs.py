"""Routes of runs: operators submit, plan, stop and resume them, viewers read them."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request

from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.auth import get_request_source
from edgefl.core.config import RunConfig, check_run_name, parse_run, parse_run_text
from edgefl.core.errors import ConfigError, UsageError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.engine.run_summary import select_device_metrics
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.repositories.records import RunRecord

MAX_PRIORITY = 1000

RunBody = Annotated[dict[str, Any], Body(embed=True)]


def runs_router(context: ApiContext) -> APIRouter:
    """Returns the routes below `/edgefl/v1/runs`, and the check of a pasted run file."""
    router = APIRouter(prefix="/edgefl/v1")
    store, scheduler = context.store, context.clients.run_scheduler
    viewer_only, operator_only = [Depends(context.viewer)], [Depends(context.operator)]

    @router.get("/runs", dependencies=viewer_only)
    def list_runs() -> Json:
        positions = {record.run_id: position for position, record in enumerate(store.list_queued_runs(), 1)}
        rows = [{**encode_run(r), "queue_position": positions.get(r.run_id)} for r in reversed(store.list_runs())]
        return {"v": PROTOCOL_VERSION, "rows": [scheduler.apply_pause(row) for row in rows]}

    @router.get("/runs/{run}", dependencies=viewer_only)
    def get_run(run: str) -> Json:
        record = store.get_run(find_run_id(store, run))
        saved_models = store.list_saved_models(record.run_id)
        metrics = select_device_metrics(store.get_newest_device_model_round(record.run_id))
        row = {**encode_run(record), "model": saved_models[0].sha256 if saved_models else None, **metrics}
        return scheduler.apply_pause(row)

    @router.post("/runs", dependencies=operator_only)
    def submit_run(request: Request, config: RunBody, priority: Annotated[int, Body(embed=True)] = 0) -> Json:
        run_config = parse_run(config)
        try:
            check_run_name(run_config.run.name)
        except ConfigError as error:  # a name that could be meant as a path
            context.record_rejection("run file", get_request_source(request), str(error))
            raise
        if abs(priority) > MAX_PRIORITY:
            raise UsageError(f"priority must lie in {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}")
        return {**context.check_run(run_config), **encode_run(_queue_run(context, run_config, priority))}

    @router.post("/runs/plan", dependencies=operator_only)
    def plan_run(config: RunBody) -> Json:
        return {"v": PROTOCOL_VERSION, **context.plan_run(parse_run(config))}

    @router.post("/run-files", dependencies=operator_only)
    def check_run_file(toml: Annotated[str, Body(embed=True)]) -> Json:
        config = parse_run_text(toml)
        return {**context.check_run(config), "v": PROTOCOL_VERSION, "config": config.to_json()}

    @router.post("/runs/{run}/stop", dependencies=operator_only)
    def stop_run(run: str) -> Json:
        run_id = find_run_id(store, run)
        scheduler.stop_run(run_id, "stopped by the operator")
        return encode_run(store.get_run(run_id))

    @router.post("/runs/{run}/resume", dependencies=operator_only)
    def resume_run(run: str) -> Json:
        run_id = find_run_id(store, run)
        scheduler.resume_run(run_id)
        return encode_run(store.get_run(run_id))

    return router


def encode_run(record: RunRecord) -> Json:
    """Returns a run in the API's format."""
    return {"v": PROTOCOL_VERSION, **asdict(record), "config": dict(record.config)}


def _queue_run(context: ApiContext, config: RunConfig, priority: int) -> RunRecord:
    """Queues a validated run."""
    now = time.time()
    record = context.store.add_run(
        run_id=f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{uuid.uuid4().hex[:6]}",
        name=config.run.name or f"{config.run.task}-{config.strategy.name}",
        task=config.run.task,
        strategy=config.strategy.name,
        config=config.to_json(),
        seed=config.run.seed,
        submitted_at=now,
        priority=priority,
    )
    context.clients.run_scheduler.wake()
    return record
