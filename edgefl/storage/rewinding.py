"""The rows of a run as they were at a checkpoint, for a run that goes on from there.

What was given out behind the checkpoint is done again, so its rows go. What had been given out before and had not
come is lost. So the history has no gap and counts no update twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, func, select, update

from edgefl.storage.journal_records import Aggregated, Entry
from edgefl.storage.models import Checkpoint, Evaluation, Event, Round, Run, RunTotal, Update
from edgefl.storage.records import UpdateRow
from edgefl.storage.store import Store
from edgefl.storage.totals import counted
from edgefl.types import Assignment, Decision, Outcome
from edgefl.types import Evaluation as EvaluationOrder

RESUMED = "run-resumed"
"""The event that every resume leaves. Its time tells the lives of a run apart where nothing else does."""
REASON = "the run was interrupted"
REMEMBERED = 50_000
"""The lives of so many newest assignments are known; devices are told of no older ones any more."""
_OUT = (Update.outcome.is_(None), Update.received_at.is_(None))
_CHUNK = 500
_UNUSED = {"outcome": None, "applied_version": None, "staleness": None, "wait_s": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a run goes on: the checkpoint's version, rounds that were closed then, and the round that was open.

    `open_round` is None where the version ended one.
    """

    version: int
    closed: int
    open_round: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SoFar:
    """What a run has counted before it went on; `unused` are updates that came and were not used yet.

    `lives` says of assignments that were given after the first resume in which life of the run that was, `devices`
    who took part in the newest round that brought something.
    """

    updates: int = 0
    bytes: int = 0
    seconds: float = 0.0
    unused: tuple[UpdateRow, ...] = ()
    lives: tuple[tuple[str, int], ...] = ()
    devices: tuple[str, ...] = ()


def versions_per_round(store: Store, run_id: str) -> int | None:
    """Returns how many versions the first round had, None where it was not closed."""
    query = select(Round.version).where(Round.run_id == run_id, Round.round == 1, Round.closed_at.is_not(None))
    with store.database.read() as connection:
        return connection.execute(query).scalar()


def rewind(  # noqa: PLR0913 one keyword per fact
    store: Store,
    run_id: str,
    mark: Mark,
    behind: Iterable[Entry],
    *,
    now: float,
    since: float | None = None,
    keeps_nothing: bool = False,
) -> SoFar:
    """Takes the rows of a run back to a checkpoint.

    Args:
        store: where they are.
        run_id: of the run.
        mark: the checkpoint.
        behind: what the journal has behind it.
        now: Unix seconds; a round that is opened again goes on from here.
        since: when the checkpoint was written, where the journal may not have all that came behind it: what rows say
            of that is taken back too.
        keeps_nothing: there is no checkpoint: the run begins anew.

    Returns:
        What the rows that are left say.
    """
    given, used = _what_followed(behind)
    with store.database.write(durable=True) as connection:
        if keeps_nothing:
            with counted(connection, run_id, _all_of(connection, run_id), takes_back=True):
                for table in (Update, Evaluation, Round):
                    connection.execute(delete(table).where(table.run_id == run_id))
        else:
            if since is not None:
                given |= _given_since(connection, run_id, since)
                used |= set(_all_of(connection, run_id, Update.applied_version >= mark.version))
            changed = [*given, *(used - given), *_all_of(connection, run_id, *_OUT)]
            with counted(connection, run_id, list(dict.fromkeys(changed)), takes_back=True):
                _take_back(connection, run_id, given, used - given)
            _reopen(connection, run_id, mark, now)
        # Files of models that are now of the future go when the coordinator looks for those that nobody names.
        later = () if keeps_nothing else (Checkpoint.version > mark.version,)
        connection.execute(delete(Checkpoint).where(Checkpoint.run_id == run_id, *later))
        values = {"rounds": mark.closed, "version": mark.version}
        connection.execute(update(Run).where(Run.run_id == run_id).values(**values))
        return _so_far(connection, run_id)


def _what_followed(behind: Iterable[Entry]) -> tuple[set[str], set[str]]:
    """Returns which orders were given, and which updates were used."""
    given: set[str] = set()
    used: set[str] = set()
    for entry in behind:
        if isinstance(entry, Decision):
            orders = (order for order in entry.orders if isinstance(order, Assignment | EvaluationOrder))
            given.update(order.assignment_id for order in orders)
        elif isinstance(entry, Aggregated):
            used.update(entry.assignment_ids)
    return given, used


def _take_back(connection: Connection, run_id: str, given: Collection[str], used: Collection[str]) -> None:
    named = [{"named": name} for name in sorted(given)]
    for table in (Update, Evaluation):
        rows: Any = table.__table__
        one = delete(rows).where(rows.c.run_id == run_id, rows.c.assignment_id == bindparam("named"))
        if named:
            connection.execute(one, named)
    updates: Any = Update.__table__
    again = update(updates).where(updates.c.run_id == run_id, updates.c.assignment_id == bindparam("named"))
    if used:
        connection.execute(again.values(**_UNUSED), [{"named": name} for name in sorted(used)])
    values = {"outcome": str(Outcome.LOST), "reason": REASON}
    connection.execute(update(Update).where(Update.run_id == run_id, *_OUT).values(values))


def _all_of(connection: Connection, run_id: str, *where: Any) -> list[str]:
    """Returns the ids of a run's assignments."""
    query = select(Update.assignment_id).where(Update.run_id == run_id, *where)
    return [str(name) for name in connection.execute(query).scalars()]


def _given_since(connection: Connection, run_id: str, since: float) -> set[str]:
    """Returns the ids of what was given out, or evaluated, after a time."""
    scored = select(Evaluation.assignment_id).where(Evaluation.run_id == run_id, Evaluation.at >= since)
    asked = _all_of(connection, run_id, Update.dispatched_at >= since)
    return {*asked, *(str(name) for name in connection.execute(scored).scalars())}


def _reopen(connection: Connection, run_id: str, mark: Mark, now: float) -> None:
    mine = Round.run_id == run_id
    last = mark.closed if mark.open_round is None else mark.open_round
    connection.execute(delete(Round).where(mine, Round.round > last))
    if mark.open_round is not None:
        ended = select(func.max(Update.ended_at)).where(Update.run_id == run_id, Update.round == mark.open_round)
        begun = select(Round.started_at).where(mine, Round.round == mark.open_round)
        ended_at, begun_at = connection.execute(ended).scalar() or 0.0, connection.execute(begun).scalar() or now
        # While the run stood still its round did not last: it begins as much before now as it had lasted by then.
        started = now - max(0.0, ended_at - begun_at)
        opened = update(Round).where(mine, Round.round == mark.open_round)
        connection.execute(
            opened.values(
                started_at=started, closed_at=None, version=None, seconds=None, waited_for=None, waited_s=None,
                waited_update_id=None,
            )
        )  # fmt: skip


def counted_so_far(store: Store, run_id: str) -> SoFar:
    """Returns what a run has counted that goes on where it is."""
    with store.database.read() as connection:
        return _so_far(connection, run_id)


def _so_far(connection: Connection, run_id: str) -> SoFar:
    # The sums, not the rows: those of a run that ended long ago may be gone.
    sums = connection.execute(
        select(RunTotal.num_used, RunTotal.bytes_up + RunTotal.bytes_down).where(RunTotal.run_id == run_id)
    ).first()
    num_used, num_bytes = sums or (0, 0)
    evaluated = select(func.sum(Evaluation.bytes_up), func.sum(Evaluation.bytes_down))
    num_bytes += sum(value or 0 for value in connection.execute(evaluated.where(Evaluation.run_id == run_id)).one())
    # A round has its length by a clock that nobody sets; what earlier programs wrote may be below zero.
    known_s = func.coalesce(Round.seconds, Round.closed_at - Round.started_at)
    length_s = func.coalesce(func.sum(case((known_s > 0.0, known_s), else_=0.0)), 0.0)
    closed = (Round.run_id == run_id, Round.closed_at.is_not(None))
    return SoFar(
        updates=int(num_used),
        bytes=int(num_bytes),
        seconds=float(connection.execute(select(length_s).where(*closed)).scalar() or 0.0),
        unused=tuple(_unused(connection, run_id)),
        lives=tuple(_lives(connection, run_id)),
        devices=tuple(_devices(connection, run_id)),
    )


def lives_by_time(store: Store, run_id: str) -> dict[str, int]:
    """Returns the lives of assignments as rows and clocks say: for what was given before lives were written down."""
    with store.database.read() as connection:
        return dict(_lives(connection, run_id))


def unused_updates(store: Store, run_id: str, used_later: Collection[str] = ()) -> tuple[UpdateRow, ...]:
    """Returns updates that came and were not used, as far as that was so before those of `used_later` were."""
    received = (Update.run_id == run_id, Update.received_at.is_not(None))
    names, found, names_used = UpdateRow.__dataclass_fields__, list[UpdateRow](), sorted(used_later)
    with store.database.read() as connection:
        found += _unused(connection, run_id)
        for start in range(0, len(used_later), _CHUNK):
            chunk = names_used[start : start + _CHUNK]
            query = select(Update.__table__).where(*received, Update.assignment_id.in_(chunk)).order_by(Update.id)
            rows = [{name: row[name] for name in names} for row in connection.execute(query).mappings()]
            found += [UpdateRow(**{**row, **_UNUSED}) for row in rows]
    return tuple(found)


def forget_told(store: Store, run_id: str, kinds: Collection[str], since: float) -> None:
    """Takes out a run's events of some kinds, which will be told again."""
    told = (Event.run_id == run_id, Event.kind.in_(list(kinds)), Event.at >= since)
    with store.database.write() as connection:
        connection.execute(delete(Event).where(*told))


def _devices(connection: Connection, run_id: str) -> Sequence[str]:
    used = (Update.run_id == run_id, Update.outcome == str(Outcome.USED))
    newest = select(func.max(Update.round)).where(*used).scalar_subquery()
    query = select(Update.device_id).where(*used, Update.round == newest).distinct().order_by(Update.device_id)
    return connection.execute(query).scalars().all()


def _unused(connection: Connection, run_id: str) -> list[UpdateRow]:
    where = (Update.run_id == run_id, Update.outcome.is_(None), Update.received_at.is_not(None))
    rows = connection.execute(select(Update.__table__).where(*where).order_by(Update.id)).mappings()
    names = UpdateRow.__dataclass_fields__
    return [UpdateRow(**{name: row[name] for name in names}) for row in rows]


def _lives(connection: Connection, run_id: str) -> Sequence[tuple[str, int]]:
    """Returns the life of every assignment that was given after the run was first taken up again, oldest first."""
    events = select(Event.at).where(Event.run_id == run_id, Event.kind == RESUMED).order_by(Event.at)
    resumed = connection.execute(events).scalars().all()
    if not resumed:
        return ()
    given = select(Update.assignment_id, Update.dispatched_at).where(
        Update.run_id == run_id, Update.dispatched_at >= resumed[0]
    )
    given = given.order_by(Update.dispatched_at.desc()).limit(REMEMBERED)
    newest = [(name, sum(at <= (given_at or 0.0) for at in resumed)) for name, given_at in connection.execute(given)]
    return newest[::-1]
