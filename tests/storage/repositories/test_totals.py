"""Sums are those of the rows, whatever happened to them and in which order."""

import numpy as np
import pytest

from edgefl.core.types import UpdateStatus
from edgefl.storage.repositories.records import AssignmentRow, UpdateRow
from edgefl.storage.repositories.totals import format_day, rebuild_totals
from edgefl.storage.tables import Base, DayTotalTable, DeviceTotalTable, RunTotalTable, TotalTable

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
