"""Runs, rounds, updates, evaluations and checkpoints: what the recorder writes once per turn of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, case, delete, func, insert, select, update

from edgefl.errors import NotFoundError, StoreError
from edgefl.storage.database import Database
from edgefl.storage.models import Checkpoint, Evaluation, Round, Run, Update
from edgefl.storage.plain import columns_of, storable
from edgefl.storage.records import (
    CheckpointRow,
    DispatchRow,
    EvaluationRow,
    RoundFigures,
    RunRecord,
    RunStatus,
    UpdateRow,
)
from edgefl.storage.totals import affected, counted
from edgefl.storage.upsert import insert_new, upsert
from edgefl.storage.waits import wait_columns, waits_of_rounds
from edgefl.types import Json, Outcome

NO_UPDATES: Mapping[str, Any] = MappingProxyType(
    {"num_devices": 0, "num_updates": 0, "loss": None, "bytes_up": 0, "bytes_down": 0}
)
"""The sums of a round that nothing was given out for."""


class RunRows:
    """The store's part about runs. Every `record_*` may be called again with the same rows (a replay)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add_run(  # noqa: PLR0913 one keyword per column
        self,
        *,
        run_id: str,
        name: str,
        task: str,
        strategy: str,
        config: Mapping[str, Any],
        seed: int,
        submitted_at: float,
        priority: int = 0,
    ) -> RunRecord:
        """Returns the new run, queued.

        Raises:
            StoreError: the id is taken.
        """
        values = {
            "run_id": run_id, "name": name, "task": task, "strategy": strategy, "config": storable(config),
            "status": str(RunStatus.QUEUED), "submitted_at": submitted_at, "rounds": 0, "version": 0, "seed": seed,
            "priority": priority, "resumes": 0,
        }  # fmt: skip
        with self._database.write(durable=True) as connection:
            if _run_row(connection, run_id) is not None:
                raise StoreError(f"there is a run {run_id!r} already")
            connection.execute(insert(Run), values)
        return self.run(run_id)

    def run(self, run_id: str) -> RunRecord:
        """Returns one run.

        Raises:
            NotFoundError: there is none of this id.
        """
        with self._database.read() as connection:
            row = _run_row(connection, run_id)
        if row is None:
            raise NotFoundError(f"no run {run_id!r}; `edgefl run list` shows them")
        return _run_record(row)

    def runs(self, *, status: RunStatus | None = None, limit: int | None = None) -> list[RunRecord]:
        """Returns runs, newest first."""
        query = select(Run.__table__).order_by(Run.submitted_at.desc(), Run.run_id.desc()).limit(limit)
        if status is not None:
            query = query.where(Run.status == str(status))
        with self._database.read() as connection:
            return [_run_record(row) for row in connection.execute(query)]

    def num_runs(self, status: RunStatus) -> int:
        """Returns how many runs have this status."""
        query = select(func.count()).select_from(Run).where(Run.status == str(status))
        with self._database.read() as connection:
            return int(connection.execute(query).scalar_one())

    def queued_runs(self) -> list[RunRecord]:
        """Returns the runs that wait, in the order in which they begin: by priority, then by time."""
        query = (
            select(Run.__table__)
            .where(Run.status == str(RunStatus.QUEUED))
            .order_by(Run.priority.desc(), Run.submitted_at, Run.run_id)
        )
        with self._database.read() as connection:
            return [_run_record(row) for row in connection.execute(query)]

    def next_queued_run(self) -> RunRecord | None:
        """Returns the run that begins next, if any waits."""
        queued = self.queued_runs()
        return queued[0] if queued else None

    def queue_again(self, run_id: str) -> None:
        """Lets a run that had ended wait once more, and counts that.

        Raises:
            NotFoundError: no such run.
        """
        values = {
            "status": str(RunStatus.QUEUED), "reason": None, "finished_at": None, "resumes": Run.resumes + 1,
        }  # fmt: skip
        self._change_run(run_id, values, durable=True)

    def forget_updates(self, run_id: str, assignment_ids: Sequence[str]) -> None:
        """Takes out what is known of assignments that are given a second time."""
        statement = delete(Update.__table__).where(  # type: ignore[arg-type] # as in `mark_applied`
            Update.run_id == run_id, Update.assignment_id == bindparam("again")
        )
        if assignment_ids:
            with (
                self._database.write() as connection,
                counted(connection, run_id, assignment_ids, takes_back=True),
            ):
                connection.execute(statement, [{"again": assignment_id} for assignment_id in assignment_ids])

    def set_run_status(self, run_id: str, status: RunStatus, *, at: float, reason: str | None = None) -> None:
        """Moves a run to `status`; the first RUNNING sets when it started, a final one when it finished.

        Raises:
            NotFoundError: no such run.
        """
        values: dict[str, Any] = {
            "status": str(status), "reason": reason, "finished_at": at if status.is_final else None,
        }  # fmt: skip
        if status is RunStatus.RUNNING:
            values["started_at"] = func.coalesce(Run.started_at, at)
        self._change_run(run_id, values, durable=True)

    def set_run_accuracy(self, run_id: str, accuracy: float) -> None:
        """Remembers the newest accuracy of the run's model."""
        self._change_run(run_id, {"accuracy": accuracy}, durable=False)

    def open_round(self, run_id: str, number: int, *, started_at: float, num_devices: int = 0) -> None:
        """Starts a round, unless it was started before."""
        self.open_rounds(run_id, {number: (started_at, num_devices)})

    def open_rounds(self, run_id: str, opened: Mapping[int, tuple[float, int]]) -> None:
        """Starts rounds, each with when and how many devices, unless they were started before."""
        rows = [
            {
                "run_id": run_id, "round": number, "started_at": started_at, "num_devices": num_devices,
                "num_updates": 0, "bytes_up": 0, "bytes_down": 0,
            }
            for number, (started_at, num_devices) in opened.items()
        ]  # fmt: skip
        with self._database.write() as connection:
            insert_new(connection, Round, rows, ("run_id", "round"))

    def close_round(self, run_id: str, number: int, *, version: int, closed_at: float) -> None:
        """Ends one round; as `close_rounds`."""
        self.close_rounds(run_id, {number: (version, closed_at)})

    def close_rounds(self, run_id: str, closed: Mapping[int, tuple[int, float]]) -> None:
        """Ends rounds, each with its version and when: sums are taken from updates, the run's `rounds` follow.

        The run's `version` follows as well, and neither ever goes down: when a run is taken up again, what is in the
        journal behind its checkpoint is written a second time.

        Raises:
            NotFoundError: one of them was never opened.
        """
        if not closed:
            return
        with self._database.write() as connection:
            begun = select(Round.round, Round.started_at).where(Round.run_id == run_id, Round.round.in_(list(closed)))
            started: dict[int, float] = {row.round: row.started_at for row in connection.execute(begun)}
            for number in closed:
                if number not in started:
                    raise NotFoundError(f"no round {number} of run {run_id!r} is open")
            sums = _round_sums(connection, run_id, Update.round.in_(list(closed)))
            waits = waits_of_rounds(connection, run_id, started, {number: at for number, (_, at) in closed.items()})
            rows = [
                {
                    "of_round": number,
                    "version": version,
                    "closed_at": at,
                    "seconds": max(0.0, at - started[number]),
                    **wait_columns(waits.get(number)),
                    **sums.get(number, NO_UPDATES),
                }
                for number, (version, at) in closed.items()
            ]
            table: Any = Round.__table__
            one = update(table).where(table.c.run_id == run_id, table.c.round == bindparam("of_round"))
            connection.execute(one, rows)  # which name the columns that change
            newest, latest = max(closed), max(version for version, _ in closed.values())
            values = {
                "rounds": case((Run.rounds < newest, newest), else_=Run.rounds),
                "version": case((Run.version < latest, latest), else_=Run.version),
            }
            connection.execute(update(Run).where(Run.run_id == run_id).values(**values))

    def sum_rounds(self, run_id: str) -> None:
        """Takes the sums of every round from its updates anew: some of them come after their round has closed.

        A round whose updates are not kept any more keeps its sums.
        """
        mine = Round.run_id == run_id
        with self._database.write() as connection:
            sums = _round_sums(connection, run_id)
            for number, num_updates in connection.execute(select(Round.round, Round.num_updates).where(mine)).all():
                if number not in sums and num_updates:
                    continue
                values = sums.get(number, NO_UPDATES)
                connection.execute(update(Round).where(mine, Round.round == number).values(**values))

    def set_round_figures(self, run_id: str, number: int, figures: RoundFigures) -> None:
        """Remembers what is known of a round beside its sums; nothing where the round was never opened."""
        changed = update(Round).where(Round.run_id == run_id, Round.round == number).values(**storable(figures))
        with self._database.write() as connection:
            connection.execute(changed)

    def newest_node_round(self, run_id: str) -> Json:
        """Returns the newest round after which devices' own models were evaluated; empty where there is none."""
        query = (
            select(Round.__table__)
            .where(Round.run_id == run_id, Round.node_accuracy.is_not(None))
            .order_by(Round.round.desc())
            .limit(1)
        )
        with self._database.read() as connection:
            row = connection.execute(query).mappings().first()
        return dict(row) if row is not None else {}

    def record_dispatches(self, run_id: str, rows: Sequence[DispatchRow]) -> None:
        """Keeps assignments that go out."""
        values = [{"run_id": run_id, "metrics": {}, **columns_of(row)} for row in rows]
        with self._database.write() as connection, counted(connection, run_id, affected(rows)):
            insert_new(connection, Update, values, ("run_id", "assignment_id"))

    def record_updates(self, run_id: str, rows: Sequence[UpdateRow]) -> None:
        """Keeps what came of assignments, over what was known of them."""
        # A row that was never dispatched has its time all the same: history goes by it.
        values = [{"run_id": run_id, "dispatched_at": row.received_at, **columns_of(row)} for row in rows]
        with self._database.write() as connection, counted(connection, run_id, affected(rows)):
            upsert(connection, Update, values, ("run_id", "assignment_id"), keeps=("dispatched_at",))

    def mark_applied(
        self, run_id: str, assignment_ids: Sequence[str], *, applied_version: int, round_number: int | None = None
    ) -> None:
        """Marks updates as used; staleness is `applied_version`, the version they met, less their base version."""
        values: dict[str, Any] = {
            "outcome": str(Outcome.USED), "applied_version": applied_version,
            "staleness": applied_version - Update.base_version,
        }  # fmt: skip
        if round_number is not None:
            values["round"] = round_number
        statement = (
            update(Update.__table__)  # type: ignore[arg-type] # a declarative class's table is typed as any FROM
            .where(Update.run_id == run_id, Update.assignment_id == bindparam("applied"))
            .values(**values)
        )
        if assignment_ids:
            with self._database.write() as connection, counted(connection, run_id, assignment_ids):
                connection.execute(statement, [{"applied": assignment_id} for assignment_id in assignment_ids])

    def record_evaluations(self, run_id: str, rows: Sequence[EvaluationRow]) -> None:
        """Keeps evaluations."""
        values = [{"run_id": run_id, **columns_of(row)} for row in rows]
        with self._database.write() as connection:
            upsert(connection, Evaluation, values, ("run_id", "assignment_id"))

    def record_checkpoint(self, run_id: str, row: CheckpointRow) -> None:
        """Keeps where a checkpoint of the run lies."""
        with self._database.write() as connection:
            upsert(connection, Checkpoint, [{"run_id": run_id, **columns_of(row)}], ("run_id", "last_record"))

    def checkpoints(self, run_id: str) -> list[CheckpointRow]:
        """Returns the run's checkpoints, newest first."""
        query = (
            select(Checkpoint.__table__).where(Checkpoint.run_id == run_id).order_by(Checkpoint.last_record.desc())
        )
        names = CheckpointRow.__dataclass_fields__
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        return [CheckpointRow(**{name: row[name] for name in names}) for row in rows]

    def _change_run(self, run_id: str, values: Mapping[str, Any], *, durable: bool) -> None:
        with self._database.write(durable=durable) as connection:
            if not connection.execute(update(Run).where(Run.run_id == run_id).values(**values)).rowcount:
                raise NotFoundError(f"no run {run_id!r}; `edgefl run list` shows them")


def _round_sums(connection: Connection, run_id: str, *where: ColumnElement[bool]) -> dict[int, dict[str, Any]]:
    """Returns the sums over the updates of each round, by its number; a round without updates is not in it."""
    used = Update.outcome == str(Outcome.USED)
    weighed = case((used & Update.loss.is_not(None), Update.num_examples))
    rows = connection.execute(
        select(
            Update.round,
            func.count(func.distinct(Update.device_id)).label("num_devices"),
            func.count(case((used, 1))).label("num_updates"),
            (func.sum(case((used, Update.loss * Update.num_examples))) / func.nullif(func.sum(weighed), 0)).label(
                "loss"
            ),
            func.coalesce(func.sum(Update.bytes_up), 0).label("bytes_up"),
            func.coalesce(func.sum(Update.bytes_down), 0).label("bytes_down"),
        )
        .where(Update.run_id == run_id, *where)
        .group_by(Update.round)
    )
    sums = [dict(row._mapping) for row in rows]  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    return {row.pop("round"): row for row in sums}


def _run_row(connection: Connection, run_id: str) -> Row[Any] | None:
    return connection.execute(select(Run.__table__).where(Run.run_id == run_id)).first()


def _run_record(row: Row[Any]) -> RunRecord:
    values = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    return RunRecord(**{**values, "status": RunStatus(row.status)})
