"""Repository of runs, rounds, updates, evaluations and checkpoints, written once per turn of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Row, bindparam, case, delete, func, insert, select, update

from edgefl.core.errors import NotFoundError, StoreError
from edgefl.core.types import Json, UpdateStatus
from edgefl.storage.database import Repository
from edgefl.storage.repositories.records import (
    AssignmentRow,
    EvaluationRow,
    RoundMetrics,
    RunRecord,
    RunStatus,
    SavedModelRow,
    UpdateRow,
)
from edgefl.storage.repositories.row_writing import (
    execute_for_assignments,
    insert_new,
    to_columns,
    to_storable,
    upsert,
)
from edgefl.storage.repositories.totals import (
    find_stragglers,
    list_assignment_ids,
    update_totals,
)
from edgefl.storage.tables import EvaluationTable, RoundTable, RunTable, SavedModelTable, UpdateTable

EMPTY_ROUND_SUMS: Mapping[str, Any] = MappingProxyType(
    {"num_devices": 0, "num_updates": 0, "loss": None, "bytes_up": 0, "bytes_down": 0}
)
"""Sums of a round without assignments."""


class RunRepository(Repository):
    """The store's methods on runs; every `record_*` is idempotent, for replays."""

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
            "run_id": run_id, "name": name, "task": task, "strategy": strategy, "config": to_storable(config),
            "status": str(RunStatus.QUEUED), "submitted_at": submitted_at, "rounds": 0, "version": 0, "seed": seed,
            "priority": priority, "resumes": 0,
        }  # fmt: skip
        with self.database.write(durable=True) as connection:
            if _find_run_row(connection, run_id) is not None:
                raise StoreError(f"there is a run {run_id!r} already")
            next_sequence = select(func.coalesce(func.max(RunTable.sequence), 0) + 1).scalar_subquery()
            connection.execute(insert(RunTable).values(**values, sequence=next_sequence))
        return self.get_run(run_id)

    def restore_run(self, record: RunRecord) -> None:
        """Inserts a run's row, which the store has lost.

        Raises:
            StoreError: there is one, or a value is of no column's type.
        """
        values = {**to_columns(record), "config": to_storable(record.config)}
        with self.database.write(durable=True) as connection:
            connection.execute(insert(RunTable), values)

    def get_run(self, run_id: str) -> RunRecord:
        """Returns one run.

        Raises:
            NotFoundError: there is none of this id.
        """
        with self.database.read() as connection:
            row = _find_run_row(connection, run_id)
        if row is None:
            raise NotFoundError(f"no run {run_id!r}; `edgefl run list` shows them")
        return _to_run_record(row)

    def list_runs(
        self, *, status: RunStatus | None = None, limit: int | None = None, prefix: str = ""
    ) -> list[RunRecord]:
        """Returns runs whose ids begin with `prefix`, newest first."""
        query = select(RunTable.__table__).order_by(RunTable.sequence.desc(), RunTable.run_id.desc()).limit(limit)
        if status is not None:
            query = query.where(RunTable.status == str(status))
        if prefix:  # a range, for which the index serves
            query = query.where(RunTable.run_id.between(prefix, f"{prefix}\uffff"))
        return [_to_run_record(row) for row in self.database.read_rows(query)]

    def find_newest_run_time(self) -> float | None:
        """Returns when the last run ended, or else began, unix seconds; None without any run."""
        ends = func.coalesce(RunTable.finished_at, RunTable.started_at, RunTable.submitted_at)
        newest = self.database.read_value(select(func.max(ends)))
        return None if newest is None else float(newest)

    def count_runs(self, status: RunStatus) -> int:
        """Returns how many runs have this status."""
        query = select(func.count()).select_from(RunTable).where(RunTable.status == str(status))
        return int(self.database.read_value(query))

    def list_queued_runs(self) -> list[RunRecord]:
        """Returns the queued runs in the order in which they start: by priority, then as submitted."""
        query = (
            select(RunTable.__table__)
            .where(RunTable.status == str(RunStatus.QUEUED))
            .order_by(RunTable.priority.desc(), RunTable.sequence, RunTable.run_id)
        )
        return [_to_run_record(row) for row in self.database.read_rows(query)]

    def requeue_run(self, run_id: str) -> None:
        """Queues an ended run again, and counts that.

        Raises:
            NotFoundError: no such run.
        """
        values = {
            "status": str(RunStatus.QUEUED), "reason": None, "finished_at": None, "resumes": RunTable.resumes + 1,
        }  # fmt: skip
        self._update_run(run_id, values, durable=True)

    def delete_updates(self, run_id: str, assignment_ids: Sequence[str]) -> None:
        """Deletes the rows of assignments that are dispatched a second time."""
        if not assignment_ids:
            return
        with (
            self.database.write() as connection,
            update_totals(connection, run_id, assignment_ids, should_subtract_deleted=True),
        ):
            execute_for_assignments(connection, delete(UpdateTable), run_id, assignment_ids)

    def set_run_status(self, run_id: str, status: RunStatus, *, at: float, reason: str | None = None) -> None:
        """Sets a run's status; the first RUNNING sets its start time, a final one its end time.

        Raises:
            NotFoundError: no such run.
        """
        values: dict[str, Any] = {
            "status": str(status), "reason": reason, "finished_at": at if status.is_final else None,
        }  # fmt: skip
        if status is RunStatus.RUNNING:
            values["started_at"] = func.coalesce(RunTable.started_at, at)
        self._update_run(run_id, values, durable=True)

    def set_run_config(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Replaces a run's settings.

        Raises:
            NotFoundError: no such run.
        """
        self._update_run(run_id, {"config": to_storable(config)}, durable=True)

    def set_run_accuracy(self, run_id: str, accuracy: float) -> None:
        """Sets the newest accuracy of the run's model."""
        self._update_run(run_id, {"accuracy": accuracy}, durable=False)

    def set_running_reason(self, run_id: str, reason: str) -> None:
        """Sets the reason of a run that is still running: what its people should know."""
        query = (
            update(RunTable)
            .where(RunTable.run_id == run_id, RunTable.status == str(RunStatus.RUNNING))
            .values(reason=reason)
        )
        with self.database.write() as connection:
            connection.execute(query)

    def open_round(self, run_id: str, number: int, *, started_at: float, num_devices: int = 0) -> None:
        """Opens a round, unless it is open already."""
        self.open_rounds(run_id, {number: (started_at, num_devices)})

    def open_rounds(self, run_id: str, opened: Mapping[int, tuple[float, int]]) -> None:
        """Opens rounds by number with start time and number of devices, unless they are open already."""
        rows = [
            {
                "run_id": run_id, "round": number, "started_at": started_at, "num_devices": num_devices,
                "num_updates": 0, "bytes_up": 0, "bytes_down": 0,
            }
            for number, (started_at, num_devices) in opened.items()
        ]  # fmt: skip
        with self.database.write() as connection:
            insert_new(connection, RoundTable, rows, ("run_id", "round"))

    def close_round(self, run_id: str, number: int, *, version: int, closed_at: float) -> None:
        """Closes one round; see `close_rounds`."""
        self.close_rounds(run_id, {number: (version, closed_at)})

    def close_rounds(self, run_id: str, closed: Mapping[int, tuple[int, float]]) -> None:
        """Closes rounds by number with version and time; sums them from updates, and updates the run's `rounds`.

        The run's `version` is updated too, and neither ever decreases: when a run resumes, the journal entries after
        its checkpoint are written a second time.

        Raises:
            NotFoundError: one of them was never opened.
        """
        if not closed:
            return
        with self.database.write() as connection:
            start_query = select(RoundTable.round, RoundTable.started_at).where(
                RoundTable.run_id == run_id, RoundTable.round.in_(list(closed))
            )
            start_times: dict[int, float] = {row.round: row.started_at for row in connection.execute(start_query)}
            for number in closed:
                if number not in start_times:
                    raise NotFoundError(f"no round {number} of run {run_id!r} is open")
            sums = _select_round_sums(connection, run_id, UpdateTable.round.in_(list(closed)))
            waits = find_stragglers(
                connection, run_id, start_times, {number: closed_at for number, (_, closed_at) in closed.items()}
            )
            rows = [
                {
                    "of_round": number,
                    "version": version,
                    "closed_at": closed_at,
                    "seconds": max(0.0, closed_at - start_times[number]),
                    **waits[number],
                    **sums.get(number, EMPTY_ROUND_SUMS),
                }
                for number, (version, closed_at) in closed.items()
            ]
            table: Any = RoundTable.__table__
            statement = update(table).where(table.c.run_id == run_id, table.c.round == bindparam("of_round"))
            connection.execute(statement, rows)  # the rows name the columns that change
            newest, latest = max(closed), max(version for version, _ in closed.values())
            values = {
                "rounds": case((RunTable.rounds < newest, newest), else_=RunTable.rounds),
                "version": case((RunTable.version < latest, latest), else_=RunTable.version),
            }
            connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(**values))

    def update_round_sums(self, run_id: str) -> None:
        """Recomputes every round's sums from its updates, some of which arrive after their round has closed.

        A round whose updates were pruned keeps its sums.
        """
        is_in_run = RoundTable.run_id == run_id
        with self.database.write() as connection:
            sums = _select_round_sums(connection, run_id)
            for number, num_updates in connection.execute(
                select(RoundTable.round, RoundTable.num_updates).where(is_in_run)
            ).all():
                if number not in sums and num_updates:
                    continue
                values = sums.get(number, EMPTY_ROUND_SUMS)
                connection.execute(update(RoundTable).where(is_in_run, RoundTable.round == number).values(**values))

    def set_round_metrics(self, run_id: str, number: int, metrics: RoundMetrics) -> None:
        """Sets the metrics of a round beside its sums; no-op where the round was never opened."""
        statement = (
            update(RoundTable)
            .where(RoundTable.run_id == run_id, RoundTable.round == number)
            .values(**to_storable(metrics))
        )
        with self.database.write() as connection:
            connection.execute(statement)

    def get_newest_measured_round(self, run_id: str, measured: Literal["metrics", "node_accuracy"]) -> Json:
        """Returns the newest round with the task's metrics, or with those of devices' models; empty without one."""
        query = (
            select(RoundTable.__table__)
            .where(RoundTable.run_id == run_id, getattr(RoundTable, measured).is_not(None))
            .order_by(RoundTable.round.desc())
            .limit(1)
        )
        rows = self.database.read_dicts(query)
        return rows[0] if rows else {}

    def count_received_updates(self, run_id: str) -> int:
        """Returns the number of updates that came; of a job that of the parts that are done."""
        query = select(func.count().label("number")).where(
            UpdateTable.run_id == run_id, UpdateTable.received_at.is_not(None)
        )
        return int(self.database.read_dicts(query)[0]["number"])

    def record_assignments(self, run_id: str, rows: Sequence[AssignmentRow]) -> None:
        """Records dispatched assignments."""
        values = [{"run_id": run_id, "metrics": {}, **to_columns(row)} for row in rows]
        with self.database.write() as connection, update_totals(connection, run_id, list_assignment_ids(rows)):
            insert_new(connection, UpdateTable, values, ("run_id", "assignment_id"))

    def record_updates(self, run_id: str, rows: Sequence[UpdateRow]) -> None:
        """Records outcomes of assignments, replacing earlier values."""
        # A row that was never dispatched needs a time too: filters and sums by day go by it.
        values = [{"run_id": run_id, "dispatched_at": row.received_at, **to_columns(row)} for row in rows]
        with self.database.write() as connection, update_totals(connection, run_id, list_assignment_ids(rows)):
            upsert(connection, UpdateTable, values, ("run_id", "assignment_id"), preserved_columns=("dispatched_at",))

    def mark_applied(
        self, run_id: str, assignment_ids: Sequence[str], *, applied_version: int, round_number: int | None = None
    ) -> None:
        """Marks updates as used; staleness is `applied_version` less their base version."""
        if not assignment_ids:
            return
        values: dict[str, Any] = {
            "outcome": str(UpdateStatus.USED), "applied_version": applied_version,
            "staleness": applied_version - UpdateTable.base_version,
        }  # fmt: skip
        if round_number is not None:
            values["round"] = round_number
        with self.database.write() as connection, update_totals(connection, run_id, assignment_ids):
            execute_for_assignments(connection, update(UpdateTable).values(**values), run_id, assignment_ids)

    def record_evaluations(self, run_id: str, rows: Sequence[EvaluationRow]) -> None:
        """Records evaluations; their sums are in the journal alone."""
        values = [{"run_id": run_id, **to_columns(row)} for row in rows]
        for columns in values:
            del columns["sums"]
        with self.database.write() as connection:
            upsert(connection, EvaluationTable, values, ("run_id", "assignment_id"))

    def record_saved_model(self, run_id: str, row: SavedModelRow) -> None:
        """Records a saved model of the run, in place of an earlier one of its version."""
        with self.database.write() as connection:
            upsert(connection, SavedModelTable, [{"run_id": run_id, **to_columns(row)}], ("run_id", "version"))

    def list_saved_models(self, run_id: str) -> list[SavedModelRow]:
        """Returns the run's saved models, newest first."""
        query = (
            select(SavedModelTable.__table__)
            .where(SavedModelTable.run_id == run_id)
            .order_by(SavedModelTable.version.desc())
        )
        names = SavedModelRow.__dataclass_fields__
        return [SavedModelRow(**{name: row[name] for name in names}) for row in self.database.read_dicts(query)]

    def _update_run(self, run_id: str, values: Mapping[str, Any], *, durable: bool) -> None:
        with self.database.write(durable=durable) as connection:
            if not connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(**values)).rowcount:
                raise NotFoundError(f"no run {run_id!r}; `edgefl run list` shows them")


def _select_round_sums(connection: Connection, run_id: str, *where: ColumnElement[bool]) -> dict[int, dict[str, Any]]:
    """Returns the sums over the updates of each round, by its number; rounds without updates are absent."""
    is_used = UpdateTable.outcome == str(UpdateStatus.USED)
    weights = case((is_used & UpdateTable.loss.is_not(None), UpdateTable.num_examples))
    rows = connection.execute(
        select(
            UpdateTable.round,
            func.count(func.distinct(UpdateTable.device_id)).label("num_devices"),
            func.count(case((is_used, 1))).label("num_updates"),
            (
                func.sum(case((is_used, UpdateTable.loss * UpdateTable.num_examples)))
                / func.nullif(func.sum(weights), 0)
            ).label("loss"),
            func.coalesce(func.sum(UpdateTable.bytes_up), 0).label("bytes_up"),
            func.coalesce(func.sum(UpdateTable.bytes_down), 0).label("bytes_down"),
        )
        .where(UpdateTable.run_id == run_id, *where)
        .group_by(UpdateTable.round)
    )
    sums = [dict(row._mapping) for row in rows]  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    return {row.pop("round"): row for row in sums}


def _find_run_row(connection: Connection, run_id: str) -> Row[Any] | None:
    return connection.execute(select(RunTable.__table__).where(RunTable.run_id == run_id)).first()


def _to_run_record(row: Row[Any]) -> RunRecord:
    values = dict(row._mapping)  # noqa: SLF001 SQLAlchemy's public name for a row as a mapping
    return RunRecord(**{**values, "status": RunStatus(row.status)})
