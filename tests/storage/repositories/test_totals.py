"""Derived columns: sums over assignments, and whom a round waited for: the last to end before it closed."""

from dataclasses import dataclass

import numpy as np
import pytest

from edgefl.core.types import UpdateStatus
from edgefl.storage.repositories.records import AssignmentRow, UpdateRow
from edgefl.storage.repositories.totals import find_straggler, format_day, rebuild_totals
from edgefl.storage.tables import Base, DayTotalTable, DeviceTotalTable, RunTotalTable, TotalTable


@dataclass(frozen=True)
class Row:
    device_id: str
    ended_at: float | None
    outcome: str | None = "used"
    base_version: int = 4
    applied_version: int | None = 4
    dispatched_at: float | None = 0.0

    @property
    def assignment_id(self):
        return f"of-{self.device_id}"

    @property
    def id(self):
        return ord(self.device_id)


ROUND = [Row("a", 2.0), Row("b", 3.0), Row("c", 43.0)]


@pytest.mark.parametrize(
    ("rows", "closed_at", "waited"),
    [
        (ROUND, 100.0, ("c", 40.0)),
        ([*ROUND, Row("d", 2.5)], 100.0, ("c", 40.5)),
        ([Row("a", 7.0, dispatched_at=1.0)], 100.0, ("a", 6.0)),
        ([Row("a", 7.0, dispatched_at=None)], 100.0, ("a", 0.0)),
        ([*ROUND, Row("x", 60.0, outcome="lost", applied_version=None)], 100.0, ("x", 57.0)),
        ([*ROUND, Row("x", 60.0, outcome="late", applied_version=None)], 43.0, ("c", 40.0)),
        # Whoever takes updates as they come waits for nobody.
        ([*ROUND, Row("d", 50.0, applied_version=5)], 100.0, None),
        ([*ROUND, Row("d", 50.0, base_version=3)], 100.0, None),
        ([], 100.0, None),
        ([Row("a", None, outcome=None, applied_version=None)], 100.0, None),
    ],
)
def test_a_round_waits_for_the_last_since_half_were_there(rows, closed_at, waited):
    wait = find_straggler(rows, closed_at)
    assert (wait["waited_for"], wait["waited_s"]) == (waited or (None, None))


def test_nobody_was_waited_for_before_the_round_began():
    wait = find_straggler([Row("a", 2.0), Row("b", 3.0), Row("c", 90_043.0)], 90_050.0, 90_000.0)
    assert (wait["waited_for"], wait["waited_s"]) == ("c", 43.0)


def assigned(store, run_id, **ended):
    for name, ended_at in ended.items():
        dispatch = AssignmentRow(assignment_id=name, device_id=name, round=1, base_version=0, dispatched_at=10.0)
        store.record_assignments(run_id, [dispatch])
        row = UpdateRow(
            assignment_id=name, device_id=name, round=1, base_version=0, outcome=UpdateStatus.USED, applied_version=0,
            received_at=ended_at, ended_at=ended_at,
        )  # fmt: skip
        store.record_updates(run_id, [row])


def closed(store, run_id, at):
    store.close_round(run_id, 1, version=1, closed_at=at)
    with store.database.read() as connection:
        row = connection.exec_driver_sql(
            "SELECT r.seconds, r.waited_for, r.waited_s, u.assignment_id "
            "FROM rounds r LEFT JOIN updates u ON u.id = r.waited_update_id"
        ).one()
    return tuple(row)


def test_closing_a_round_writes_its_seconds_and_whom_it_waited_for(store, run_id):
    store.open_round(run_id, 1, started_at=10.0)
    assigned(store, run_id, a=12.0, b=13.0, c=53.0)
    assert closed(store, run_id, 54.0) == (44.0, "c", 40.0, "c")


def test_a_round_of_a_run_that_was_taken_up_again_waited_for_nobody_before(store, run_id):
    store.open_round(run_id, 1, started_at=50.0)
    assigned(store, run_id, a=12.0, b=13.0, c=53.0)
    assert closed(store, run_id, 54.0) == (4.0, "c", 3.0, "c")


DAY = 86_400.0
TABLES = (TotalTable, RunTotalTable, DeviceTotalTable, DayTotalTable)


def sums(store):
    """Every table of sums as it is, by its keys; floats rounded, since they were added in another order."""
    found = {}
    with store.database.read() as connection:
        for table in TABLES:
            keys = [column.name for column in table.__table__.primary_key]
            for row in connection.execute(table.__table__.select()).mappings():
                values = {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
                found[table.__tablename__, *(row[key] for key in keys)] = values
    return found


def rebuilt(store):
    with store.database.write() as connection:
        rebuild_totals(connection)
    return sums(store)


def update(assignment_id="a", device_id="pi", **changes):
    return UpdateRow(assignment_id=assignment_id, device_id=device_id, round=1, base_version=0, **changes)


def of(store, table, *keys):
    return sums(store)[table.__tablename__, *keys]


def test_sums_are_those_of_a_count_from_the_rows_after_anything_that_may_happen(store, run_id):
    rng, runs = np.random.default_rng(7), [run_id, store.submit("run-2")]
    for _ in range(40):
        run_id = runs[int(rng.integers(2))]
        ids = [f"a{number}" for number in rng.choice(30, size=int(rng.integers(1, 6)), replace=False)]
        at = float(rng.integers(0, 3)) * DAY
        if rng.random() < 0.3:
            store.record_assignments(
                run_id,
                [AssignmentRow(assignment_id=i, device_id=f"d{len(i)}", round=1, base_version=0, dispatched_at=at)
                 for i in ids],
            )  # fmt: skip
        else:
            outcome = rng.choice([None, *UpdateStatus])
            rows = [
                update(
                    i, f"d{len(i)}", outcome=outcome, iterations=3,
                    staleness=int(rng.integers(0, 5)) if outcome == "used" else None,
                    bytes_up=int(rng.integers(0, 9)), compute_s=float(rng.random()), received_at=at,
                    max_temperature_c=float(rng.integers(40, 90)), energy_j=rng.choice([None, 1.5, 2.5]),
                )
                for i in ids
            ]  # fmt: skip
            store.record_updates(run_id, rows)
    kept = sums(store)
    assert len(kept) > 6
    assert kept == rebuilt(store)


@pytest.mark.parametrize(
    ("at", "day"),
    [
        (0.0, "1970-01-01"),
        (DAY - 0.0001, "1970-01-01"),
        (DAY, "1970-01-02"),
        (946_684_800.5, "2000-01-01"),
        (None, ""),
    ],
)
def test_a_day_ends_at_midnight_in_utc_here_and_in_sql(store, run_id, at, day):
    assert format_day(at) == day
    store.record_updates(run_id, [update(received_at=at)])
    assert set(sums(store)) == set(rebuilt(store))
    assert of(store, DayTotalTable, day)["num_assignments"] == 1


def test_every_sum_is_in_every_table_of_sums():
    names = {table: set(table.__table__.columns.keys()) for table in TABLES}
    assert names[TotalTable] - {"run_id", "device_id", "day"} == names[RunTotalTable] - {"run_id"}
    assert all(issubclass(table, Base) for table in TABLES)
