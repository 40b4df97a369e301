"""All that the store knows of one round."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from edgefl.errors import NotFoundError
from edgefl.storage.models import Round, Run, Update
from edgefl.storage.queries import find_run
from edgefl.storage.store import Store
from edgefl.types import Json
from edgefl.untrusted import is_int64


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFacts:
    """A round, its run, and its assignments in the order in which they ended, those that have not ended last."""

    run: Json
    round: Json
    assignments: list[Json]


def round_facts(store: Store, run: str, number: int | None = None) -> RoundFacts:
    """Returns the facts of a round, of the one that took longest without a number; `run` as `find_run` has it.

    Raises:
        NotFoundError: there is no such run, or it has no such round.
    """
    run_id = find_run(store, run)
    number = _slowest(store, run_id) if number is None else number
    sought = number if is_int64(number) else -1  # the database takes no larger ones, so no round has them
    of_round = (Update.run_id == run_id, Update.round == sought)
    with store.database.read() as connection:
        its_run = connection.execute(select(Run.__table__).where(Run.run_id == run_id)).mappings().one()
        query = select(Round.__table__).where(Round.run_id == run_id, Round.round == sought)
        row = connection.execute(query).mappings().first()
        rows = connection.execute(select(Update.__table__).where(*of_round)).mappings().all()
    if row is None:
        raise NotFoundError(f"run {run_id} has no round {number}; it has {its_run['rounds']} so far")
    assignments = [dict(one) for one in rows]
    assignments.sort(key=lambda one: (one["ended_at"] is None, one["ended_at"] or 0.0, one["assignment_id"]))
    return RoundFacts(run=dict(its_run), round=dict(row), assignments=assignments)


def _slowest(store: Store, run_id: str) -> int:
    query = select(Round.round).where(Round.run_id == run_id, Round.seconds.is_not(None))
    with store.database.read() as connection:
        number = connection.execute(query.order_by(Round.seconds.desc(), Round.round).limit(1)).scalar()
    if number is None:
        raise NotFoundError(f"run {run_id} has closed no round yet")
    return int(number)
