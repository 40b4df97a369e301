"""The operator's JSON API under `/edgefl/v1`: runs, devices, history. See `auth` for its errors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request

from edgefl import __version__
from edgefl.coordinator.api.history import add_history_routes
from edgefl.coordinator.auth import AccessCheck
from edgefl.coordinator.fleet.registry import DEFAULT_STATUS_ROW, DeviceRegistry
from edgefl.coordinator.rejected_requests import RecordRejection, get_client_network, ignore_rejection
from edgefl.coordinator.runs.scheduler import RunScheduler
from edgefl.core.config import RunConfig, check_run_name, parse_run
from edgefl.core.errors import ConfigError, UsageError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.engine.run_summary import select_device_metrics
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store

CheckRun = Callable[[RunConfig], Json]

MAX_PRIORITY = 1000


def operator_router(  # noqa: PLR0913 one keyword per neighbour
    *,
    store: Store,
    registry: DeviceRegistry,
    run_scheduler: RunScheduler,
    check: CheckRun,
    viewer: AccessCheck,
    operator: AccessCheck,
    record_rejection: RecordRejection = ignore_rejection,
) -> APIRouter:
    """Returns the routes.

    `check` raises an EdgeflError for an invalid run file, before it is queued, and returns notes on a valid one;
    `viewer` and `operator` admit those who may read and act; `record_rejection` is called for run files whose name
    could be meant as a path.
    """
    router = APIRouter()
    viewer_only = [Depends(viewer)]

    @router.get("/healthz")
    def healthz() -> Json:
        return {"v": PROTOCOL_VERSION, "status": "ok", "version": __version__}

    _add_run_routes(router, store, run_scheduler, viewer_only)
    _add_run_commands(
        router, store, run_scheduler, acts=[Depends(operator)], check=check, record_rejection=record_rejection
    )
    _add_device_routes(router, store, registry, viewer_only)
    add_history_routes(router, store, viewer_only)
    return router


def _add_run_routes(router: APIRouter, store: Store, run_scheduler: RunScheduler, reads: list[Any]) -> None:
    @router.get("/edgefl/v1/runs", dependencies=reads)
    def runs() -> Json:
        positions = {record.run_id: position for position, record in enumerate(store.list_queued_runs(), 1)}
        rows = [{**encode_run(r), "queue_position": positions.get(r.run_id)} for r in reversed(store.list_runs())]
        return _encode_rows([run_scheduler.apply_pause(row) for row in rows])

    @router.get("/edgefl/v1/runs/{run}", dependencies=reads)
    def show(run: str) -> Json:
        record = store.get_run(find_run_id(store, run))
        saved_models = store.list_saved_models(record.run_id)
        metrics = select_device_metrics(store.get_newest_device_model_round(record.run_id))
        row = {**encode_run(record), "model": saved_models[0].sha256 if saved_models else None, **metrics}
        return run_scheduler.apply_pause(row)


def _add_run_commands(
    router: APIRouter,
    store: Store,
    run_scheduler: RunScheduler,
    *,
    acts: list[Any],
    check: CheckRun,
    record_rejection: RecordRejection,
) -> None:
    @router.post("/edgefl/v1/runs", dependencies=acts)
    def submit(
        request: Request,
        config: Annotated[dict[str, Any], Body(embed=True)],
        priority: Annotated[int, Body(embed=True)] = 0,
    ) -> Json:
        run_config = parse_run(config)
        try:
            check_run_name(run_config.run.name)
        except ConfigError as error:
            record_rejection(
                "run file", get_client_network(request.client.host if request.client else None), str(error)
            )
            raise
        _check_priority(priority)
        return {**check(run_config), **encode_run(submit_run(store, run_scheduler, run_config, priority))}

    @router.post("/edgefl/v1/runs/{run}/stop", dependencies=acts)
    def stop(run: str) -> Json:
        run_id = find_run_id(store, run)
        run_scheduler.stop_run(run_id, "stopped by the operator")
        return encode_run(store.get_run(run_id))


def _add_device_routes(router: APIRouter, store: Store, registry: DeviceRegistry, reads: list[Any]) -> None:
    @router.get("/edgefl/v1/devices", dependencies=reads)
    def devices() -> Json:
        return _encode_rows(list_device_rows(store, registry))

    @router.get("/edgefl/v1/devices/{device}", dependencies=reads)
    def device(device: str) -> Json:
        store.get_device(device)
        row = next(row for row in list_device_rows(store, registry) if row["device_id"] == device)
        capabilities = store.get_capabilities(device)
        return {"v": PROTOCOL_VERSION, **row, "capabilities": dict(capabilities.facts) if capabilities else {}}


def submit_run(store: Store, run_scheduler: RunScheduler, config: RunConfig, priority: int = 0) -> RunRecord:
    """Queues a validated run."""
    now = time.time()
    run_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{uuid.uuid4().hex[:6]}"
    record = store.add_run(
        run_id=run_id,
        name=config.run.name or f"{config.run.task}-{config.strategy.name}",
        task=config.run.task,
        strategy=config.strategy.name,
        config=config.to_json(),
        seed=config.run.seed,
        submitted_at=now,
        priority=priority,
    )
    run_scheduler.wake()
    return record


def _check_priority(priority: int) -> None:
    if abs(priority) > MAX_PRIORITY:
        raise UsageError(f"priority must lie in {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}")


def list_device_rows(store: Store, registry: DeviceRegistry) -> list[Json]:
    """Returns one row per device: that of the store, updated with its live status."""
    live_rows = {row["device_id"]: row for row in registry.list_status_rows()}
    running_models, heartbeats = store.get_running_models(), registry.list_heartbeats()
    return [
        {
            "device_id": record.device_id,
            "role": record.role,
            "groups": list(record.groups),
            "examples": dict(record.examples),
            "version": record.version,
            "joined_at": record.joined_at,
            "last_seen_at": record.last_seen_at,
            "model": heartbeat.model
            if (heartbeat := heartbeats.get(record.device_id))
            else running_models.get(record.device_id),
            **live_rows.get(record.device_id, DEFAULT_STATUS_ROW),  # a joining device is in the store first
        }
        for record in store.list_devices()
    ]


def encode_run(record: RunRecord) -> Json:
    """Returns a run in the API's format."""
    return {"v": PROTOCOL_VERSION, **asdict(record), "config": dict(record.config)}


def _encode_rows(rows: list[Json]) -> Json:
    return {"v": PROTOCOL_VERSION, "rows": rows}
