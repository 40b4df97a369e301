"""Saved models: listing, lookup by name, and orphaned files."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import Column, Connection, String, cast, delete, func, or_, select

from edgefl.core.analyses import is_model
from edgefl.core.clusters import CLUSTER_FIGURE
from edgefl.core.errors import NotFoundError
from edgefl.core.types import Json, UpdateStatus
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.repositories.records import SavedModelRow
from edgefl.storage.store import Store
from edgefl.storage.tables import Base, RunTable, SavedModelTable, UpdateTable

LATEST, BEST = "latest", "best"
MIN_HASH_PREFIX_CHARS = 4
DEFAULT_TEST_FRACTION = 0.1
"""Of a run whose file does not set it."""
_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_HASH_PREFIX_CHARS},64}}\Z")
_ROUND = re.compile(r"\d{1,18}\Z")
_COLUMNS = ("run_id", "version", "round", "last_record", "sha256", "bytes_file", "accuracy", "quality", "at")


def list_models(store: Store, run: str | None = None) -> list[Json]:
    """Returns the saved models of one run or of all, oldest run first, in the order of their versions.

    Each row has the columns of `checkpoints`, of its run the `name`, the `task` with its `task_options` and the
    `test_fraction`, and whether it is the run's `latest` and its `best`: by `quality` where one of the run has it,
    else by accuracy. Results of jobs and analyses are left out.

    Raises:
        NotFoundError: there is no such run.
    """
    query = (
        select(
            *(SavedModelTable.__table__.columns[name] for name in _COLUMNS),
            RunTable.name,
            RunTable.task,
            RunTable.config,
        )
        .join(RunTable, RunTable.run_id == SavedModelTable.run_id)
        .order_by(RunTable.sequence, RunTable.run_id, SavedModelTable.version)
    )
    if run is not None:
        query = query.where(SavedModelTable.run_id == find_run_id(store, run))
    rows = [row for row in store.database.read_dicts(query) if is_model(row["config"])]
    # By version, the key: after a replay of the journal several versions may contain the same records.
    latest = {row["run_id"]: row["version"] for row in rows}
    best = {row["run_id"]: row["version"] for row in _sort_by_score(rows)}
    return [
        {
            **_add_settings(row),
            LATEST: latest[row["run_id"]] == row["version"],
            BEST: best.get(row["run_id"]) == row["version"],
        }
        for row in rows
    ]


def find_model(store: Store, text: str, run: str | None = None) -> Json:
    """Returns the row of `list_models` that a text identifies.

    Args:
        store: to search.
        text: a prefix of a SHA-256, `RUN:ROUND`, `RUN:latest` or `RUN:best`; without `RUN:` of `run`; a run
            alone stands for its latest.
        run: a run as `find_run_id` understands it; None for the newest that has a model.

    Raises:
        NotFoundError: none or several match.
    """
    name = text.strip()
    run_name, colon, selector = name.rpartition(":")
    if colon and (selector in {LATEST, BEST} or _ROUND.match(selector)):
        return _select_model_of_run(list_models(store, run_name), run_name, selector)
    if name in {LATEST, BEST}:
        rows = list_models(store, run)
        if run is None:
            newest = rows[-1]["run_id"] if rows else None
            rows = [row for row in rows if row["run_id"] == newest]
        return _select_model_of_run(rows, run, name)
    if run is not None and _ROUND.match(name) and len(name) < MIN_HASH_PREFIX_CHARS:
        return _select_model_of_run(list_models(store, run), run, name)
    model = _find_by_prefix(list_models(store, run), name)
    if model is None and run is None and name and (run_id := _find_run_id(store, name)) is not None:
        return _select_model_of_run(list_models(store, run_id), name, LATEST)
    if model is None:
        raise NotFoundError(_format_not_found(name, run))
    return model


def find_clusters(store: Store, run_id: str, version: int, num_clusters: int) -> dict[str, int]:
    """Returns which cluster's model each device took last, of those whose updates went into a version of a run.

    A device says it itself, under a name that any device may use: only a number below `num_clusters` counts.
    """
    query = (
        select(UpdateTable.device_id, UpdateTable.metrics)
        .where(
            UpdateTable.run_id == run_id,
            UpdateTable.base_version < version,
            UpdateTable.outcome == UpdateStatus.USED,
        )
        .order_by(UpdateTable.id)
    )
    found = ((row["device_id"], row["metrics"].get(CLUSTER_FIGURE)) for row in store.database.read_dicts(query))
    return {name: int(number) for name, number in found if number in range(num_clusters)}


def save_model_rows(
    store: Store, run_id: str, rows: Sequence[SavedModelRow], deleted_versions: Collection[int]
) -> None:
    """Writes rows of saved models and deletes those of `deleted_versions`, in one durable transaction."""
    with store.batch(durable=True), store.database.write() as connection:
        for row in rows:
            store.record_saved_model(run_id, row)
        if deleted_versions:
            connection.execute(
                delete(SavedModelTable).where(
                    SavedModelTable.run_id == run_id, SavedModelTable.version.in_(deleted_versions)
                )
            )


def find_orphaned_models(store: Store, sha256s: Collection[str]) -> set[str]:
    """Returns the hashes that nothing in the store refers to, whose files may be deleted.

    A text column `sha256` or `model`, or with such a suffix, refers to a model, in any table; so does the run file
    of a run, whose `init` may be a saved model.
    """
    hashes = {sha256 for sha256 in sha256s if sha256}
    if not hashes:
        return set()
    with store.database.read() as connection:
        referenced = {
            str(value) for column in _list_model_columns() for value in _find_values(connection, column, hashes)
        }
        unreferenced = hashes - referenced
        return {sha256 for sha256 in unreferenced if not _is_in_run_config(connection, sha256)}


def _list_model_columns() -> Iterator[Column[Any]]:
    for table in Base.metadata.tables.values():
        texts = (column for column in table.columns if isinstance(column.type, String))
        yield from (column for column in texts if column.name.split("_")[-1] in {"sha256", "model"})


def _find_values(connection: Connection, column: Column[Any], hashes: Collection[str]) -> Sequence[Any]:
    return connection.execute(select(column).where(column.in_(hashes)).distinct()).scalars().all()


def _is_in_run_config(connection: Connection, sha256: str) -> bool:
    names = cast(RunTable.config, String).contains(sha256, autoescape=True)
    return bool(connection.execute(select(func.count()).select_from(RunTable).where(names)).scalar())


def _add_settings(row: Json) -> Json:
    config = row.pop("config")
    fraction = config.get("run", {}).get("local_test_fraction", DEFAULT_TEST_FRACTION)
    return {**row, "task_options": dict(config.get("task", {})), "test_fraction": fraction}


def _sort_by_score(rows: Sequence[Json]) -> list[Json]:
    """Returns the rows with a score, the best of each run last; of equals the newest."""
    has_quality = {row["run_id"] for row in rows if row["quality"] is not None}
    scores = [(row["quality" if row["run_id"] in has_quality else "accuracy"], row) for row in rows]
    scored = [(score, row) for score, row in scores if score is not None]
    return [row for _, row in sorted(scored, key=lambda pair: (pair[0], pair[1]["version"]))]


def _select_model_of_run(rows: Sequence[Json], run: str | None, which: str) -> Json:
    subject = "there is" if run is None else f"run {run!r} has"
    if not rows:
        raise NotFoundError(f"{subject} no kept model yet; `edgefl model list` shows what is kept")
    matches: Callable[[Json], bool] = {LATEST: lambda row: row[LATEST], BEST: lambda row: row[BEST]}.get(
        which, lambda row: row["round"] == int(which)
    )
    models = [row for row in rows if matches(row)]
    if not models and which == BEST:
        raise NotFoundError(f"{subject} no model whose accuracy is known; `latest` names the last one")
    if not models:
        round_numbers = ", ".join(str(number) for number in sorted({row["round"] for row in rows}))
        raise NotFoundError(f"{subject} no kept model of round {which}; kept are those of round {round_numbers}")
    return models[-1]


def _find_by_prefix(rows: Sequence[Json], text: str) -> Json | None:
    """Returns the newest model whose SHA-256 has this prefix, or None; raises where several match."""
    models = [row for row in rows if row["sha256"].startswith(text)] if _PREFIX.match(text) else []
    hashes = sorted({row["sha256"] for row in models})
    if len(hashes) > 1:
        raise NotFoundError(
            f"several models begin with {text!r}, among them {hashes[0][:16]} and {hashes[1][:16]}; say more of it"
        )
    return models[-1] if models else None


def _find_run_id(store: Store, text: str) -> str | None:
    """Returns the id of the run with this name or prefix, or None; raises where several match."""
    is_named = or_(RunTable.name == text, RunTable.run_id.startswith(text, autoescape=True))
    exists = store.database.read_value(select(RunTable.run_id).where(is_named).limit(1)) is not None
    return find_run_id(store, text) if exists else None


def _format_not_found(text: str, run: str | None) -> str:
    if _PREFIX.match(text):
        owner = "" if run is None else f" of run {run!r}"
        return f"no kept model{owner} begins with {text!r}; `edgefl model list` shows them"
    return (
        f"no model {text!r}: a model is the beginning of its SHA-256 ({MIN_HASH_PREFIX_CHARS} digits or more), "
        "a run, RUN:ROUND, RUN:best, RUN:latest, best or latest"
    )
