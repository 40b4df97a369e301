import plotted_store as made
import pytest

from edgefl.history import assignments
from edgefl.history.assignments import read_assignments, read_assignments_between
from edgefl.history.series import RoundRange, read_rounds
from edgefl.history.store_reader import StoreHistoryReader


class Listening(StoreHistoryReader):
    """A real source that remembers how many rows it gave."""

    def __init__(self, store):
        super().__init__(store)
        self.sizes = []

    def read_rows(self, kind, **filters):
        rows = super().read_rows(kind, **filters)
        self.sizes.append(len(rows))
        return rows


def read(source, run, *within):
    return read_assignments(source, read_rounds(source, made.head(run)), *within)


def test_every_assignment_is_read_with_its_times(store):
    run = made.add_synchronous(store, "a")
    made.add_lost(store, run, 2, "pi-3", at=1006.0)
    work = read(StoreHistoryReader(store), run)
    assert len(work) == 7
    own = work.select(work.device == "pi-2")
    assert own.compute_s.tolist() == [3.0] * 3
    assert (own.received_at - own.dispatched_at).tolist() == pytest.approx([3.4] * 3)
    assert (own.is_used.all(), work.is_used.sum()) == (True, 6)


def test_a_stale_update_belongs_to_the_round_that_applied_it(store):
    work = read(StoreHistoryReader(store), made.add_asynchronous(store, "a", [0, 1, 2, 3]), RoundRange(4, 4))
    assert (work.staleness.tolist(), work.dispatched_at.tolist()) == ([3], [made.BEGIN])


def test_a_large_run_is_read_in_parts_and_nothing_twice(store, monkeypatch):
    run, source = made.add_synchronous(store, "a", rounds=25), Listening(store)
    whole = read(source, run)
    monkeypatch.setattr(assignments, "READ_BATCH_ROWS", 10)
    series = read_rounds(source, made.head(run))
    source.sizes.clear()
    parts = read_assignments(source, series)
    assert max(source.sizes) <= 12
    assert len(source.sizes) >= 5
    assert sorted(parts.dispatched_at) == sorted(whole.dispatched_at)
    assert len(parts) == 50
    assert sorted(set(read_assignments_between(source, run, 1006.0, 1013.0).round)) == [2, 3]
