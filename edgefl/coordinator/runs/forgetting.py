"""Runs made anew without the data of some devices: from which model they start, and what the history says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgefl.coordinator.directory import CoordinatorDirectory
from edgefl.coordinator.fleet.registry import DeviceRegistry
from edgefl.coordinator.runs.planning import is_selected_trainer
from edgefl.core.analyses import ANALYSES
from edgefl.core.config import RunConfig
from edgefl.core.errors import UsageError
from edgefl.engine.replacement import CleanModel, make_replacement, require_boards
from edgefl.storage.queries.uses import RunUse, find_run_use, read_progress
from edgefl.storage.repositories.records import RunRecord
from edgefl.storage.store import Store

RUN_REPLACED = "run-replaced"
"""Kind of the event of a run that another one replaces."""
NO_MODEL = "it starts where the replaced run did"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRequest:
    """Whose data a run is to be made without.

    Attributes:
        devices: their names.
        since: unix seconds; data that is not older, None for all.
        keep_devices: they take part again, having removed that data.
    """

    devices: tuple[str, ...]
    since: float | None = None
    keep_devices: bool = False


def replace_run(
    store: Store,
    registry: DeviceRegistry,
    directory: CoordinatorDirectory,
    record: RunRecord,
    request: ForgetRequest,
) -> tuple[RunConfig, list[str]]:
    """Returns the run file of a run without the data of devices, and notes for who asked.

    Raises:
        UsageError: the run is not over, a device took no part in it, or what it began with has their data.
        ConfigError: this release does not know its settings any more.
        NotFoundError: there was never such a device.
    """
    run_id = record.run_id
    if not record.status.is_final:
        raise UsageError(f"run {run_id} is {record.status}; it must be over: edgefl run stop {run_id}")
    found = {name: find_run_use(store, name, run_id, request.since) for name in request.devices}
    if absent := [name for name, use in found.items() if use is None]:
        when = "" if request.since is None else " since then"
        raise UsageError(
            f"{absent[0]} took no part in run {run_id}{when}; `edgefl history uses {absent[0]}` lists where"
        )
    uses = [use for use in found.values() if use is not None]
    config = RunConfig.from_json(record.config)
    behind = {name: use.gateways for name, use in found.items() if use and use.gateways}
    if behind and not request.keep_devices:
        name = min(behind)
        raise UsageError(
            f"{name} works behind {behind[name][0]}: take it from that gateway, then give --keep-device, which asks "
            "the gateway for all others"
        )
    if inherited := next((use.inherited_model for use in uses if use.inherited_model), None):
        raise UsageError(
            f"run {run_id} began with a model of run {inherited}, which has data of {', '.join(found)}: forget it "
            "there, then submit this run file with run.init = the new model"
        )
    has_their_scales = any(use.scales_run for use in uses)
    model, note = None, f"{NO_MODEL}: its means and scales are of them, too, and the others are asked for new ones"
    if not has_their_scales:
        model, note = _find_clean_model(store, directory.models.absolute(), record, uses)
    config, notes = make_replacement(
        config,
        run_id,
        request.devices,
        model=model,
        keep_devices=request.keep_devices,
        has_their_scales=has_their_scales,
    )
    boards = sum(is_selected_trainer(info, config) for info in registry.list_devices())
    config, lowered = require_boards(config, boards)
    return config, [note, *notes, *lowered]


def _find_clean_model(
    store: Store, folder: Path, record: RunRecord, uses: Sequence[RunUse]
) -> tuple[CleanModel | None, str]:
    """Returns the newest kept model without data of the devices, if any, and a note on where the run starts."""
    versions = [use.clean_version for use in uses]
    known = [version for version in versions if version is not None]
    if len(known) < len(versions):
        return None, f"{NO_MODEL}: its updates are pruned, so nobody knows when they took part"
    if record.strategy in ANALYSES:
        return None, f"{NO_MODEL}: an analysis has no model to start from"
    for row in store.list_saved_models(record.run_id):
        path = folder / f"{row.sha256}.safetensors"
        if 0 < row.version <= min(known) and path.is_file():
            updates, seconds, num_bytes = read_progress(store, record.run_id, row)
            spent = {"rounds": row.round, "updates": updates, "bytes": num_bytes}
            model = CleanModel(path=str(path), seconds=seconds, **spent)
            return model, f"it starts from the model of round {row.round}, which is from before"
    return None, (
        f"{NO_MODEL}: no model from before is kept; models.keep_every = 1 keeps that of each evaluated round"
    )


def record_replacement(store: Store, run_id: str, successor_id: str, request: ForgetRequest, *, at: float) -> None:
    """Records at the run that was replaced by which one, and without whom."""
    devices = list(request.devices)
    what = f"without {', '.join(devices)}"
    if request.keep_devices:
        what = f"without data that {', '.join(devices)} has removed"
    data = {"run_id": successor_id, "devices": devices, "keep_devices": request.keep_devices}
    store.record_event(RUN_REPLACED, f"run {successor_id} replaces it, {what}", at=at, run_id=run_id, data=data)
