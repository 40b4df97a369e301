"""Rolls a run's rows back to a checkpoint, for a run that resumes from there.

Assignments dispatched after the checkpoint are repeated, so their rows are deleted; those dispatched before it and
still in flight are lost. So the history has no gap and counts no update twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, case, delete, func, select, update

from edgefl.core.types import Decision, EvaluateInstruction, TrainInstruction, UpdateStatus
from edgefl.storage.checkpoints import Checkpoint
from edgefl.storage.journal.record_encoding import Aggregation, JournalEntry
from edgefl.storage.repositories.records import UpdateRow
from edgefl.storage.repositories.row_writing import execute_for_assignments
from edgefl.storage.repositories.totals import NO_STRAGGLER, update_totals
from edgefl.storage.store import Store
from edgefl.storage.tables import (
    EvaluationTable,
    EventTable,
    RoundTable,
    RunTable,
    RunTotalTable,
    SavedModelTable,
    UpdateTable,
)

RUN_RESUMED = "run-resumed"
"""Event of every resume. Its place among the updates separates a run's incarnations where nothing else does."""
INTERRUPTION_REASON = "the run was interrupted"
MAX_INCARNATION_ROWS = 50_000
"""Number of newest assignments whose incarnations are read; devices are not told of older ones."""
_IN_FLIGHT = (UpdateTable.outcome.is_(None), UpdateTable.received_at.is_(None))
_CHUNK = 500
_UNUSED_VALUES: dict[str, Any] = {"outcome": None, "applied_version": None, "staleness": None, "wait_s": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPoint:
    """Where a run resumes: the checkpoint's version, the rounds closed then, and the open round.

    `open_round` is None where the version ended one.
    """

    version: int
    num_closed_rounds: int
    open_round: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressAtRollback:
    """Progress of a run at a rollback; `unused_updates` were received and not yet used.

    `work` has each device's iterations, and the examples that it trains on.
    `incarnations` are the incarnations of assignments dispatched after the first resume, `participants` the devices
    of the newest round with an update.
    """

    work: tuple[tuple[str, int, int], ...] = ()
    num_updates: int = 0
    num_bytes: int = 0
    elapsed_s: float = 0.0
    unused_updates: tuple[UpdateRow, ...] = ()
    incarnations: tuple[tuple[str, int], ...] = ()
    participants: tuple[str, ...] = ()


def count_versions_per_round(store: Store, run_id: str) -> int | None:
    """Returns the number of versions in the first round, None where it was not closed."""
    query = select(RoundTable.version).where(
        RoundTable.run_id == run_id, RoundTable.round == 1, RoundTable.closed_at.is_not(None)
    )
    num_versions: int | None = store.database.read_value(query)
    return num_versions


def roll_back_history(  # noqa: PLR0913 one keyword per fact
    store: Store,
    run_id: str,
    point: RollbackPoint,
    later_entries: Iterable[JournalEntry],
    *,
    now: float,
    after: Checkpoint | None = None,
    should_reset: bool = False,
) -> ProgressAtRollback:
    """Rolls the rows of a run back to a checkpoint.

    Args:
        store: where they are.
        run_id: of the run.
        point: the checkpoint.
        later_entries: journal entries after it.
        now: Unix seconds; a reopened round continues from here.
        after: the checkpoint, where the journal may lack later entries: later rows are rolled back too.
        should_reset: there is no checkpoint: the run starts over.

    Returns:
        The progress by the remaining rows.
    """
    dispatched_ids, applied_ids = _find_later_assignments(later_entries)
    with store.database.write(durable=True) as connection:
        if should_reset:
            with update_totals(
                connection, run_id, _list_assignment_ids(connection, run_id), should_subtract_deleted=True
            ):
                for table in (UpdateTable, EvaluationTable, RoundTable):
                    connection.execute(delete(table).where(table.run_id == run_id))
        else:
            if after is not None:
                dispatched_ids |= _list_written_after(connection, run_id, after)
                applied_ids |= set(
                    _list_assignment_ids(connection, run_id, UpdateTable.applied_version >= point.version)
                )
            changed_ids = [
                *dispatched_ids,
                *(applied_ids - dispatched_ids),
                *_list_assignment_ids(connection, run_id, *_IN_FLIGHT),
            ]
            with update_totals(connection, run_id, list(dict.fromkeys(changed_ids)), should_subtract_deleted=True):
                _undo_assignments(connection, run_id, dispatched_ids, applied_ids - dispatched_ids)
            _reopen_round(connection, run_id, point, now)
        # Model files of later versions are deleted when the coordinator collects orphaned ones.
        conditions = () if should_reset else (SavedModelTable.version > point.version,)
        connection.execute(delete(SavedModelTable).where(SavedModelTable.run_id == run_id, *conditions))
        values = {"rounds": point.num_closed_rounds, "version": point.version}
        connection.execute(update(RunTable).where(RunTable.run_id == run_id).values(**values))
        return _read_progress(connection, run_id)


def _find_later_assignments(later_entries: Iterable[JournalEntry]) -> tuple[set[str], set[str]]:
    """Returns the ids of dispatched instructions, and of used updates."""
    dispatched_ids: set[str] = set()
    applied_ids: set[str] = set()
    for entry in later_entries:
        if isinstance(entry, Decision):
            dispatched = (i for i in entry.instructions if isinstance(i, TrainInstruction | EvaluateInstruction))
            dispatched_ids.update(instruction.assignment_id for instruction in dispatched)
        elif isinstance(entry, Aggregation):
            applied_ids.update(entry.assignment_ids)
    return dispatched_ids, applied_ids


def _undo_assignments(
    connection: Connection, run_id: str, dispatched_ids: Collection[str], applied_ids: Collection[str]
) -> None:
    for table in (UpdateTable, EvaluationTable):
        execute_for_assignments(connection, delete(table), run_id, sorted(dispatched_ids))
    execute_for_assignments(connection, update(UpdateTable).values(**_UNUSED_VALUES), run_id, sorted(applied_ids))
    values = {"outcome": str(UpdateStatus.LOST), "reason": INTERRUPTION_REASON}
    connection.execute(update(UpdateTable).where(UpdateTable.run_id == run_id, *_IN_FLIGHT).values(values))


def _list_assignment_ids(connection: Connection, run_id: str, *where: Any) -> list[str]:
    """Returns the ids of a run's assignments."""
    query = select(UpdateTable.assignment_id).where(UpdateTable.run_id == run_id, *where)
    return [str(assignment_id) for assignment_id in connection.execute(query).scalars()]


def _list_written_after(connection: Connection, run_id: str, checkpoint: Checkpoint) -> set[str]:
    """Returns the ids of assignments dispatched, or evaluated, after a checkpoint."""
    evaluation_query = select(EvaluationTable.assignment_id).where(
        EvaluationTable.run_id == run_id, EvaluationTable.id > checkpoint.newest_evaluation_id
    )
    assignment_ids = _list_assignment_ids(connection, run_id, UpdateTable.id > checkpoint.newest_update_id)
    return {
        *assignment_ids,
        *(str(assignment_id) for assignment_id in connection.execute(evaluation_query).scalars()),
    }


def _reopen_round(connection: Connection, run_id: str, point: RollbackPoint, now: float) -> None:
    is_in_run = RoundTable.run_id == run_id
    last = point.num_closed_rounds if point.open_round is None else point.open_round
    connection.execute(delete(RoundTable).where(is_in_run, RoundTable.round > last))
    if point.open_round is not None:
        ended_query = select(func.max(UpdateTable.ended_at)).where(
            UpdateTable.run_id == run_id, UpdateTable.round == point.open_round
        )
        started_query = select(RoundTable.started_at).where(is_in_run, RoundTable.round == point.open_round)
        ended_at, previous_start = (
            connection.execute(ended_query).scalar() or 0.0,
            connection.execute(started_query).scalar() or now,
        )
        # The interruption does not count: the round starts as long before now as it had lasted by then.
        started_at = now - max(0.0, ended_at - previous_start)
        reopening = update(RoundTable).where(is_in_run, RoundTable.round == point.open_round)
        connection.execute(
            reopening.values(
                started_at=started_at, closed_at=None, version=None, seconds=None, **NO_STRAGGLER
            )
        )  # fmt: skip


def get_progress(store: Store, run_id: str) -> ProgressAtRollback:
    """Returns the progress of a run that resumes where it is."""
    with store.database.read() as connection:
        return _read_progress(connection, run_id)


def _read_progress(connection: Connection, run_id: str) -> ProgressAtRollback:
    # The sums, not the rows: those of a run that ended long ago may be pruned.
    sums = connection.execute(
        select(RunTotalTable.num_used, RunTotalTable.bytes_up + RunTotalTable.bytes_down).where(
            RunTotalTable.run_id == run_id
        )
    ).first()
    num_used, num_bytes = sums or (0, 0)
    evaluation_query = select(func.sum(EvaluationTable.bytes_up), func.sum(EvaluationTable.bytes_down))
    num_bytes += sum(
        value or 0 for value in connection.execute(evaluation_query.where(EvaluationTable.run_id == run_id)).one()
    )
    # Durations come from a monotonic clock; those written by earlier versions may be negative.
    known_s = func.coalesce(RoundTable.seconds, RoundTable.closed_at - RoundTable.started_at)
    length_s = func.coalesce(func.sum(case((known_s > 0.0, known_s), else_=0.0)), 0.0)
    is_closed = (RoundTable.run_id == run_id, RoundTable.closed_at.is_not(None))
    return ProgressAtRollback(
        work=tuple(_read_work(connection, run_id)),
        num_updates=int(num_used),
        num_bytes=int(num_bytes),
        elapsed_s=float(connection.execute(select(length_s).where(*is_closed)).scalar() or 0.0),
        unused_updates=tuple(_read_received_updates(connection, run_id, UpdateTable.outcome.is_(None))),
        incarnations=tuple(_read_incarnations(connection, run_id)),
        participants=tuple(_list_newest_participants(connection, run_id)),
    )


def list_unused_updates(store: Store, run_id: str, applied_later: Collection[str] = ()) -> tuple[UpdateRow, ...]:
    """Returns the updates that were unused before those of `applied_later` were applied."""
    later_ids = sorted(applied_later)
    with store.database.read() as connection:
        unused = _read_received_updates(connection, run_id, UpdateTable.outcome.is_(None))
        for start in range(0, len(later_ids), _CHUNK):
            chunk = UpdateTable.assignment_id.in_(later_ids[start : start + _CHUNK])
            unused += [replace(row, **_UNUSED_VALUES) for row in _read_received_updates(connection, run_id, chunk)]
    return tuple(unused)


def get_newest_ids(store: Store, run_id: str) -> dict[str, int]:
    """Returns the ids of the run's newest rows, by the names that a checkpoint has for them; 0 for none."""
    queries = {
        "newest_update_id": select(func.max(UpdateTable.id)).where(UpdateTable.run_id == run_id),
        "newest_evaluation_id": select(func.max(EvaluationTable.id)).where(EvaluationTable.run_id == run_id),
        "newest_event_id": select(func.max(EventTable.id)).where(EventTable.run_id == run_id),
    }
    with store.database.read() as connection:
        return {name: int(connection.execute(query).scalar() or 0) for name, query in queries.items()}


def record_resume(store: Store, run_id: str, message: str, *, at: float) -> None:
    """Records that a run goes on in another incarnation, to which the updates from now on belong."""
    row_ids = get_newest_ids(store, run_id)
    data = {"newest_update_id": row_ids["newest_update_id"]}
    store.record_event(RUN_RESUMED, message, at=at, run_id=run_id, data=data)


def delete_events(store: Store, run_id: str, kinds: Collection[str], *, after_id: int) -> None:
    """Deletes a run's later events of some kinds, which will be recorded again."""
    is_selected = (EventTable.run_id == run_id, EventTable.kind.in_(list(kinds)), EventTable.id > after_id)
    with store.database.write() as connection:
        connection.execute(delete(EventTable).where(*is_selected))


def _list_newest_participants(connection: Connection, run_id: str) -> Sequence[str]:
    is_used = (UpdateTable.run_id == run_id, UpdateTable.outcome == str(UpdateStatus.USED))
    newest = select(func.max(UpdateTable.round)).where(*is_used).scalar_subquery()
    query = (
        select(UpdateTable.device_id)
        .where(*is_used, UpdateTable.round == newest)
        .distinct()
        .order_by(UpdateTable.device_id)
    )
    return connection.execute(query).scalars().all()


def _read_received_updates(connection: Connection, run_id: str, condition: ColumnElement[bool]) -> list[UpdateRow]:
    where = (UpdateTable.run_id == run_id, UpdateTable.received_at.is_not(None), condition)
    rows = connection.execute(select(UpdateTable.__table__).where(*where).order_by(UpdateTable.id)).mappings()
    return [UpdateRow(**{name: row[name] for name in UpdateRow.__dataclass_fields__}) for row in rows]


def _read_work(connection: Connection, run_id: str) -> list[tuple[str, int, int]]:
    """Returns device, iterations and training examples by its newest update; of all updates that the run took in."""
    is_taken = UpdateTable.outcome.is_(None) | UpdateTable.outcome.in_(
        [str(UpdateStatus.USED), str(UpdateStatus.LATE)]
    )
    where = (UpdateTable.run_id == run_id, UpdateTable.received_at.is_not(None), is_taken)
    sums = (
        select(UpdateTable.device_id, func.sum(UpdateTable.iterations), func.max(UpdateTable.id))
        .where(*where)
        .group_by(UpdateTable.device_id)
        .subquery()
    )
    query = select(sums.c[0], sums.c[1], UpdateTable.num_examples).join(UpdateTable, UpdateTable.id == sums.c[2])
    rows = connection.execute(query.order_by(sums.c[0]))
    return [(name, int(iterations or 0), int(num_examples or 0)) for name, iterations, num_examples in rows]


def _read_incarnations(connection: Connection, run_id: str) -> Sequence[tuple[str, int]]:
    """Returns the incarnation of every assignment dispatched after the first resume, oldest first."""
    query = select(EventTable.data).where(EventTable.run_id == run_id, EventTable.kind == RUN_RESUMED)
    resumed_after = [int(data["newest_update_id"]) for data in connection.execute(query).scalars()]
    if not resumed_after:
        return ()
    updates = (
        select(UpdateTable.assignment_id, UpdateTable.id)
        .where(UpdateTable.run_id == run_id, UpdateTable.id > min(resumed_after))
        .order_by(UpdateTable.id.desc())
        .limit(MAX_INCARNATION_ROWS)
    )
    newest = [
        (name, sum(row_id > previous_id for previous_id in resumed_after))
        for name, row_id in connection.execute(updates)
    ]
    return newest[::-1]
