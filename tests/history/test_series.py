from __future__ import annotations

import numpy as np
import plotted_store as made
import pytest

from edgefl.errors import NotFoundError, UsageError
from edgefl.history.series import RoundRange, find_runs, parse_range, read_rounds
from edgefl.history.store_source import StoreSource
from edgefl.storage.store import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened:
        yield opened


def test_time_and_bytes_count_from_the_first_round(store):
    run = made.add_synchronous(store, "a")
    series = read_rounds(StoreSource(store), made.head(run))
    assert series.round.tolist() == [1, 2, 3]
    assert series.elapsed_s.tolist() == [5, 11, 17]
    assert series.moved_bytes.tolist() == [800, 1600, 2400]
    assert series.accuracy.tolist() == [0.1, 0.2, 0.3]
    assert series.train_loss.tolist() == pytest.approx([1, 1 / 2, 1 / 3])
    assert series.duration_s == 17


def test_what_nobody_knows_is_no_number_and_an_open_round_is_left_out(store):
    run = made.add_synchronous(store, "a", accuracies={2: 0.5})
    store.open_round(run, 4, started_at=2000.0)
    series = read_rounds(StoreSource(store), made.head(run))
    assert np.isnan(series.accuracy).tolist() == [True, False, True]
    assert len(series) == 3
    assert (series.has("accuracy"), series.has("node_accuracy"), series.has("disagreement")) == (True, False, False)


def test_a_range_keeps_times_and_bytes_of_the_whole_run(store):
    run = made.add_synchronous(store, "a", rounds=5)
    series = read_rounds(StoreSource(store), made.head(run)).within(RoundRange(2, 3))
    assert series.round.tolist() == [2, 3]
    assert series.elapsed_s.tolist() == [11, 17]
    assert series.moved_bytes.tolist() == [1600, 2400]
    assert series.duration_s == 11
    with pytest.raises(NotFoundError, match="run a has rounds 2 to 3, none in 9:"):
        series.within(RoundRange(9))


def test_the_newest_rounds_can_be_read_alone(store):
    run = made.add_synchronous(store, "a", rounds=5)
    assert read_rounds(StoreSource(store), made.head(run), newest=2).round.tolist() == [4, 5]
    store.open_round(run, 6, started_at=2000.0)
    assert read_rounds(StoreSource(store), made.head(run), newest=2).round.tolist() == [4, 5]


def test_a_run_without_a_closed_round_has_nothing_to_draw(store):
    run = made.add_run(store, "a")
    with pytest.raises(NotFoundError, match="no closed round"):
        read_rounds(StoreSource(store), made.head(run))


@pytest.mark.parametrize(
    ("text", "low", "high"), [("10:40", 10, 40), ("10:", 10, None), (":40", None, 40), (" 7 ", 7, 7), ("7:7", 7, 7)]
)
def test_a_range_is_written_as_its_ends(text, low, high):
    assert parse_range(text) == RoundRange(low, high)


@pytest.mark.parametrize("text", ["", ":", "x", "1:x", "0:3", "-1", "1.5", "²:3", "1:2:3", "4:2"])
def test_what_is_no_range_is_refused_with_what_was_found(text):
    with pytest.raises(UsageError, match=r"rounds .* got"):
        parse_range(text)


def test_runs_are_called_by_name_and_those_of_one_name_by_id_too(store):
    for run_id, name in (("r1", "same"), ("r2", "same"), ("r3", "other")):
        made.add_run(store, name, run_id=run_id)
    source = StoreSource(store)
    assert list(find_runs(source, ["r1", "r2", "other", "r1"])) == ["same r1", "same r2", "other"]
    assert list(find_runs(source, ["r2", "latest"])) == ["same", "other"]
    with pytest.raises(NotFoundError, match="no run 'none'"):
        find_runs(source, ["none"])
