"""Uses of a device's data: the runs that it took part in, and the models and deployments that come of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from sqlalchemy import String, cast, func, select

from edgefl.core.errors import NotFoundError
from edgefl.core.types import Json, UpdateStatus
from edgefl.storage.repositories.records import SavedModelRow
from edgefl.storage.store import Store
from edgefl.storage.tables import (
    DeploymentTable,
    DeviceTable,
    EventTable,
    RoundTable,
    RunTable,
    SavedModelTable,
    TotalTable,
    UpdateTable,
)

SCALES_TAKEN = "scales-taken"
"""Kind of the event of a run whose means and scales an earlier one has found; `data` has that one's `run_id`."""
_WORK_COLUMNS = ("run_id", "round", "base_version", "dispatched_at", "ended_at", "outcome", "metrics", "device_id")
_NO_TOTALS = (0, 0)


@dataclass(slots=True, kw_only=True)
class RunUse:
    """What a run had of a device's data.

    Attributes:
        run_id, name, status: of the run.
        gateways: that the device worked behind; empty where it itself took part.
        inherited_model: the run with a use whose model this one began with; None for none.
        scales_run: likewise, whose means and scales it takes.
        clean_version: the newest version whose model has nothing of the device: that before its first assignment;
            None where none is known to have nothing.
        num_assignments, num_used: of the device or its gateway, and how many of them are in a model.
        first_round, last_round: of them; None where the history of the updates is pruned, or there are none.
        first_at, last_at: unix seconds of the first dispatch and of the last end; likewise.
        shards: the versions of the shard that were trained on, each with examples, first and last round.
        models: kept models that may have something of it: `sha256`, `version`, `round`.
        deployments: of such models: `deployment_id`, `model`, `status`.
        replaced_by: runs that were made to replace this one.
    """

    run_id: str
    name: str
    status: str
    gateways: list[str] = field(default_factory=list)
    inherited_model: str | None = None
    scales_run: str | None = None
    clean_version: int | None = None
    num_assignments: int = 0
    num_used: int = 0
    first_round: int | None = None
    last_round: int | None = None
    first_at: float | None = None
    last_at: float | None = None
    shards: list[Json] = field(default_factory=list)
    models: list[Json] = field(default_factory=list)
    deployments: list[Json] = field(default_factory=list)
    replaced_by: list[str] = field(default_factory=list)


def list_device_uses(
    store: Store, device_id: str, *, since: float | None = None, until: float | None = None
) -> list[RunUse]:
    """Returns the uses of a device's data, oldest run first.

    A run that began with a model, or with means and scales, of such a run has a use too: all of its models. Where a
    run's updates are pruned, it is not known when the device took part, and no model of it counts as clean.

    Args:
        store: to read.
        device_id: the device, or a board behind a site gateway.
        since: unix seconds; the data is not older: work that ended before does not count.
        until: unix seconds; the data was removed then: work that was dispatched from then on does not count.

    Raises:
        NotFoundError: nobody has ever heard of the device.
    """
    work = _group(_list_work(store, device_id))
    totals = _list_totals(store, device_id)
    if not work and not totals and not _is_device(store, device_id):
        raise NotFoundError(f"no run has had a device {device_id!r}; `edgefl history devices` shows them")
    kept_models = _group(_list_models(store))
    scales_runs = _find_scales_runs(store)
    uses, tainted = dict[str, RunUse](), dict[str, str]()
    runs = _list_runs(store)
    for run in runs:
        run_id = run["run_id"]
        rows, (num_assignments, num_used) = work.get(run_id, []), totals.get(run_id, _NO_TOTALS)
        counted = [row for row in rows if _is_within(row, since, until)]
        is_pruned = num_assignments > len(rows)
        inherited = _find_inherited(run["config"], tainted)
        scales_run = _find_scales_run(run["config"], uses, scales_runs.get(run_id))
        if not (counted or is_pruned or inherited or scales_run):
            continue
        use = uses[run_id] = RunUse(run_id=run_id, name=run["name"], status=run["status"])
        if counted:
            _add_work(use, counted, device_id)
        if is_pruned:
            use.num_assignments, use.num_used = num_assignments, num_used
        use.inherited_model, use.scales_run = inherited, scales_run
        if is_pruned or inherited or scales_run:
            use.clean_version = None
        use.models = [
            {name: row[name] for name in ("sha256", "version", "round")}
            for row in kept_models.get(run_id, [])
            if use.clean_version is None or row["version"] > use.clean_version
        ]
        tainted |= {row["sha256"]: run_id for row in use.models}
    _add_deployments(store, uses, kept_models)
    for run in runs:
        if (replaced := uses.get(_get(run["config"], "run", "replaces"))) is not None:
            replaced.replaced_by.append(run["run_id"])
    return list(uses.values())


def find_run_use(store: Store, device_id: str, run_id: str, since: float | None = None) -> RunUse | None:
    """Returns what one run had of a device's data; None where that is nothing. Raises as `list_device_uses`."""
    uses = list_device_uses(store, device_id, since=since)
    return next((use for use in uses if use.run_id == run_id), None)


def read_progress(store: Store, run_id: str, model: SavedModelRow) -> tuple[int, float, int]:
    """Returns what a run had spent when it made a kept model: updates, seconds and bytes."""
    rounds = (RoundTable.run_id == run_id, RoundTable.round <= model.round)
    columns = (
        func.coalesce(func.sum(RoundTable.num_updates), 0).label("updates"),
        func.coalesce(func.max(RoundTable.closed_at) - func.min(RoundTable.started_at), 0.0).label("seconds"),
        func.coalesce(func.sum(RoundTable.bytes_up + RoundTable.bytes_down), 0).label("bytes"),
    )
    (row,) = store.database.read_dicts(select(*columns).where(*rounds))
    return int(row["updates"]), float(row["seconds"]), int(row["bytes"])


def _list_runs(store: Store) -> list[Json]:
    columns = (RunTable.run_id, RunTable.name, RunTable.status, RunTable.config)
    return store.database.read_dicts(select(*columns).order_by(RunTable.sequence, RunTable.run_id))


def _list_models(store: Store) -> list[Json]:
    return store.database.read_dicts(select(SavedModelTable.__table__).order_by(SavedModelTable.version))


def _list_work(store: Store, device_id: str) -> list[Json]:
    """Returns the assignments of a device, and those of gateways whose update names it."""
    columns = [getattr(UpdateTable, name) for name in _WORK_COLUMNS]
    own = select(*columns).where(UpdateTable.device_id == device_id).order_by(UpdateTable.id)
    if rows := store.database.read_dicts(own):
        return rows
    # No device has the name as a gateway's board and as its own; a text search first, for the rows may be a million.
    named = cast(UpdateTable.metrics, String).contains(f'"{device_id}"', autoescape=True)
    rows = store.database.read_dicts(select(*columns).where(named).order_by(UpdateTable.id))
    return [row for row in rows if device_id in _list_boards(row)]


def _list_boards(row: Json) -> set[str]:
    boards = (row["metrics"] or {}).get("boards")
    shares = boards if isinstance(boards, list) else ()
    return {str(share.get("board")) for share in shares if isinstance(share, Mapping)}


def _is_within(row: Json, since: float | None, until: float | None) -> bool:
    """Returns whether an assignment overlaps the times; one whose times are not known does."""
    started, ended = row["dispatched_at"], row["ended_at"]
    is_late_enough = since is None or ended is None or ended >= since
    return is_late_enough and (until is None or started is None or started < until)


def _list_totals(store: Store, device_id: str) -> dict[str, tuple[int, int]]:
    """Returns assignments and used updates of a device by run, which stay when their rows are pruned."""
    sums = [func.sum(column) for column in (TotalTable.num_assignments, TotalTable.num_used)]
    query = select(TotalTable.run_id, *sums).where(TotalTable.device_id == device_id).group_by(TotalTable.run_id)
    return {run_id: (int(num), int(used)) for run_id, num, used in store.database.read_rows(query)}


def _is_device(store: Store, device_id: str) -> bool:
    query = select(DeviceTable.device_id).where(DeviceTable.device_id == device_id)
    return store.database.read_value(query) is not None


def _find_scales_runs(store: Store) -> dict[str, str]:
    """Returns the run that has found the means and scales of each run that took them from another."""
    query = select(EventTable.run_id, EventTable.data).where(EventTable.kind == SCALES_TAKEN)
    return {run_id: str(data.get("run_id")) for run_id, data in store.database.read_rows(query)}


def _find_inherited(config: Json, tainted: Mapping[str, str]) -> str | None:
    """Returns the run with a use whose model a run begins with; a model's file is known by its name."""
    bases = [PurePath(str(_get(config, *name))).stem for name in (("run", "init"), ("adapt", "base"))]
    return next((tainted[base] for base in bases if base in tainted), None)


def _find_scales_run(config: Json, uses: Collection[str], recorded: str | None) -> str | None:
    named = str(_get(config, "task", "normalise")).removeprefix("run:")
    return next((run_id for run_id in (recorded, named) if run_id in uses), None)


def _get(config: Json, section: str, name: str) -> Any:
    return config.get(section, {}).get(name) or ""


def _add_work(use: RunUse, rows: Sequence[Json], device_id: str) -> None:
    use.gateways = sorted({row["device_id"] for row in rows} - {device_id})
    use.clean_version = min(row["base_version"] for row in rows)
    use.num_assignments = len(rows)
    use.num_used = sum(row["outcome"] == UpdateStatus.USED for row in rows)
    use.first_round, use.last_round = min(row["round"] for row in rows), max(row["round"] for row in rows)
    use.first_at = min((row["dispatched_at"] for row in rows if row["dispatched_at"] is not None), default=None)
    use.last_at = max((row["ended_at"] for row in rows if row["ended_at"] is not None), default=None)
    shards = dict[str, Json]()
    for row in rows:
        if (version := (row["metrics"] or {}).get("shard_version")) is None:
            continue
        new = {"version": version, "examples": row["metrics"].get("shard_examples"), "first_round": row["round"]}
        shard = shards.setdefault(version, new)
        shard["last_round"] = row["round"]
    use.shards = list(shards.values())


def _add_deployments(store: Store, uses: Mapping[str, RunUse], kept_models: Mapping[str, Sequence[Json]]) -> None:
    """Adds the deployments of models that may have something of the device; one that is not kept may have."""
    columns = (DeploymentTable.deployment_id, DeploymentTable.run_id, DeploymentTable.model, DeploymentTable.status)
    for row in store.database.read_dicts(select(*columns).order_by(DeploymentTable.sequence)):
        if (use := uses.get(row.pop("run_id") or "")) is None:
            continue
        used = {model["sha256"] for model in use.models}
        clean = {model["sha256"] for model in kept_models.get(use.run_id, ())} - used
        if row["model"] not in clean:
            use.deployments.append(row)


def _group(rows: Sequence[Json]) -> dict[str, list[Json]]:
    by_run = dict[str, list[Json]]()
    for row in rows:
        by_run.setdefault(row["run_id"], []).append(row)
    return by_run
