from dataclasses import replace

import numpy as np
import plotted_store as made
import pytest

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.history import series as assignments
from edgefl.history.series import (
    RoundRange,
    average_runs,
    find_runs,
    parse_round_range,
    read_assignments,
    read_assignments_between,
    read_rounds,
)


def read_series(store, run, **options):
    return read_rounds(made.StoreReader(store), made.head(run), **options)


def test_time_and_bytes_count_from_the_first_round_in_a_range_too(store):
    series = read_series(store, made.add_synchronous(store, "a"))
    assert series.round.tolist() == [1, 2, 3]
    assert series.elapsed_s.tolist() == [5, 11, 17]
    assert series.transferred_bytes.tolist() == [800, 1600, 2400]
    assert series.accuracy.tolist() == [0.1, 0.2, 0.3]
    assert series.train_loss.tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    assert series.duration_s == 17
    part = series.select_rounds(RoundRange(2, 3))
    assert (part.round.tolist(), part.elapsed_s.tolist(), part.transferred_bytes.tolist()) == (
        [2, 3],
        [11, 17],
        [1600, 2400],
    )
    assert part.duration_s == 11
    with pytest.raises(NotFoundError, match="run a has rounds 2 to 3, none in 9:"):
        part.select_rounds(RoundRange(9))


def test_what_nobody_knows_is_no_number_and_an_open_round_is_left_out(store):
    run = made.add_synchronous(store, "a", accuracies={2: 0.5})
    store.open_round(run, 4, started_at=2000.0)
    series = read_series(store, run)
    assert np.isnan(series.accuracy).tolist() == [True, False, True]
    assert [series.has_values(name) for name in ("accuracy", "node_accuracy", "disagreement")] == [True, False, False]
    assert read_series(store, run, newest=2).round.tolist() == [2, 3]
    with pytest.raises(NotFoundError, match="no closed round"):
        read_series(store, made.add_run(store, "b"))


@pytest.mark.parametrize(
    ("text", "low", "high"), [("10:40", 10, 40), ("10:", 10, None), (":40", None, 40), (" 7 ", 7, 7), ("7:7", 7, 7)]
)
def test_a_range_is_written_as_its_ends(text, low, high):
    assert parse_round_range(text) == RoundRange(low, high)


@pytest.mark.parametrize("text", ["", ":", "x", "1:x", "0:3", "-1", "1.5", "²:3", "1:2:3", "4:2"])
def test_what_is_no_range_is_refused_with_what_was_found(text):
    with pytest.raises(UsageError, match=r"rounds .* got"):
        parse_round_range(text)


def test_runs_are_called_by_name_and_those_of_one_name_by_id_too(store):
    for run_id, name in (("r1", "same"), ("r2", "same"), ("r3", "other")):
        made.add_run(store, name, run_id=run_id)
    source = made.StoreReader(store)
    assert list(find_runs(source, ["r1", "r2", "other", "r1"])) == ["same r1", "same r2", "other"]
    assert list(find_runs(source, ["r2", "latest"])) == ["same", "other"]
    with pytest.raises(NotFoundError, match="no run 'none'"):
        find_runs(source, ["none"])


class Listening(made.StoreReader):
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
    work = read(made.StoreReader(store), run)
    assert len(work) == 7
    own = work.select(work.device == "pi-2")
    assert own.compute_s.tolist() == [3.0] * 3
    assert (own.received_at - own.dispatched_at).tolist() == pytest.approx([3.4] * 3)
    assert (own.is_used.all(), work.is_used.sum()) == (True, 6)


def test_a_stale_update_belongs_to_the_round_that_applied_it(store):
    work = read(made.StoreReader(store), made.add_asynchronous(store, "a", [0, 1, 2, 3]), RoundRange(4, 4))
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


def test_a_pattern_takes_the_newest_run_with_a_round_of_each_name_that_matches(store, caplog):
    names = ("lr=1 seed=1", "lr=1 seed=2", "lr=1 seed=1", "other")
    runs = [made.add_synchronous(store, name, rounds=1, run_id=f"r{i}") for i, name in enumerate(names, 1)]
    for run_id, name in (("r5", "lr=1 seed=2"), ("r6", "lr=1 seed=3"), ("r7", "unlike")):
        made.add_run(store, name, run_id=run_id)
    found = find_runs(made.StoreReader(store), ["lr=1 *", "other"])
    assert [run.run_id for run in found.values()] == [runs[2], runs[1], runs[3]]
    assert caplog.messages == ["left out, since they have no closed round: lr=1 seed=2 r5, lr=1 seed=3 r6"]
    with pytest.raises(NotFoundError, match=r"no run's name matches 'lr=2\*'"):
        find_runs(made.StoreReader(store), ["lr=2*"])


def test_runs_that_differ_in_their_seed_alone_become_their_mean_over_common_rounds(store):
    def read(name, accuracies, seed, rate=0.1):
        run = read_series(store, made.add_synchronous(store, name, rounds=len(accuracies), accuracies=accuracies))
        config = {"run": {"task": "digits", "seed": seed, "name": name}, "strategy": {"learning_rate": rate}}
        return replace(run, head=replace(run.head, config=config))

    runs = [
        read("lr=0.1 seed=1", {1: 0.1, 2: 0.5, 3: 0.6}, 1),
        read("lr=0.5 seed=1", {1: 0.3}, 1, rate=0.5),
        read("lr=0.1 seed=2", {1: 0.3, 2: 0.7}, 2),
    ]
    mean, alone = average_runs(runs)
    assert (mean.label, alone.label) == ("lr=0.1 (mean of 2)", "lr=0.5 seed=1")
    assert mean.round.tolist() == [1, 2]
    assert mean.accuracy.tolist() == pytest.approx([0.2, 0.6])
    assert mean.spread["accuracy"].tolist() == pytest.approx([np.sqrt(0.02)] * 2)
    assert mean.select_rounds(RoundRange(2, 2)).spread["accuracy"].shape == (1,)
    assert not alone.spread
    unknown = [replace(run, head=replace(run.head, config={})) for run in runs]
    assert [run.label for run in average_runs(unknown)] == [run.label for run in runs]
    with pytest.raises(NotFoundError, match="no round in common"):
        average_runs([runs[0].select_rounds(RoundRange(3, 3)), runs[2]])
