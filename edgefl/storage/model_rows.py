"""The models that are kept: which there are, which one somebody means, and whose file nobody names any more."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from sqlalchemy import Column, Connection, String, cast, delete, func, or_, select

from edgefl.errors import NotFoundError
from edgefl.storage.models import Base, Checkpoint, Run
from edgefl.storage.plain import columns_of
from edgefl.storage.queries import find_run
from edgefl.storage.records import CheckpointRow
from edgefl.storage.store import Store
from edgefl.storage.upsert import upsert
from edgefl.types import Json

LATEST, BEST = "latest", "best"
MIN_PREFIX = 4
TEST_FRACTION = 0.1
"""Of a run whose file does not say it."""
_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},64}}\Z")
_ROUND = re.compile(r"\d{1,18}\Z")
_COLUMNS = ("run_id", "version", "round", "last_record", "sha256", "bytes_file", "accuracy", "at")


def kept_models(store: Store, run: str | None = None) -> list[Json]:
    """Returns the kept models of one run or of all, oldest run first, in the order of their versions.

    Each row has the columns of `checkpoints`, of its run the `name`, the `task` with its `task_options` and the
    `test_fraction`, and whether it is the run's `latest` and its `best` by accuracy.

    Raises:
        NotFoundError: there is no such run.
    """
    query = (
        select(*(Checkpoint.__table__.columns[name] for name in _COLUMNS), Run.name, Run.task, Run.config)
        .join(Run, Run.run_id == Checkpoint.run_id)
        .order_by(Run.submitted_at, Run.run_id, Checkpoint.version, Checkpoint.last_record)
    )
    if run is not None:
        query = query.where(Checkpoint.run_id == find_run(store, run))
    with store.database.read() as connection:
        rows = [dict(row) for row in connection.execute(query).mappings()]
    latest = {row["run_id"]: row["last_record"] for row in sorted(rows, key=lambda row: row["last_record"])}
    best = {row["run_id"]: row["last_record"] for row in sorted(_scored(rows), key=_by_accuracy)}
    return [
        {
            **_with_settings(row),
            LATEST: latest[row["run_id"]] == row["last_record"],
            BEST: best.get(row["run_id"]) == row["last_record"],
        }
        for row in rows
    ]


def find_model(store: Store, text: str, run: str | None = None) -> Json:
    """Returns the row of `kept_models` that a person means.

    Args:
        store: where to look.
        text: the beginning of a SHA-256, `RUN:ROUND`, `RUN:latest` or `RUN:best`; without `RUN:` of `run`; a run
            alone stands for its latest.
        run: a run as `find_run` understands it; None for the newest that has a model.

    Raises:
        NotFoundError: none, or several different ones.
    """
    wanted = text.strip()
    before, colon, last = wanted.rpartition(":")
    if colon and (last in {LATEST, BEST} or _ROUND.match(last)):
        return _of_run(kept_models(store, before), before, last)
    if wanted in {LATEST, BEST}:
        rows = kept_models(store, run)
        if run is None:
            newest = rows[-1]["run_id"] if rows else None
            rows = [row for row in rows if row["run_id"] == newest]
        return _of_run(rows, run, wanted)
    if run is not None and _ROUND.match(wanted) and len(wanted) < MIN_PREFIX:
        return _of_run(kept_models(store, run), run, wanted)
    found = _of_prefix(kept_models(store, run), wanted)
    if found is None and run is None and wanted and (run_id := _named_run(store, wanted)) is not None:
        return _of_run(kept_models(store, run_id), wanted, LATEST)
    if found is None:
        raise NotFoundError(_no_model(wanted, run))
    return found


def keep_models(store: Store, run_id: str, rows: Sequence[CheckpointRow], dropped: Collection[int]) -> None:
    """Writes rows of kept models and forgets those of the records `dropped`, in one durable transaction."""
    with store.batch(durable=True), store.database.write() as connection:
        for row in rows:
            upsert(connection, Checkpoint, [{"run_id": run_id, **columns_of(row)}], ("run_id", "last_record"))
        if dropped:
            connection.execute(
                delete(Checkpoint).where(Checkpoint.run_id == run_id, Checkpoint.last_record.in_(dropped))
            )


def unnamed_models(store: Store, sha256s: Collection[str]) -> set[str]:
    """Returns those that nothing in the store names, whose files may go.

    A text column `sha256` or `model`, or one that ends so, names a model, in whatever table it stands; so does the
    run file of a run, whose `init` may be a kept model.
    """
    wanted = {sha256 for sha256 in sha256s if sha256}
    if not wanted:
        return set()
    with store.database.read() as connection:
        named = {str(value) for column in _naming_columns() for value in _found(connection, column, wanted)}
        left = wanted - named
        return {sha256 for sha256 in left if not _is_in_a_run_file(connection, sha256)}


def _naming_columns() -> Iterator[Column[Any]]:
    for table in Base.metadata.tables.values():
        texts = (column for column in table.columns if isinstance(column.type, String))
        yield from (column for column in texts if column.name.split("_")[-1] in {"sha256", "model"})


def _found(connection: Connection, column: Column[Any], wanted: Collection[str]) -> Sequence[Any]:
    return connection.execute(select(column).where(column.in_(wanted)).distinct()).scalars().all()


def _is_in_a_run_file(connection: Connection, sha256: str) -> bool:
    names = cast(Run.config, String).contains(sha256, autoescape=True)
    return bool(connection.execute(select(func.count()).select_from(Run).where(names)).scalar())


def _with_settings(row: Json) -> Json:
    config = row.pop("config")
    fraction = config.get("run", {}).get("local_test_fraction", TEST_FRACTION)
    return {**row, "task_options": dict(config.get("task", {})), "test_fraction": fraction}


def _scored(rows: Sequence[Json]) -> list[Json]:
    return [row for row in rows if row["accuracy"] is not None]


def _by_accuracy(row: Json) -> tuple[float, int]:
    return row["accuracy"], row["version"]


def _of_run(rows: Sequence[Json], run: str | None, which: str) -> Json:
    of = "there is" if run is None else f"run {run!r} has"
    if not rows:
        raise NotFoundError(f"{of} no kept model yet; `edgefl model list` shows what is kept")
    matches: Callable[[Json], bool] = {LATEST: lambda row: row[LATEST], BEST: lambda row: row[BEST]}.get(
        which, lambda row: row["round"] == int(which)
    )
    found = [row for row in rows if matches(row)]
    if not found and which == BEST:
        raise NotFoundError(f"{of} no model whose accuracy is known; `latest` names the last one")
    if not found:
        kept = ", ".join(str(number) for number in sorted({row["round"] for row in rows}))
        raise NotFoundError(f"{of} no kept model of round {which}; kept are those of round {kept}")
    return found[-1]


def _of_prefix(rows: Sequence[Json], text: str) -> Json | None:
    """Returns the newest model whose SHA-256 begins so, if there is one; raises where there are several."""
    found = [row for row in rows if row["sha256"].startswith(text)] if _PREFIX.match(text) else []
    different = sorted({row["sha256"] for row in found})
    if len(different) > 1:
        raise NotFoundError(
            f"several models begin with {text!r}, among them {different[0][:16]} and {different[1][:16]}; "
            "say more of it"
        )
    return found[-1] if found else None


def _named_run(store: Store, text: str) -> str | None:
    """Returns the run that is called so, None where there is none; raises where several are."""
    named = or_(Run.name == text, Run.run_id.startswith(text, autoescape=True))
    with store.database.read() as connection:
        is_there = connection.execute(select(Run.run_id).where(named).limit(1)).first() is not None
    return find_run(store, text) if is_there else None


def _no_model(text: str, run: str | None) -> str:
    if _PREFIX.match(text):
        of = "" if run is None else f" of run {run!r}"
        return f"no kept model{of} begins with {text!r}; `edgefl model list` shows them"
    return (
        f"no model {text!r}: a model is the beginning of its SHA-256 ({MIN_PREFIX} digits or more), a run, "
        "RUN:ROUND, RUN:best, RUN:latest, best or latest"
    )
