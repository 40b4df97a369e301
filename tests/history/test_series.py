import numpy as np
import plotted_store as made
import pytest

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.history.series import RoundRange, find_runs, parse_round_range, read_rounds
from edgefl.history.store_reader import StoreHistoryReader


def read(store, run, **options):
    return read_rounds(StoreHistoryReader(store), made.head(run), **options)


def test_time_and_bytes_count_from_the_first_round_in_a_range_too(store):
    series = read(store, made.add_synchronous(store, "a"))
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
    series = read(store, run)
    assert np.isnan(series.accuracy).tolist() == [True, False, True]
    assert [series.has_values(name) for name in ("accuracy", "node_accuracy", "disagreement")] == [True, False, False]
    assert read(store, run, newest=2).round.tolist() == [2, 3]
    with pytest.raises(NotFoundError, match="no closed round"):
        read(store, made.add_run(store, "b"))


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
    source = StoreHistoryReader(store)
    assert list(find_runs(source, ["r1", "r2", "other", "r1"])) == ["same r1", "same r2", "other"]
    assert list(find_runs(source, ["r2", "latest"])) == ["same", "other"]
    with pytest.raises(NotFoundError, match="no run 'none'"):
        find_runs(source, ["none"])
