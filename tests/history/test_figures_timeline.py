from dataclasses import replace
from itertools import pairwise

import numpy as np
import plotted_store as made
import pytest

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.history import figures
from edgefl.history.series import RoundRange, read_assignments, read_rounds


def read(store, run):
    source = made.StoreReader(store)
    series = read_rounds(source, made.head(run))
    return series, read_assignments(source, series)


def drawn(store, **options):
    return figures.render_timeline(*read(store, made.add_synchronous(store, "a", **options)))


def bars(figure):
    """(begin, end) of each bar by device and activity."""
    found = {}
    for collection in figure.axes[0].collections:
        ends = [(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in collection.get_paths()]
        found[collection.get_gid()] = [(round(begin, 6), round(end, 6)) for begin, end in sorted(ends)]
    return found


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts() if text.get_text()]


def devices(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def test_each_device_has_bars_for_computing_sending_and_waiting(store):
    figure = drawn(store, rounds=1)
    # 0.4 s on the way: three of four bytes go down, so 0.3 s before and 0.1 s after.
    assert bars(figure) == {
        "pi-1 computing": [(0.3, 1.3)],
        "pi-1 sending": [(0.0, 0.3), (1.3, 1.4)],
        "pi-1 waiting": [(1.4, 5.0)],
        "pi-2 computing": [(0.3, 3.3)],
        "pi-2 sending": [(0.0, 0.3), (3.3, 3.4)],
        "pi-2 waiting": [(3.4, 5.0)],
    }
    assert devices(figure) == ["pi-1", "pi-2"]
    assert figure.axes[0].get_xlabel() == "time since round 1 began (s); 2 devices"
    assert (legend(figure), figure.get_suptitle()) == (["computing", "sending", "waiting"], "a: round 1")


def test_a_range_is_cut_at_its_ends_and_what_began_before_is_seen(store):
    series, work = read(store, made.add_asynchronous(store, "a", [0, 1, 2, 3]))
    figure = figures.render_timeline(series.select_rounds(RoundRange(4, 4)), work)
    # Given at 0 and received at 3.9: what lies before the round's begin at 3 is not on the sheet.
    spans = [span for name, found in bars(figure).items() if name.startswith("pi-3") for span in found]
    assert min(begin for begin, _ in spans) == 0.0
    assert max(end for _, end in spans) == pytest.approx(0.9)
    assert figure.axes[0].get_xlim()[1] == pytest.approx(1.0, rel=0.01)


def test_a_device_does_one_thing_at_a_time(store):
    _, work = read(store, made.add_synchronous(store, "a"))
    own = work.select(work.device == "pi-2")
    # Asked again before it has answered, as with double buffering, and still waiting for its round when asked again.
    own = replace(own, dispatched_at=own.received_at - 10.0, wait_s=np.full(3, 60.0))
    spans = sorted(
        span for found in figures.compute_device_spans(own).values() for span in found if span[1] > span[0]
    )
    assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))
    assert sum(end - begin for begin, end in figures.compute_device_spans(own)["computing"]) == pytest.approx(9.0)


def test_an_assignment_that_brought_nothing_is_a_cross_unless_it_was_lost_before_the_range(store):
    run = made.add_synchronous(store, "a", rounds=2)
    made.add_lost(store, run, 2, "pi-9", at=1007.0)
    series, work = read(store, run)
    figure = figures.render_timeline(series, work)
    (cross,) = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert cross.get_xydata().tolist() == [[7.0, 2.0]]
    assert "brought no update" in legend(figure)
    made.add_round(store, run, 3, 1012.0, made.PACES_S)
    series, work = read(store, run)
    later = figures.render_timeline(series.select_rounds(RoundRange(3, 3)), work)
    assert (legend(later), devices(later)) == (["computing", "sending", "waiting"], ["pi-1", "pi-2"])


def test_the_ends_of_rounds_are_marked_with_their_numbers_which_do_not_touch(store):
    (top,) = drawn(store).axes[0].child_axes
    assert top.get_xticks().tolist() == [5, 11, 17]
    assert [label.get_text() for label in top.get_xticklabels()] == ["1", "2", "3"]
    run = made.add_synchronous(store, "b", rounds=30)
    made.add_round(store, run, 31, 3000.0, made.PACES_S)
    figure = figures.render_timeline(*read(store, run))
    figure.draw_without_rendering()
    (top,) = figure.axes[0].child_axes
    boxes = [label.get_window_extent() for label in top.get_xticklabels()]
    assert top.get_xticklabels()[-1].get_text() == "31"
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_of_a_hundred_devices_the_slowest_are_shown_and_the_sheet_says_so(store):
    figure = drawn(store, rounds=1, paces_s={f"pi-{n}": 0.04 * n for n in range(1, 101)})
    assert devices(figure) == [f"pi-{n}" for n in range(100, 68, -1)]
    assert figure.axes[0].get_xlabel().endswith("the 32 slowest of 100 devices, slowest on top")


def test_devices_stand_in_the_order_of_their_numbers(store):
    figure = drawn(store, rounds=1, paces_s=dict.fromkeys(["pi-10", "pi-9", "bench"], 1.0))
    assert devices(figure) == ["bench", "pi-9", "pi-10"]


def test_a_time_in_which_nobody_answered_and_more_bars_than_can_be_told_apart_are_errors(store, monkeypatch):
    run = made.add_run(store, "a")
    store.open_round(run, 1, started_at=1000.0)
    made.add_lost(store, run, 1, "pi-1", at=1001.0)
    store.close_round(run, 1, version=1, closed_at=1005.0)
    with pytest.raises(NotFoundError, match="run a has no update in round 1"):
        figures.render_timeline(*read(store, run))
    monkeypatch.setattr(figures, "MAX_ASSIGNMENTS", 8)
    series, work = read(store, made.add_synchronous(store, "b", rounds=10))
    with pytest.raises(UsageError, match=r"rounds 1 to 10 hold 20 assignments.*--rounds 7:10"):
        figures.render_timeline(series, work)
    assert figures.render_timeline(series.select_rounds(RoundRange(7, 10)), work)
