"""Sums are those of the rows, whatever happened to them and in which order."""

import numpy as np
import pytest

from edgefl.storage.models import Base, DayTotal, DeviceTotal, RunTotal, Total
from edgefl.storage.records import DispatchRow, UpdateRow
from edgefl.storage.totals import day_of, rebuild
from edgefl.types import Outcome

DAY = 86_400.0
TABLES = (Total, RunTotal, DeviceTotal, DayTotal)


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
        rebuild(connection)
    return sums(store)


def update(assignment_id="a", device_id="pi", **changes):
    return UpdateRow(assignment_id=assignment_id, device_id=device_id, round=1, base_version=0, **changes)


def of(store, table, *keys):
    return sums(store)[table.__tablename__, *keys]


def test_sums_are_those_of_a_count_from_the_rows_after_anything_that_may_happen(store, run_id):
    rng = np.random.default_rng(7)
    for _ in range(40):
        ids = [f"a{number}" for number in rng.choice(30, size=int(rng.integers(1, 6)), replace=False)]
        at = float(rng.integers(0, 3)) * DAY
        if rng.random() < 0.3:
            store.record_dispatches(
                run_id,
                [DispatchRow(assignment_id=i, device_id=f"d{len(i)}", round=1, base_version=0, dispatched_at=at)
                 for i in ids],
            )  # fmt: skip
        else:
            outcome = rng.choice([None, *Outcome])
            rows = [
                update(
                    i, f"d{len(i)}", outcome=outcome, iterations=3,
                    staleness=int(rng.integers(0, 5)) if outcome == "used" else None,
                    bytes_up=int(rng.integers(0, 9)), compute_s=float(rng.random()), received_at=at,
                    max_temperature_c=float(rng.integers(40, 90)), energy_j=1.5,
                )
                for i in ids
            ]  # fmt: skip
            store.record_updates(run_id, rows)
    kept = sums(store)
    assert len(kept) > 6
    assert kept == rebuilt(store)


def test_a_row_that_is_recorded_twice_counts_once(store, run_id):
    for _ in range(2):
        store.record_dispatches(
            run_id, [DispatchRow(assignment_id="a", device_id="pi", round=1, base_version=0, dispatched_at=DAY)]
        )
        store.record_updates(run_id, [update(outcome=Outcome.USED, bytes_up=10, received_at=DAY + 5)])
    row = of(store, Total, run_id, "pi", "1970-01-02")
    assert (row["num_assignments"], row["num_used"], row["bytes_up"]) == (1, 1, 10)


def test_an_outcome_that_comes_later_moves_the_count(store, run_id):
    store.record_updates(run_id, [update(bytes_up=10, received_at=1.0)])
    before = of(store, DeviceTotal, "pi")
    store.record_updates(run_id, [update(outcome=Outcome.LATE, bytes_up=12, received_at=1.0)])
    after = of(store, DeviceTotal, "pi")
    assert (before["num_late"], before["bytes_up"]) == (0, 10)
    assert (after["num_assignments"], after["num_late"], after["bytes_up"]) == (1, 1, 12)


def test_the_highest_falls_when_the_row_that_had_it_does(store, run_id):
    store.record_updates(
        run_id, [update("a", staleness=9, received_at=1.0), update("b", staleness=2, received_at=1.0)]
    )
    store.record_updates(run_id, [update("a", staleness=1, received_at=1.0)])
    for table, *keys in ((Total, run_id, "pi", "1970-01-01"), (RunTotal, run_id), (DeviceTotal, "pi")):
        assert of(store, table, *keys)["max_staleness"] == 2


def test_energy_that_nobody_told_is_not_known_and_what_some_told_is_their_sum(store, run_id):
    store.record_updates(run_id, [update("a", received_at=1.0)])
    assert of(store, RunTotal, run_id)["energy_j"] is None
    store.record_updates(
        run_id, [update("b", energy_j=2.5, received_at=1.0), update("c", energy_j=1.0, received_at=1.0)]
    )
    assert of(store, RunTotal, run_id)["energy_j"] == 3.5


def test_each_run_and_day_has_its_own(store, run_id):
    other = store.submit("run-2")
    store.record_updates(run_id, [update("a", bytes_up=1, received_at=DAY - 1)])
    store.record_updates(other, [update("a", bytes_up=2, received_at=DAY)])
    assert of(store, RunTotal, other)["bytes_up"] == 2
    assert of(store, DayTotal, "1970-01-01")["bytes_up"] == 1
    assert of(store, DeviceTotal, "pi")["bytes_up"] == 3


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
    assert day_of(at) == day
    store.record_updates(run_id, [update(received_at=at)])
    assert set(sums(store)) == set(rebuilt(store))
    assert of(store, DayTotal, day)["num_assignments"] == 1


def test_every_sum_is_in_every_table_of_sums():
    names = {table: set(table.__table__.columns.keys()) for table in TABLES}
    assert names[Total] - {"run_id", "device_id", "day"} == names[RunTotal] - {"run_id"}
    assert all(issubclass(table, Base) for table in TABLES)
