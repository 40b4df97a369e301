"""Whom a round waited for: the last to end before it closed, unless it takes updates as they come."""

from dataclasses import dataclass, replace

import pytest

from edgefl.storage.records import DispatchRow, UpdateRow
from edgefl.storage.waits import wait_of
from edgefl.types import Outcome


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


def told(rows, closed_at=100.0):
    wait = wait_of(rows, closed_at)
    return wait and (wait.device_id, wait.seconds)


ROUND = [Row("a", 2.0), Row("b", 3.0), Row("c", 43.0)]


def test_a_round_waits_for_the_last_since_half_were_there():
    assert told(ROUND) == ("c", 40.0)
    assert told([*ROUND, Row("d", 2.5)]) == ("c", 40.5)


def test_alone_a_device_is_waited_for_since_it_was_asked():
    assert told([Row("a", 7.0, dispatched_at=1.0)]) == ("a", 6.0)
    assert told([Row("a", 7.0, dispatched_at=None)]) == ("a", 0.0)


def test_a_device_that_was_lost_was_waited_for_too():
    assert told([*ROUND, Row("x", 60.0, outcome="lost", applied_version=None)]) == ("x", 57.0)


def test_what_came_after_the_round_had_closed_was_not_waited_for():
    late = Row("x", 60.0, outcome="late", applied_version=None)
    assert told([*ROUND, late], closed_at=43.0) == ("c", 40.0)


@pytest.mark.parametrize("change", [{"applied_version": 5}, {"base_version": 3}])
def test_a_round_that_takes_updates_as_they_come_waits_for_nobody(change):
    assert told([*ROUND, replace(Row("d", 50.0), **change)]) is None


def test_nobody_was_waited_for_before_the_round_began():
    wait = wait_of([Row("a", 2.0), Row("b", 3.0), Row("c", 90_043.0)], 90_050.0, 90_000.0)
    assert (wait.device_id, wait.seconds) == ("c", 43.0)


def test_a_round_without_assignments_waited_for_nobody():
    assert told([]) is None
    assert told([Row("a", None, outcome=None, applied_version=None)]) is None


def assigned(store, run_id, **ended):
    for name, ended_at in ended.items():
        dispatch = DispatchRow(assignment_id=name, device_id=name, round=1, base_version=0, dispatched_at=10.0)
        store.record_dispatches(run_id, [dispatch])
        row = UpdateRow(
            assignment_id=name, device_id=name, round=1, base_version=0, outcome=Outcome.USED, applied_version=0,
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
