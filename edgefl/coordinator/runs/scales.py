"""Means and scales of a run's inputs: found by a run before it, and in its record from its first round on."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.core.config import RunConfig
from edgefl.core.errors import RunFailedError
from edgefl.core.safe_parsing import parse_json
from edgefl.core.types import Json
from edgefl.engine.assembly.normalisation import apply_scales, check_same_columns, find_named_run, should_find_scales
from edgefl.storage.checkpoints import open_tensor_bytes
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.queries.uses import SCALES_TAKEN
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.store import Store
from edgefl.strategies.job_strategy import RESULT

log = logging.getLogger(__name__)

SCALES_LEFT_OUT = "scales-left-out"
"""Kind of the event: what a board said of a column has no part in its mean and scale."""
MAX_SHOWN_COLUMNS = 12


def find_scales_run(config: RunConfig, store: Store) -> str | None:
    """Returns the id of the earlier run whose means and scales a run takes; None where it asks the boards itself.

    Raises:
        NotFoundError: there is no such run.
        ConfigError: it is about other columns.
    """
    named = find_named_run(config)
    if named is None:
        return None
    run_id = find_run_id(store, named)
    check_same_columns(config, store.get_run(run_id).config)
    return run_id


def record_scales(record: RunRecord, store: Store, directory: CoordinatorDirectory) -> RunRecord:
    """Returns a run that begins with its means and scales, written into its record; any other as it is.

    A coordinator that dies before finds the same ones again; one that dies later, in the record.

    Raises:
        RunFailedError: the run that was to find them has none.
    """
    config = RunConfig.from_json(record.config)
    if not should_find_scales(config):
        return record
    run_id = find_scales_run(config, store)
    if run_id is None:
        raise RunFailedError("its means and scales were asked of no board; submit it again")
    result = _load_result(store.get_run(run_id), store, directory)
    found = apply_scales(config, result).to_json()
    with store.batch(durable=True):
        store.set_run_config(record.run_id, found)
        message = f"takes the means and scales that run {run_id} has found"
        store.record_event(SCALES_TAKEN, message, at=time.time(), run_id=record.run_id, data={"run_id": run_id})
        _record_left_out(record.run_id, result, store)
    log.info("run %s takes the means and scales that run %s has found", record.run_id, run_id)
    return replace(record, config=found)


def _record_left_out(run_id: str, result: Json, store: Store) -> None:
    """Records an event for each board that was left out of a column."""
    columns: dict[str, list[str]] = {}
    for column in result["columns"]:
        for device_id in column.get("left_out", ()):
            columns.setdefault(device_id, []).append(column["name"])
    for device_id, names in columns.items():
        more = f" and {len(names) - MAX_SHOWN_COLUMNS} more" if len(names) > MAX_SHOWN_COLUMNS else ""
        message = (
            f"left out of the scales of {', '.join(names[:MAX_SHOWN_COLUMNS])}{more}: its values lie further from "
            "the others' median than theirs by far"
        )
        log.warning("run %s: %s is %s", run_id, device_id, message)
        store.record_event(SCALES_LEFT_OUT, message, at=time.time(), run_id=run_id, device_id=device_id)


def _load_result(asked: RunRecord, store: Store, directory: CoordinatorDirectory) -> Json:
    saved = store.list_saved_models(asked.run_id)
    if asked.status is not RunStatus.FINISHED or not saved:
        reason = f": {asked.reason}" if asked.reason else ""
        raise RunFailedError(f"run {asked.run_id} has found no means and scales, it is {asked.status}{reason}")
    opened, size = open_tensor_bytes(directory.models / f"{saved[0].sha256}.safetensors", RESULT)
    with opened:
        result: Json = parse_json(opened.read(size))
    return result
