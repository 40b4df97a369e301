import logging
from dataclasses import replace

import plotted_store as made
import pytest

from edgefl.core.errors import NotFoundError, UsageError
from edgefl.history import PLOT_KINDS, figures
from edgefl.history.figures import render_figure
from edgefl.history.series import RoundRange
from edgefl.storage.store import Store

FIRST = RoundRange(1, 1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with Store.open(tmp_path_factory.mktemp("sheets") / "edgefl.db") as opened:
        with opened.batch():
            made.add_synchronous(opened, "sync", rounds=30)
            made.add_asynchronous(opened, "async", [0, 1, 2, 3, 0])
            made.add_synchronous(opened, "nodes")
            made.add_nodes(opened, "nodes", [0.5] * 3)
            made.add_synchronous(opened, "blind", accuracies={})
            made.add_synchronous(opened, "late")
            made.add_late(opened, "late", 1, "pi-3", at=1001.0)
            made.add_run(opened, "empty")
            opened.open_round("empty", 1, started_at=1000.0)
            opened.close_round("empty", 1, version=1, closed_at=1001.0)
            made.add_run(opened, "instant")
            made.add_round(opened, "instant", 1, 1000.0, made.PACES_S)
            opened.close_round("instant", 1, version=1, closed_at=1000.0)
        yield opened


@pytest.fixture(scope="module")
def sheet(store):
    def make(kind, *runs, batch_size=None, **wish):
        return render_figure(made.StoreReader(store, batch_size), kind, runs or ("sync",), **wish)

    return make


def bar_widths(figure):
    return [bar.get_width() for bar in figure.axes[0].patches]


def test_without_a_kind_accuracy_and_loss_share_a_sheet_and_what_a_run_lacks_is_left_out_and_said(sheet, caplog):
    figure = sheet(None)
    assert [panel.get_ylabel() for panel in figure.axes if panel.get_ylabel()] == ["accuracy (%)", "loss"]
    assert (len(figure.axes), len(sheet(None, axis="time").axes)) == (6, 2)
    with caplog.at_level(logging.WARNING):
        figure = sheet(None, "sync", "blind")
    assert [panel.get_ylabel() for panel in figure.axes if panel.get_ylabel()] == ["loss"]
    assert caplog.messages == ["accuracy is left out: blind has none"]


def test_throughput_is_iterations_times_batch_size_where_that_is_known_over_the_time_of_the_rounds(sheet):
    figure = sheet("throughput", batch_size=8)
    seconds = 30 * made.ROUND_S + 29 * made.BETWEEN_S
    assert bar_widths(figure) == [pytest.approx(30 * 2 * made.ITERATIONS * 8 / seconds)]
    assert figure.axes[0].get_xlabel() == "samples trained on (1/s)"
    figure = sheet("throughput", "sync", "async", rounds=RoundRange(1, 2))
    assert figure.axes[0].get_xlabel() == "local iterations (1/s)"
    assert bar_widths(figure) == [pytest.approx(2 * 2 * made.ITERATIONS / 11), pytest.approx(2 / 2)]


def test_traffic_is_bytes_over_time_both_ways(sheet):
    figure = sheet("traffic", rounds=RoundRange(2, 2))
    assert bar_widths(figure) == [2 * made.BYTES_UP / 5, 2 * made.BYTES_DOWN / 5]
    assert figure.axes[0].get_xlabel() == "traffic of all devices (B/s)"


def test_computing_time_is_each_device_s_share_of_the_time_for_an_update_that_was_not_applied_too(sheet):
    assert bar_widths(sheet("computing-time", rounds=FIRST)) == pytest.approx([20, 60])
    assert bar_widths(sheet("computing-time", "late", rounds=FIRST)) == pytest.approx([20, 60, 20])
    assert bar_widths(sheet("throughput", "late", rounds=FIRST)) == bar_widths(sheet("throughput", rounds=FIRST))


def test_staleness_is_that_of_applied_updates(sheet):
    for rounds, shares in ((None, [40, 20, 20, 20]), (RoundRange(4, 4), [0, 0, 0, 100])):
        assert [bar.get_height() for bar in sheet("staleness", "async", rounds=rounds).axes[0].patches] == shares


def test_a_time_line_shows_the_newest_rounds_fewer_with_much_in_them_unless_some_are_named(sheet, monkeypatch):
    assert sheet("timeline").get_suptitle() == "sync: rounds 11 to 30"
    assert sheet("timeline", rounds=RoundRange(2, 4)).get_suptitle() == "sync: rounds 2 to 4"
    assert sheet("timeline", title="mine").get_suptitle() == "mine"
    labels = sheet("timeline", "async", rounds=RoundRange(3, 4)).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["pi-0", "pi-2", "pi-3"], (
        "what went out two rounds before is seen"
    )
    for most, title in ((3, "sync: rounds 28 to 30"), (0.5, "sync: round 30")):
        monkeypatch.setattr(figures, "MAX_ASSIGNMENTS_PER_DEVICE", most)
        assert sheet("timeline").get_suptitle() == title


@pytest.mark.parametrize(
    ("kind", "runs", "wish", "error", "words"),
    [
        ("pie", "sync", {}, UsageError, "no sheet 'pie'; there are accuracy"),
        ("timeline", "sync", {"axis": "time"}, UsageError, "timeline has one of its own"),
        ("timeline", "sync async", {}, UsageError, "shows one run, got 2: sync, async"),
        (None, "async", {}, NotFoundError, "async has neither accuracy nor loss"),
        ("accuracy", "async", {}, NotFoundError, "run async has no accuracy"),
        ("disagreement", "sync", {}, NotFoundError, "run sync has no disagreement"),
        ("throughput", "empty", {}, NotFoundError, "run empty has no throughput"),
        ("traffic", "empty", {}, NotFoundError, "run empty has no traffic"),
        ("computing-time", "empty", {}, NotFoundError, "run empty has no computing time"),
        ("staleness", "empty", {}, NotFoundError, "run empty has no staleness"),
        ("traffic", "sync", {"rounds": RoundRange(99)}, NotFoundError, "none in 99:"),
        ("accuracy", "nobody", {}, NotFoundError, "no run 'nobody'"),
        ("throughput", "instant", {}, NotFoundError, "took no time"),
        ("traffic", "instant", {}, NotFoundError, "took no time"),
        ("computing-time", "instant", {}, NotFoundError, "took no time"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_error(sheet, kind, runs, wish, error, words):
    with pytest.raises(error, match=words):
        sheet(kind, *runs.split(), **wish)


def test_every_kind_is_drawn(sheet):
    for kind in PLOT_KINDS:
        assert sheet(kind, "nodes").axes, kind


def test_a_reference_keeps_its_own_end_and_is_of_curves_alone(sheet):
    panel = sheet("accuracy", "sync", references=["late"], axis="rounds", rounds=FIRST).axes[0]
    curve, line = panel.lines
    assert len(curve.get_xdata()) == 1
    assert float(line.get_ydata()[0]) == sheet("accuracy", "late", axis="rounds").axes[0].lines[0].get_ydata()[-1]
    with pytest.raises(UsageError, match="--reference is of accuracy, loss, disagreement, not of traffic"):
        sheet("traffic", references=["late"])
    with pytest.raises(NotFoundError, match="no run 'nobody'"):
        sheet("accuracy", references=["nobody"])


def test_a_spread_is_a_band_around_the_mean_and_of_curves_alone(store):
    class Reader(made.StoreReader):
        def find_run(self, text):
            return replace(super().find_run(text), config={"run": {"seed": len(text)}, "strategy": {}})

    reader = Reader(store)
    panel = render_figure(reader, "accuracy", ["sync", "late"], axis="rounds", spread=True).axes[0]
    assert len(panel.collections) == 1
    assert [len(line.get_xdata()) for line in panel.lines] == [3]
    assert not render_figure(reader, "accuracy", ["sync", "late"], axis="rounds").axes[0].collections
    with pytest.raises(UsageError, match="--spread is of accuracy, loss, disagreement, not of traffic"):
        render_figure(reader, "traffic", ["sync"], spread=True)
