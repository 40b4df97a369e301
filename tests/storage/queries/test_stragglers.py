"""Whom a round waited for: the last to end before it closed, unless it takes updates as they come."""

from dataclasses import dataclass

import pytest

from edgefl.core.types import UpdateStatus
from edgefl.storage.queries.stragglers import find_straggler
from edgefl.storage.repositories.records import AssignmentRow, UpdateRow


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
    assert (wait and (wait.device_id, wait.wait_s)) == waited


def test_nobody_was_waited_for_before_the_round_began():
    wait = find_straggler([Row("a", 2.0), Row("b", 3.0), Row("c", 90_043.0)], 90_050.0, 90_000.0)
    assert (wait.device_id, wait.wait_s) == ("c", 43.0)


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
        row = connection.exec_driver_sql("SELECT seconds, waited_for, waited_s, waited_update_id FROM rounds").one()
    return tuple(row)


def test_closing_a_round_writes_its_seconds_and_whom_it_waited_for(store, run_id):
    store.open_round(run_id, 1, started_at=10.0)
    assigned(store, run_id, a=12.0, b=13.0, c=53.0)
    assert closed(store, run_id, 54.0) == (44.0, "c", 40.0, 3)


def test_a_round_of_a_run_that_was_taken_up_again_waited_for_nobody_before(store, run_id):
    store.open_round(run_id, 1, started_at=50.0)
    assigned(store, run_id, a=12.0, b=13.0, c=53.0)
    assert closed(store, run_id, 54.0) == (4.0, "c", 3.0, 3)
