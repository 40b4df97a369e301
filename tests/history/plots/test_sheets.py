from __future__ import annotations

import logging

import plotted_store as made
import pytest

from edgefl.errors import NotFoundError, UsageError
from edgefl.history.plots import sheets
from edgefl.history.plots.names import KINDS
from edgefl.history.plots.sheets import Wish, draw
from edgefl.history.series import RoundRange
from edgefl.history.store_source import StoreSource
from edgefl.storage.store import Store


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "edgefl.db") as opened:
        made.add_synchronous(opened, "sync", rounds=30)
        made.add_asynchronous(opened, "async", [0, 1, 2, 3, 0])
        yield opened


def sheet(store, kind, *runs, batch_size=None, **wish):
    return draw(StoreSource(store, lambda _: batch_size), Wish(kind=kind, runs=runs or ("sync",), **wish))


def bar_widths(figure):
    return [bar.get_width() for bar in figure.axes[0].patches]


def test_without_a_kind_accuracy_and_loss_share_a_sheet(store):
    figure = sheet(store, None)
    assert [panel.get_ylabel() for panel in figure.axes if panel.get_ylabel()] == ["accuracy (%)", "loss"]
    assert len(figure.axes) == 6
    assert len(sheet(store, None, axis="time").axes) == 2


def test_what_a_run_lacks_is_left_out_of_the_shared_sheet_and_said(store, caplog):
    made.add_synchronous(store, "blind", accuracies={})
    with caplog.at_level(logging.WARNING):
        figure = sheet(store, None, "sync", "blind")
    assert [panel.get_ylabel() for panel in figure.axes if panel.get_ylabel()] == ["loss"]
    assert caplog.messages == ["accuracy is left out: blind has none"]
    with pytest.raises(NotFoundError, match="async has neither accuracy nor loss"):
        sheet(store, None, "async")


def test_throughput_is_iterations_times_batch_size_over_the_time_of_the_rounds(store):
    seconds = 30 * made.ROUND_S + 29 * made.BETWEEN_S
    figure = sheet(store, "throughput", batch_size=8)
    assert bar_widths(figure) == [pytest.approx(30 * 2 * made.ITERATIONS * 8 / seconds)]
    assert figure.axes[0].get_xlabel() == "samples trained on (1/s)"


def test_throughput_counts_iterations_where_a_batch_size_is_unknown(store):
    figure = sheet(store, "throughput", "sync", "async", rounds=RoundRange(1, 2))
    assert figure.axes[0].get_xlabel() == "local iterations (1/s)"
    assert bar_widths(figure) == [pytest.approx(2 * 2 * made.ITERATIONS / 11), pytest.approx(2 / 2)]


def test_an_update_that_was_not_applied_adds_no_samples_but_its_device_computed(store):
    before = bar_widths(sheet(store, "throughput", rounds=RoundRange(1, 1)))
    made.add_late(store, "sync", 1, "pi-3", at=1001.0)
    assert bar_widths(sheet(store, "throughput", rounds=RoundRange(1, 1))) == before
    assert bar_widths(sheet(store, "computing-time", rounds=RoundRange(1, 1))) == pytest.approx([20, 60, 20])


def test_traffic_is_bytes_over_time_both_ways(store):
    figure = sheet(store, "traffic", "sync", rounds=RoundRange(2, 2))
    assert bar_widths(figure) == [2 * made.BYTES_UP / 5, 2 * made.BYTES_DOWN / 5]
    assert figure.axes[0].get_xlabel() == "traffic of all devices (B/s)"


def test_computing_time_is_each_device_s_share_of_the_time(store):
    assert bar_widths(sheet(store, "computing-time", rounds=RoundRange(1, 1))) == pytest.approx([20, 60])


def test_staleness_is_that_of_applied_updates(store):
    figure = sheet(store, "staleness", "async")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [40, 20, 20, 20]
    late = sheet(store, "staleness", "async", rounds=RoundRange(4, 4))
    assert [bar.get_height() for bar in late.axes[0].patches] == [0, 0, 0, 100]


def test_a_time_line_shows_the_newest_rounds_unless_some_are_named(store):
    assert sheet(store, "timeline").get_suptitle() == "sync: rounds 11 to 30"
    assert sheet(store, "timeline", rounds=RoundRange(2, 4)).get_suptitle() == "sync: rounds 2 to 4"
    assert sheet(store, "timeline", title="mine").get_suptitle() == "mine"


def test_a_time_line_of_rounds_with_much_in_them_shows_fewer(store, monkeypatch):
    monkeypatch.setattr(sheets, "MOST_IN_A_LINE", 3)
    assert sheet(store, "timeline").get_suptitle() == "sync: rounds 28 to 30"
    monkeypatch.setattr(sheets, "MOST_IN_A_LINE", 0.5)
    assert sheet(store, "timeline").get_suptitle() == "sync: round 30"


@pytest.mark.parametrize(
    ("kind", "runs", "wish", "error", "words"),
    [
        ("pie", ("sync",), {}, UsageError, "no sheet 'pie'; there are accuracy"),
        ("timeline", ("sync",), {"axis": "time"}, UsageError, "timeline has one of its own"),
        ("timeline", ("sync", "async"), {}, UsageError, "shows one run, got 2: sync, async"),
        ("accuracy", ("async",), {}, NotFoundError, "run async has no accuracy"),
        ("disagreement", ("sync",), {}, NotFoundError, "run sync has no disagreement"),
        ("throughput", ("empty",), {}, NotFoundError, "run empty has no throughput"),
        ("traffic", ("empty",), {}, NotFoundError, "run empty has no traffic"),
        ("computing-time", ("empty",), {}, NotFoundError, "run empty has no computing time"),
        ("staleness", ("empty",), {}, NotFoundError, "run empty has no staleness"),
        ("traffic", ("sync",), {"rounds": RoundRange(99)}, NotFoundError, "none in 99:"),
        ("accuracy", ("nobody",), {}, NotFoundError, "no run 'nobody'"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_error(store, kind, runs, wish, error, words):
    empty = made.add_run(store, "empty")
    store.open_round(empty, 1, started_at=1000.0)
    store.close_round(empty, 1, version=1, closed_at=1001.0)
    with pytest.raises(error, match=words):
        sheet(store, kind, *runs, **wish)


def test_rounds_that_took_no_time_have_no_rate(store):
    run = made.add_run(store, "instant")
    made.add_round(store, run, 1, 1000.0, made.PACES_S)
    store.close_round(run, 1, version=1, closed_at=1000.0)
    for kind in ("throughput", "traffic", "computing-time"):
        with pytest.raises(NotFoundError, match="took no time"):
            sheet(store, kind, "instant")


def test_every_kind_is_drawn(store):
    made.add_nodes(store, "sync", [0.5] * 30)
    for kind in KINDS:
        assert sheet(store, kind).axes, kind
