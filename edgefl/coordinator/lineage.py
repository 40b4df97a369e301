"""Lineage of the coordinator's store at its start: what was found, recorded, and rebuilt from the runs' folders."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.execution.live_fleet import LINEAGE_BEGAN
from edgefl.core.errors import StoreError, StoreFullError
from edgefl.core.safe_parsing import parse_json
from edgefl.storage.lineage import Lineage
from edgefl.storage.repositories.records import RunRecord, RunStatus
from edgefl.storage.store import Store
from edgefl.system.atomic_files import write_atomic

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
"""File beside a run's journal: its row, which nothing else could rebuild."""
MAX_RUN_FILE_BYTES = 4 * 1024 * 1024


def open_lineage(directory: CoordinatorDirectory, store: Store, *, now: float) -> Lineage:
    """Returns the lineage of a store; a new one is recorded, and lost runs with a journal are restored.

    Raises:
        StoreFullError: no room.
        StoreError: its files or the store cannot be written.
    """
    lineage = Lineage(store, directory.root)
    if lineage.finding is None:
        return lineage
    restored_ids = _restore_lost_runs(directory.runs, store)
    message = f"{lineage.finding}; a new lineage begins, and devices' answers to the former one are not used"
    if lineage.num_lost_commits:
        message += f"; lost are the last {lineage.num_lost_commits} changes of runs, devices and tokens"
        message += f", but for {', '.join(restored_ids)}, from the journal" if restored_ids else ""
    log.warning("%s", message)
    with store.batch(durable=True):
        store.record_event(LINEAGE_BEGAN, message, at=now, data={"lineage": lineage.lineage_id})
    return lineage


def save_run_record(directory: CoordinatorDirectory, record: RunRecord) -> None:
    """Writes a run's row beside its journal, for a store that loses it.

    Raises:
        StoreFullError: no room.
        StoreError: it cannot be written.
    """
    content = json.dumps({**asdict(record), "config": dict(record.config)}).encode()
    write_atomic(directory.runs / record.run_id / RUN_FILE, content)


def _restore_lost_runs(folder: Path, store: Store) -> list[str]:
    """Returns the runs that have a journal and no row any more; each gets a row, as one whose coordinator died."""
    known_ids = {record.run_id for record in store.list_runs()}
    restored_ids = []
    for path in sorted(folder.glob(f"*/{RUN_FILE}")):
        run_id = path.parent.name
        if run_id in known_ids:
            continue
        try:
            store.restore_run(_parse_run_record(run_id, path))
        except StoreFullError:
            raise
        except (StoreError, OSError, ValueError, TypeError, KeyError) as error:
            log.warning("run %s cannot be restored from %s: %s", run_id, path, error)
            continue
        restored_ids.append(run_id)
    return restored_ids


def _parse_run_record(run_id: str, path: Path) -> RunRecord:
    with path.open("rb") as file:
        value: Any = parse_json(file.read(MAX_RUN_FILE_BYTES))
    if not isinstance(value, Mapping) or value.get("run_id") != run_id:
        raise ValueError(f"it must be the row of {run_id}")
    return RunRecord(**{**value, "status": RunStatus.RUNNING, "finished_at": None, "reason": None})
