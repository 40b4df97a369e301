"""Full details of one round."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from edgefl.core.errors import NotFoundError
from edgefl.core.safe_parsing import is_int64
from edgefl.core.types import Json
from edgefl.storage.queries.history import find_run_id
from edgefl.storage.store import Store
from edgefl.storage.tables import RoundTable, RunTable, UpdateTable


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDetails:
    """A round, its run, and its assignments by end time, unfinished ones last."""

    run: Json
    round: Json
    assignments: list[Json]


def get_round_details(store: Store, run: str, number: int | None = None) -> RoundDetails:
    """Returns the details of a round, by default the slowest; `run` as in `find_run_id`.

    Raises:
        NotFoundError: there is no such run, or it has no such round.
    """
    run_id = find_run_id(store, run)
    number = _find_slowest_round(store, run_id) if number is None else number
    round_number = number if is_int64(number) else -1  # a number beyond the database's range matches no round
    is_in_round = (UpdateTable.run_id == run_id, UpdateTable.round == round_number)
    with store.database.read() as connection:
        run_row = connection.execute(select(RunTable.__table__).where(RunTable.run_id == run_id)).mappings().one()
        query = select(RoundTable.__table__).where(RoundTable.run_id == run_id, RoundTable.round == round_number)
        row = connection.execute(query).mappings().first()
        rows = connection.execute(select(UpdateTable.__table__).where(*is_in_round)).mappings().all()
    if row is None:
        raise NotFoundError(f"run {run_id} has no round {number}; it has {run_row['rounds']} so far")
    assignments = [dict(row_values) for row_values in rows]
    assignments.sort(
        key=lambda row_values: (
            row_values["ended_at"] is None,
            row_values["ended_at"] or 0.0,
            row_values["assignment_id"],
        )
    )
    return RoundDetails(run=dict(run_row), round=dict(row), assignments=assignments)


def _find_slowest_round(store: Store, run_id: str) -> int:
    query = select(RoundTable.round).where(RoundTable.run_id == run_id, RoundTable.seconds.is_not(None))
    with store.database.read() as connection:
        number = connection.execute(query.order_by(RoundTable.seconds.desc(), RoundTable.round).limit(1)).scalar()
    if number is None:
        raise NotFoundError(f"run {run_id} has closed no round yet")
    return int(number)
