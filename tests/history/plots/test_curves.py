import plotted_store as made
import pytest

from edgefl.core.errors import NotFoundError
from edgefl.history.plots import curves, style
from edgefl.history.plots.options import AXES
from edgefl.history.series import read_rounds
from edgefl.history.store_reader import StoreHistoryReader
from edgefl.storage.store import Store


@pytest.fixture
def series(tmp_path):
    """Writes a synchronous run, with models of the devices' own if told to, and reads its rounds."""
    with Store.open(tmp_path / "edgefl.db") as store:

        def write(name, nodes=(), **options):
            run = made.add_synchronous(store, name, **options)
            made.add_nodes(store, run, nodes)
            return read_rounds(StoreHistoryReader(store), made.head(run))

        yield write


def words(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts() if text.get_text()]


def test_a_sheet_has_a_row_for_each_quantity_and_a_column_for_each_axis_in_the_units_of_its_labels(series):
    figure = curves.render_curves([series("a", accuracies={1: 0.25, 3: 0.5})], ("accuracy", "loss"), AXES)
    assert len(figure.axes) == 6
    assert [panel.get_ylabel() for panel in figure.axes if panel.get_ylabel()] == ["accuracy (%)", "loss"]
    labels = [panel.get_xlabel() for panel in figure.axes if panel.get_xlabel()]
    assert labels == ["round", "time since the start (s)", "sent, up and down (kB)"]
    by_axis = [panel.lines[0].get_xydata().tolist() for panel in figure.axes[:3]]
    assert by_axis == [[[1, 25], [3, 50]], [[5, 25], [17, 50]], [[0.8, 25], [2.4, 50]]]


def test_several_runs_differ_in_colour_and_in_mark(series):
    figure = curves.render_curves([series(name) for name in "abcdefgh"], ("accuracy",), ("rounds",))
    lines = figure.axes[0].lines
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == len(lines) == 8
    assert words(figure) == list("abcdefgh")


def test_models_of_the_devices_own_have_lines_of_their_own_style(series):
    figure = curves.render_curves([series("a", [0.4, 0.2, 0.1])], ("accuracy",), ("rounds",))
    shown = {line.get_linestyle(): line.get_ydata().round(6).tolist() for line in figure.axes[0].lines}
    assert shown == {"-": [10, 20, 30], "--": [9, 19, 29], ":": [0, 10, 20]}
    assert set(words(figure)) == {"a", "global model", "mean of the devices", "worst device"}


def test_consensus_errors_are_logarithmic_and_equal_models_leave_a_gap(series):
    figure = curves.render_curves([series("a", [0.4, 0.0, 0.1])], ("disagreement",), ("rounds", "time"))
    assert [panel.get_yscale() for panel in figure.axes] == ["log", "log"]
    assert figure.axes[0].lines[0].get_xydata().tolist() == [[1, 0.4], [3, 0.1]]


def test_a_run_without_the_quantity_is_named_and_nothing_is_drawn(series):
    runs = [series("has", [0.4]), series("lacks", accuracies={})]
    for quantity, reason in (("accuracy", "nobody has evaluated it"), ("disagreement", "share one model")):
        with pytest.raises(NotFoundError, match=f"run lacks has no {quantity}: .*{reason}"):
            curves.render_curves(runs, (quantity,), AXES)
    with pytest.raises(NotFoundError, match="no disagreement"):
        curves.render_curves([series("equal", [0.0, 0.0, 0.0])], ("disagreement",), AXES)


def test_a_run_of_one_round_shows_a_point(series):
    figure = curves.render_curves([series("a", rounds=1)], ("accuracy",), ("rounds",))
    assert all(line.get_marker() != "None" for panel in figure.axes for line in panel.lines)
    assert style.encode_figure(figure, ".png")


def test_a_run_that_is_over_long_before_the_others_is_still_seen(series):
    short, long = (series(name, rounds=count) for name, count in (("short", 2), ("long", 40)))
    figure = curves.render_curves([short, long], ("accuracy",), AXES)
    assert [panel.get_xscale() for panel in figure.axes] == ["linear", "log", "log"]
    assert {panel.get_xscale() for panel in curves.render_curves([long], ("accuracy",), AXES).axes} == {"linear"}


def test_a_legend_covers_no_panel(series):
    with style.apply_style():
        figure = curves.render_curves(
            [series(f"a run with quite a long name {n}") for n in range(9)], ("loss",), AXES, "title"
        )
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert all(panel.get_tightbbox().y0 >= legend.y1 - 1 for panel in figure.axes)
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
