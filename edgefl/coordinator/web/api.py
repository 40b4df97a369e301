"""The operator's JSON API under `/edgefl/v1`: runs, devices, history. Errors look as `access` says."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Request

from edgefl import __version__
from edgefl.config import RunConfig, check_run_name, parse_run
from edgefl.coordinator.access import Guard
from edgefl.coordinator.attempts import Note, network_of, nobody_notes
from edgefl.coordinator.fleet.roster import NEVER_SEEN, Roster
from edgefl.coordinator.runs.worker import RunWorker
from edgefl.coordinator.web.history_api import add_history
from edgefl.errors import ConfigError, UsageError
from edgefl.protocol import PROTOCOL_VERSION
from edgefl.storage.queries import find_run
from edgefl.storage.records import RunRecord
from edgefl.storage.store import Store
from edgefl.summary import node_figures
from edgefl.types import Json

Check = Callable[[RunConfig], Json]

MAX_PRIORITY = 1000


def operator_router(  # noqa: PLR0913 one keyword per neighbour
    *,
    store: Store,
    roster: Roster,
    worker: RunWorker,
    check: Check,
    viewer: Guard,
    operator: Guard,
    note: Note = nobody_notes,
) -> APIRouter:
    """Returns the routes.

    `check` raises an EdgeflError for a run file that cannot work, before it is queued, and returns what is to be said
    of one that can; `viewer` and `operator` let those through who may read and who may act; `note` is
    told of run files whose name could be meant as a path.
    """
    router = APIRouter()
    reads = [Depends(viewer)]

    @router.get("/healthz")
    def healthz() -> Json:
        return {"v": PROTOCOL_VERSION, "status": "ok", "version": __version__}

    _add_runs(router, store, worker, reads)
    _add_orders(router, store, worker, acts=[Depends(operator)], check=check, note=note)
    _add_devices(router, store, roster, reads)
    add_history(router, store, reads)
    return router


def _add_runs(router: APIRouter, store: Store, worker: RunWorker, reads: list[Any]) -> None:
    @router.get("/edgefl/v1/runs", dependencies=reads)
    def runs() -> Json:
        places = {record.run_id: place for place, record in enumerate(store.queued_runs(), 1)}
        rows = [{**run_json(r), "queue_position": places.get(r.run_id)} for r in reversed(store.runs())]
        return _rows([worker.as_it_is(row) for row in rows])

    @router.get("/edgefl/v1/runs/{run}", dependencies=reads)
    def show(run: str) -> Json:
        record = store.run(find_run(store, run))
        kept = store.checkpoints(record.run_id)
        figures = node_figures(store.newest_node_round(record.run_id))
        row = {**run_json(record), "model": kept[0].sha256 if kept else None, **figures}
        return worker.as_it_is(row)


def _add_orders(
    router: APIRouter, store: Store, worker: RunWorker, *, acts: list[Any], check: Check, note: Note
) -> None:
    @router.post("/edgefl/v1/runs", dependencies=acts)
    def submit(
        request: Request,
        config: Annotated[dict[str, Any], Body(embed=True)],
        priority: Annotated[int, Body(embed=True)] = 0,
    ) -> Json:
        checked = parse_run(config)
        try:
            check_run_name(checked.run.name)
        except ConfigError as error:
            note("run file", network_of(request.client.host if request.client else None), str(error))
            raise
        _check_priority(priority)
        return {**check(checked), **run_json(submit_run(store, worker, checked, priority))}

    @router.post("/edgefl/v1/runs/{run}/stop", dependencies=acts)
    def stop(run: str) -> Json:
        run_id = find_run(store, run)
        worker.stop_run(run_id, "stopped by the operator")
        return run_json(store.run(run_id))


def _add_devices(router: APIRouter, store: Store, roster: Roster, reads: list[Any]) -> None:
    @router.get("/edgefl/v1/devices", dependencies=reads)
    def devices() -> Json:
        return _rows(device_rows(store, roster))

    @router.get("/edgefl/v1/devices/{device}", dependencies=reads)
    def device(device: str) -> Json:
        store.device(device)
        row = next(row for row in device_rows(store, roster) if row["device_id"] == device)
        facts = store.capabilities_of(device)
        return {"v": PROTOCOL_VERSION, **row, "capabilities": dict(facts.facts) if facts else {}}


def submit_run(store: Store, worker: RunWorker, config: RunConfig, priority: int = 0) -> RunRecord:
    """Queues a run that has been checked."""
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
    worker.wake()
    return record


def _check_priority(priority: int) -> None:
    if abs(priority) > MAX_PRIORITY:
        raise UsageError(f"priority must lie in {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority}")


def device_rows(store: Store, roster: Roster) -> list[Json]:
    """Returns one row per device: what the store knows, over it what is true now."""
    now = {row["device_id"]: row for row in roster.facts()}
    running, heartbeats = store.running_models(), roster.heartbeats()
    return [
        {
            "device_id": record.device_id,
            "role": record.role,
            "groups": list(record.groups),
            "examples": dict(record.examples),
            "version": record.version,
            "joined_at": record.joined_at,
            "last_seen_at": record.last_seen_at,
            "model": heard.model if (heard := heartbeats.get(record.device_id)) else running.get(record.device_id),
            **now.get(record.device_id, NEVER_SEEN),  # one that joins at this moment is in the store first
        }
        for record in store.devices()
    ]


def run_json(record: RunRecord) -> Json:
    """Returns a run as the API tells it."""
    return {"v": PROTOCOL_VERSION, **asdict(record), "config": dict(record.config)}


def _rows(rows: list[Json]) -> Json:
    return {"v": PROTOCOL_VERSION, "rows": rows}
