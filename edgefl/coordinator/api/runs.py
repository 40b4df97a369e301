"""Routes of runs, of their history (rows of one kind, the newest or by pages) and of saved models."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from typing import IO, Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi.responses import StreamingResponse

from edgefl.coordinator.api.context import ApiContext
from edgefl.coordinator.auth import get_request_source
from edgefl.coordinator.runs.forgetting import ForgetRequest, record_replacement, replace_run
from edgefl.coordinator.runs.scales import find_scales_run
from edgefl.core.analyses import has_result
from edgefl.core.config import RunConfig, check_run_name, parse_run, parse_run_text
from edgefl.core.errors import ConfigError, NotFoundError, UsageError
from edgefl.core.protocol import PROTOCOL_VERSION
from edgefl.core.types import Json
from edgefl.engine.assembly.normalisation import make_scales_run, name_scales_run, should_find_scales
from edgefl.engine.run_summary import select_device_metrics
from edgefl.history.diagnosis import diagnose_round
from edgefl.storage.checkpoints import open_tensor_bytes
from edgefl.storage.queries.columns import HistoryFilters
from edgefl.storage.queries.history import (
    PAGE_ROWS,
    find_run_id,
    get_round_details,
    read_history,
    read_history_page,
)
from edgefl.storage.queries.uses import list_device_uses
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.repositories.saved_models import find_model, list_models
from edgefl.strategies.job_strategy import RESULT

MAX_PRIORITY = 1000
MAX_FORGOTTEN = 1000
"""Devices that one run is made without."""
MAX_ROWS = 50_000
"""Maximum rows of one response; more come by pages."""
CHUNK_BYTES = 1 << 20

RunBody = Annotated[dict[str, Any], Body(embed=True)]


def runs_router(context: ApiContext) -> APIRouter:  # noqa: C901 one function per route
    """Returns the routes below `/edgefl/v1/runs`, and the check of a pasted run file."""
    router = APIRouter(prefix="/edgefl/v1")
    store, scheduler = context.store, context.clients.run_scheduler
    viewer_only, operator_only = [Depends(context.viewer)], [Depends(context.operator)]

    @router.get("/runs", dependencies=viewer_only)
    def list_runs() -> Json:
        positions = {record.run_id: position for position, record in enumerate(store.list_queued_runs(), 1)}
        rows = [{**encode_run(r), "queue_position": positions.get(r.run_id)} for r in reversed(store.list_runs())]
        return {"v": PROTOCOL_VERSION, "rows": [scheduler.apply_idle_state(row) for row in rows]}

    @router.get("/runs/{run}", dependencies=viewer_only)
    def get_run(run: str) -> Json:
        record = store.get_run(find_run_id(store, run))
        saved_models = store.list_saved_models(record.run_id)
        row = {
            **encode_run(record),
            "model": saved_models[0].sha256 if saved_models else None,
            "metrics": store.get_newest_measured_round(record.run_id, "metrics").get("metrics"),
            **select_device_metrics(store.get_newest_measured_round(record.run_id, "node_accuracy")),
        }
        if "job" in record.config:
            row["parts_done"] = store.count_received_updates(record.run_id)
        return scheduler.apply_idle_state(row)

    @router.get("/runs/{run}/result", dependencies=viewer_only)
    def get_result(run: str) -> StreamingResponse:
        return _send_result(context, store.get_run(find_run_id(store, run)))

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
        checked = context.check_run(run_config)
        if not should_find_scales(run_config):
            return {**checked, **encode_run(_queue_run(context, run_config, priority))}
        record, note = _queue_normalised_run(context, run_config, priority)
        return {**checked, "notes": [*checked.get("notes", ()), note], **encode_run(record)}

    @router.post("/runs/plan", dependencies=operator_only)
    def plan_run(config: RunBody) -> Json:
        parsed = parse_run(config)
        return {"v": PROTOCOL_VERSION, **_add_scales_note(context, parsed, context.plan_run(parsed))}

    @router.post("/run-files", dependencies=operator_only)
    def check_run_file(toml: Annotated[str, Body(embed=True)]) -> Json:
        config = parse_run_text(toml)
        checked = _add_scales_note(context, config, context.check_run(config))
        return {**checked, "v": PROTOCOL_VERSION, "config": config.to_json()}

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

    _add_forget_route(router, context)
    return router


def _add_forget_route(router: APIRouter, context: ApiContext) -> None:
    store = context.store

    @router.post("/runs/{run}/forget", dependencies=[Depends(context.operator)])
    def forget_devices(
        run: str,
        devices: Annotated[list[str], Body(embed=True, min_length=1, max_length=MAX_FORGOTTEN)],
        since: Annotated[float | None, Body(embed=True)] = None,
        keep_devices: Annotated[bool, Body(embed=True)] = False,
    ) -> Json:
        replaced = store.get_run(find_run_id(store, run))
        request = ForgetRequest(devices=tuple(dict.fromkeys(devices)), since=since, keep_devices=keep_devices)
        config, notes = replace_run(store, context.registry, context.directory, replaced, request)
        checked = context.check_run(config)
        # Both or none: who asks an old run finds the one that replaces it.
        with store.batch(durable=True):
            if should_find_scales(config):
                record, note = _queue_normalised_run(context, config, 0)
                notes.append(note)
            else:
                record = _queue_run(context, config, 0)
            record_replacement(store, replaced.run_id, record.run_id, request, at=time.time())
        context.clients.run_scheduler.wake()
        return {**checked, "notes": [*checked.get("notes", ()), *notes], **encode_run(record)}


def history_router(context: ApiContext) -> APIRouter:
    """Returns the routes below `/edgefl/v1/history` and `/edgefl/v1/models`."""
    router, store = APIRouter(prefix="/edgefl/v1", dependencies=[Depends(context.viewer)]), context.store
    _add_model_routes(router, context)

    @router.get("/history/why")
    def diagnose(run: str, round: int | None = None) -> Json:  # noqa: A002 the parameter's name in the URL
        return {"v": PROTOCOL_VERSION, **diagnose_round(get_round_details(store, run, round))}

    @router.get("/history/uses")
    def list_uses(device: str, since: float | None = None, until: float | None = None) -> Json:
        uses = list_device_uses(store, device, since=since, until=until)
        return {"v": PROTOCOL_VERSION, "kind": "uses", "rows": [asdict(use) for use in uses]}

    @router.get("/history/{kind}")
    def list_rows(  # noqa: PLR0913 one parameter per filter
        *,
        request: Request,
        kind: str,
        run: str | None = None,
        device: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
        where: Annotated[list[str] | None, Query()] = None,
        by: str | None = None,
        after: str | None = None,
    ) -> Json:
        if kind == "audit":
            context.operator(request)
        filters = HistoryFilters(
            run=run, device=device, since=since, until=until, limit=limit, where=where or (), by=by
        )
        response = {"v": PROTOCOL_VERSION, "kind": kind}
        if after is not None:
            rows, next_cursor = read_history_page(store, kind, after, **filters)
            return {**response, "rows": rows, "next": next_cursor}
        if limit is not None and limit > MAX_ROWS:
            raise UsageError(f"one answer holds {MAX_ROWS} rows at most, got {limit}; ask page by page with `after`")
        filters["limit"] = limit or PAGE_ROWS
        return {**response, "rows": read_history(store, kind, **filters)}

    return router


def _add_model_routes(router: APIRouter, context: ApiContext) -> None:
    store, folder = context.store, context.directory.models

    @router.get("/models")
    def list_saved_models(run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, "rows": list_models(store, run)}

    @router.get("/models/{model}")
    def get_model(model: str, run: str | None = None) -> Json:
        return {"v": PROTOCOL_VERSION, **find_model(store, model, run)}

    @router.get("/models/{model}/file")
    def get_model_file(model: str, run: str | None = None) -> StreamingResponse:
        sha256 = find_model(store, model, run)["sha256"]
        try:
            # Opened here: the file may be deleted for a newer model, but an open one stays readable.
            opened = (folder / f"{sha256}.safetensors").open("rb")
        except OSError:
            raise NotFoundError(f"the file of model {sha256[:12]} is missing in {folder}") from None
        size = str(opened.seek(0, 2))
        opened.seek(0)
        headers = {"Content-Length": size, "ETag": f'"{sha256}"'}
        return StreamingResponse(_read_chunks(opened), media_type="application/octet-stream", headers=headers)


def _read_chunks(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def encode_run(record: RunRecord) -> Json:
    """Returns a run in the API's format."""
    return {"v": PROTOCOL_VERSION, **asdict(record), "config": dict(record.config)}


def _send_result(context: ApiContext, record: RunRecord) -> StreamingResponse:
    """Returns the result of a job, or of an analysis, that has finished."""
    if "job" not in record.config and not has_result(record.config):
        raise UsageError(f"run {record.run_id} is a training: its result is a model, see edgefl model")
    saved = context.store.list_saved_models(record.run_id)
    if record.status is not RunStatus.FINISHED or not saved:
        reason = f": {record.reason}" if record.reason else ""
        what = "job" if "job" in record.config else record.strategy
        raise NotFoundError(f"{what} {record.run_id} has no result, it is {record.status}{reason}")
    opened, size = open_tensor_bytes(context.directory.models / f"{saved[0].sha256}.safetensors", RESULT)
    headers = {"Content-Length": str(size)}
    return StreamingResponse(_read_chunks(opened), media_type="application/octet-stream", headers=headers)


def _plan_scales(context: ApiContext, config: RunConfig, priority: int = 0) -> tuple[str | None, str]:
    """Returns the earlier run that a run's means and scales are of, None for one that is to be made, and a note.

    Raises:
        NotFoundError, ConfigError: what is named is no run of these scales, or is not there when they are needed.
    """
    asked = find_scales_run(config, context.store)
    if asked is None:
        return None, "a run before it asks the boards for mean and deviation of each column"
    record = context.store.get_run(asked)
    if record.status.is_final and record.status is not RunStatus.FINISHED:
        raise ConfigError(
            f'run {asked} has found no means and scales, it is {record.status}; give normalise = "fleet"'
        )
    if not record.status.is_final and record.priority < priority:
        raise ConfigError(
            f"run {asked} is to find means and scales, and comes later: its priority must be at least {priority}, "
            f"got {record.priority}"
        )
    return asked, f"means and scales are those of run {asked}"


def _add_scales_note(context: ApiContext, config: RunConfig, answer: Json) -> Json:
    """Returns an answer about a run that is not submitted yet, and whose its means and scales are."""
    if not should_find_scales(config):
        return answer
    return {**answer, "notes": [*answer.get("notes", ()), _plan_scales(context, config)[1]]}


def _queue_normalised_run(context: ApiContext, config: RunConfig, priority: int) -> tuple[RunRecord, str]:
    """Queues a run that needs means and scales, after one that finds them if it names none; returns a note, too."""
    asked, note = _plan_scales(context, config, priority)
    if asked is not None:
        return _queue_run(context, name_scales_run(config, asked), priority), note
    first = make_scales_run(config)
    context.check_run(first)
    # Both or none: the run could not find its means and scales.
    with context.store.batch(durable=True):
        asked = _queue_run(context, first, priority).run_id
        record = _queue_run(context, name_scales_run(config, asked), priority)
    context.clients.run_scheduler.wake()
    return record, f"run {asked} first asks the boards for mean and deviation of each column"


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
