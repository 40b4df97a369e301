"""What happened: rows of history in the columns of `COLUMNS`, all of them, the newest, or page by page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from sqlalchemy import Connection, select

from edgefl.errors import NotFoundError, UsageError
from edgefl.storage.columns import BY, COLUMNS, SUMMED, columns_of
from edgefl.storage.models import Run
from edgefl.storage.row_queries import ROW_QUERIES
from edgefl.storage.store import Store
from edgefl.storage.sum_queries import SUM_QUERIES
from edgefl.storage.wanted import PLACES, Question, Wanted, parse_place, place_text
from edgefl.storage.where import parse_conditions
from edgefl.types import Json

LATEST = "latest"
PAGE_ROWS = 5_000
EARLIEST, LATEST_TIME = -62_135_596_800.0, 253_402_300_799.0
"""The years 1 to 9999."""
_QUESTIONS = {**ROW_QUERIES, **SUM_QUERIES}


class Filters(TypedDict, total=False):
    """What rows of history can be chosen by; what is left out or None chooses all.

    run: a run's id, the beginning of one, its name (the newest run of that name), or `latest`.
    device: a device id; for slow rounds, the device that they waited for.
    since: rows from this time on, unix seconds; for devices, those seen since; sums go by whole days.
    until: rows before this time.
    limit: how many rows at most.
    where: conditions such as `staleness>3`; all of them hold.
    by: what sums are by, of `BY`.
    """

    run: str | None
    device: str | None
    since: float | None
    until: float | None
    limit: int | None
    where: Sequence[str]
    by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some rows; `next` is the place after which there may be more, None at the end."""

    rows: list[Json]
    next: str | None


def history(store: Store, kind: str, **filters: Unpack[Filters]) -> list[Json]:
    """Returns the newest rows of one kind, oldest of them first; devices by name, slow rounds slowest first.

    Raises:
        UsageError: there is no such kind, or a filter makes no sense.
        NotFoundError: no such run.
    """
    with store.database.read() as connection:
        wanted = _wanted(connection, kind, filters)
        rows, question = _rows(connection, kind, wanted)
    if question.is_timeline:
        rows.reverse()
    return _named(rows, kind, wanted)


def history_page(store: Store, kind: str, after: str, **filters: Unpack[Filters]) -> Page:
    """Returns the rows behind a place, oldest first (slow rounds slowest first), no more than `PAGE_ROWS`.

    Args:
        store: where to look.
        kind: a key of `COLUMNS`.
        after: empty for the first page, else what the page before called `next`.
        filters: see `Filters`; a limit can only make the page smaller.

    Raises:
        UsageError: as `history`; or the place is none.
        NotFoundError: no such run.
    """
    size = min(filters.get("limit") or PAGE_ROWS, PAGE_ROWS)
    with store.database.read() as connection:
        wanted = replace(_wanted(connection, kind, filters), after=parse_place(after), limit=size)
        if kind in SUMMED or kind in {"devices", "accuracy"}:  # as many as there are devices, days or rounds of a run
            wanted = replace(wanted, limit=None)
        rows, question = _rows(connection, kind, wanted)
    is_last = wanted.limit is None or len(rows) < wanted.limit or not question.is_paged
    place = None if is_last or not rows else place_text([rows[-1][name] for name in PLACES])
    return Page(rows=_named(rows, kind, wanted), next=place)


def history_pages(store: Store, kind: str, **filters: Unpack[Filters]) -> Iterator[list[Json]]:
    """Yields all rows page by page, so that a long history never lies in memory whole."""
    after: str | None = ""
    while after is not None:
        page = history_page(store, kind, after, **filters)
        yield page.rows
        after = page.next


def find_run(store: Store, text: str) -> str:
    """Returns the id of the run that a person means: its id, the beginning of one, its name, or `latest`.

    Raises:
        NotFoundError: none, or several.
    """
    with store.database.read() as connection:
        return _find_run(connection, text)


def _wanted(connection: Connection, kind: str, filters: Filters) -> Wanted:
    by, limit, run = filters.get("by") or BY[0], filters.get("limit"), filters.get("run")
    if kind not in COLUMNS:
        raise UsageError(f"history has no {kind!r}; it has {', '.join(COLUMNS)}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, got {limit}")
    if by not in BY or (filters.get("by") and kind not in SUMMED):
        raise UsageError(f"{', '.join(sorted(SUMMED))} can be by {', '.join(BY)}; got {kind} by {by!r}")
    for name in ("since", "until"):
        at = filters.get(name)
        if at is not None and not EARLIEST <= at <= LATEST_TIME:  # type: ignore[operator] # both are numbers
            raise UsageError(f"{name} must be a time in unix seconds, got {at!r}")
    where = parse_conditions(kind, by, filters.get("where") or ())
    if kind == "accuracy":
        run = run or LATEST
        if filters.get("device"):
            raise UsageError("the accuracy is the model's, not a device's; `edgefl history evaluations` has theirs")
    return Wanted(
        run_id=None if run is None else _find_run(connection, run),
        device=filters.get("device"),
        since=filters.get("since"),
        until=filters.get("until"),
        limit=limit,
        where=where,
        by=by,
    )


def _rows(connection: Connection, kind: str, wanted: Wanted) -> tuple[list[Any], Question]:
    question = _QUESTIONS[kind](connection, wanted)
    return list(connection.execute(question.query).mappings()), question


def _named(rows: Sequence[Any], kind: str, wanted: Wanted) -> list[Json]:
    names = columns_of(kind, wanted.by)
    return [{name: row[name] for name in names} for row in rows]


def _find_run(connection: Connection, text: str) -> str:
    newest = select(Run.run_id).order_by(Run.submitted_at.desc(), Run.run_id.desc())
    if text == LATEST:
        queries = [newest.limit(1)]
    else:
        begins = newest.where(Run.run_id.startswith(text, autoescape=True)).limit(2)
        queries = [newest.where(Run.run_id == text), newest.where(Run.name == text).limit(1), begins]
    for query in queries:
        found = list(connection.execute(query).scalars())
        if len(found) > 1:
            raise NotFoundError(f"several runs begin with {text!r}, among them {' and '.join(found)}; say more of it")
        if found:
            return str(found[0])
    raise NotFoundError("there is no run yet" if text == LATEST else f"no run {text!r}; `edgefl run list` shows them")
